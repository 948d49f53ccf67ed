"""The attack ``auto``: it tries attacks that differ in kind, and keeps what fits the update best."""

from fl_privacy.attacks.auto.attack import AutoAttack
from fl_privacy.attacks.auto.sub_attacks import Budget

__all__ = ["AutoAttack", "Budget"]
