"""Automatic transformation search: scores of policies, and which of them to use."""

from fl_privacy.policy_search.accuracy import Total, accuracy_scores, correlation_score, input_jacobian
from fl_privacy.policy_search.distortion import altered_shares, fsim_scores, require_fsim
from fl_privacy.policy_search.privacy import PrivacyPlan, PrivacyScore, privacy_scores, transformed_by
from fl_privacy.policy_search.selection import Scored, Selection
from fl_privacy.policy_search.similarity import GradientSimilarity, InnerProducts
from fl_privacy.policy_search.training import TrainingPlan, TrainingProgress, train_model

__all__ = [
    "GradientSimilarity",
    "InnerProducts",
    "PrivacyPlan",
    "PrivacyScore",
    "Scored",
    "Selection",
    "Total",
    "TrainingPlan",
    "TrainingProgress",
    "accuracy_scores",
    "altered_shares",
    "correlation_score",
    "fsim_scores",
    "input_jacobian",
    "privacy_scores",
    "require_fsim",
    "train_model",
    "transformed_by",
]
