"""The server's side of a round: whom to ask, what to send, what to make of the replies."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fl_privacy.defenses.encoding import encoded_bytes
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator
from fl_privacy.types import LocalPlan, ModelState, Tensors, Upload

Tamper = Callable[[ModelState, int], ModelState]
"""(the global model, client id) -> what that client is sent; a malicious server's hand."""


@dataclass(frozen=True)
class Failure:
    """Why a client's reply does not count, in one line."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """How replies become the next model.

    Attributes:
        aggregation: ``mean`` of the replies weighted by examples, or ``round_robin``: one client a round, in turn.
        fraction: share of the clients asked in a round, in (0, 1]; at least one.
        lr: the server's step along the aggregated gradient (downhill) or delta.
    """

    aggregation: Literal["mean", "round_robin"] = "mean"
    fraction: float = 1.0
    lr: float = 1.0

    def __post_init__(self) -> None:
        if self.aggregation not in ("mean", "round_robin"):
            raise UserError(f"aggregation is expected to be mean or round_robin, but got {self.aggregation!r}.")
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction is expected in (0, 1], but got {self.fraction}; use 1 to ask every client.")
        if not 0 < self.lr < math.inf:
            raise UserError(f"server lr is expected to be above 0 and finite, but got {self.lr}; try 1.")


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
        excluded = {c: reason for c, reply in sorted(replies.items()) if (reason := self.fault(reply))}
        usable = {c: r for c, r in sorted(replies.items()) if c not in excluded and isinstance(r, Upload)}
        if not usable:
            reasons = "; ".join(f"client {c}: {reason}" for c, reason in list(excluded.items())[:3])
            raise UserError(
                f"At least one usable reply is expected in a round, but all {len(replies)} clients failed ({reasons});"
                " fix the clients, or lower the learning rate if updates are not finite."
            )
        uploads = list(usable.values())
        weights = [u.num_examples for u in uploads]
        shared = weighted_mean([u.buffers for u in uploads], weights)
        self.state = ModelState(self._moved([u.tensors for u in uploads], weights), {**self.state.buffers, **shared})
        return excluded

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

    def fault(self, reply: Upload | Failure) -> str | None:
        """Why ``reply`` does not count; ``None`` where it does."""
        if isinstance(reply, Failure):
            return reply.reason
        if reply.num_examples < 1:
            return f"expected at least 1 example, got {reply.num_examples}"
        for held, known in ((reply.tensors, self.state.parameters), (reply.buffers, self.state.buffers)):
            for name, tensor in held.items():
                if name not in known:
                    return f"unknown tensor {name}"
                if tensor.shape != known[name].shape:
                    return f"{name}: expected shape {tuple(known[name].shape)}, got {tuple(tensor.shape)}"
                if not torch.isfinite(tensor).all():
                    return f"{name}: not finite"
        return None


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
