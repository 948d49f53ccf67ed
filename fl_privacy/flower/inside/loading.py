"""The object that an app's pyproject.toml names, as Flower's own processes load it."""

from pathlib import Path
from typing import Any

from flwr.common.config import parse_config_args
from flwr.supercore.object_ref import load_app

__all__ = ["loaded", "parse_config_args"]


def loaded(reference: str, folder: Path) -> Any:
    """Load the object that ``module:attribute`` names in ``folder``.

    Raises:
        ValueError: it names nothing there.
    """
    return load_app(reference, ValueError, folder)
