"""What updates tell beside images: who took part, whose an example is, what its owner has; blind to the truth."""

from fl_privacy.inference.inference import Inference, Watch
from fl_privacy.inference.kinds import About
from fl_privacy.inference.membership import Membership
from fl_privacy.inference.read_round import ReadRound

__all__ = ["About", "Inference", "Membership", "ReadRound", "Watch"]
