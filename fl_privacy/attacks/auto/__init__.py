"""The attack without a setting: it looks at the update, tries attacks that differ in kind, keeps what fits best."""

from fl_privacy.attacks.auto.attack import AutoAttack
from fl_privacy.attacks.auto.budget import Budget

__all__ = ["AutoAttack", "Budget"]
