"""An observed round, and statistics of candidate examples in it, computed on demand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.models.gradients import gradient_products, number_of_steps
from fl_privacy.models.gradients.choose_method import sgd_factor
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Tensors

CHUNK = 1000  # largest number of examples in one forward pass
_OUTPUTS = 1 << 24  # largest number of outputs in one forward pass; each token has one for each word of the vocabulary
LOWEST = 0.2  # share of a text's tokens in Min-K% (Shi et al. 2024, Sec. 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rehearsal:
    """Defended uploads of public examples, from which an attacker who knows the defense learns to infer attributes."""

    attributes: Tensor  # (N,) classes of the attribute, one per example
    uploads: Callable[[ModelState, int], Iterator[Observation]]  # (model's values, n) -> uploads of n single examples


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadRound:
    """One round as an inference attack sees it: uploads, and candidate examples whose membership is tested."""

    observations: tuple[Observation, ...]  # K uploads, one for each client that replied
    candidates: Batch  # C examples
    public: Batch | None = None  # the attacker's examples
    public_attributes: Tensor | None = None  # (N,) of these, other than the class
    rehearsal: Rehearsal | None = None  # if the attacker knows the defense
    victims: tuple[tuple[int, Observation], ...] = ()  # row in the scores of an attribute, upload of one example
    sent_next: ModelState | None = None  # global model after the round; ``None``: only uploads are known
    remaining: int = 0  # number of rounds to come
    seed: int = 0
    device: torch.device | str = "cpu"

    @property
    def round(self) -> int:
        return (self.observations[0] if self.observations else self.victims[0][1]).id.round

    @cached_property
    def after(self) -> list[ModelState]:
        return [model_after(observation).to(self.device) for observation in self.observations]

    @cached_property
    def published(self) -> ModelState:
        """Return the global model after the round, or if it is unknown, the weighted mean of clients' finite models."""
        if self.sent_next is not None:
            return self.sent_next.to(self.device)
        pairs = list(zip(self.observations, self.after, strict=True))
        sound = [(o, state) for o, state in pairs if all(bool(p.isfinite().all()) for p in state.parameters.values())]
        sizes = torch.tensor([float(max(1, o.upload.num_examples)) for o, _ in sound or pairs])
        states, shares = [state for _, state in sound or pairs], (sizes / sizes.sum()).tolist()

        def mean(parts: Sequence[Tensors]) -> Tensors:
            weighted = {n: sum(w * p[n] for w, p in zip(shares, parts, strict=True)) for n in parts[0]}
            return {n: torch.as_tensor(value).to(parts[0][n].dtype) for n, value in weighted.items()}

        return ModelState(mean([state.parameters for state in states]), mean([state.buffers for state in states]))

    @cached_property
    def losses_before(self) -> Tensor:
        columns = torch.empty(len(self.candidates), len(self.observations))
        for model, sent, own in self.same_sent:
            columns[:, own] = self.measured(model, sent, losses_of).unsqueeze(1)
        return columns

    @cached_property
    def losses_after(self) -> Tensor:
        return self.after_each(losses_of)

    def after_each(self, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return ``measure(logits, labels)`` (C, K) of C candidates under each of K clients' models after training."""
        pairs = zip(self.observations, self.after, strict=True)
        return torch.stack([self.measured(o.model.to(self.device), state, measure) for o, state in pairs], 1)

    def measured(self, model: nn.Module, state: ModelState, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return measured(model, state, self.candidates, measure).cpu()

    @cached_property
    def same_sent(self) -> list[tuple[nn.Module, ModelState, list[int]]]:
        return self.grouped(self.observations)

    def grouped(self, observations: Sequence[Observation]) -> list[tuple[nn.Module, ModelState, list[int]]]:
        """Group indices of ``observations`` by model and sent values."""
        groups: list[tuple[nn.Module, ModelState, list[int]]] = []
        for column, observation in enumerate(observations):
            sent = observation.assumed()
            for model, state, own in groups:
                pairs = ((state.parameters, sent.parameters), (state.buffers, sent.buffers))
                if model is observation.model and all(
                    a.keys() == b.keys() and all(a[n] is b[n] or torch.equal(a[n], b[n]) for n in a) for a, b in pairs
                ):
                    own.append(column)
                    break
            else:
                groups.append((observation.model, sent, [column]))
        return [(model.to(self.device), sent.to(self.device), own) for model, sent, own in groups]

    @cached_property
    def directions(self) -> list[Tensors]:
        return list(map(mean_gradient, self.observations))

    @cached_property
    def products(self) -> tuple[Tensor, Tensor]:
        """Return inner products (C, K) of C candidates' and K clients' gradients, and candidates' squared norms."""
        shape = len(self.candidates), len(self.observations)
        products, squares = torch.empty(shape), torch.empty(shape)
        for model, sent, own in self.same_sent:
            directions = [self.directions[column] for column in own]
            plan = self.observations[own[0]].plan
            found, norms = gradient_products(model, sent, self.candidates, directions, plan=plan)
            products[:, own], squares[:, own] = found.cpu(), norms.cpu().unsqueeze(1)
        return products, squares


def model_after(observation: Observation) -> ModelState:
    """Return the model that a client uploaded or, for an uploaded gradient, the sent model after one step with it."""
    sent, update = observation.assumed(), observation.update()
    step = -observation.plan.lr if observation.plan.shares == "gradient" else 1.0
    moved = {name: p + step * update[name].to(p) if name in update else p for name, p in sent.parameters.items()}
    return ModelState(moved, {**sent.buffers, **observation.upload.buffers})


def mean_gradient(observation: Observation) -> Tensors:
    """Return the uploaded gradient, or the mean gradient of the local steps that led to an uploaded model."""
    update, plan = observation.update(), observation.plan
    if plan.shares == "gradient":
        return update
    steps = number_of_steps(max(1, observation.upload.num_examples), plan)
    return mean_over_steps(update, observation.sent.parameters, plan, steps=steps)


def mean_over_steps(change: Tensors, sent: Tensors, plan: LocalPlan, *, steps: int) -> Tensors:
    """Return the mean gradient of the local steps that changed ``sent`` (*shape) by ``change`` (..., *shape), by name.

    SGD's momentum and weight decay are removed to first order; for Adam, the mean normalized step is returned.
    """
    if plan.optimizer != "sgd":
        return {name: t / (-plan.lr * steps) for name, t in change.items()}
    factor = -plan.lr * sgd_factor(steps, plan)
    return {name: t / factor - plan.weight_decay * sent[name].to(t) for name, t in change.items()}


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy (N,) of logits (N, K) for classes (N,), or (N, K, L) for tokens (N, L), -100 ignored."""
    found = F.cross_entropy(logits, labels, reduction="none")
    return found if labels.dim() == 1 else _mean_there(found, labels)


def margins_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 - p)) (N,) of the label's probability p (Carlini et al. 2022, eq. 6); for texts, its mean."""
    known = labels.clamp_min(0).unsqueeze(1)
    margins = logits.gather(1, known).squeeze(1) - logits.scatter(1, known, -torch.inf).logsumexp(1)
    return margins if labels.dim() == 1 else _mean_there(margins, labels)


def lowest_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return Min-K% (N,): the mean log probability of each text's least likely tokens, a share ``LOWEST`` of all."""
    scores = -F.cross_entropy(logits, labels, reduction="none")
    there = labels >= 0
    number = (LOWEST * there.sum(1)).ceil().clamp_min(1)
    ordered = scores.masked_fill(~there, torch.inf).sort(1).values
    lowest = torch.arange(scores.shape[1], device=scores.device) < number[:, None]
    return ordered.masked_fill(~lowest | ordered.isinf(), 0.0).sum(1) / number


def signals_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return four membership signals (N, 4) of N examples: loss, margin, entropy and a fourth.

    The fourth is minus :func:`lowest_of` for texts, and the loss again for other data.
    """
    entropy, loss = torch.special.entr(logits.softmax(1)).sum(1), losses_of(logits, labels)
    of_tokens = labels.dim() > 1
    last, entropy = (-lowest_of(logits, labels), _mean_there(entropy, labels)) if of_tokens else (loss, entropy)
    return torch.stack([loss, margins_of(logits, labels), entropy, last], 1)


def _mean_there(values: Tensor, labels: Tensor) -> Tensor:
    there = labels >= 0
    return (values * there).sum(1) / there.sum(1).clamp_min(1)


@torch.no_grad()
def measured(
    model: nn.Module, state: ModelState, examples: Batch, measure: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the values (N,) of ``measure(logits, labels)`` for ``examples``, at the model's values ``state``."""
    model.eval()
    values, found, begin, size = {**state.parameters, **state.buffers}, [], 0, 1
    while begin < len(examples.labels):
        rows = slice(begin, begin + size)
        logits = functional_call(model, values, (examples.inputs[rows],))
        found.append(measure(logits, examples.labels[rows]))
        begin, size = begin + size, max(1, min(CHUNK, _OUTPUTS // max(1, logits[0].numel())))
    return torch.cat(found)
