"""A labelled set of examples in memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.types import Batch


@dataclass(frozen=True, eq=False)
class Examples:
    """Images kept as bytes; batches come out as floats.

    Attributes:
        images: (N, C, H, W) uint8.
        labels: (N,) int64 in [0, K).
        class_names: K names, in label order.
        groups: (N,) int64, whose example it is (a writer, a person); ``None`` where the data do not say.
        attributes: (N,) int64 in [0, A), what it is beside its class; ``None`` where the data do not say.
        attribute_names: A names.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    groups: Tensor | None = None
    attributes: Tensor | None = None
    attribute_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """K, also of classes that no example has."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        _, c, h, w = self.images.shape
        return c, h, w

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Batch:
        """The examples at ``indices`` with inputs in [0, 1]."""
        return Batch(self.images[indices].to(device).float() / 255, self.labels[indices].to(device))

    def subset(self, indices: Tensor) -> "Examples":
        """The examples at ``indices``."""
        groups = None if self.groups is None else self.groups[indices]
        attributes = None if self.attributes is None else self.attributes[indices]
        images, labels = self.images[indices], self.labels[indices]
        return Examples(images, labels, self.class_names, groups, attributes, self.attribute_names)
