"""What updates tell beside images: who took part, whose an example is, what its owner has; blind to the truth."""

from fl_privacy.inference.attribute import AttributeInference
from fl_privacy.inference.class_shares import PropertyInference
from fl_privacy.inference.inference import Inference, Watch
from fl_privacy.inference.kinds import About
from fl_privacy.inference.membership import Membership
from fl_privacy.inference.read_round import ReadRound
from fl_privacy.inference.source import SourceInference

__all__ = [
    "About",
    "AttributeInference",
    "Inference",
    "Membership",
    "PropertyInference",
    "ReadRound",
    "SourceInference",
    "Watch",
]
