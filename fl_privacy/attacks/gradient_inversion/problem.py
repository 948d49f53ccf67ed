"""The attack's objective for V victims, and its gradient."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive import Clips, Constraints
from fl_privacy.attacks.gradient_inversion.layer_statistics import (
    Coefficients,
    Explicit,
    LayerStatistics,
    Products,
    Target,
    Zero,
    weighted_distance,
)
from fl_privacy.attacks.gradient_inversion.objectives import OfLayers
from fl_privacy.attacks.gradient_inversion.priors import Guess, TotalVariation, batch_statistics
from fl_privacy.attacks.gradient_inversion.settings import Projection, Settings, project
from fl_privacy.models.gradients import Layered, VictimGradients, differentiable_twice
from fl_privacy.models.gradients.layered import Factors
from fl_privacy.models.losses import CROSS_ENTROPY, Loss
from fl_privacy.types import Tensors

_plain_roughness, _relative_roughness = TotalVariation(weight=1.0), TotalVariation(weight=1.0, relative=True)
_LARGE = 1e-2  # largest unit of smoothness, as a share of the zero loss
_SMALL = 1 << 13  # most elements of a tensor that is joined with others to save operations


@dataclass(frozen=True, eq=False)
class RoundUpdates:
    """The updates of V victims in one round, and how they are compared with guessed gradients."""

    gradients: VictimGradients  # gradients of the losses; :class:`Layered` if there are ``factors`` or ``compared``
    targets: Mapping[str, Target]
    factors: Mapping[str, Factors]  # factors of observed tensors whose gradients are not formed
    clip: Clips | None
    compared: Collection[str] = ()  # weights whose gradients are formed and compared a few victims at a time

    @cached_property
    def small(self) -> tuple[Sequence[str], Target] | None:
        formed = [(name, target) for name, target in self.targets.items() if name not in self.factors]
        names = [name for name, target in formed if target.low is None and target.size <= _SMALL]
        return (names, Target.joined([self.targets[name] for name in names])) if len(names) > 1 else None

    def statistics(
        self, images: Tensor, labels: Tensor, hidden: Tensor | None, *, by_layer: bool = True
    ) -> dict[str, LayerStatistics]:
        """Return statistics, by tensor, that compare gradients for ``images`` (V, B, C, H, W) with V uploaded ones.

        ``images``: as the model sees them. ``labels``: (V, B) or (V, B, K). ``hidden``: gradient (V, B, F) at the
        features of a loss that only the client knows; requires :class:`Layered`. ``by_layer=False`` joins small tensors
        under the first one's name.
        """
        joined = None if by_layer else self.small
        if not self.factors:
            if hidden is None:
                gradients = self.gradients(images, labels)
            else:
                assert isinstance(self.gradients, Layered)
                gradients = self.gradients(images, labels, hidden)
            gradients = self.clip(gradients) if self.clip else gradients
            return self._explicit(gradients, joined)
        assert isinstance(self.gradients, Layered)
        gradients, products = self.gradients.gradients_and_products(images, labels, self.factors.keys(), hidden)
        found: dict[str, LayerStatistics] = {
            name: Products(*products[name], factors, self.targets[name]) for name, factors in self.factors.items()
        }
        found |= self._explicit(gradients, joined)
        return found if joined else {name: found[name] for name in self.targets}

    def compare(self, images: Tensor, labels: Tensor, hidden: Tensor | None, weights: Coefficients) -> Tensor:
        assert isinstance(self.gradients, Layered)
        found = self.gradients.gradients_and_products(images, labels, self.compared, hidden)
        return weighted_distance(*found, self.targets, weights)

    def _explicit(self, gradients: Tensors, joined: tuple[Sequence[str], Target] | None) -> dict[str, LayerStatistics]:
        formed = [name for name in self.targets if name in gradients]
        found: dict[str, LayerStatistics] = {name: Explicit(gradients[name], self.targets[name]) for name in formed}
        if joined is None:
            return found
        names, target = joined
        whole = Explicit(torch.cat([gradients[name].reshape(len(gradients[name]), -1) for name in names], 1), target)
        return {names[0]: whole, **{name: own for name, own in found.items() if name not in names}}

    def map(self, change: Callable[[Tensor], Tensor]) -> "RoundUpdates":
        targets = {name: target.map(change) for name, target in self.targets.items()}
        factors = {name: factors.map(change) for name, factors in self.factors.items()}
        clip = None if self.clip is None else self.clip.map(change)
        return RoundUpdates(self.gradients, targets, factors, clip, self.compared)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The loss of V victims as a function of their N variables, (V, N).

    The variables are pixels or inputs of the image source; then label logits, if labels are optimized; then the guessed
    gradients at the features, for each round, if a defense adds a loss that only the client knows.
    """

    settings: Settings
    shape: tuple[int, ...]  # (B, C, H, W) of one victim
    num_classes: int
    rounds: Sequence[RoundUpdates]
    labels: Tensor | None  # (V, B) or (V, B, K); ``None`` if they are optimized
    observer: nn.Module
    attempts: int  # number of neighboring victims that are attempts at the same one
    constraints: Constraints
    held: Tensor | None = None  # values (V, m) that the source holds fixed
    of_outputs: Loss = CROSS_ENTROPY
    own_statistics: Tensors = field(default_factory=dict)  # (V, C) of the clients' batches by buffer name, if uploaded

    @cached_property
    def pixels(self) -> int:
        source = self.settings.source
        return int(torch.Size(self.shape).numel()) if source is None else source.size(self.shape)

    def images(self, variables: Tensor) -> Tensor:
        if self.settings.source is not None and self.held is not None:
            labels = self.guessed_labels(variables)
            return self.settings.source.images(variables[:, : self.pixels], self.held, labels, self.shape)
        return self.settings.space.to_images(variables[:, : self.pixels].reshape(-1, *self.shape))

    def guessed_labels(self, variables: Tensor) -> Tensor:
        if self.labels is not None:
            return self.labels
        logits = variables[:, self.pixels : self._known]
        return self.of_outputs.expected(logits.reshape(-1, self.shape[0], self.num_classes))

    def hidden_gradients(self, variables: Tensor) -> Sequence[Tensor | None]:
        """Return, by round, the guessed gradient (V, B, F) of the client's secret loss at F features, or ``None``."""
        unknowns = self.constraints.unknowns
        if unknowns is None:
            return [None] * len(self.rounds)
        rounds = (len(self.rounds), self.shape[0], unknowns.features)
        return (unknowns.unit * variables[:, self._known :].reshape(-1, *rounds)).unbind(1)

    @property
    def _known(self) -> int:
        return self.pixels + (self.shape[0] * self.num_classes if self.labels is None else 0)

    def loss(self, variables: Tensor) -> Tensor:
        """Return the loss (V,): the mismatch plus terms of priors, constraints and the image source."""
        images, known = self.images(variables), self.constraints
        seen = known.transform(images) if known.transform else images
        loss = self.mismatch(seen, self.guessed_labels(variables), self.hidden_gradients(variables))
        if known.features is not None:
            loss = loss + known.features.mismatch(seen)
        guess = Guess(images, self.attempts, lambda: batch_statistics(self.observer, seen, self.own_statistics))
        for prior in self.settings.priors:
            loss = loss + prior(guess)
        if self.settings.source is not None:
            loss = loss + self.settings.source.penalty(variables[:, : self.pixels], self.shape)
        return loss if known.smoothness is None else loss + known.smoothness * self.roughness(guess)

    def roughness(self, guess: Guess) -> Tensor:
        return (_relative_roughness if self.constraints.any_contrast else _plain_roughness)(guess)

    def mismatch(self, images: Tensor, labels: Tensor, hidden: Sequence[Tensor | None]) -> Tensor:
        """Return the distance (V,) of gradients for ``images`` from updates; ``hidden``: :meth:`hidden_gradients`."""
        objective, terms = self.settings.objective, []
        for one, own in zip(self.rounds, hidden, strict=True):
            weights = None
            if one.compared and isinstance(objective, OfLayers):
                weights = objective.coefficients(list(one.targets))
            if weights is not None:
                terms.append(one.compare(images, labels, own, weights))
            else:
                terms.append(objective(one.statistics(images, labels, own, by_layer=objective.by_layer)))
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    def zero_loss(self) -> Tensor:
        """Return each victim's objective (V,) for an all-zero gradient; loss thresholds are multiples of it."""
        zeros = [{name: Zero(target) for name, target in r.targets.items()} for r in self.rounds]
        return torch.stack([self.settings.objective(statistics) for statistics in zeros]).sum(0)

    def blank_loss(self) -> Tensor:
        """Return gray images' objective (V,), at most ``_LARGE`` times ``zero_loss``, a unit for smoothness weights."""
        zero, known = self.zero_loss(), self.constraints
        images = zero.new_full((len(zero), *self.shape), 0.5)
        labels = self.labels
        if labels is None:
            labels = zero.new_full((len(zero), self.shape[0], self.num_classes), 1 / self.num_classes)
        free = known.unknowns
        hidden = None if free is None else zero.new_zeros(len(zero), self.shape[0], free.features)
        with differentiable_twice(), torch.no_grad():
            seen = known.transform(images) if known.transform else images
            gray = self.mismatch(seen, labels, [hidden] * len(self.rounds))
        return torch.where(gray.isfinite(), gray, zero).minimum(_LARGE * zero)

    def evaluate(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        with differentiable_twice():
            leaf = variables.detach().requires_grad_()
            loss = self.loss(leaf)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), gradient

    def projected(self, variables: Tensor, how: Projection) -> Tensor:
        space, source = self.settings.space, self.settings.source
        if source is not None and self.held is not None:
            pixels = source.confined(variables[:, : self.pixels], self.held, self.shape)
        elif how == "clamp":
            pixels = space.clamped(variables[:, : self.pixels])
        else:
            pixels = space.to_variables(project(self.images(variables), how)).flatten(1)
        return pixels if variables.shape[1] == self.pixels else torch.cat([pixels, variables[:, self.pixels :]], 1)

    def matching(self, targets: Sequence[Mapping[str, Target]]) -> "Problem":
        pairs = zip(self.rounds, targets, strict=True)
        return replace(self, rounds=[RoundUpdates(one.gradients, own, {}, None) for one, own in pairs])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        return replace(
            self,
            rounds=[one.map(change) for one in self.rounds],
            labels=None if self.labels is None else change(self.labels),
            constraints=self.constraints.map(change),
            held=None if self.held is None else change(self.held),
            own_statistics={name: change(value) for name, value in self.own_statistics.items()},
        )

    def select(self, rows: Tensor) -> "Problem":
        return self.map(lambda values: values[rows])
