"""What differential privacy a defense gives, and the noise that a budget asks for."""

from fl_privacy.defenses.privacy.accounting import Guarantee, guarantee, mechanism, noise_of

__all__ = ["Guarantee", "guarantee", "mechanism", "noise_of"]
