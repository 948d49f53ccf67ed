"""Automatic transformation search (ATS): scores and selection of transformation policies."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.defenses.policy_search.scores import (
        GradientSimilarity as GradientSimilarity,
        PrivacyPlan as PrivacyPlan,
        Total as Total,
        TrainingPlan as TrainingPlan,
        Variant as Variant,
        accuracy_scores as accuracy_scores,
        correlation_score as correlation_score,
        input_jacobian as input_jacobian,
        normalized_scores as normalized_scores,
        privacy_scores as privacy_scores,
        train_model as train_model,
        transformed_by as transformed_by,
    )
    from fl_privacy.defenses.policy_search.selection import (
        PrivacyAware as PrivacyAware,
        Scored as Scored,
        Selection as Selection,
        altered_shares as altered_shares,
        fsim_scores as fsim_scores,
        least_epsilon as least_epsilon,
        require_fsim as require_fsim,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
