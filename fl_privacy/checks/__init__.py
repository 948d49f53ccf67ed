"""Checks of options and settings, with uniform error messages."""

import difflib
import functools
import inspect
import json
import math
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar

from fl_privacy.errors import UserError
from fl_privacy.files import shipped

_P = ParamSpec("_P")
_R = TypeVar("_R")
MOST_NAMED = 16  # most values listed in an error; if there are more, the closest to the given one are listed
LARGEST = sys.float_info.max  # larger whole numbers, which a file may contain, overflow a float


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ``UserError`` unless ``value`` is one of ``allowed``; the message suggests the closest one."""
    allowed = tuple(allowed)
    if value in allowed:
        return
    names = [str(one) for one in allowed]
    like = meant_by(str(value), names, name.rpartition(".")[2])
    meant = f" (did you mean {like}?)" if like else ""
    others = ""
    if len(names) > MOST_NAMED:
        others = f" and {len(names) - MOST_NAMED} others"
        names = sorted(difflib.get_close_matches(str(value), names, n=MOST_NAMED, cutoff=0.0))
    raise UserError(f"{name} is expected to be one of {', '.join(names)}{others}, but got {value!r}{meant}.")


def meant_by(word: str, allowed: Collection[str], group: str = "", *, above: str | None = None) -> str:
    """Return the name in ``allowed`` that a misspelled ``word`` most likely means; empty if none fits.

    Aliases come before similar names. The result may also be an override, such as ``server=imprint``. ``group``:
    configuration group of an option, such as ``attack``; empty for a setting. ``above``: section of a setting; at top
    level (empty) and in ``federation``, settings of other sections are suggested, too.
    """
    table = aliases()
    plain = re.sub(r"[\s.-]+", "_", word.strip().lower())
    names = {plain, _YEAR.sub("", plain) or plain, plain.removesuffix("_attack")}
    if name := next((name for name in allowed if plain == name.lower()), ""):
        return name
    for name, others in (table["options"].get(group, {}) if group else table["settings"]).items():
        if (name in allowed or "=" in name) and names & set(others):
            return str(name)
    places = (table["elsewhere"][name] for name in sorted(names) if name in table["elsewhere"])
    free = not group and above is not None and above.partition(".")[0] in ("", "federation")
    if free and (place := next(places, "")):
        return str(place)
    return next(iter(difflib.get_close_matches(word, allowed, n=1)), "")


_YEAR = re.compile(r"(_?et_?al)?_?((19|20)?\d\d)?$")


@cache
def aliases() -> Mapping[str, Any]:
    """Return other names that users type for options and settings, from ``aliases.json``.

    Examples: ``options["attack"]["dlg"] == ["zhu", ...]``, ``settings["lr"] == ["learning_rate", ...]``. The full name
    of a setting is, for instance, ``elsewhere["lr"] == "federation=fedavg federation.plan.lr"``.
    """
    return shipped(__file__, "aliases.json")  # type: ignore[no-any-return]


def number(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    example: float | str,
) -> float:
    """Return ``value`` if it is within the bounds and finite (or ``infinite``); else ``UserError`` with ``example``."""
    inside = isinstance(value, int | float) and not isinstance(value, bool)
    inside = inside and (_is_number(value) if infinite else abs(value) <= LARGEST)  # NaN is within no bound
    inside = inside and (at_least is None or value >= at_least) and (above is None or value > above)
    inside = inside and (at_most is None or value <= at_most) and (below is None or value < below)
    if not inside:
        if at_most is None and below is None:
            wanted = "to be a finite number"
            if at_least is not None or above is not None:
                wanted = f"to be at least {at_least}" if at_least is not None else f"to be above {above}"
                wanted += "" if infinite or at_least is not None else " and finite"
        else:
            low = f"[{at_least}" if at_least is not None else f"({above if above is not None else '-inf'}"
            wanted = f"in {low}, {f'{at_most}]' if at_most is not None else f'{below})'}"
        raise UserError(f"{name} is expected {wanted}, but got {value!r}; {_remedy(example)}.")
    return value


def whole(name: str, value: int, *, at_least: int, at_most: int | None = None, example: int | str) -> int:
    """Return ``value`` if it is a whole number within the bounds, else raise ``UserError`` with ``example``."""
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    if not inside or (at_most is not None and value > at_most):
        wanted = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise UserError(f"{name} is expected to be a whole number {wanted}, but got {value!r}; {_remedy(example)}.")
    return value


def shape(name: str, value: object, *, example: str) -> tuple[int, ...]:
    """Return ``value``, one or more whole numbers from 1, as a tuple; else a ``UserError`` advises ``example``."""
    sizes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise UserError(f"{name} is expected to be whole numbers of at least 1, but got {value!r}; {example}.")
    return sizes


def expects_its_arguments(**remedies: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function raise a one-line ``UserError`` for wrong arguments; ``remedies``: unknown argument -> advice."""

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: _P.args, **given: _P.kwargs) -> _R:
            unknown = [name for name in given if name not in signature.parameters]
            if unknown:
                known = ", ".join(name for name in signature.parameters if name not in ("cls", "self"))
                remedy = remedies.get(unknown[0], "leave it out")
                raise UserError(
                    f"{function.__name__} is expected to get arguments among {known}, but got {unknown[0]}; {remedy}."
                )
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                raise UserError(f"{function.__name__} is expected to get its arguments, but {error}; add it.") from None
            return function(*args, **given)

        return checked

    return decorated


def _remedy(example: float | str) -> str:
    return example if isinstance(example, str) else f"try {example}"


_UNIONS = (typing.Union, UnionType)
_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def fits(value: object, annotation: Any) -> bool:
    """Return whether ``value`` has the type ``annotation``.

    Whole numbers count as numbers; booleans, NaN and integers too large for a float do not. Only numbers, text,
    literals, and unions, sequences and mappings of them are checked; other types always fit.
    """
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in _UNIONS:
        return any(fits(value, part) for part in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if annotation in _PLAIN:
        kinds = (int, float) if annotation is float else annotation
        alike = isinstance(value, kinds) and isinstance(value, bool) == (annotation is bool)
        return alike and (annotation is not float or _is_number(value))  # type: ignore[arg-type]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(fits(entry, arguments[0]) for entry in value if arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(entry, arguments[1]) for entry in value.values() if arguments)
    return True


def in_words(annotation: Any) -> str:
    """Return the type ``annotation`` in words: ``a whole number or null``."""
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(map(in_words, arguments)))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 2 else " or ".join(map(str, arguments))
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list [{in_words(arguments[0])}, ...]" if arguments else "a list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping {{name: {in_words(arguments[1])}}}" if arguments else "a mapping"
    return str(getattr(annotation, "__name__", annotation))


def _is_number(value: float) -> bool:
    return abs(value) <= LARGEST if isinstance(value, int) else not math.isnan(value)


_hints_of = cache(typing.get_type_hints)
FromPlain = Callable[[object, str], object]  # builds a field from its value and place; raises ``ValueError``


def made(kind: type[_R], plain: object, where: str, **parts: FromPlain) -> _R:
    """Build the dataclass ``kind`` from the JSON object ``plain``; ``ValueError`` names ``where`` if a field is wrong.

    ``parts``: function (value, place) that builds the value of a field, by the field's name.
    """
    if not isinstance(plain, dict):
        raise ValueError(f"{where} is {beginning(plain)}")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, field in known.items() if field.default is field.default_factory is MISSING}
    if wrong := sorted(needed - plain.keys()) or sorted(plain.keys() - known):
        raise ValueError(f"{where} should {'have' if wrong[0] in needed else 'not have'} {wrong[0]}")
    hints = _hints_of(kind)  # type: ignore[arg-type]
    values = {
        name: parts.get(name, partial(_of_type, hints[name]))(value, f"{where}.{name}") for name, value in plain.items()
    }
    return kind(**values)


def _of_type(hint: Any, plain: object, where: str) -> object:
    if isinstance(kind := next((one for one in (hint, *typing.get_args(hint)) if is_dataclass(one)), None), type):
        return None if plain is None and NoneType in typing.get_args(hint) else made(kind, plain, where)
    if not fits(plain, hint):
        raise ValueError(f"{where} is {beginning(plain)}, not {in_words(hint)}")
    return tuple(plain) if isinstance(plain, list) else plain


def each(make: Callable[[Any, str], _R], plain: object, where: str, *, at_least: int = 0) -> tuple[_R, ...]:
    """Return ``make(entry, place)`` for each entry of the JSON list ``plain``, with a place such as ``where[0]``.

    ``ValueError`` names ``where`` if ``plain`` is no list, or has fewer than ``at_least`` entries.
    """
    if not isinstance(plain, list) or len(plain) < at_least:
        raise ValueError(f"{where} is {beginning(plain)}, not a list of at least {at_least}")
    return tuple(make(entry, f"{where}[{number}]") for number, entry in enumerate(plain))


def beginning(value: object) -> str:
    """Return a value's JSON, cut after 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."
