"""Servers that do not follow the protocol: what they send, and what they read in the replies."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.malicious.fishing import Fishing
    from fl_privacy.malicious.imprint import Imprint, Loki
    from fl_privacy.malicious.inconsistent import Inconsistent
    from fl_privacy.malicious.membership_trap import MembershipTrap
    from fl_privacy.malicious.server_attack import ServerAttack, ThreatLevel
    from fl_privacy.malicious.trap_weights import TrapWeights

_HOMES = {
    "fl_privacy.malicious.fishing": ("Fishing",),
    "fl_privacy.malicious.imprint": (
        "Imprint",
        "Loki",
    ),
    "fl_privacy.malicious.inconsistent": ("Inconsistent",),
    "fl_privacy.malicious.membership_trap": ("MembershipTrap",),
    "fl_privacy.malicious.server_attack": (
        "ServerAttack",
        "ThreatLevel",
    ),
    "fl_privacy.malicious.trap_weights": ("TrapWeights",),
}

__all__ = [
    "Fishing",
    "Imprint",
    "Inconsistent",
    "Loki",
    "MembershipTrap",
    "ServerAttack",
    "ThreatLevel",
    "TrapWeights",
]

__getattr__ = on_demand(__name__, _HOMES)
