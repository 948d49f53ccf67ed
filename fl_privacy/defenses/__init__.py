"""Client-side defenses: each is a ``Defense`` of hooks."""

from fl_privacy.defenses.base import ClientState, Defense, LocalStep, compose

__all__ = ["ClientState", "Defense", "LocalStep", "compose"]
