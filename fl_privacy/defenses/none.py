"""The undefended client."""

from fl_privacy.defenses.base import Defense


def none() -> Defense:
    """No defense: what is computed is uploaded."""
    return Defense()
