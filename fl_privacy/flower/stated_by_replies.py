"""What clients' metrics say of their differential privacy, and which figures leave beside the arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import Message

KEYS = {
    "epsilon": "epsilon",
    "delta": "delta",
    "noise_multiplier": "noise_multiplier",
    "noise-multiplier": "noise_multiplier",
    "sample_rate": "sample_rate",
    "sample-rate": "sample_rate",
}
"""Metric of a client, as clients that train by Opacus report it -> what it is."""

MOST_STATED = 1e12
"""Of a figure that a client states; a larger one, or none that is finite, counts as not stated."""

COUNTS = frozenset({"num-examples", "num_examples"})

SETTINGS = frozenset({"target_delta", "target-delta", "target_epsilon", "max_grad_norm", "max-grad-norm"})
"""Metrics that say how a client was told to train; they are no figures of its data."""


@dataclass(eq=False)
class StatedByReplies:
    """What clients' metrics say of their differential privacy, and which figures leave beside the arrays.

    Attributes:
        stated: by name, the largest epsilon and the least noise that any client stated, in the last round.
        metrics: names of figures that clients sent.
    """

    stated: dict[str, float] = field(default_factory=dict)
    metrics: set[str] = field(default_factory=set)

    def see(self, replies: Sequence[Message]) -> None:
        """Take the metrics of a round's replies; what is no number counts as not stated."""
        found: dict[str, list[float]] = {}
        for reply in replies:
            if reply.has_error() or not reply.has_content():
                continue
            for record in reply.content.metric_records.values():
                for name, value in list(record.items())[:64]:
                    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_STATED:
                        continue
                    self.metrics.add(str(name)[:64])
                    if name in KEYS:
                        found.setdefault(KEYS[name], []).append(float(value))
        for name, values in found.items():
            self.stated[name] = min(values) if name == "noise_multiplier" else max(values)
