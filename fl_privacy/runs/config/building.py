"""Build targets with Hydra's instantiate, with errors of one line."""

import hashlib
import inspect
import json
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from fl_privacy.checks.packages import missing_extra
from fl_privacy.errors import UserError, in_one_line, is_out_of_memory, what_was_asked
from fl_privacy.files import PACKAGE, user_cache_folder, write_whole
from fl_privacy.runs.config.parse import expect_type, suggest

T = TypeVar("T")


def instantiate(section: Mapping[str, Any], name: str, **arguments: Any) -> Any:
    """Call the ``_target_`` of section ``name`` with its settings and ``arguments``; ``UserError`` if that fails."""
    settings = plain_settings(section)
    target = settings.pop("_target_", None)
    check_arguments(locate_target(section, name), settings, name)
    try:
        return hydra.utils.instantiate(plain_settings(section), **arguments, _convert_="all")
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, UserError | OSError | MemoryError):
            raise cause from error
        failed = cause or error
        unfit = isinstance(failed, TypeError) and target.rpartition(".")[2] in str(failed)
        what = "these settings" if unfit else "a call"
        raise UserError(
            f"{target} is expected to accept {what}, but got {in_one_line(failed)}; correct {name}."
        ) from error
    except SystemExit as error:
        raise UserError(f"{name}: {target} is expected to return, but raised {in_one_line(error)}; mend it.") from error


def instantiate_as(kind: type[T], section: Mapping[str, Any], name: str) -> T:
    """Call the ``_target_`` of the section ``name``; ``UserError`` unless it returns a ``kind``."""
    made = instantiate(section, name)
    if not isinstance(made, kind):
        raise UserError(
            f"{name}._target_={section['_target_']} is expected to return a {kind.__name__}, but got"
            f" {type(made).__name__}; name a function or class that does."
        )
    return made


def plain_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration section as plain dicts, lists and scalars."""
    settings = (
        OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else deepcopy(dict(section))
    )
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}


def check_arguments(function: Any, settings: dict[str, Any], name: str) -> None:
    """Raise ``UserError`` if ``function`` has no parameter for one of ``settings``, or a setting has the wrong type."""
    try:
        signature = Signature.of(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is expected to name a function or class, but got {function!r}; correct it.") from error
    signature.check(settings, name)


def locate_target(section: Mapping[str, Any], name: str) -> Any:
    """Import the ``_target_`` of the section ``name``, see :func:`own_modules`; ``UserError`` if that fails."""
    target = section.get("_target_")
    if target is None:
        raise UserError(f"{name} is expected to name what it builds, but has no _target_; add {name}._target_=PATH.")
    try:
        with own_modules(target), _unlogged():
            return hydra.utils.get_object(target)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if missing := missing_extra(error):
            raise missing from error
        why = error.__cause__ or error
        if isinstance(why, MemoryError) or is_out_of_memory(why):
            raise MemoryError(what_was_asked(why)) from error
        module, _, wanted = str(target).rpartition(".")
        remedy = "check the spelling and that the package is installed"
        if isinstance(why, ModuleNotFoundError) and why.name == target and module:  # its parent was found
            remedy = f"define {wanted} in {module}, of a package import it in its __init__.py, or check the spelling"
        first_line = (str(why) or type(why).__name__).strip().splitlines()[0]
        raise UserError(
            f"{name}._target_ is expected to be an import path, but {target!r} can't be imported"
            f" ({first_line}); {remedy}."
        ) from error


@contextmanager
def own_modules(target: str) -> Iterator[None]:
    """Allow imports of ``target`` from the working directory, unless an installed package has the same name."""
    here = str(Path.cwd())
    if find_spec(target.partition(".")[0]) is not None:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


@contextmanager
def _unlogged() -> Iterator[None]:
    before, hydra.utils.log.disabled = hydra.utils.log.disabled, True
    try:
        yield
    finally:
        hydra.utils.log.disabled = before


FILE = "signatures.json"
_PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "null": NoneType}
_NAMES = {kind: name for name, kind in _PLAIN.items()}
_UNIONS = (Union, UnionType)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Parameters of a function or class that ``_target_`` names; ``takes_any``: ``True`` if it accepts other names."""

    defaults: Mapping[str, Any]
    annotations: Mapping[str, Any]
    takes_any: bool

    @classmethod
    def of(cls, function: Any) -> "Signature":
        parameters = inspect.signature(function).parameters
        named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        return cls(
            defaults={name: p.default for name, p in named.items()},
            annotations={name: p.annotation for name, p in named.items()},
            takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
        )

    def check(self, settings: Mapping[str, Any], section: str, *, remedy: str = "") -> None:
        for key, value in settings.items():
            if key.startswith("_") or self.takes_any:
                continue
            if key not in self.annotations:
                raise UserError(
                    f"Unknown key {section}.{key}{suggest(key, self.annotations)}{remedy.format(f'{section}.{key}')}"
                )
            if value is not None or self.defaults.get(key, inspect.Parameter.empty) is not None:
                expect_type(f"{section}.{key}", value, self.annotations[key])


@cache
def signature_of(target: str, section: str) -> Signature:
    """Return the signature of import path ``target``; ``UserError``, which names ``section``, if the import fails."""
    if not target.startswith("fl_privacy."):
        return _decoded(_asked(target, section))
    kept = _kept()
    if target not in kept:
        kept[target] = _asked(target, section)
        with suppress(OSError):  # a read-only home only costs time
            user_cache_folder().mkdir(parents=True, exist_ok=True)
            write_whole(user_cache_folder() / FILE, json.dumps({"of": _stamp(), "signatures": kept}))
    return _decoded(kept[target])


def _asked(target: str, section: str) -> dict[str, Any]:
    try:
        found = Signature.of(locate_target({"_target_": target}, section))
    except (TypeError, ValueError):
        return {"defaults": {}, "annotations": {}, "takes_any": True}
    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in found.defaults.items()}
    return {
        "defaults": {name: value for name, value in defaults.items() if _is_plain(value)},
        "annotations": {name: _encoded(annotation) for name, annotation in found.annotations.items()},
        "takes_any": found.takes_any,
    }


def _decoded(plain: Mapping[str, Any]) -> Signature:
    annotations = {name: _annotation(code) for name, code in plain["annotations"].items()}
    return Signature(**{**plain, "annotations": annotations})


def _kept() -> dict[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((user_cache_folder() / FILE).read_text())
        kinds = {"defaults": dict, "annotations": dict, "takes_any": bool}
        entries = content["signatures"].values()
        whole = all(isinstance(entry[name], kind) for entry in entries for name, kind in kinds.items())
        if content["of"] == _stamp() and whole:
            return dict(content["signatures"])
    return {}


@cache
def _stamp() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(PACKAGE.rglob("*.py")):
        found = path.stat()
        digest.update(f"{path} {found.st_mtime_ns} {found.st_size}\n".encode())
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


def _encoded(annotation: Any) -> Any:
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if annotation in (None, *_NAMES):
        return _NAMES[annotation or NoneType]
    if origin in _UNIONS:
        return {"any": [_encoded(part) for part in arguments]}
    if origin is Literal:
        return {"one of": list(arguments)}
    if isinstance(origin, type) and issubclass(origin, Sequence) and not issubclass(origin, str):
        return {"list": [_encoded(part) for part in arguments[:1]]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"mapping": [_encoded(part) for part in arguments]}
    return {"other": str(getattr(annotation, "__name__", annotation))}


def _annotation(code: Any) -> Any:
    if isinstance(code, str):
        return _PLAIN[code]
    kind, content = next(iter(code.items()))
    if kind == "any":
        return Union[tuple(_annotation(part) for part in content)]  # noqa: UP007  (of a tuple)
    if kind == "one of":
        return Literal[tuple(content)]
    if kind == "other":
        return type(content, (), {})
    found = tuple(_annotation(part) for part in content)
    if kind == "list":
        return Sequence[found[0]] if found else Sequence  # type: ignore[valid-type]
    return Mapping[found] if found else Mapping  # type: ignore[misc, valid-type]
