"""Model inversion against the private front of a split network, many victims at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fl_privacy.attacks.attack import Report, part_of
from fl_privacy.attacks.gradient_inversion import GradientInversion, settings, targets
from fl_privacy.attacks.gradient_inversion.execution import fitting_threads, multiplications_of_a_layer
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, failed
from fl_privacy.attacks.gradient_inversion.labels import choose_labels, guessed_outputs, infer_labels, output_layer
from fl_privacy.attacks.gradient_inversion.minimization import Minimum, filmed_rows, films_of, minimize
from fl_privacy.attacks.gradient_inversion.priors import Guess, Prior, TotalVariation
from fl_privacy.attacks.optimizers import LBFGS, Optimizer
from fl_privacy.checks import whole
from fl_privacy.effects import PrivateLayers
from fl_privacy.errors import UserError
from fl_privacy.models import Front, Rest, cut_layer
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.losses import CROSS_ENTROPY, is_plain
from fl_privacy.progress import Progress
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState, Observation, Reconstruction, Tensors
from fl_privacy.types.film import Snapshot, shortened


def recover_by_lemma(layer: nn.Module, weight: Tensor, bias: Tensor) -> Tensor | None:
    """Recover a layer's input (D,) or (C, H, W) from its gradients for a single example.

    It solves ``grad_W = grad_b . O^T`` (Gu et al. 2021, Lemma 1; Geiping et al. 2020) in least squares, which is exact
    if :func:`applies`. ``None`` if the layer is neither linear nor an ungrouped convolution, or ``bias`` is 0.
    """
    if not isinstance(layer, nn.Linear | nn.Conv2d) or (isinstance(layer, nn.Conv2d) and layer.groups != 1):
        return None
    squared = bias.square().sum()
    if squared == 0:
        return None
    return (bias @ weight.flatten(1) / squared).reshape(weight.shape[1:])


def applies(layer: nn.Module, seen: tuple[int, ...], batch_size: int) -> bool:
    """Return whether :func:`recover_by_lemma` is exact for a layer; ``seen``: shape of one example's input."""
    if batch_size != 1 or not isinstance(layer, nn.Linear | nn.Conv2d) or layer.bias is None:
        return False
    if isinstance(layer, nn.Linear):
        return len(seen) == 1
    return layer.groups == 1 and layer.padding in ("valid", (0, 0), 0) and tuple(seen[1:]) == layer.kernel_size


_GUESSES = 64
_ROOM = 2.0  # range, around 0, in which features are searched, as a multiple of random images' range


class _Stretched(nn.Module):
    def __init__(self, rest: Rest, low: float, width: float) -> None:
        super().__init__()
        self.rest, self.low, self.width = rest, low, width

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.rest(self.low + self.width * inputs))


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Callable that recovers each client's input of the first layer that it uploaded.

    It solves for the input (:func:`recover_by_lemma`) if that is exact, and else searches it by the gradient inversion
    ``matching``. For each observation, it returns the input, or the reason why that can't be recovered.
    """

    matching: GradientInversion

    def __call__(
        self, observations: Sequence[Observation], front: Front, *, seed: int, progress: Progress
    ) -> list[Tensor | str]:
        first, shape = observations[0], seen_shape(front, observations[0])
        layer = first.model.get_submodule(front.layer)
        if applies(layer, shape, first.upload.num_examples):
            by_lemma: list[Tensor | str] = []
            for gradient in map(targets.as_gradient, observations):
                weight, bias = (gradient.get(f"{front.layer}.{name}") for name in ("weight", "bias"))
                input_ = None if weight is None or bias is None else recover_by_lemma(layer, weight, bias)
                missing = f"A gradient of {front.layer} is expected, but was withheld or is zero; use attack=auto."
                by_lemma.append(missing if input_ is None else input_[None])
            return by_lemma
        values, generator = next(front.parameters()), torch.Generator().manual_seed(seed % 2**63)
        with torch.no_grad():
            guesses = front(torch.rand(_GUESSES, *first.input_shape, generator=generator).to(values))
        low = _ROOM * min(float(guesses.min()), 0.0)
        width = _ROOM * max(float(guesses.max()), 0.0) - low

        def renamed(tensors: Tensors) -> dict[str, Tensor]:
            return {f"rest.model.{name}": tensor for name, tensor in tensors.items()}

        rest = _Stretched(Rest(first.model, front.layer, first.input_shape), low, width)
        assumed = first.assumed()
        sent = ModelState(renamed(assumed.parameters), renamed(assumed.buffers))
        inner = [
            replace(
                o,
                id=replace(o.id, part="features"),
                model=rest,
                sent=sent,
                upload=replace(o.upload, tensors=renamed(o.upload.tensors), buffers=renamed(o.upload.buffers)),
                input_shape=shape,
            ).given(private=None, features=None, defense=None)
            for o in observations
        ]
        return [
            low + width * r.batch.inputs if r.batch is not None else f"Its features were not found: {r.failure}"
            for r in self.matching(inner, seed=seed, progress=progress)
        ]


@torch.no_grad()
def seen_shape(front: Front, observation: Observation) -> tuple[int, ...]:
    """Return the shape of one example's output of ``front``, the model's first layers."""
    return tuple(front(next(front.parameters()).new_zeros(1, *observation.input_shape)).shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class InversionProblem:
    """Loss ``||F(x) - O||^2`` plus image priors of V victims, for first layers F and their outputs O.

    O is ``features`` (V, B, ...). A victim's N variables are the pixels of its images x, of ``shape`` (B, C, H, W), and
    then the weights of F that are guessed, too (``unknown``: start values by name).
    """

    attack: "ModelInversion"
    front: Front
    features: Tensor
    shape: tuple[int, ...]
    unknown: Mapping[str, Tensor]
    attempts: ClassVar[int] = 1

    @property
    def pixels(self) -> int:
        return int(torch.Size(self.shape).numel())

    def images(self, variables: Tensor) -> Tensor:
        return self.attack.space.to_images(variables[:, : self.pixels].reshape(-1, *self.shape))

    def loss(self, variables: Tensor) -> Tensor:
        images = self.images(variables)
        if self.unknown:
            flat = variables[:, self.pixels :]
            pieces = torch.split(flat, [value.numel() for value in self.unknown.values()], 1)
            shaped = zip(self.unknown.items(), pieces, strict=True)
            values = {name: piece.reshape(-1, *value.shape) for (name, value), piece in shaped}
            origin = torch.cat([value.flatten() for value in self.unknown.values()])
            strayed = (flat - origin).square().sum(1) / origin.square().sum()
            features = vmap(lambda own, x: functional_call(self.front, own, (x,)))(values, images)
        else:
            features = self.front(images.flatten(0, 1)).unflatten(0, images.shape[:2])
            strayed = images.new_zeros(len(images))
        distance = (features - self.features).flatten(1).square().sum(1)
        unit = self.features.flatten(1).square().sum(1) if self.attack.relative else 1.0
        loss: Tensor = distance / unit + self.attack.anchor * strayed
        guess = Guess(images, self.attempts, lambda: ())
        for prior in self.attack.priors:
            loss = loss + prior(guess)
        return loss

    def evaluate(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = variables.detach().requires_grad_()
            loss = self.loss(leaf)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), gradient

    def projected(self, variables: Tensor, how: settings.Projection) -> Tensor:
        pixels = self.attack.space.to_variables(settings.project(self.images(variables), how)).flatten(1)
        return torch.cat([pixels, variables[:, self.pixels :]], 1)

    def select(self, rows: Tensor) -> "InversionProblem":
        return replace(self, features=self.features[rows])


UNKNOWN = -1  # label of an image whose label can't be inferred


def best_reconstruction(
    observation: Observation,
    model: nn.Module,
    found: Minimum,
    images: Tensor,
    *,
    rows: range,
    films: Mapping[int, tuple[Snapshot, ...]],
    sentences: tuple[str, ...] = (),
) -> Reconstruction:
    """Return the best attempt at ``observation``, or a failed reconstruction if no attempt has a finite loss.

    ``rows``: indices of the attempts at this victim, in ``found`` (results of the search) and ``images``. ``films``:
    snapshots of the search, by row. ``sentences``: descriptions of countermeasures, for the report.
    """
    losses = found.loss[rows.start : rows.stop]
    if not losses.isfinite().any():
        return failed(observation, "A finite objective is expected, but no start has one; check the update.")
    best = rows.start + int(losses.argmin())
    history = found.history[:, best]
    given = observation.knowledge.labels
    return Reconstruction(
        id=observation.id,
        batch=Batch(images[best], (_inferred(observation, model, images[best]) if given is None else given).cpu()),
        loss=float(found.loss[best]),
        history=tuple(history[history.isfinite()].tolist()),
        label_source="inferred" if given is None else "known",
        countermeasures=sentences,
        film=shortened(films.get(best, ())),
    )


def _inferred(observation: Observation, model: nn.Module, images: Tensor) -> Tensor:
    unknown, layer = torch.full((len(images),), UNKNOWN), output_layer(model, observation.num_classes)
    if layer is None:
        return unknown
    values, scale = next(model.parameters()), observation.plan.loss_scale
    gradient = {n: g.to(values) / scale for n, g in targets.as_gradient(observation).items() if n in layer}
    if not any(g.any() for g in gradient.values()):
        return unknown
    if is_plain(observation.loss or CROSS_ENTROPY):
        labels = infer_labels(gradient, layer, len(images), *guessed_outputs(model, images.to(values), layer[0]))
    else:
        try:
            labels, _ = choose_labels(observation, "auto", model, loss_scale=scale, seed=0)
        except targets.NotAttackableError:
            return unknown
    return unknown if labels is None else labels


FeatureSource = Literal["auto", "known", "recovered"]
"""Source of the private layers' output. ``auto``: the given one, if any, else recovered from the public gradients."""

FrontPolicy = Literal["auto", "fixed", "joint"]
"""Stand-ins for private layers stay ``fixed`` or are optimized (``joint``); ``auto``: optimized if a split is known."""

JOINTLY = "It optimizes the private layers jointly with the image, starting from those that stand in for them."


@dataclass(frozen=True, kw_only=True)
class ModelInversion(GroupAttack):
    """Attack that minimizes ``||F(x) - O||^2 / ||O||^2`` + priors over images x with features O (He et al. 2019).

    F are the model's first layers, and O is their output for the victim's images. If these layers are private,
    stand-ins replace F, such as a colluding client's layers; if not, F is the first layer as sent. ``relative=False``
    omits the division (Gu et al. 2021, Algorithm 3).

    ``front="joint"`` also optimizes the parameters of F for each image. ``recover_at``: module whose input is O if O
    has to be recovered; by default, the first that is not private.
    """

    recovery: Recovery = field(default_factory=lambda: Recovery(matching=GradientInversion()))
    of_rounds = "last"

    features: FeatureSource = "auto"
    recover_at: str | None = None
    front: FrontPolicy = "auto"
    relative: bool = True
    anchor: float = 1e-2  # weight of the squared distance of F to its start, in shares of its squared norm
    optimizer: Optimizer = field(default_factory=LBFGS)
    priors: tuple[Prior, ...] = (TotalVariation(weight=1e-3),)
    start: settings.Start = field(default_factory=settings.Uniform)
    space: settings.Space = field(default_factory=settings.Space)
    projection: settings.Projection = "none"
    into_range: settings.Scaling = "clamp"
    iterations: int = 1500
    restarts: int = 1  # attempts from different starts; the least loss is taken
    dtype: settings.DType = "float32"
    device: str | None = None
    most_rows: int = 256  # most victims times restarts attacked at once

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts", "most_rows"):
            whole(f"attack.{name}", getattr(self, name), at_least=1, example=1)
        settings.expect_choices(self)

    def wrong(self, observation: Observation) -> str | None:
        recovers = self.features == "recovered" or observation.knowledge.features is None
        return targets.why_not_attackable(observation, informative=recovers)

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        targets.expect_images(first)
        device = torch.device(self.device or next(iter(first.sent.parameters.values())).device)
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        values, knowledge, layer = first.assumed(), first.knowledge, self.recover_at
        if self.features != "recovered":
            layer = knowledge.features_at if knowledge.features is not None else layer
            if known := knowledge.front:
                values = ModelState({**values.parameters, **known.parameters}, {**values.buffers, **known.buffers})
        try:
            layer = layer or cut_layer(first.model, first.input_shape, first.sent.parameters)
        except UserError as error:
            raise targets.NotAttackableError(str(error)) from error
        evaluating = replace(first.plan, batch_norm="eval")  # features must not depend on the batch
        front = Front(frozen_copy(first.model, values, evaluating, device=device, dtype=dtype), layer)
        found = self._features(list(group.observations.values()), front, seed=seed, report=report)
        members = list(zip(group.observations.items(), found, strict=True))
        results = {position: failed(o, reason) for (position, o), reason in members if isinstance(reason, str)}
        pairs = [(*member, f) for member, f in members if isinstance(f, Tensor)]
        each = max(1, self.most_rows // self.restarts)
        for begin in range(0, len(pairs), each):
            chunk = pairs[begin : begin + each]
            features = torch.stack([f for _, _, f in chunk]).to(device=device, dtype=dtype)
            meter = part_of(report, *(0.5 + 0.5 * at / len(pairs) for at in (begin, begin + len(chunk))))
            blank = features.new_zeros(len(chunk) * self.restarts, first.upload.num_examples, *first.input_shape)
            with fitting_threads(multiplications_of_a_layer(front, blank)):
                inverted = self._invert([o for _, o, _ in chunk], front, features, seed, meter)
            results |= {position: r for (position, _, _), r in zip(chunk, inverted, strict=True)}
        return results

    def _features(
        self, observations: Sequence[Observation], front: Front, *, seed: int, report: Report
    ) -> list[Tensor | str]:
        known = [None if self.features == "recovered" else o.knowledge.features for o in observations]
        shape = (observations[0].upload.num_examples, *seen_shape(front, observations[0]))
        needed = [o for o, f in zip(observations, known, strict=True) if f is None]
        if needed and self.features == "known":
            return ["The attack needs the features, but was given none; set threat_model=shown_features."] * len(known)

        def progress(done: int, total: int) -> None:
            report(0.5 * done / max(1, total))

        recovered = iter(self.recovery(needed, front, seed=seed, progress=progress) if needed else ())
        chosen = [next(recovered) if f is None else f for f in known]
        wrong = "Features of shape {} are expected, but got {}; check the layer that they come from.".format
        return [wrong(shape, tuple(f.shape)) if isinstance(f, Tensor) and f.shape != shape else f for f in chosen]

    def _invert(
        self, observations: Sequence[Observation], front: Front, features: Tensor, seed: int, report: Report
    ) -> list[Reconstruction]:
        first, restarts = observations[0], self.restarts
        victims = [o for o in observations for _ in range(restarts)]
        stand_ins = first.knowledge.private.parameters if first.knowledge.private is not None else {}
        splits = any(isinstance(part.effect, PrivateLayers) for part in first.knowledge.defense or ())
        joint = bool(stand_ins) and (self.front == "joint" or (self.front == "auto" and splits))
        values = dict(front.model.named_parameters())
        problem = InversionProblem(
            attack=self,
            front=front,
            features=features.repeat_interleave(restarts, 0),
            shape=(first.upload.num_examples, *first.input_shape),
            unknown={f"model.{name}": values[name].detach() for name in stand_ins if joint},
        )
        starts = [derive_generator(seed, "attack", str(o.id), k) for o in observations for k in range(restarts)]
        pairs = zip(victims, starts, strict=True)
        contexts = [
            settings.VictimContext(o, o.knowledge.labels, problem.shape, generator, self.space)
            for o, generator in pairs
        ]
        pixels = torch.stack([self.start(context).flatten() for context in contexts]).to(problem.features)
        found = minimize(
            problem,
            torch.cat([pixels, *[value.flatten().expand(len(pixels), -1) for value in problem.unknown.values()]], 1),
            generators=starts,
            enough=features.new_zeros(len(starts)),
            settings=settings.Settings(
                optimizer=self.optimizer, iterations=self.iterations, projection=self.projection
            ),
            evaluate=InversionProblem.evaluate,
            report=report,
            filmed=filmed_rows(victims),
        )
        films = films_of(problem, found)
        images = (
            settings.scaled_to_range(problem.images(found.variables), self.into_range).float().to(first.precision).cpu()
        )
        sentences = (JOINTLY,) if joint and first.knowledge.defense is not None else ()
        return [
            best_reconstruction(
                o, front.model, found, images, rows=range(k, k + restarts), films=films, sentences=sentences
            )
            for k, o in zip(range(0, len(victims), restarts), observations, strict=True)
        ]
