"""Servers that do not follow the protocol: what they send, and what they read in the replies."""

from fl_privacy.malicious.fishing import Fishing
from fl_privacy.malicious.imprint import Imprint
from fl_privacy.malicious.inconsistent import Inconsistent
from fl_privacy.malicious.loki import Loki
from fl_privacy.malicious.membership_trap import MembershipTrap
from fl_privacy.malicious.server_attack import ServerAttack, ThreatLevel
from fl_privacy.malicious.trap_weights import TrapWeights

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
