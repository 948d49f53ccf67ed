"""Defenses of what enters the last linear layer."""

from fl_privacy.defenses.representation.masking import soteria

__all__ = ["soteria"]
