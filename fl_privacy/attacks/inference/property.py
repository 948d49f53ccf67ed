"""Infer the share of each class among a client's examples, by shadow clients with chosen shares."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.attacks.inference.kinds import About
from fl_privacy.attacks.inference.read_round import ReadRound, mean_gradient, mean_over_steps
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import ManyModels, local_orders, loss_gradients, models_at_once
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

RIDGE = 1e-3  # penalty of the regression, in units of the features' variance


@dataclass(frozen=True, kw_only=True)
class PropertyInference:
    """Attack that infers the shares of the classes among a client's examples (after Wang et al. 2019).

    Shadow clients train on public examples with chosen shares; ridge regression predicts shares from an update's inner
    products with the classes' mean gradients.
    """

    about: ClassVar[About] = About.PROPERTY
    shadows: int = 64  # number of shadow clients trained in a round
    shadow_rounds: int = 5  # number of last rounds with shadow clients
    alpha: float = 0.5  # parameter of the Dirichlet distribution of shares

    def __post_init__(self) -> None:
        checks.whole("inference.property.shadows", self.shadows, at_least=8, at_most=100_000, example=64)
        checks.whole("inference.property.shadow_rounds", self.shadow_rounds, at_least=1, example=5)
        checks.number("inference.property.alpha", self.alpha, above=0, example=0.5)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "PropertyWatch":
        return PropertyWatch(self, tuple(clients), torch.zeros(len(clients), classes), torch.zeros(len(clients)))


@dataclass(eq=False)
class PropertyWatch:
    """Observer that infers each client's class shares and sums them over rounds."""

    settings: PropertyInference
    clients: tuple[int, ...]
    total: Tensor = field(repr=False)
    rounds: Tensor = field(repr=False)

    def add(self, read: ReadRound) -> None:
        """Add the class shares inferred from one of the last rounds; ``UserError`` if a class lacks public examples."""
        if read.remaining >= self.settings.shadow_rounds:
            return
        classes = self.total.shape[1]
        if read.public is None or int((read.public.labels.bincount(minlength=classes) > 0).sum()) < classes:
            raise UserError(f"Public examples of all {classes} classes are expected, but some have none; give them.")
        for number, (model, sent, own) in enumerate(read.same_sent):
            observations = [read.observations[column] for column in own]
            rng = derive_generator(read.seed, "inference", "property", read.round, number)
            shadows = _Shadows(model, sent, observations[0].plan, read.public, tuple(observations[0].update()))
            sizes = torch.tensor([max(1, observation.upload.num_examples) for observation in observations])
            alpha = torch.full((self.settings.shadows, classes), self.settings.alpha)
            gamma = torch._standard_gamma(alpha, generator=rng).clamp(min=1e-8)
            shares = gamma / gamma.sum(1, keepdim=True)
            seen = torch.stack([shadows.features_of(mean_gradient(observation)) for observation in observations])
            guessed = _regressed(shadows.trained(shares, int(sizes.median()), rng), shares, seen)
            rows = torch.tensor([self.clients.index(observation.id.client) for observation in observations])
            finite = guessed.isfinite().all(1)
            self.total[rows[finite]] += guessed[finite]
            self.rounds[rows[finite]] += 1

    def answers(self) -> dict[str, Tensor]:
        return {"shadows": torch.where(self.rounds[:, None] > 0, self.total / self.rounds[:, None], torch.nan)}

    def titles(self) -> dict[str, tuple[str, str]]:
        return {"shadows": ("Regression on shadow clients", "after Wang et al. 2019")}


@dataclass(frozen=True, eq=False)
class _Shadows:
    """Shadow clients that train on public examples and upload the tensors ``names``."""

    model: nn.Module
    sent: ModelState
    plan: LocalPlan
    public: Batch
    names: tuple[str, ...]

    def trained(self, shares: Tensor, size: int, rng: torch.Generator) -> Tensor:
        """Return features (S, K) of S clients trained on examples with ``shares`` (S, K) of K classes.

        A feature is the inner product of a client's and a class's mean gradient. ``size``: examples of each client.
        """
        labels = self.public.labels.cpu()
        weights = shares[:, labels] / labels.bincount(minlength=shares.shape[1])[labels]
        subsets, found = torch.multinomial(weights, size, replacement=True, generator=rng), []
        for some in torch.split(subsets, models_at_once(self.model, min(self.plan.batch_size or size, size))):
            order = [rows.to(self.public.labels.device) for rows in local_orders(some, self.plan, rng)]
            after = ManyModels.copies(self.model, self.sent, len(some)).trained(self.public, order, self.plan)
            change = {n: after.values.parameters[n] - self.sent.parameters[n] for n in self.names}
            moved = mean_over_steps(change, self.sent.parameters, self.plan, steps=len(order))
            found.append(self._products(moved, len(some)))
        return torch.cat(found)

    def features_of(self, gradient: Tensors) -> Tensor:
        known = {n: gradient[n] if n in gradient else torch.zeros_like(self.sent.parameters[n]) for n in self.names}
        return self._products({n: g.unsqueeze(0) for n, g in known.items()}, 1)[0]

    @cached_property
    def class_gradients(self) -> list[Tensors]:
        found = []
        for label in range(int(self.public.labels.max()) + 1):
            own = self.public.labels == label
            batch = Batch(self.public.inputs[own], self.public.labels[own])
            found.append(loss_gradients(self.model, self.sent, batch, batch_norm="eval").gradients)
        return found

    def _products(self, gradients: Tensors, number: int) -> Tensor:
        products = torch.zeros(number, len(self.class_gradients))
        for name in self.names:
            own = torch.stack([g[name].flatten() for g in self.class_gradients], 1)
            products += (gradients[name].to(own).reshape(number, -1) @ own).cpu()
        return products


def _regressed(features: Tensor, shares: Tensor, seen: Tensor) -> Tensor:
    features, shares, seen = features.double(), shares.double(), seen.double()
    mean, spread = features.mean(0), features.std(0).clamp(min=1e-12)
    inputs, asked = (features - mean) / spread, (seen - mean) / spread
    gram = inputs.T @ inputs / len(inputs) + RIDGE * torch.eye(inputs.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, inputs.T @ (shares - shares.mean(0)) / len(inputs))
    guessed = (shares.mean(0) + asked @ weights).clamp(min=0)
    found: Tensor = (guessed / guessed.sum(1, keepdim=True).clamp(min=1e-12)).float()
    return found
