"""What a generator was trained on, and whether it has seen given images."""

import json
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 8
"""Pixels of a side of a fingerprint."""

ALIKE = 3.0
"""Root mean square distance of fingerprints, in grey levels of 255, up to which two images are the same: JPEG stays
below, and different images are above (``experiments/generative_prior.py seen``)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Provenance:
    """What a generator was trained on.

    Attributes:
        data: name of the data set.
        split: of it.
        images: how many.
        seed: of the training.
        steps: of the training.
        fingerprints: (N, 64) uint8 of its images; empty where they are not known.
    """

    data: str
    split: str
    images: int
    seed: int = 0
    steps: int = 0
    fingerprints: Tensor = field(default_factory=lambda: torch.zeros(0, SIDE * SIDE, dtype=torch.uint8))

    def words(self) -> str:
        """For reports: ``cifar10, split train, 50,000 images``."""
        return f"{self.data}, split {self.split}, {self.images:,} images"

    def header(self) -> str:
        """The fields but the fingerprints, as JSON."""
        fields = asdict(self)
        del fields["fingerprints"]
        return json.dumps(fields)

    def seen(self, images: Tensor) -> Tensor:
        """(N,) bool: which of ``images`` (N, C, H, W), uint8 or in [0, 1], it was trained on, up to re-encoding."""
        if not len(self.fingerprints):
            return torch.zeros(len(images), dtype=torch.bool)
        known, asked = self.fingerprints.float(), image_fingerprints(images).float()
        nearest = torch.cat([torch.cdist(part, known).amin(1) for part in torch.split(asked, 256)])
        return nearest / SIDE <= ALIKE


def image_fingerprints(images: Tensor) -> Tensor:
    """(N, 64) uint8: the mean grey of 8 by 8 parts of each of ``images`` (N, C, H, W), uint8 or in [0, 1]."""
    parts = []
    for part in torch.split(images, 4096):
        values = part.float() if part.dtype == torch.uint8 else 255 * part.float()
        parts.append(F.adaptive_avg_pool2d(values.mean(1, keepdim=True), SIDE).flatten(1).round().clamp(0, 255))
    return torch.cat(parts).to(torch.uint8) if parts else torch.zeros(0, SIDE * SIDE, dtype=torch.uint8)
