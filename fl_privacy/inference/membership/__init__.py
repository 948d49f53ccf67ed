"""Membership inference by several methods."""

from fl_privacy.inference.membership.attack import METHODS, Membership

__all__ = ["METHODS", "Membership"]
