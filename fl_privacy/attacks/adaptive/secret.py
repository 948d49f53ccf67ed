"""What is guessed of a loss that only the clients know."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Secret:
    """Gradients that a private loss sends back into the features.

    Attributes:
        weight: of the linear layer that the features enter.
        norm: expected length of an example's vector of them, above 0; sets the unit in which they are guessed.
    """

    weight: str
    norm: float
