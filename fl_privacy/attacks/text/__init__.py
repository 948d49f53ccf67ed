"""Attacks that read text."""

from fl_privacy.attacks.text.dager import Dager
from fl_privacy.attacks.text.words.attack import BagOfWords

__all__ = ["BagOfWords", "Dager"]
