"""Mods of a ClientApp: Flower's own local differential privacy as a defense, and SecAgg+ that can be repeated."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable, Mod

from fl_privacy.defenses import ClientState, Defense, local_dp
from fl_privacy.flower.records import PARTITION
from fl_privacy.rng import SecretGenerator, derive_seed
from fl_privacy.types import Tensors

_ARRAYS = "arrays"


def local_dp_mod(
    *, round_epsilon: float = 1.0, delta: float = 1e-5, clip_norm: float = 1.0, sensitivity: float | None = None
) -> Defense:
    """``fl_privacy.defenses.local_dp``, equal in distribution, computed by ``flwr.clientapp.mod.LocalDpMod``.

    The mod acts on a message with the update, as if zeros had been sent. It draws from NumPy's global stream, which is
    seeded for each update by the client's own and put back afterwards.

    Args:
        round_epsilon: the budget of one round, above 0.
        delta: in (0, 1).
        clip_norm: l2 norm the update is scaled down to, above 0.
        sensitivity: l2 distance that the calibration hides; ``None`` takes ``clip_norm``.
    """
    ours = local_dp(round_epsilon=round_epsilon, delta=delta, clip_norm=clip_norm, sensitivity=sensitivity)
    mod = LocalDpMod(clip_norm, clip_norm if sensitivity is None else sensitivity, round_epsilon, delta)

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        sent, reply = (_Letter(_content(values)) for values in (_zeros_like(tensors), tensors))
        call: Any = mod
        with _numpy_stream(_numpy_seed(rng)):
            answer = call(sent, None, lambda message, context: reply)
        noised = answer.content.array_records[_ARRAYS].to_torch_state_dict()
        return {name: noised[name].to(t) for name, t in tensors.items()}

    (part,) = ours.parts
    flowers = replace(part, settings={**part.settings, "implementation": "flower"})
    return replace(ours, parts=(flowers,), upload=(on_upload,))


@dataclass
class _Letter:
    """What the mod reads of a ``flwr.app.Message``, which can't be made outside of a running Flower app."""

    content: RecordDict

    def has_error(self) -> bool:
        return False


def _zeros_like(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(t) for name, t in tensors.items()}


def _content(tensors: Tensors) -> RecordDict:
    values = OrderedDict((name, t.detach().cpu()) for name, t in tensors.items())
    return RecordDict({_ARRAYS: ArrayRecord(values)})


def reproducible_mod(seed: int) -> Mod:
    """Makes a client's random rounding, for which Flower uses NumPy's global stream, that of ``seed`` and the round."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        client = int(context.node_config[PARTITION])
        named = derive_seed(seed, "client", client, f"round-{message.metadata.group_id}", "secagg")
        with _numpy_stream(named % 2**32):
            return call_next(message, context)

    return mod


def _numpy_seed(rng: torch.Generator) -> int | np.ndarray:
    if isinstance(rng, SecretGenerator):
        return np.frombuffer(rng.next_bytes(4 * 624), dtype="<u4")
    return int(torch.randint(2**32, (), generator=rng, device=rng.device))


@contextmanager
def _numpy_stream(seed: int | np.ndarray) -> Iterator[None]:
    """NumPy's global stream as it starts from ``seed``; put back afterwards."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
