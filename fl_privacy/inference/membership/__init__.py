"""Membership inference: one file a method."""

from fl_privacy.inference.membership.attack import METHODS, Membership

__all__ = ["METHODS", "Membership"]
