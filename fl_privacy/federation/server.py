"""The server's side of a round: whom to ask, what to send, what to make of the replies."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fl_privacy.checks import number, one_of
from fl_privacy.defenses.compression.encoding import encoded_bytes
from fl_privacy.errors import UserError
from fl_privacy.federation.guard import FACTOR, Failure, norm, sort_out
from fl_privacy.rng import derive_generator
from fl_privacy.types import LocalPlan, ModelState, Tensors, Upload

logger = logging.getLogger(__name__)

Tamper = Callable[[ModelState, int], ModelState]
"""(the global model, client id) -> what that client is sent; a malicious server's hand."""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """How replies become the next model.

    Attributes:
        aggregation: ``mean`` of the replies weighted by examples, or ``round_robin``: one client a round, in turn.
        fraction: share of the clients asked in a round, in (0, 1]; at least one.
        lr: the server's step along the aggregated gradient (downhill) or delta.
        norm_factor: of three or more replies, those are excluded whose norm is over so many times the largest median so
            far; a client counts as at most so many times the median number of examples.
    """

    aggregation: Literal["mean", "round_robin"] = "mean"
    fraction: float = 1.0
    lr: float = 1.0
    norm_factor: float = FACTOR

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, ("mean", "round_robin"))
        number("fraction", self.fraction, above=0, at_most=1, example="use 1 to ask every client")
        number("server lr", self.lr, above=0, example=1)
        number("norm_factor", self.norm_factor, above=1, infinite=True, example="inf excludes no large update")


@dataclass(kw_only=True, eq=False)
class Server:
    """The global model and the rules by which it moves.

    Attributes:
        state: the global model; replaced, never changed in place.
        local_plan: what clients share, hence how replies are read.
        plan: how they are put together.
        clients: ids.
        seed: of the choice of clients.
        tamper: changes what a client is sent.
        personal: clients keep a part of the model: at the end of a round those asked are sent the new model, to train
            their part on it.
        tested: rounds after which they also test what they hold then.
    """

    state: ModelState
    local_plan: LocalPlan
    plan: ServerPlan
    clients: Sequence[int]
    seed: int
    tamper: Tamper | None = None
    personal: bool = False
    tested: frozenset[int] = frozenset()
    _usual: Mapping[str, float] = field(default_factory=dict, init=False, repr=False)

    def select(self, round: int) -> list[int]:
        """Ids of the clients asked in ``round`` (from 1), in ascending order."""
        if self.plan.aggregation == "round_robin":
            return [self.clients[(round - 1) % len(self.clients)]]
        number = max(1, math.ceil(self.plan.fraction * len(self.clients) - 1e-9))
        order = torch.randperm(len(self.clients), generator=derive_generator(self.seed, "select", round))
        return sorted(self.clients[i] for i in order[:number].tolist())

    def sent_to(self, client: int) -> ModelState:
        """What ``client`` is sent in the current round."""
        return self.tamper(self.state, client) if self.tamper else self.state

    def receive(self, replies: Mapping[int, Upload | Failure]) -> dict[int, str]:
        """Move the global model by the replies that are usable.

        Returns:
            Reason of exclusion by client; these replies do not count.

        Raises:
            UserError: no reply is usable.
        """
        found = sort_out(replies, self.state, self.local_plan.shares, factor=self.plan.norm_factor, usual=self._usual)
        self._usual = found.usual
        usable, excluded = dict(found.usable), dict(found.excluded)
        weights = dict(zip(usable, found.weights, strict=True))
        for client, upload in usable.items():
            if weights[client] < upload.num_examples:
                text = "Client %d claims %d examples and counts as %d, %g times the median"
                logger.warning(text, client, upload.num_examples, weights[client], self.plan.norm_factor)
        while usable:
            moved = self._after(list(usable.values()), [weights[c] for c in usable])
            if all(torch.isfinite(t).all() for t in moved.parameters.values()):
                self.state = moved
                return dict(sorted(excluded.items()))
            largest = max(usable, key=lambda c: norm(usable[c].tensors))
            excluded[largest] = (
                f"the model is not finite with its update of norm {norm(usable.pop(largest).tensors):.3g}"
            )
        reasons = "; ".join(f"client {c}: {reason}" for c, reason in sorted(excluded.items())[:3])
        raise UserError(
            f"At least one usable reply is expected in a round, but all {len(replies)} clients failed ({reasons});"
            " fix the clients, or lower the learning rate if updates are not finite."
        )

    def _after(self, uploads: Sequence[Upload], weights: Sequence[int]) -> ModelState:
        old = self.state.buffers
        shared = {n: t.to(old[n].dtype) for n, t in weighted_mean([u.buffers for u in uploads], weights).items()}
        return ModelState(self._moved([u.tensors for u in uploads], weights), {**old, **shared})

    def _moved(self, tensors: Sequence[Tensors], weights: Sequence[int]) -> Tensors:
        old = self.state.parameters
        mean = {n: t.to(old[n].dtype) for n, t in weighted_mean(tensors, weights).items()}
        match self.local_plan.shares:
            case "gradient":
                return {n: p - self.plan.lr * mean[n] if n in mean else p for n, p in old.items()}
            case "delta":
                return {n: p + self.plan.lr * mean[n] if n in mean else p for n, p in old.items()}
            case "weights":
                return {n: p + self.plan.lr * (mean[n] - p) if n in mean else p for n, p in old.items()}


def weighted_mean(tensors: Sequence[Tensors], weights: Sequence[int]) -> dict[str, torch.Tensor]:
    """Mean of each tensor over those that hold it, weighted; summed in the order given, integers rounded back."""
    names = dict.fromkeys(name for t in tensors for name in t)
    result = {}
    for name in names:
        held = [(t[name], w) for t, w in zip(tensors, weights, strict=True) if name in t]
        total = sum(w for _, w in held)
        mean = torch.stack([t.to(torch.promote_types(t.dtype, torch.float32)) * (w / total) for t, w in held]).sum(0)
        like = held[0][0]
        result[name] = mean if like.is_floating_point() else mean.round().to(like.dtype)
    return result


def upload_bytes(upload: Upload) -> int:
    """Bytes of the tensors of an upload; those with zeros or few levels as ``defenses.encoding`` sends them."""
    return encoded_bytes(upload.tensors) + sum(b.numel() * b.element_size() for b in upload.buffers.values())
