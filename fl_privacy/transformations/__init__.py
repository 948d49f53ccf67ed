"""Image operations and the policies that ATS makes of them."""

from fl_privacy.transformations.operations import KINDS, OPERATIONS, Kind, Operation
from fl_privacy.transformations.policies import (
    POLICY_FILE,
    Policy,
    apply_policy,
    check_shape,
    disjoint,
    random_policies,
    read_policies,
    transform,
)

__all__ = [
    "KINDS",
    "OPERATIONS",
    "POLICY_FILE",
    "Kind",
    "Operation",
    "Policy",
    "apply_policy",
    "check_shape",
    "disjoint",
    "random_policies",
    "read_policies",
    "transform",
]
