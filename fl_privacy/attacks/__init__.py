"""Attacks on intercepted updates."""

from fl_privacy.attacks.base import Progress, ReconstructionAttack, no_progress

__all__ = ["Progress", "ReconstructionAttack", "no_progress"]
