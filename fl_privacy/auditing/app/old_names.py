"""Names that Flower has moved, provided to apps written for earlier versions."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

MOVED: Mapping[str, Mapping[str, str]] = {
    "flwr.common.typing": {"UserConfig": "flwr.app", "UserConfigValue": "flwr.app"},
    "flwr.client.typing": {"ClientAppCallable": "flwr.clientapp.typing", "Mod": "flwr.clientapp.typing"},
}
"""Earlier module -> its names -> their present modules."""


@contextmanager
def moved_names_lent() -> Iterator[list[str]]:
    """Provide the names in ``MOVED``, if missing, until the block ends; list those used, as ``module.name``."""
    asked: list[str] = []
    with ExitStack() as stack:
        for place, names in MOVED.items():
            try:
                module: Any = importlib.import_module(place)
            except ModuleNotFoundError:
                module = ModuleType(place)
                sys.modules[place] = module
                stack.callback(sys.modules.pop, place, None)
            if not hasattr(module, "__getattr__"):
                module.__getattr__ = _lender(place, names, asked)
                stack.callback(delattr, module, "__getattr__")
        yield asked


def lent_in_words(asked: list[str]) -> str:
    """Describe the provided names in a sentence."""
    return (
        f"The app names {', '.join(asked)}, which Flower {metadata.version('flwr')} has elsewhere: it was lent"
        " them here, and would not start by itself."
    )


def _lender(place: str, names: Mapping[str, str], asked: list[str]) -> Any:
    def lend(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {place!r} has no attribute {name!r}")
        if f"{place}.{name}" not in asked:
            asked.append(f"{place}.{name}")
        return getattr(importlib.import_module(names[name]), name)

    return lend
