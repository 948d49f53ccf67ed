"""Malicious servers, which send crafted models and reconstruct examples from the replies."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.attacks.malicious.fishing import Fishing as Fishing
    from fl_privacy.attacks.malicious.imprint import Imprint as Imprint, Loki as Loki
    from fl_privacy.attacks.malicious.inconsistent import Inconsistent as Inconsistent
    from fl_privacy.attacks.malicious.membership_trap import MembershipTrap as MembershipTrap
    from fl_privacy.attacks.malicious.server_attack import ServerAttack as ServerAttack, ThreatLevel as ThreatLevel
    from fl_privacy.attacks.malicious.trap_weights import TrapWeights as TrapWeights
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
