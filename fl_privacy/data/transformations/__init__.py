"""Image operations and the policies that ATS makes of them."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.data.transformations.operations import (
        KINDS as KINDS,
        OPERATIONS as OPERATIONS,
        POLICY_FILE as POLICY_FILE,
        TABLES as TABLES,
        UNTRANSFORMED as UNTRANSFORMED,
        Kind as Kind,
        Operation as Operation,
        Policy as Policy,
        Table as Table,
        apply_policy as apply_policy,
        check_shape as check_shape,
        disjoint as disjoint,
        random_policies as random_policies,
        read_policies as read_policies,
        transform as transform,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
