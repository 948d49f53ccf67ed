"""What a server reads in one round, and the statistics of examples that follow from it, each computed if asked for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.gradients import gradient_products, number_of_steps
from fl_privacy.types import Batch, ModelState, Observation, Tensors

CHUNK = 1000
"""Examples that a model sees at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rehearsal:
    """Public examples on which an attacker who knows the defense rehearses.

    Attributes:
        attributes: (N,) what the examples are beside their class.
        uploads: of the first so many of them, each as a client with the same defense makes it of that example alone, at
            the given values; one at a time.
    """

    attributes: Tensor
    uploads: Callable[[ModelState, int], Iterator[Observation]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadRound:
    """The uploads of one round and the examples that are asked about; nothing of it outlives the round.

    Attributes:
        observations: one of each client that replied; K of them.
        candidates: C examples.
        public: examples that the attacker holds and no client does; ``None`` where it has none.
        public_attributes: (N,) what these are beside their class, where the data say so.
        rehearsal: of an attacker who knows the defense.
        victims: uploads of single examples that were probed, each with the row of its answer.
        remaining: how many rounds will be read after this one.
        seed: of the attacker's own draws.
        device: where it computes.
    """

    observations: tuple[Observation, ...]
    candidates: Batch
    public: Batch | None = None
    public_attributes: Tensor | None = None
    rehearsal: Rehearsal | None = None
    victims: tuple[tuple[int, Observation], ...] = ()
    remaining: int = 0
    seed: int = 0
    device: torch.device | str = "cpu"

    @property
    def round(self) -> int:
        """Return the number of the round, from 1."""
        read = self.observations[0] if self.observations else self.victims[0][1]
        return read.id.round

    @property
    def clients(self) -> list[int]:
        """Return who replied, in the order of the columns below."""
        return [observation.id.client for observation in self.observations]

    @cached_property
    def after(self) -> list[ModelState]:
        """Return the model that each upload leads to."""
        return [model_after(observation).to(self.device) for observation in self.observations]

    @cached_property
    def losses_before(self) -> Tensor:
        """Return the cross entropy (C, K) of each candidate at what each client was sent."""
        columns = torch.empty(len(self.candidates), len(self.observations))
        for model, sent, own in self.same_sent:
            columns[:, own] = example_losses(model, sent, self.candidates).cpu().unsqueeze(1)
        return columns

    @cached_property
    def losses_after(self) -> Tensor:
        """Return the cross entropy (C, K) at the model that each upload leads to; NaN where not finite."""
        found = [
            example_losses(observation.model.to(self.device), state, self.candidates).cpu()
            for observation, state in zip(self.observations, self.after, strict=True)
        ]
        return torch.stack(found, 1)

    @cached_property
    def margins_after(self) -> Tensor:
        """Return the margins (C, K) of each candidate's class at the model that each upload leads to."""
        found = [
            example_margins(observation.model.to(self.device), state, self.candidates).cpu()
            for observation, state in zip(self.observations, self.after, strict=True)
        ]
        return torch.stack(found, 1)

    @cached_property
    def products(self) -> Tensor:
        """Return inner products (C, K) of each candidate's gradient and each client's mean gradient."""
        return self._products[0]

    @cached_property
    def squares(self) -> Tensor:
        """Return squared norms (C, K) of the candidates' gradients."""
        return self._products[1]

    @cached_property
    def update_squares(self) -> Tensor:
        """Return squared norms (K,) of the clients' mean gradients."""
        return torch.tensor([sum(float(t.double().square().sum()) for t in d.values()) for d in self._directions])

    @cached_property
    def same_sent(self) -> list[tuple[nn.Module, ModelState, list[int]]]:
        """Return models sent, and which of ``observations`` are of each: an honest server sends one."""
        return self._grouped(self.observations)

    @cached_property
    def victims_sent(self) -> list[tuple[nn.Module, ModelState, list[int]]]:
        """Return models sent, and which of ``victims`` are of each of them."""
        return self._grouped([observation for _, observation in self.victims])

    def _grouped(self, observations: Sequence[Observation]) -> list[tuple[nn.Module, ModelState, list[int]]]:
        groups: list[tuple[nn.Module, ModelState, list[int]]] = []
        for column, observation in enumerate(observations):
            sent = observation.assumed()
            known = next(
                (own for model, state, own in groups if model is observation.model and _same(state, sent)), None
            )
            if known is None:
                groups.append((observation.model, sent, [column]))
            else:
                known.append(column)
        return [(model.to(self.device), sent.to(self.device), own) for model, sent, own in groups]

    @cached_property
    def _directions(self) -> list[Tensors]:
        return [mean_gradient(observation) for observation in self.observations]

    @cached_property
    def _products(self) -> tuple[Tensor, Tensor]:
        shape = len(self.candidates), len(self.observations)
        products, squares = torch.empty(shape), torch.empty(shape)
        for model, sent, own in self.same_sent:
            directions = [self._directions[column] for column in own]
            plan = self.observations[own[0]].plan
            found, norms = gradient_products(model, sent, self.candidates, directions, plan=plan)
            products[:, own], squares[:, own] = found.cpu(), norms.cpu().unsqueeze(1)
        return products, squares


def model_after(observation: Observation) -> ModelState:
    """Return the values that the upload leads to: those sent and the change, or one step down a shared gradient."""
    sent, update = observation.assumed(), observation.update()
    step = -observation.plan.lr if observation.plan.shares == "gradient" else 1.0
    moved = {name: p + step * update[name].to(p) if name in update else p for name, p in sent.parameters.items()}
    return ModelState(moved, {**sent.buffers, **observation.upload.buffers})


def mean_gradient(observation: Observation) -> Tensors:
    """Return the gradient that was shared; of a change of the weights, the mean over the local steps by plain SGD."""
    update, plan = observation.update(), observation.plan
    if plan.shares == "gradient":
        return update
    steps = number_of_steps(max(1, observation.upload.num_examples), plan)
    return {name: t / (-plan.lr * steps) for name, t in update.items()}


@torch.no_grad()
def example_losses(model: nn.Module, state: ModelState, examples: Batch) -> Tensor:
    """Compute the cross entropy of each example (N,), batch norm by its running statistics."""
    return torch.cat([F.cross_entropy(z, y, reduction="none") for z, y in _logits(model, state, examples)])


@torch.no_grad()
def example_margins(model: nn.Module, state: ModelState, examples: Batch) -> Tensor:
    """Compute the logarithm of p / (1 - p) of each example's class (N,) (Carlini et al. 2022, eq. 6)."""
    return torch.cat([logit_margins(z, y) for z, y in _logits(model, state, examples)])


def logit_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute margins (..., N) from logits (..., N, K) and class indices (..., N)."""
    own = logits.gather(-1, labels.unsqueeze(-1))
    others = logits.scatter(-1, labels.unsqueeze(-1), -torch.inf)
    return own.squeeze(-1) - others.logsumexp(-1)


def _logits(model: nn.Module, state: ModelState, examples: Batch) -> Sequence[tuple[Tensor, Tensor]]:
    model.eval()
    values, found = {**state.parameters, **state.buffers}, []
    for inputs, labels in zip(torch.split(examples.inputs, CHUNK), torch.split(examples.labels, CHUNK), strict=True):
        found.append((functional_call(model, values, (inputs,)), labels))
    return found


def _same(one: ModelState, other: ModelState) -> bool:
    if one is other:
        return True
    pairs = ((one.parameters, other.parameters), (one.buffers, other.buffers))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
