"""Fewer elements or fewer bits of the update."""

from fl_privacy.defenses.compression.rounding import quantization
from fl_privacy.defenses.compression.sparsification import ppdl, pruning, selective_sharing

__all__ = ["ppdl", "pruning", "quantization", "selective_sharing"]
