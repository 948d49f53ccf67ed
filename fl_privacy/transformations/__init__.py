"""Image operations and the policies that ATS makes of them."""

from fl_privacy.transformations.operations import KINDS, OPERATIONS, Kind, Operation

__all__ = ["KINDS", "OPERATIONS", "Kind", "Operation"]
