"""What differential privacy a defense gives, and the noise that a budget asks for."""

from fl_privacy.defenses.privacy.accounting import Guarantee, guarantee

__all__ = ["Guarantee", "guarantee"]
