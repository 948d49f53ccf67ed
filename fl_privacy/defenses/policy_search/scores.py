"""Scores of ATS policies: privacy by gradient similarity, accuracy by an untrained model's Jacobian."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy import checks
from fl_privacy.data.transformations import Policy, transform
from fl_privacy.models.gradients import Layered, VictimModel, frozen_copy, loss_gradients, set_mode, victim_gradients
from fl_privacy.models.gradients.memory import spare_bytes, written_by
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.types import Batch, LocalPlan, ModelState

Cosine = Literal["whole", "layers"]
"""Cosine of two gradients as ``whole`` vectors (Eq. 5), or the mean cosine of ``layers`` (the authors' code)."""

_ELEMENTS_ON_CPU = 1 << 24  # most elements of per-image gradients held at once on CPUs; more would not be faster


@dataclass(frozen=True, eq=False)
class InnerProducts:
    """Inner products of gradients at S targets and at K images on a line to each, for T parameter tensors."""

    dot: Tensor  # (T, S, K), of each point with its target
    squared: Tensor  # (T, S, K), of each point with itself
    squared_target: Tensor  # (T, S, 1), of each target with itself

    def cosine(self, of: Cosine) -> Tensor:
        """Return cosines (S, K) of the gradient at each target with those at the K images between start and target.

        ``of``: ``whole`` for whole gradients, ``layers`` for the mean over parameter tensors.
        """
        parts = (self.dot, self.squared, self.squared_target)
        if of == "whole":
            dot, squared, target = (part.sum(0, keepdim=True) for part in parts)
        else:
            dot, squared, target = parts
        return (dot / (squared * target).sqrt().clamp_min(torch.finfo(dot.dtype).tiny ** 0.5)).mean(0)


class GradientSimilarity:
    """Compares images by a model's gradients at them; ``at_once``: largest number of gradients to keep in memory."""

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        input_shape: tuple[int, ...],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        at_once: int | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        plan = LocalPlan(batch_norm="eval")
        frozen = frozen_copy(model, state, plan, device=self.device, dtype=dtype)
        trial = torch.rand((2, 1, *input_shape), generator=derive_generator(0, "trial"))
        trial, labels = trial.to(self.device, dtype), torch.zeros(2, 1, dtype=torch.long, device=self.device)
        self._gradients = victim_gradients(VictimModel(frozen, list(state.parameters), plan), trial, labels)
        self._factored = self._gradients.ranks(trial, labels).keys() if isinstance(self._gradients, Layered) else set()
        self._size = sum(p.numel() for name, p in state.parameters.items() if name not in self._factored)
        self._at_once = at_once or self._most(trial, labels)

    def __call__(self, starts: Tensor, targets: Tensor, labels: Tensor, shares: Tensor) -> InnerProducts:
        """Compare the gradients at points between a start and a target image with the gradient at the target.

        Args:
            starts: images (R, C, H, W); target s has the start s modulo R.
            targets: images (S, C, H, W).
            labels: classes (S,) of the targets and their points.
            shares: share (K,) of the target in each point.
        """
        points = min(len(shares), max(1, self._at_once - 1))
        ways = max(1, self._at_once // (points + 1))
        parts = []
        for rows in torch.split(torch.arange(len(targets), device=targets.device), ways):
            first, last = (part.to(self.device, self.dtype) for part in (starts[rows % len(starts)], targets[rows]))
            own = labels[rows.to(labels.device)].to(self.device)
            goals, some = last.unsqueeze(1), []
            for chunk in torch.split(shares, points):
                way = torch.lerp(first.unsqueeze(1), goals, chunk.to(goals).view(-1, 1, 1, 1))
                some.append(self._compare(torch.cat([way, goals], 1), own))
            dot, squared = (torch.cat([part[number][..., :-1] for part in some], 2) for number in (0, 1))
            parts.append((dot, squared, some[0][1][..., -1:]))
        return InnerProducts(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))

    def _most(self, images: Tensor, labels: Tensor) -> int:
        with torch.no_grad():
            needed = written_by(lambda: self._compare(images, labels.flatten())) / len(images)
        fit = spare_bytes(self.device) / max(1, needed)
        if self.device.type == "cpu":
            fit = min(fit, _ELEMENTS_ON_CPU / max(self._size, images[0].numel()))
        return int(fit)

    def _compare(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # (T, s, K + 1) each: products with the gradient of a row's last image, and squared norms
        count, length = images.shape[:2]
        inputs, repeated = images.flatten(0, 1).unsqueeze(1), labels.repeat_interleave(length).unsqueeze(1)
        products: dict[str, tuple[Tensor, Tensor]] = {}
        apart = (count, length)
        with torch.no_grad():
            if isinstance(self._gradients, Layered):
                gradients, products = self._gradients.gradients_and_products(inputs, repeated, self._factored)
            else:
                gradients = self._gradients(inputs, repeated)
            flat = [gradient.reshape(*apart, -1) for gradient in gradients.values()]
            rows = [((each @ each[:, -1:].mT).squeeze(-1), each.square().sum(-1)) for each in flat]
            factors = [(part.reshape(*apart, *part.shape[1:]) for part in parts) for parts in products.values()]
            rows += [_factored(*pair) for pair in factors]
        return torch.stack([dot for dot, _ in rows]), torch.stack([squared for _, squared in rows])


def _factored(deltas: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    # gradients (s, L) are sums over P positions of outer products of deltas (s, L, O, P) and inputs (s, L, D, P)
    with_last = (deltas.mT @ deltas[:, -1:]) * (inputs.mT @ inputs[:, -1:])
    return with_last.sum((-2, -1)), ((deltas.mT @ deltas) * (inputs.mT @ inputs)).sum((-2, -1))


Rule = Literal["left", "trapezoid"]  # integration rule for the area under the curve of similarities


Over = Literal["images", "class means"]  # units of the areas' mean and variance

Variant = Literal["paper", "code", "code_normalized"]
"""Scoring by the ``paper``, by the authors' ``code``, or by their code's comparison of several policies."""


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Options of the privacy score (Gao et al. 2023, Eq. 11); the defaults are the paper's."""

    points: int = 20  # K, number of gradients compared on the way to the transformed image
    rule: Rule = "left"  # points j / K, for ``left`` from 0 to (K - 1) / K; for ``trapezoid`` K points from 0 to 1
    cosine: Cosine = "whole"
    alpha: float = 0.7  # weight of the mean of the areas below the curve
    beta: float = 0.3  # weight of their variance
    over: Over = "images"  # units for the mean and variance of areas: images (Eq. 9) or class means
    normalized: bool = False  # ``True`` scales mean and variance as in :func:`normalized_scores`

    def __post_init__(self) -> None:
        least = 1 if self.rule == "left" else 2
        checks.whole("points", self.points, at_least=least, example="the paper's code has 21")

    @classmethod
    def named(
        cls, variant: Variant, *, points: int | None = None, alpha: float = 0.7, beta: float = 0.3
    ) -> "PrivacyPlan":
        """Return the options of the privacy score in the ``paper`` (Gao et al. 2023) or in the authors' ``code``.

        These differ in ``points``, rule of integration and cosine. ``code_normalized`` is ``code`` with areas averaged
        over each class first, and with mean and variance normalized over all policies.
        """
        if variant == "paper":
            return cls(points=20 if points is None else points, alpha=alpha, beta=beta)
        checks.one_of("variant", variant, ("paper", "code", "code_normalized"))
        picks = variant == "code_normalized"
        over: Over = "class means" if picks else "images"
        code = cls(rule="trapezoid", cosine="layers", alpha=alpha, beta=beta, over=over, normalized=picks)
        return replace(code, points=21 if points is None else points)

    def shares(self) -> Tensor:
        if self.rule == "left":
            return torch.arange(self.points, dtype=torch.float64) / self.points
        return torch.linspace(0, 1, self.points, dtype=torch.float64)

    def area(self, similarities: Tensor) -> Tensor:
        if self.rule == "left":
            return similarities.mean(1)
        return torch.trapezoid(similarities, dx=1 / (self.points - 1), dim=1)


@dataclass(frozen=True, kw_only=True)
class PrivacyScore:
    """Privacy score of one policy, from similarities of gradients; lower is better for the client."""

    score: float
    mean: float  # mean of the areas under curves of gradient similarity
    variance: float  # variance of these areas


def privacy_scores(
    similarity: GradientSimilarity, batch: Batch, policies: Sequence[Policy], *, plan: PrivacyPlan, seed: int
) -> list[PrivacyScore]:
    """Return the privacy score S_pri (Gao et al. 2023) of each policy on the images of ``batch``; lower is better.

    It compares the gradient at a transformed image with gradients at blends of this image and noise, as ``plan`` says.
    """
    start = torch.rand(batch.inputs.shape, generator=derive_generator(seed, "search", "start")).to(batch.inputs)
    goals = torch.stack([transformed_by(batch.inputs, policy, seed) for policy in policies])
    products = similarity(start, goals.flatten(0, 1), batch.labels.repeat(len(policies)), plan.shares())
    areas = plan.area(products.cosine(plan.cosine).double()).view(len(policies), -1)
    if plan.over == "class means":
        # average areas (P, S) over the images of each class that there is, (P, C)
        _, of_class = torch.unique(batch.labels, return_inverse=True)
        shares = torch.nn.functional.one_hot(of_class).to(areas)
        areas = areas @ (shares / shares.sum(0))
    means, variances = areas.mean(1), areas.var(1, correction=0)
    rows = zip((plan.alpha * means + plan.beta * variances).tolist(), means.tolist(), variances.tolist(), strict=True)
    return [PrivacyScore(score=score, mean=mean, variance=variance) for score, mean, variance in rows]


def normalized_scores(means: Sequence[float], variances: Sequence[float], plan: PrivacyPlan) -> list[float]:
    """Return each policy's privacy score from ``means`` and ``variances`` (:class:`PrivacyScore`) of all policies.

    Both are scaled to [0, 1] over the policies; equal values become 0. ``plan`` has their weights. This follows the
    authors' code.
    """
    parts = []
    for values in (means, variances):
        found = torch.tensor(values, dtype=torch.float64)
        least, most = found.min(), found.max()
        parts.append((found - least) / (most - least) if most > least else torch.zeros_like(found))
    return (plan.alpha * parts[0] + plan.beta * parts[1]).tolist()


def transformed_by(images: Tensor, policy: Policy, seed: int) -> Tensor:
    """Return ``images`` transformed by ``policy``; random choices follow from ``seed`` and the policy."""
    return transform(images, [policy], derive_generator(seed, "search", "policy", str(policy)))


Total = Literal["mean", "sum"]
"""Reduction over eigenvalues: ``mean`` (Eq. 14) or ``sum`` (the authors' code)."""

_CHUNK = 1000  # images differentiated at once


def input_jacobian(model: nn.Module, state: ModelState, images: Tensor) -> Tensor:
    """Return the gradient (N, C H W) of each image's summed logits with respect to its pixels, in evaluation mode."""
    set_mode(model, "eval")
    values = {**state.parameters, **state.buffers}
    rows = []
    for some in torch.split(images, _CHUNK):
        leaf = some.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(functional_call(model, values, (leaf,)).sum(), leaf)
        rows.append(slope.flatten(1))
    return torch.cat(rows)


def correlation_score(jacobian: Tensor, *, total: Total = "mean", eta: float = 1e-5) -> Tensor:
    """Return a score that is higher the less correlated the rows are (Mellor et al. 2021; Gao et al. 2023).

    It is minus Eq. 14 of Gao et al. ``jacobian`` (..., N, D): derivatives for N images of D pixels. ``total``: ``mean``
    or ``sum`` over the N eigenvalues of the rows' correlations. ``eta``: small constant added to the eigenvalues.
    """
    rows = jacobian.double()
    rows = rows - rows.mean(-1, keepdim=True)
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    values = torch.linalg.eigvalsh(rows @ rows.mT).clamp_min(0) + eta
    terms = values.log() + 1 / values
    return cast(Tensor, -(terms.mean(-1) if total == "mean" else terms.sum(-1)))


def accuracy_scores(
    model: nn.Module,
    states: Sequence[ModelState],
    images: Sequence[Tensor],
    policies: Sequence[Policy],
    *,
    seed: int,
    total: Total = "mean",
) -> list[float]:
    """Return the accuracy score S_acc (Gao et al. 2023) of each of ``policies``, higher is better.

    It is the mean over k, for values ``states[k]`` of the model and the batch ``images[k]``; ``total``: see
    :data:`Total`.
    """
    draws = []
    for number, (state, batch) in enumerate(zip(states, images, strict=True)):
        own = derive_seed(seed, "draw", number)
        jacobian = input_jacobian(model, state, torch.cat([transformed_by(batch, policy, own) for policy in policies]))
        draws.append(correlation_score(jacobian.reshape(len(policies), -1, jacobian.shape[1]), total=total))
    return torch.stack(draws).mean(0).tolist()


TrainingProgress = Callable[[int, int, float], None]  # (epochs done, total epochs, mean loss of the last)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Training by SGD with momentum and three learning-rate drops; the defaults are those of Gao et al. 2023."""

    epochs: int = 50
    lr: float = 0.1  # initial learning rate, divided by ten after 3/8, 5/8 and 7/8 of the epochs
    batch_size: int = 128
    momentum: float = 0.9  # value in [0, 1)
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            checks.whole(f"training.{name}", getattr(self, name), at_least=1, example=50)
        checks.number("training.lr", self.lr, above=0, example=0.1)
        checks.number("training.momentum", self.momentum, at_least=0, below=1, example=0.9)
        checks.number("training.weight_decay", self.weight_decay, at_least=0, example=5e-4)


def train_model(
    model: nn.Module,
    batch: Batch,
    plan: TrainingPlan,
    *,
    seed: int,
    progress: TrainingProgress = lambda done, total, loss: None,
) -> ModelState:
    """Return the values of ``model`` after training a copy on ``batch``; ``UserError`` if the loss diverges."""
    state, order = ModelState.of(model), derive_generator(seed, "training", "order")
    parameters = {name: p.clone().requires_grad_() for name, p in state.parameters.items()}
    buffers = state.buffers
    decay = plan.weight_decay
    optimizer = torch.optim.SGD(list(parameters.values()), lr=plan.lr, momentum=plan.momentum, weight_decay=decay)
    steps_down = [round(plan.epochs * share) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps_down, gamma=0.1)
    for epoch in range(plan.epochs):
        losses = []
        for chosen in torch.split(torch.randperm(len(batch), generator=order).to(batch.labels.device), plan.batch_size):
            some = Batch(batch.inputs[chosen], batch.labels[chosen])
            result = loss_gradients(model, ModelState(parameters, buffers), some)
            for name, parameter in parameters.items():
                parameter.grad = result.gradients[name]
            optimizer.step()
            buffers = result.buffers
            losses.append(result.loss)
        schedule.step()
        mean = float(torch.stack(losses).mean())
        loss = f"The loss in epoch {epoch + 1} of the model that policies are scored on"
        checks.number(loss, mean, example=f"lower training.lr, which is {plan.lr}")
        progress(epoch + 1, plan.epochs, mean)
    return ModelState({name: p.detach() for name, p in parameters.items()}, buffers)
