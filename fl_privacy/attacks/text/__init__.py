"""Attacks that reconstruct texts without gradient descent."""

from fl_privacy.attacks.text.bag_of_words import BagOfWords
from fl_privacy.attacks.text.dager import Dager

__all__ = ["BagOfWords", "Dager"]
