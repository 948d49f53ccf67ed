"""Old module names, for code and settings that still import them."""

import importlib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

MOVED: Mapping[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Old module name -> new one, both without ``fl_privacy.``; a package's entry covers its modules without entries."""

IN_SETTINGS = ("guard", "inference", "malicious")
"""Packages whose old names give no warning: recorded settings use these names, and a run's hash must stay the same."""


class MovedFinder(MetaPathFinder):
    """Import finder that maps old module names to the moved modules, with a warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (new := new_name(fullname)) is None:
            return None
        if fullname.split(".")[1] not in IN_SETTINGS:
            warnings.warn(
                f"{fullname} is {new} now; import that, since version 0.4 removes the old name.",
                DeprecationWarning,
                stacklevel=2,
            )
        return ModuleSpec(fullname, _Alias(new), origin=getattr(find_spec(new), "origin", None), is_package=True)


class _Alias(Loader):
    def __init__(self, new: str) -> None:
        self.new = new

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.new)


def new_name(fullname: str) -> str | None:
    """Return the new name of the module ``fullname``, or ``None`` if it never moved."""
    package, _, name = fullname.partition(".")
    if package != __package__ or not name:
        return None
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (new := MOVED.get(".".join(parts[:length]))) is not None:
            return ".".join([package, new, *parts[length:]])
    return None


def answer_to_old_names() -> None:
    """Install the import finder for moved modules; further calls do nothing."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())  # before what would load a moved package's modules a second time
