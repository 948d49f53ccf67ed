"""What a client looks at in a model that it was sent, before it trains on it."""

from fl_privacy.inspection.model_guard import ModelGuard, RefusedModelError
from fl_privacy.inspection.signs import Architecture

__all__ = ["Architecture", "ModelGuard", "RefusedModelError"]
