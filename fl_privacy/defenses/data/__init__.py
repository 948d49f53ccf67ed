"""Other images in place of the client's own, batch by batch."""

from fl_privacy.defenses.data.mixtures import instahide
from fl_privacy.defenses.data.refining import refiner
from fl_privacy.defenses.data.transformed import ats

__all__ = ["ats", "instahide", "refiner"]
