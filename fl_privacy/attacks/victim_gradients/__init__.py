"""Gradients of many victims at once: one model, an update for each victim."""

from fl_privacy.attacks.victim_gradients.base import VictimGradients, differentiable_twice, frozen_copy
from fl_privacy.attacks.victim_gradients.choose import choose

__all__ = ["VictimGradients", "choose", "differentiable_twice", "frozen_copy"]
