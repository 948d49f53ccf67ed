"""Settings of a gradient inversion, its first guesses and its sources of images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, get_args, get_origin

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.objectives import L2, Objective
from fl_privacy.attacks.gradient_inversion.priors import Prior
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.optimizers import LBFGS, EvolutionStrategy, Optimizer
from fl_privacy.checks import number, one_of, whole
from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import Provenance
from fl_privacy.types import Observation

Projection = Literal["none", "clamp", "minmax"]
"""``clamp``: clamp to [0, 1]; ``minmax`` maps the range of each image that leaves [0, 1] onto [0, 1]."""

Scaling = Literal["clamp", "stretch"]
"""``clamp``: clamp a guess to [0, 1]; ``stretch`` maps its range onto [0, 1] (FDL-PP, Gu et al. 2021, A.4)."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Map from variables to images ``mean + std * variables``; some papers optimize normalized images."""

    mean: float = 0.0
    std: float = 1.0

    def to_images(self, variables: Tensor) -> Tensor:
        return variables if (self.mean, self.std) == (0.0, 1.0) else self.mean + self.std * variables

    def to_variables(self, images: Tensor) -> Tensor:
        return images if (self.mean, self.std) == (0.0, 1.0) else (images - self.mean) / self.std

    def clamped(self, variables: Tensor) -> Tensor:
        return variables.clamp(-self.mean / self.std, (1 - self.mean) / self.std)


def project(images: Tensor, how: Projection) -> Tensor:
    """Project V victims' ``images`` (V, B, C, H, W) to [0, 1] as ``how`` says."""
    if how == "clamp":
        return images.clamp(0, 1)
    if how == "minmax":
        low = images.amin((2, 3, 4), keepdim=True).clamp_max(0)
        high = images.amax((2, 3, 4), keepdim=True).clamp_min(1)
        return (images - low) / (high - low)
    return images


def scaled_to_range(images: Tensor, how: Scaling) -> Tensor:
    """Scale or clamp finished guesses (..., C, H, W) to [0, 1]; constant images are always clamped."""
    if how == "clamp":
        return images.clamp(0, 1)
    low, high = images.amin((-3, -2, -1), keepdim=True), images.amax((-3, -2, -1), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class VictimContext:
    """Arguments of a function that draws a victim's first guess, of ``shape`` (B, C, H, W).

    ``generator`` is on the CPU. ``labels`` (B,) are known or inferred; ``None`` if they are optimized.
    """

    observation: Observation
    labels: Tensor | None
    shape: tuple[int, ...]
    generator: torch.Generator
    space: Space


Start = Callable[[VictimContext], Tensor]  # draws a victim's first variables, of ``context.shape``, on the CPU


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Start from variables drawn from N(0, std^2)."""

    std: float = 1.0

    def __call__(self, context: VictimContext) -> Tensor:
        return self.std * torch.randn(context.shape, generator=context.generator)


@dataclass(frozen=True)
class Uniform:
    """Start from pixels drawn from U[0, 1]."""

    def __call__(self, context: VictimContext) -> Tensor:
        return context.space.to_variables(torch.rand(context.shape, generator=context.generator))


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Start from pixels of one value; 0 is a black image."""

    value: float = 0.5

    def __call__(self, context: VictimContext) -> Tensor:
        return context.space.to_variables(torch.full(context.shape, self.value))


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Start from a tiled random patch of side ``size``, U[0, 1] (Wei et al. 2020; Fan et al. 2020)."""

    size: int = 4

    def __call__(self, context: VictimContext) -> Tensor:
        b, c, h, w = context.shape
        patch = torch.rand((b, c, self.size, self.size), generator=context.generator)
        return context.space.to_variables(patch.repeat(1, 1, -(-h // self.size), -(-w // self.size))[..., :h, :w])


@dataclass(frozen=True, kw_only=True)
class PublicMean:
    """Start from the mean of public images; ``of_class`` takes only images of each example's own class."""

    of_class: bool = False

    def __call__(self, context: VictimContext) -> Tensor:
        known, labels = context.observation.knowledge, context.labels
        if known.public_images is None:
            raise UserError(
                "The public-mean start needs public images, but got none;"
                " set threat_model.public_images=1000, or use attack.start=uniform."
            )
        images = known.public_images.cpu()
        mean = images.mean(0).expand(context.shape)
        if not self.of_class:
            return context.space.to_variables(mean.clone())
        if known.public_labels is None or labels is None:
            raise UserError(
                "The class-mean start is expected to know the classes of public images and of the victim, but does not;"
                " use attack.labels=auto, or attack.start=public_mean."
            )
        belongs = (known.public_labels.cpu() == labels.cpu().unsqueeze(1)).to(images.dtype)
        counts = belongs.sum(1).view(-1, 1, 1, 1)
        of_class = torch.tensordot(belongs, images, 1) / counts.clamp_min(1)
        return context.space.to_variables(torch.where(counts > 0, of_class, mean))


@dataclass(frozen=True)
class Previous:
    """Start from an earlier round's result for the same examples; without one, from variables drawn from N(0, 1)."""

    def __call__(self, context: VictimContext) -> Tensor:
        previous = context.observation.knowledge.previous
        return Normal()(context) if previous is None else Given(images=previous)(context)


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """Start from given images (C, H, W) or (B, C, H, W) in [0, 1]."""

    images: Tensor

    def __call__(self, context: VictimContext) -> Tensor:
        shape = context.shape
        if self.images.shape[-3:] != shape[-3:] or (self.images.dim() == 4 and len(self.images) != shape[0]):
            raise UserError(f"A start of shape {shape} is expected, but got {tuple(self.images.shape)}; resize it.")
        return context.space.to_variables(self.images.cpu().expand(shape).clone())


STARTS: Mapping[str, Start] = {
    "normal": Normal(),
    "uniform": Uniform(),
    "gray": Constant(value=0.5),
    "black": Constant(value=0.0),
    "pattern": Pattern(),
    "public_mean": PublicMean(),
    "class_mean": PublicMean(of_class=True),
    "previous": Previous(),
}


def named_start(name: str) -> Start:
    """Return the rule for first guesses that is called ``name`` in ``STARTS``, or raise ``UserError``."""
    one_of("attack.start", name, STARTS)
    return STARTS[name]


Shape = Sequence[int]  # (B, C, H, W) of one victim's images


class ImageSource(Protocol):
    """Map from optimized variables (V, n) and fixed values (V, m) to V victims' images.

    A source with several stages optimizes one set of variables after another. Start and fixed values are drawn on the
    CPU from each victim's own random stream.
    """

    def size(self, shape: Shape) -> int:
        return int(torch.Size(shape).numel())

    def start(self, context: VictimContext) -> Tensor: ...

    def held(self, context: VictimContext) -> Tensor:
        """Draw one victim's values (m,) that stay fixed in the search, such as a network's noise input; m may be 0."""
        ...

    def images(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return images (V, B, C, H, W) in [0, 1]; ``held``: fixed values (V, m); ``labels``: (V, B) or (V, B, K)."""
        ...

    def penalty(self, variables: Tensor, shape: Shape) -> Tensor:
        return variables.new_zeros(len(variables))

    def confined(self, variables: Tensor, held: Tensor, shape: Shape) -> Tensor:
        """Return ``variables`` (V, n) projected to the source's range, for fixed values ``held`` (V, m)."""
        return variables

    def following(
        self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape
    ) -> "tuple[ImageSource, Tensor, Tensor] | None":
        """Return the stage after this result: its source, start (V, n) and fixed values (V, m); ``None`` at the end."""
        return None

    @property
    def stages(self) -> int:
        return 1

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        """Describe the source's training data, if any; ``UserError`` unless it makes images of the shape (C, H, W)."""
        return None


LabelPolicy = Literal["auto", "known", "infer", "optimize"]
"""``known``: labels given to the attacker; ``infer``: from the output layer's gradient; ``optimize``: jointly with the
images; ``auto``: given ones, else inferred."""

Compile = Literal["auto", "on", "off"]
"""Use of ``torch.compile`` for losses and gradients. ``auto``: if the work is large enough to repay the minutes of
compiling. Compiled sums differ in their last bits, so that an attack in float32 ends elsewhere; the same setting gives
the same result. ``off`` still records long attacks on few victims on a CPU and reruns them without autograd."""

DType = Literal["float32", "float64"]

TokenReading = Literal["nearest", "pseudo_inverse"]
"""Decoding of embeddings: the ``nearest`` token by cosine (TAG, LAMP), or by the pseudo-inverse (SAPAG)."""


def expect_choices(settings: Any) -> None:
    """Raise ``UserError`` if a field of the dataclass ``settings`` is not among the values of its ``Literal`` type."""
    for each in fields(settings):
        if get_origin(each.type) is Literal:
            one_of(f"attack.{each.name}", getattr(settings, each.name), get_args(each.type))


@dataclass(frozen=True, kw_only=True)
class Rearranging:
    """Settings of the search for the order of words during a descent on embeddings.

    Each move compares ``tries`` orders of the decoded words: two words exchanged, a word or sequence moved, or a
    beginning put to the end. The best minimizes the mismatch of gradients plus ``prior`` times the mean negative log
    likelihood under a language model of public texts. The latter is multiplied by the orders' median excess over the
    least mismatch.
    """

    every: int = 75  # iterations between moves
    burn_in: float = 1.0  # share of the iterations before the first move; 1 moves words at the end alone
    tries: int = 200
    prior: float = 0.5
    starts: int = 1  # random first guesses, then orders of the best one, of which the least mismatch is kept
    last: int = 10  # most moves at the end, as long as they improve the text

    def __post_init__(self) -> None:
        whole("attack.every", self.every, at_least=1, example=75)
        number("attack.burn_in", self.burn_in, at_least=0, at_most=1, example=0.1)
        whole("attack.tries", self.tries, at_least=1, example=200)
        number("attack.prior", self.prior, at_least=0, example=0.2)
        whole("attack.starts", self.starts, at_least=1, example=1)
        whole("attack.last", self.last, at_least=0, example=10)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a gradient inversion.

    Attributes:
        embedding_norm: weight of the squared relative difference between the mean length of guessed embeddings and that
            of tokens' embeddings (LAMP, Balunovic et al. 2022).
        evident: ``True`` lets an attacker who knows no defense infer it from zeros, few values or empty columns;
            without these, it clips guesses' gradients to the update's norm (GGL, Li et al. 2022, section 4.2).
        enough: loss at which a descent ends, as a share of a zero gradient's loss (with ``L2``: the squared norm).
    """

    objective: Objective = field(default_factory=L2)
    optimizer: Optimizer | EvolutionStrategy = field(default_factory=LBFGS)
    labels: LabelPolicy = "auto"
    priors: tuple[Prior, ...] = ()
    start: Start = field(default_factory=Normal)
    space: Space = field(default_factory=Space)
    source: ImageSource | None = None  # source of the images, instead of pixels; replaces ``start`` and ``space``
    reading: TokenReading = "nearest"
    embedding_norm: float = 0.0
    moves: Rearranging | None = None
    bounded: bool = True  # ``True`` keeps numbers of a table within its schema's bounds
    counted: bool = False  # ``True`` leaves out categories that are absent by the first layer's gradient
    pooled: bool = False  # ``True`` takes the median of the aligned attempts at a table's rows
    evident: bool = False
    projection: Projection = "none"  # projection to [0, 1] after each iteration
    as_they_come: bool = False  # ``True`` reports pixels outside of [0, 1]
    into_range: Scaling = "clamp"  # final mapping to [0, 1]
    iterations: int = 300
    restarts: int = 1  # most attempts; the first below ``accept`` is taken, else the one with the least loss
    enough: float = 0.0
    accept: float = 0.0  # loss below which a victim is not attacked again, in the unit of ``enough``
    noise: float = 0.0  # standard deviation of Gaussian noise on the pixels' gradient
    local_steps: LocalSteps = "unroll"
    compile: Compile = "auto"
    dtype: DType = "float32"
    device: str | None = None  # device of the computation; ``None``: that of the sent values
    most_victims: int | None = None  # most victims in one chunk; ``None``: found from the free memory

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts"):
            whole(f"attack.{name}", getattr(self, name), at_least=1, example=1)
        expect_choices(self)
