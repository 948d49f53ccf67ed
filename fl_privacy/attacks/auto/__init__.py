"""The attack ``auto``: it tries different attacks, and keeps the result that fits the update best."""

from fl_privacy.attacks.auto.attack import AutoAttack
from fl_privacy.attacks.auto.sub_attacks import Budget

__all__ = ["AutoAttack", "Budget"]
