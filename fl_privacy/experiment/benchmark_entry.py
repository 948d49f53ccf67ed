"""A user's own defense among those of a benchmark: found in a file or by its import path."""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from fl_privacy.config.grid import GridPoint, grid_points
from fl_privacy.config.groups import options
from fl_privacy.config.targets import own_modules
from fl_privacy.defenses import Defense
from fl_privacy.errors import UserError, in_one_line


def find_entry(entry: str, strengths: Sequence[str]) -> tuple[list[GridPoint], str]:
    """The points of the defense that ``entry`` names, and the SHA-256 of the code that makes it.

    Args:
        entry: ``my_defense.py`` with one function that returns a ``Defense``, ``my_defense.py:function``,
            ``package.module.function``, or the name of an option of ``defense=`` that a plugin registers.
        strengths: ``defense.KEY=VALUE``, of which one may list several values.

    Raises:
        UserError: there is no such defense.
    """
    if entry in options("defense"):
        content = options("defense")[entry].read_bytes()
        return _points(entry, [f"defense={entry}", *strengths]), hashlib.sha256(content).hexdigest()
    path, _, name = entry.partition(":")
    if path.endswith(".py"):
        module = _module_in(Path(path))
    elif path.count("."):
        named, _, name = entry.rpartition(".")
        module = _module_called(named)
    else:
        raise UserError(
            f"--entry is expected to be a file as my_defense.py, an import path as package.module.function or the name"
            f" of a registered defense, but got {entry!r}."
        )
    function = _function_in(module, name)
    overrides = ["defense=custom", f"defense._target_={module.__name__}.{function}", *strengths]
    return _points(function, overrides), _source_hash(module)


def _points(family: str, overrides: Sequence[str]) -> list[GridPoint]:
    return list(grid_points(family, overrides))


def _module_in(path: Path) -> ModuleType:
    """The module in the file ``path``, which worker processes can import as well."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"--entry is expected to be a Python file, but there is no {path}.")
    name = path.stem
    if not name.isidentifier():
        raise UserError(f"--entry is expected to be a file that can be imported, but {path.name} can't; rename it.")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = sys.modules.get(name) or find_spec(name)
    origin = getattr(found, "__file__", None) or getattr(found, "origin", None)
    if origin is None or Path(origin).resolve() != path:
        raise UserError(f"--entry is expected to be a file with a name of its own, but {name} is {origin}; rename it.")
    return _module_called(name)


def _module_called(name: str) -> ModuleType:
    try:
        with own_modules(name):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"--entry names {name}, which can't be imported: {in_one_line(error)}") from error


def _function_in(module: ModuleType, name: str) -> str:
    """``name``, or that of the one function of ``module`` that says that it returns a ``Defense``."""
    if name:
        if not callable(getattr(module, name, None)):
            raise UserError(f"--entry names the function {name}, but {module.__name__} has none.")
        return name
    found = [
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_") and _returns_defense(function)
    ]
    if len(found) != 1:
        there = f"has {', '.join(found)}" if found else "has none"
        raise UserError(
            f"--entry is expected to hold one function that is annotated to return a Defense, but {module.__name__}"
            f" {there}; name it as {module.__name__}.py:FUNCTION."
        )
    return found[0]


def _returns_defense(function: object) -> bool:
    annotation = inspect.signature(function).return_annotation  # type: ignore[arg-type]
    return annotation is Defense or annotation in ("Defense", "defenses.Defense", "fl_privacy.defenses.Defense")


def _source_hash(module: ModuleType) -> str:
    file = module.__file__
    return hashlib.sha256(Path(file).read_bytes() if file else module.__name__.encode()).hexdigest()
