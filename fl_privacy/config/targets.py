"""Hydra's instantiate with one line of error instead of a chain of tracebacks."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from fl_privacy.config.groups import suggest
from fl_privacy.config.reading import expect_type
from fl_privacy.errors import UserError, in_one_line
from fl_privacy.extras import missing_extra


def instantiate(section: DictConfig, name: str, **arguments: Any) -> Any:
    """Call the ``_target_`` of the configuration section ``name`` with its keys and ``arguments``.

    Raises:
        UserError: there is no such target, it does not take a key, or a value is wrong.
    """
    settings = plain_settings(section)
    target = settings.pop("_target_", None)
    check_arguments(locate_target(section, name), settings, name)
    try:
        return hydra.utils.instantiate(section, **arguments, _convert_="all")
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, UserError | OSError | MemoryError):
            raise cause from error
        raise UserError(f"{_what_failed(cause or error, name, target)}: {in_one_line(cause or error)}") from error
    except SystemExit as error:
        raise UserError(f"{name}: {target} raised {in_one_line(error)}; it is expected to return.") from error


def _what_failed(error: BaseException, name: str, target: str) -> str:
    """Settings are to blame only where the call itself does not fit; what happens within it has other reasons."""
    if isinstance(error, TypeError) and target.rpartition(".")[2] in str(error):
        return f"{name}: {target} does not accept these settings"
    return f"{name} can't be made by {target}"


def plain_settings(section: DictConfig) -> dict[str, Any]:
    """A configuration section as plain values."""
    settings = OmegaConf.to_container(section, resolve=True)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}


def check_arguments(function: Any, settings: dict[str, Any], name: str) -> None:
    """Refuse settings that ``function`` has no parameter for, or that are not of the type it announces."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is expected to name a function or class, but got {function!r}.") from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key, value in settings.items():
        if key.startswith("_"):
            continue
        if key not in parameters:
            raise UserError(f"Unknown key {name}.{key}{suggest(key, parameters)}")
        if value is not None or parameters[key].default is not None:
            expect_type(f"{name}.{key}", value, parameters[key].annotation)


def locate_target(section: DictConfig, name: str) -> Any:
    """What the ``_target_`` of the configuration section ``name`` names; see :func:`own_modules`.

    Raises:
        UserError: it has none, or it can't be imported.
    """
    target = section.get("_target_")
    if target is None:
        raise UserError(f"{name} is expected to name what it builds, but has no _target_; add {name}._target_=PATH.")
    try:
        with own_modules(target):
            return hydra.utils.get_object(target)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if missing := missing_extra(error):
            raise missing from error
        raise UserError(
            f"{name}._target_ is expected to be an import path, but {target!r} can't be imported"
            f" ({_first_line(error)}); check the spelling and that the package is installed."
        ) from error


@contextmanager
def own_modules(target: str) -> Iterator[None]:
    """Where nothing installed is called like the first word of ``target``, look in the working directory as well.

    For this import alone, and last: no file that lies there stands in for an installed or an optional package.
    """
    here = str(Path.cwd())
    if find_spec(target.partition(".")[0]) is not None:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
