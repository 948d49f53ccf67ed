"""What training code of somebody else does, seen through PyTorch's own hooks: data, model, loss and steps.

Nothing here knows of Flower. ``Watch`` looks on while a client answers, a ``Program`` is the way from a batch to its
loss as the code went it, ``matched`` says which uploaded array is which parameter, and ``findings_of`` what leaves in
clear.
"""

from fl_privacy.auditing.clear_text.findings import Leak, findings_of
from fl_privacy.auditing.clear_text.inventory import Inventory, Sent
from fl_privacy.auditing.instrument.matching import Matched, matched
from fl_privacy.auditing.instrument.program import Program, ReplayModel
from fl_privacy.auditing.instrument.watch import Watch, Watched

__all__ = [
    "Inventory",
    "Leak",
    "Matched",
    "Program",
    "ReplayModel",
    "Sent",
    "Watch",
    "Watched",
    "findings_of",
    "matched",
]
