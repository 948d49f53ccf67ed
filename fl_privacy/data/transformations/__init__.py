"""Image operations and the policies that ATS makes of them."""

from fl_privacy.data.transformations.operations import KINDS, OPERATIONS, TABLES, Kind, Operation, Table
from fl_privacy.data.transformations.policies import (
    POLICY_FILE,
    UNTRANSFORMED,
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
    "TABLES",
    "UNTRANSFORMED",
    "Kind",
    "Operation",
    "Policy",
    "Table",
    "apply_policy",
    "check_shape",
    "disjoint",
    "random_policies",
    "read_policies",
    "transform",
]
