"""Gradient inversion that knows Refiner (Fan et al. 2025, appendix M and section 6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, Unpack

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.layer_statistics import LayerStatistics
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine, LayerWeights
from fl_privacy.attacks.gradient_inversion.priors import Guess
from fl_privacy.attacks.preset_options import GradientOptions, takes, vary
from fl_privacy.attacks.presets import idlg, inverting_gradients
from fl_privacy.checks import number, one_of
from fl_privacy.files.foreign import expanded
from fl_privacy.models.pretrained.evaluator_files import CachedEvaluator, read_about
from fl_privacy.progress import Progress, no_progress
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, Reconstruction, Tensors


@dataclass(frozen=True)
class Sphere:
    """Objective that is least for gradients at Euclidean distance ``radius`` from the upload g.

    The defense Refiner moves the true gradient by that distance (Fan et al. 2025, appendix M). For L2, the loss is |d -
    radius^2| for the squared distance d from g. For cosine, it is |d - c| for the cosine distance d; c is the largest
    cosine distance of a gradient at Euclidean distance ``radius``: 1 - sqrt(1 - radius^2 / ||g||^2).
    """

    objective: L2 | Cosine
    radius: float
    elementwise: bool = field(default=True, init=False)
    by_layer: bool = field(default=True, init=False)

    @property
    def layers(self) -> LayerWeights:
        return self.objective.layers

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        loss = self.objective(statistics)
        if isinstance(self.objective, L2):
            return (loss - self.radius**2).abs()
        squared = torch.stack([s.target.squared for s in statistics.values()]).sum(0)
        share = (self.radius**2 / squared).clamp_max(1)
        return (loss - (1 - (1 - share).sqrt())).abs()


@dataclass(frozen=True)
class NoiseRatio:
    """Penalty on noise in images: ``weight`` times its share, estimated by the network of the defense Refiner."""

    weight: float
    evaluator: str | None = None  # file of the network; ``None``: the small one for gray images

    def __call__(self, guess: Guess) -> Tensor:
        images = guess.images
        network = self._find(images.shape[2:], images.device)
        ratios: Tensor = network(images.flatten(0, 1).clamp(0, 1).float())
        return self.weight * ratios.reshape(len(images), -1).mean(1).to(images.dtype)

    @cached_property
    def _find(self) -> CachedEvaluator:
        return CachedEvaluator(self.evaluator)


@takes(GradientOptions)
def refiner_aware(
    *,
    base: Literal["inverting_gradients", "idlg"] = "inverting_gradients",
    radius: float | None = 0.1,
    away_from_noise: float = 0.0,
    evaluator: str | None = None,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build a gradient inversion that counters the defense Refiner.

    It looks for a gradient at L2 distance ``radius`` from the upload, and has a penalty on noise. Both are our own,
    after Fan et al. (2025), appendix M; with either, the attack reconstructs less than ``base`` alone.

    Args:
        base: attack from which objective and optimizer are taken.
        radius: Refiner's epsilon, at least 0; ``None`` compares guesses with the upload itself.
        away_from_noise: weight of :class:`NoiseRatio`, at least 0. A gradient of zero has a loss of 1 under
            ``inverting_gradients``, and of the upload's squared norm under ``idlg``.
        evaluator: file of Refiner's network; ``None``: a small one, for gray images only.
    """
    one_of("attack.base", base, ("inverting_gradients", "idlg"))
    for name, value in (("radius", radius), ("away_from_noise", away_from_noise)):
        if value is not None:
            number(f"attack.{name}", value, at_least=0, infinite=True, example=1)
    published = inverting_gradients() if base == "inverting_gradients" else idlg()
    published = replace(published, iterations=1000, compile="off")
    if away_from_noise or radius is not None:
        published = replace(published, enough=0.0)
    attack = vary(published, options)
    if away_from_noise:
        if evaluator is not None:
            read_about(expanded(evaluator))
        attack = replace(attack, priors=(*attack.priors, NoiseRatio(away_from_noise, evaluator)))
    if radius is not None:
        assert isinstance(attack.objective, L2 | Cosine)
        attack = replace(attack, objective=Sphere(attack.objective, radius))
    return attack


def solve_gradient(
    upload: Tensors,
    weights: Tensors,
    squared: float,
    rng: torch.Generator,
    *,
    scaled: bool = False,
    spread: float = 1.0,
) -> Tensors:
    """Return a gradient g' with ``|w (g* - g')|^2 = squared``, nearest to a random start (Fan et al. 2025, appendix M).

    If the start already has a smaller weighted distance, it is returned.

    Args:
        upload: g*, the defended gradient.
        weights: w, at least 0.
        squared: target of the weighted squared distance, above 0.
        rng: random stream of the start from N(0, 1), which the paper leaves open.
        scaled: ``True`` scales the start of each tensor by the standard deviation of its elements in ``upload``.
        spread: factor on the random start.
    """
    flat = torch.cat([t.detach().flatten().double().cpu() for t in upload.values()])
    speed = torch.cat([weights[name].detach().flatten().double().cpu() for name in upload]).square()
    own = torch.cat([torch.full((t.numel(),), float(t.std(correction=0))).double() for t in upload.values()])
    apart = spread * torch.randn(flat.shape, generator=rng, dtype=flat.dtype) * (own if scaled else 1) - flat
    pace = speed / speed.max().clamp_min(torch.finfo(speed.dtype).tiny)

    def left(time: float) -> float:
        return float((speed * (apart * (-pace * time).exp()).square()).sum())

    low, high = 0.0, 1.0
    while left(high) > squared and high < 1e30:
        high *= 2
    for _ in range(200 if left(low) > squared else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > squared else (low, middle)
    found = flat + apart * (-pace * (high if left(0.0) > squared else 0.0)).exp()
    parts = torch.split(found, [t.numel() for t in upload.values()])
    return {n: part.view(t.shape).to(t) for (n, t), part in zip(upload.items(), parts, strict=True)}


@dataclass(frozen=True, kw_only=True)
class SolvedInversion(GradientInversion):
    """Gradient inversion of a gradient g' at a fixed weighted distance from the upload g*; see :func:`solve_gradient`.

    A parameter of value theta in layer i = 1, 2, ... has the weight w = |g* theta tau^i|, with a factor tau in (0, 1]
    that makes later layers count less (Fan et al. 2025, Eq. 3).
    """

    constant: float | None = None  # ``|w (g* - g')|^2``, above 0; ``None``: ``radius`` squared times mean w squared
    radius: float = 0.1  # Refiner's epsilon
    decay: float = 0.95  # tau
    scaled: bool = False

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        return super().__call__([self._moved(each, seed) for each in observations], seed=seed, progress=progress)

    def _moved(self, observation: Observation, seed: int) -> Observation:
        tensors, values = observation.upload.tensors, observation.sent.parameters
        if not tensors or not tensors.keys() <= values.keys():
            return observation
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in values))
        depth = {layer: number for number, layer in enumerate(layers, start=1)}
        weights = {
            name: (g.detach() * values[name].detach().to(g)).abs() * self.decay ** depth[name.rpartition(".")[0]]
            for name, g in tensors.items()
        }
        mean = float(torch.cat([w.flatten() for w in weights.values()]).double().square().mean())
        squared = self.constant if self.constant is not None else self.radius**2 * mean
        rng = derive_generator(seed, "solve", str(observation.id))
        moved = solve_gradient(tensors, weights, max(squared, 1e-300), rng, scaled=self.scaled)
        return replace(observation, upload=replace(observation.upload, tensors=moved))


@takes(GradientOptions)
def refiner_solved(
    *,
    base: Literal["inverting_gradients", "idlg"] = "inverting_gradients",
    radius: float = 0.1,
    constant: float | None = None,
    decay: float = 0.95,
    scaled: bool = False,
    **options: Unpack[GradientOptions],
) -> SolvedInversion:
    """Build an attack that solves ``|w (g* - g')|^2 = constant`` for g' and inverts it (Fan et al. 2025, appendix M).

    g* is the upload, g' the gradient before the defense Refiner, w a weight of each element. The equation, as
    published, leaves most of g' at its random start; ``base`` alone reconstructs far more.

    Args:
        base: attack from which objective and optimizer are taken.
        radius: Refiner's epsilon, above 0; unused with a ``constant``.
        constant: right side of the equation; ``None``: ``radius`` squared times the mean of w squared.
        decay: tau of :class:`SolvedInversion`, in (0, 1].
        scaled: ``True`` scales the random start of each tensor by the standard deviation of its elements.
    """
    one_of("attack.base", base, ("inverting_gradients", "idlg"))
    number("attack.radius", radius, above=0, example=0.1)
    number("attack.decay", decay, above=0, at_most=1, example=0.95)
    if constant is not None:
        number("attack.constant", constant, above=0, example=1e-6)
    attack = inverting_gradients() if base == "inverting_gradients" else idlg()
    attack = vary(replace(attack, iterations=1000, compile="off"), options)
    settings = {field.name: getattr(attack, field.name) for field in fields(attack) if field.init}
    return SolvedInversion(**settings, radius=radius, constant=constant, decay=decay, scaled=scaled)
