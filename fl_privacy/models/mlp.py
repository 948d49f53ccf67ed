"""Fully connected layers only: what the linear systems of SPN's theorems are written for."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.models.initialization import initialize
from fl_privacy.models.layers import activation as new_activation
from fl_privacy.models.layers import input_normalization, require_positive


class MLP(nn.Module):
    """A multilayer perceptron on the pixels. Any image size and number of channels fit.

    Args:
        in_channels: C of the images.
        image_size: their height and width.
        num_classes: K.
        widths: of the hidden layers.
        activation: after each hidden layer, one of ``layers.ACTIVATIONS``.
        mean, std: normalization of the inputs, one value or one a channel; none if ``None``.
        init: weight initialization, one of ``initialization.INITIALIZERS``.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        widths: Sequence[int] = (256, 128),
        activation: str = "relu",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__()
        require_positive(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        if not isinstance(widths, Sequence):
            raise UserError(f"model.widths is expected to be a list such as [256, 128], but got {widths}.")
        require_positive(**{f"widths[{i}]": width for i, width in enumerate(widths)})
        sizes = [in_channels * image_size**2, *widths]
        layers = [(nn.Linear(inner, outer), new_activation(activation)) for inner, outer in pairwise(sizes)]
        self.normalize = input_normalization(mean, std, in_channels)
        self.features = nn.Sequential(*(module for layer in layers for module in layer))
        self.classifier = nn.Linear(sizes[-1], num_classes)
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> logits (B, K)."""
        logits: Tensor = self.classifier(self.features(self.normalize(inputs).flatten(1)))
        return logits
