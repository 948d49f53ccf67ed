"""Server's side of a round: choice of clients, messages, and aggregation."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fl_privacy.checks import number, one_of
from fl_privacy.data.examples import LabelledExamples
from fl_privacy.defenses.encoding import encoded_bytes
from fl_privacy.defenses.guard import RefusedModelError
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import FACTOR, Failure, norm, sort_out
from fl_privacy.federation.server_optimizer import ServerOptimizer, ServerSteps
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.types import LocalPlan, ModelState, Tensors, Upload

logger: logging.Logger = logging.getLogger(__name__)

Tamper = Callable[[ModelState, int], ModelState]
"""(global model, client id) -> model sent to that client by a malicious server."""

Heard = Callable[[int, Upload, Mapping[int, int]], None]
"""Callback (round, mean of the replies, number of examples by client) for a server that sees only means."""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """The server's aggregation rules.

    Attributes:
        aggregation: ``mean`` of the replies weighted by examples, or ``round_robin``: one client a round, in turn.
        fraction: share of the clients asked in a round, in (0, 1]; at least one client.
        lr: server's step along the aggregated gradient (downhill) or delta.
        optimizer: rule of that step.
        noise: standard deviation of Gaussian noise on each value of the mean; it does not protect from the server.
        norm_factor: largest norm of a reply, in multiples of the largest of the rounds' median norms, if a round has
            three or more replies. Also limits a client's number of examples, relative to their median.
    """

    aggregation: Literal["mean", "round_robin"] = "mean"
    fraction: float = 1.0
    lr: float = 1.0
    norm_factor: float = FACTOR
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    noise: float = 0.0

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, ("mean", "round_robin"))
        number("fraction", self.fraction, above=0, at_most=1, example="use 1 to ask every client")
        number("server lr", self.lr, above=0, example=1)
        number("server_noise", self.noise, at_least=0, example=0.01)
        number("norm_factor", self.norm_factor, above=1, infinite=True, example="inf excludes no large update")


@dataclass(kw_only=True, eq=False)
class Server:
    """A federation's server: global model and aggregation."""

    state: ModelState  # global model; replaced, never changed in place
    local_plan: LocalPlan
    plan: ServerPlan
    clients: Sequence[int]
    seed: int
    tamper: Tamper | None = None  # change of the model sent to a client, if any
    tampered: frozenset[int] | None = None  # rounds with tampering; ``None`` is all
    learns: bool = True  # ``True`` if the model also moves in tampered rounds
    heard: Heard | None = None  # gets each round's mean reply; with ``tamper``, that of tampered rounds only
    personal: bool = False  # ``True`` if clients train a private part on the new model at the end of a round
    tested: frozenset[int] = frozenset()  # rounds after which clients with a private part also test their models
    _usual: Mapping[str, float] = field(default_factory=dict, init=False, repr=False)
    _steps: ServerSteps = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = ServerSteps(rule=self.plan.optimizer)

    def select(self, round: int) -> list[int]:
        if self.plan.aggregation == "round_robin":
            return [self.clients[(round - 1) % len(self.clients)]]
        number = max(1, math.ceil(self.plan.fraction * len(self.clients) - 1e-9))
        order = torch.randperm(len(self.clients), generator=derive_generator(self.seed, "select", round))
        return sorted(self.clients[i] for i in order[:number].tolist())

    def sent_to(self, client: int, round: int | None = None) -> ModelState:
        return self.tamper(self.state, client) if self.tamper and self._tampers(round) else self.state

    def receive(
        self,
        replies: Mapping[int, Upload | Failure],
        round: int | None = None,
        *,
        behind: Mapping[int, int] | None = None,
    ) -> dict[int, str]:
        """Update the global model from the usable replies; return the reasons of excluded replies, by client.

        After a round with an altered model (``tamper``), the model only changes if ``learns`` is ``True``. ``behind``:
        client -> number of examples, if the only reply is the clients' secure sum. ``UserError`` if no reply is usable,
        except if all clients refused the model.
        """
        found = sort_out(replies, self.state, self.local_plan.shares, factor=self.plan.norm_factor, usual=self._usual)
        self._usual = found.usual
        usable, excluded = dict(found.usable), dict(found.excluded)
        weights = dict(zip(usable, found.weights, strict=True))
        for client, upload in usable.items():
            if weights[client] < upload.num_examples:
                text = "Client %d claims %d examples and counts as %d, %g times the median"
                logger.warning(text, client, upload.num_examples, weights[client], self.plan.norm_factor)
        attacked = self.tamper is not None and round is not None and self._tampers(round)
        while usable:
            uploads, counts = list(usable.values()), [weights[c] for c in usable]
            mean = Upload(
                tensors=weighted_mean([u.tensors for u in uploads], counts),
                buffers=weighted_mean([u.buffers for u in uploads], counts),
                num_examples=sum(counts),
                rounding=math.hypot(*(w * u.rounding for w, u in zip(counts, uploads, strict=True))) / sum(counts),
            )
            before, moved = self._steps.copied(), self._moved(mean, round)
            if all(torch.isfinite(t).all() for t in moved.parameters.values()):
                if self.learns or not attacked:
                    self.state, before = moved, self._steps
                self._steps = before
                if self.heard and round is not None and (attacked or self.tamper is None):
                    self.heard(round, mean, behind or {c: weights[c] for c in usable})
                return dict(sorted(excluded.items()))
            self._steps = before
            largest = max(usable, key=lambda c: norm(usable[c].tensors))
            size = norm(usable.pop(largest).tensors)
            excluded[largest] = f"the model is not finite with its update of norm {size:.3g}"
        if excluded and all(reason.startswith(RefusedModelError.__name__) for reason in excluded.values()):
            return dict(sorted(excluded.items()))
        reasons = "; ".join(f"client {c}: {reason}" for c, reason in sorted(excluded.items())[:3])
        raise UserError(
            f"At least one usable reply is expected in a round, but all {len(replies)} clients failed ({reasons});"
            " fix the clients, or lower the learning rate if updates are not finite."
        )

    def _tampers(self, round: int | None) -> bool:
        return self.tampered is None or round is None or round in self.tampered

    def _moved(self, mean: Upload, round: int | None) -> ModelState:
        old, buffers = self.state.parameters, self.state.buffers
        steps = mean_change(mean, old, self.local_plan)
        if self.plan.noise:
            rng = derive_generator(self.seed, "server-noise", round or 0)
            steps = {n: t + self.plan.noise * torch.randn(t.shape, generator=rng).to(t) for n, t in steps.items()}
        steps = self._steps.step(steps)
        moved = {n: p + self.plan.lr * steps[n] if n in steps else p for n, p in old.items()}
        return ModelState(moved, {**buffers, **{n: t.to(buffers[n].dtype) for n, t in mean.buffers.items()}})


def mean_change(mean: Upload, sent: Tensors, plan: LocalPlan) -> Tensors:
    """Convert a mean upload into a change of the values ``sent``; ``plan`` says if it holds weights or gradients."""
    steps = {n: t.to(sent[n].dtype) for n, t in mean.tensors.items()}
    if plan.shares == "weights":
        return {n: t - sent[n] for n, t in steps.items()}
    return {n: -t for n, t in steps.items()} if plan.shares == "gradient" else steps


def weighted_mean(tensors: Sequence[Tensors], weights: Sequence[int]) -> dict[str, torch.Tensor]:
    """Average each tensor over the clients that have it, weighted by ``weights``; integers are rounded."""
    result = {}
    for name in dict.fromkeys(name for t in tensors for name in t):
        held = [(t[name], w) for t, w in zip(tensors, weights, strict=True) if name in t]
        total = sum(w for _, w in held)
        mean = torch.stack([t.to(torch.promote_types(t.dtype, torch.float32)) * (w / total) for t, w in held]).sum(0)
        like = held[0][0]
        result[name] = mean if like.is_floating_point() else mean.round().to(like.dtype)
    return result


def upload_bytes(upload: Upload) -> int:
    """Return the size of an upload in bytes, with each tensor in its shorter encoding (``defenses.encoding``)."""
    return encoded_bytes(upload.tensors) + sum(b.numel() * b.element_size() for b in upload.buffers.values())


_NOT_ASKED = -100  # label of a position without a next token


@dataclass(frozen=True)
class Evaluation:
    """Result of a test: accuracy in [0, 1], cross entropy (both means over examples or tokens), number of examples."""

    accuracy: float
    loss: float
    num_examples: int


def mean_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Average the evaluations of clients that tested their own models, equally weighted."""
    accuracy, loss = sum(e.accuracy for e in evaluations), sum(e.loss for e in evaluations)
    count, examples = len(evaluations), sum(e.num_examples for e in evaluations)
    return Evaluation(accuracy / count, loss / count, examples)


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    state: ModelState,
    examples: LabelledExamples,
    *,
    batch_size: int = 200,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Evaluate ``state`` in eval mode on all of ``examples``."""
    model.eval()
    correct, asked, loss = 0, 0, 0.0
    for indices in counted("testing batch", torch.arange(len(examples)).split(batch_size)):
        batch = examples.batch(indices, device)
        logits = functional_call(model, {**state.parameters, **state.buffers}, (batch.inputs,))
        correct += int((logits.argmax(1) == batch.labels).sum())
        asked += int((batch.labels != _NOT_ASKED).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum", ignore_index=_NOT_ASKED))
    return Evaluation(correct / max(1, asked), loss / max(1, asked), len(examples))
