"""What updates tell beside images: who took part, whose an example is, what its owner has; blind to the truth."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.inference.attribute import AttributeInference
    from fl_privacy.inference.canaries import Canaries
    from fl_privacy.inference.inference import Inference, Watch
    from fl_privacy.inference.kinds import About
    from fl_privacy.inference.membership import Membership
    from fl_privacy.inference.property import PropertyInference
    from fl_privacy.inference.read_round import ReadRound, Rehearsal
    from fl_privacy.inference.source import SourceInference

__all__ = [
    "About",
    "AttributeInference",
    "Canaries",
    "Inference",
    "Membership",
    "PropertyInference",
    "ReadRound",
    "Rehearsal",
    "SourceInference",
    "Watch",
]

__getattr__ = on_demand(
    __name__,
    {
        "fl_privacy.inference.attribute": ["AttributeInference"],
        "fl_privacy.inference.canaries": ["Canaries"],
        "fl_privacy.inference.property": ["PropertyInference"],
        "fl_privacy.inference.inference": ["Inference", "Watch"],
        "fl_privacy.inference.kinds": ["About"],
        "fl_privacy.inference.membership": ["Membership"],
        "fl_privacy.inference.read_round": ["ReadRound", "Rehearsal"],
        "fl_privacy.inference.source": ["SourceInference"],
    },
)
