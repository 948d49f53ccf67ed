"""What images come out of where they are not optimized pixel by pixel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fl_privacy.attacks.gradient_inversion.initialization import Blank
from fl_privacy.generator import Provenance

Shape = Sequence[int]
"""(B, C, H, W) of one victim's images."""


class ImageSource(Protocol):
    """Makes the images of V victims of variables (V, n), the attack's own, and of what it holds fixed, (V, m)."""

    def size(self, shape: Shape) -> int:
        """n."""
        ...

    def start(self, blank: Blank) -> Tensor:
        """First variables (n,) of a victim, on the CPU, drawn from its stream alone."""
        ...

    def held(self, blank: Blank) -> Tensor:
        """What is fixed for a victim, (m,), on the CPU, drawn likewise; m may be 0."""
        ...

    def images(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """(V, B, C, H, W) in [0, 1], for labels (V, B) or probabilities (V, B, K)."""
        ...

    def penalty(self, variables: Tensor, shape: Shape) -> Tensor:
        """(V,) how unlikely the variables are, weighted."""
        ...

    def confined(self, variables: Tensor, held: Tensor, shape: Shape) -> Tensor:
        """``variables`` brought back to where they may be, after each iteration of an attack that projects."""
        ...

    def following(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> "NextSource | None":
        """Where to go on from the variables that were found; ``None`` at the end."""
        ...

    @property
    def stages(self) -> int:
        """How many there are, this one included."""
        ...

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        """What it was trained on, for images (C, H, W); ``None`` where it was not.

        Raises:
            UserError: there is no such source for these images.
        """
        ...


@dataclass(frozen=True, eq=False)
class NextSource:
    """A source to go on with, its first variables (V, n) and what it holds fixed, (V, m)."""

    source: ImageSource
    variables: Tensor
    held: Tensor
