"""Names of a package that import their modules when they are first asked for."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from fl_privacy.extras import missing_extra


def on_demand(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """``__getattr__`` of ``package``: what ``homes`` names (module -> its names), imported by the first use.

    What needs a package that is not installed is a ``UserError`` that names the extra.
    """
    where = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(where[name]), name)
        except ImportError as error:
            if (missing := missing_extra(error)) is None:
                raise
            raise missing from error

    return find
