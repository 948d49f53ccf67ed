"""Automatic transformation search: scoring and selection of policies."""

from fl_privacy.defenses.policy_search.definition import PrivacyAware, least_epsilon
from fl_privacy.defenses.policy_search.scores import (
    GradientSimilarity,
    InnerProducts,
    PrivacyPlan,
    PrivacyScore,
    Total,
    TrainingPlan,
    TrainingProgress,
    Variant,
    accuracy_scores,
    correlation_score,
    input_jacobian,
    normalized_scores,
    privacy_scores,
    train_model,
    transformed_by,
)
from fl_privacy.defenses.policy_search.selection import Scored, Selection, altered_shares, fsim_scores, require_fsim

__all__ = [
    "GradientSimilarity",
    "InnerProducts",
    "PrivacyAware",
    "PrivacyPlan",
    "PrivacyScore",
    "Scored",
    "Selection",
    "Total",
    "TrainingPlan",
    "TrainingProgress",
    "Variant",
    "accuracy_scores",
    "altered_shares",
    "correlation_score",
    "fsim_scores",
    "input_jacobian",
    "least_epsilon",
    "normalized_scores",
    "privacy_scores",
    "require_fsim",
    "train_model",
    "transformed_by",
]
