"""Where what took time to make is kept for the next run."""

import os
from pathlib import Path

CACHE_VARIABLE = "FL_PRIVACY_CACHE"
"""Environment variable: the folder; ``~/.cache/fl_privacy`` if unset."""


def user_cache_folder() -> Path:
    """The user's cache folder, whether or not it exists yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "fl_privacy"
