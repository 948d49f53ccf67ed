"""Infer membership, source, attributes and properties from updates."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.attacks.inference.attribute import (
        AttributeInference as AttributeInference,
        SourceInference as SourceInference,
    )
    from fl_privacy.attacks.inference.inference import Canaries as Canaries, Inference as Inference, Watch as Watch
    from fl_privacy.attacks.inference.kinds import About as About
    from fl_privacy.attacks.inference.membership import Membership as Membership
    from fl_privacy.attacks.inference.property import PropertyInference as PropertyInference
    from fl_privacy.attacks.inference.read_round import ReadRound as ReadRound, Rehearsal as Rehearsal
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
