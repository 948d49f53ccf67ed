"""A plugin: one of each part that a run is made of, and a metric, as somebody would write them outside the package."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_privacy.attacks import Progress, ReconstructionAttack, no_progress
from fl_privacy.data import Dataset, Examples
from fl_privacy.defenses import Defense
from fl_privacy.effects import Part
from fl_privacy.measure import Metric
from fl_privacy.types import Batch, Observation, Reconstruction


def stripes(size: int = 16) -> Dataset:
    """Horizontal and vertical stripes."""
    lines = torch.zeros(size, size, dtype=torch.uint8)
    lines[::2] = 255
    images = torch.stack([lines, lines.T]).unsqueeze(1).repeat(20, 1, 1, 1)
    examples = Examples(images, torch.arange(2).repeat(20), ("horizontal", "vertical"))
    return Dataset(examples, examples, "stripes")


class OneLayer(nn.Sequential):
    """A single fully connected layer."""

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))


def scaled(factor: float = 0.5) -> Defense:
    """Make a defense that uploads a multiple of the update."""
    return Defense(
        parts=(Part("scaled", {"factor": factor}, strength="factor"),),
        upload=(lambda tensors, state, rng: {name: factor * tensor for name, tensor in tensors.items()},),
    )


def uniform(level: float = 0.5) -> ReconstructionAttack:
    """Guesses images of one shade."""

    def attack(
        observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        return [
            Reconstruction(
                id=o.id,
                batch=Batch(
                    torch.full((o.upload.num_examples, *o.input_shape), level),
                    torch.zeros(o.upload.num_examples, dtype=torch.int64),
                ),
            )
            for o in observations
        ]

    return attack


def darkness(weight: float = 1.0) -> Metric:
    """How much darker the guess is."""

    def difference(guesses: Tensor, truths: Tensor) -> Tensor:
        return weight * (truths - guesses).flatten(1).mean(1).double()

    return Metric(
        function=difference,
        leaks="low",
        range=(-weight, weight),
        title="Darkness",
        description="Mean of the difference.",
    )
