"""The client's side of SecAgg+: what goes into the masked sum, and what can't."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.flower.client import NAMES, Arrays, Config, PrivacyClient, Reply
from fl_privacy.flower.records import PARTITION
from fl_privacy.rng import derive_seed

COUNTS = "counts"
"""Key of the metrics under which whole-number buffers travel in the clear, as JSON: SecAgg+ would blur them."""


class MaskableClient(PrivacyClient):
    """Replies with floating-point arrays of at least one dimension, all within ``clip``, as SecAgg+ takes them.

    Args:
        client: whose data, model and plan it is.
        memory: ``context.state`` of the node.
        clip: largest absolute value.
    """

    def __init__(self, client: Client, memory: RecordDict, *, clip: float) -> None:
        super().__init__(client, memory)
        self.clip = clip

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """As a ``PrivacyClient``.

        Raises:
            UserError: a value is larger than ``clip``, or no number.
        """
        arrays, num_examples, metrics = super().fit(parameters, config)
        named = dict(zip(json.loads(str(metrics[NAMES])), arrays, strict=True))
        masked = {name: np.atleast_1d(array) for name, array in named.items() if array.dtype.kind == "f"}
        for name, array in masked.items():
            if not (np.abs(array) <= self.clip).all():
                raise UserError(
                    f"Values of {name} are expected within +-{self.clip}, but reach {np.abs(array).max():.3g};"
                    " raise secure_aggregation.clip or lower the learning rate."
                )
        counts = {name: array.tolist() for name, array in named.items() if name not in masked}
        return (
            list(masked.values()),
            num_examples,
            {**metrics, NAMES: json.dumps(list(masked)), COUNTS: json.dumps(counts)},
        )


def reproducible_mod(seed: int) -> Mod:
    """Makes a client's random rounding, for which Flower uses NumPy's global stream, that of ``seed`` and the round."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        client = int(context.node_config[PARTITION])
        with _numpy_stream(derive_seed(seed, "client", client, f"round-{message.metadata.group_id}", "secagg")):
            return call_next(message, context)

    return mod


@contextmanager
def _numpy_stream(seed: int) -> Iterator[None]:
    before = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)
