"""Attacks that read text."""

from fl_privacy.attacks.text.dager import Dager

__all__ = ["Dager"]
