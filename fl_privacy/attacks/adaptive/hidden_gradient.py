"""What is guessed of a loss that only the clients know."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Secret:
    """Gradients that a private loss sends back into the features.

    Attributes:
        weight: of the linear layer that the features enter.
        strength: expected size of one of them, relative to the factor of the cross entropy, over the root mean square
            of the private head's weights, above 0; sets the unit in which they are guessed.
        weight_rms: of the private head's weights; ``None`` where it is that of the layer's own.
    """

    weight: str
    strength: float
    weight_rms: float | None
