"""The page on a Flower app as JSON, from the process that ran the app, and as the files of an audit.

What comes from a process in which somebody else's code ran is checked before anything is made of it.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fl_privacy.checks import fits, in_words
from fl_privacy.files import write_private
from fl_privacy.measure.aggregate_leakage import TITLES, Survivor
from fl_privacy.measure.counts import Counts, Words
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.untouched import KINDS, AppPage, Step, render_app
from fl_privacy.runs.folder.from_json import beginning, each, made

PAGE, RECORD = "report.html", "audit.json"
"""Files in the folder of an audit."""

LARGEST_PICTURE = 1 << 24
"""Numbers of a picture."""

LARGEST_NUMBER, MOST_COUNTED, MOST_STEPS, MOST_SHOWN, MOST_VALUES = 1 << 63, 10_000, 100, 1000, 1 << 21
"""What a page may hold: whole numbers, examples of a rung, rungs, letters of a headline on a terminal, and values."""

FINDING: Mapping[str, Any] = {
    "severity": Literal["data", "facts", "look"],
    **dict.fromkeys(("what", "where", "why", "kind"), str),
    **dict.fromkeys(("times", "of"), int),
}
LINE: Mapping[str, Any] = {
    **dict.fromkeys(("direction", "kind", "record", "key", "what", "example"), str),
    "size": float,
    "messages": int,
    "rounds": Sequence[int],
}
VOLUME: Mapping[str, Any] = {"direction": str, "kind": str, "messages": int, "bytes": int}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a record says of a run and its page does not.

    Attributes:
        nodes: clients.
        rounds: number of rounds of training; ``None`` if unknown.
        models: names of networks, and in how many answers each was seen.
        rungs: rungs of the ladder as plain data.
        seconds: time of the training, and of all.
    """

    nodes: int
    rounds: int | None
    models: Mapping[str, int]
    rungs: Sequence[Mapping[str, Any]]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """An example and the guess at it, as the page shows them: a picture, a row or words."""

    original: Any
    guess: Any
    read: bool


def write_audit(folder: Path, page: AppPage, ran: Ran) -> Mapping[str, Any]:
    """Write the page and the record into ``folder``, for their owner alone; return the record."""
    record = {
        "command": "audit APP",
        "app": page.app,
        "headline": page.headline,
        "further": page.further,
        "tone": page.tone,
        "going_on": page.going_on,
        "broken": page.broken,
        "nodes": ran.nodes,
        "rounds": ran.rounds,
        "models": dict(ran.models),
        "findings": list(page.findings),
        "rungs": list(ran.rungs),
        "survivors": [one.as_plain() for one in page.survivors],
        "inventory": list(page.lines),
        "stated": dict(page.stated),
        "problems": list(page.problems),
        "notes": list(page.notes),
        "facts": dict(page.facts),
        "seconds": dict(ran.seconds),
    }
    write_private(folder / PAGE, render_app(page))
    write_private(folder / RECORD, json.dumps(record, indent=1, default=str))
    return record


def folder_name(app: str) -> str:
    """Return the name of the folder in which an app of this name is audited."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in app)[:60] or "app"
    return f"audit-{safe}"


def terminal_line(page: AppPage, path: Path) -> str:
    """Return what a terminal says of a page that is done."""
    told = [page.headline, *page.further, *(page.problems[:1] if page.silent else ())]
    said = [one if len(one) <= MOST_SHOWN else f"{one[:MOST_SHOWN]} …" for one in told]
    return f"audit: {'. '.join(each.rstrip('.') for each in said)}. Page: {path}"


def page_to_json(page: AppPage, ran: Ran) -> str:
    """Serialize a page and its run."""
    told = {field.name: getattr(page, field.name) for field in fields(page)}
    told["steps"] = [_plain_step(step) for step in page.steps]
    told["survivors"] = [asdict(one) for one in page.survivors]
    return json.dumps({"page": told, "ran": asdict(ran)}, default=str)


def page_of_json(content: bytes | str) -> tuple[AppPage, Ran]:
    """Parse a page and its run: the inverse of ``page_to_json``.

    Raises:
        ValueError: it is something else.
    """

    def whole(text: str) -> int:
        if abs(found := int(text)) > LARGEST_NUMBER:
            raise ValueError("it has a number that nothing here counts to")
        return found

    text = content if isinstance(content, str) else content.decode()
    if sum(map(text.count, "[{,")) > MOST_VALUES:  # which take a hundred times their letters' memory
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        told = json.loads(text, parse_int=whole)
        if not isinstance(told, dict) or set(told) != {"page", "ran"}:
            raise ValueError(f"it is {beginning(told)}")
        page = made(AppPage, told["page"], "page", **_PARTS)
        ran = made(Ran, told["ran"], "ran")
    except (RecursionError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(f"it can't be read: {type(error).__name__}") from error
    if len(page.steps) > MOST_STEPS or len(page.survivors) > MOST_STEPS:
        raise ValueError(f"it has more than {MOST_STEPS} rungs or questions")
    if any(one.name not in TITLES for one in page.survivors) or any(step.kind not in KINDS for step in page.steps):
        raise ValueError("it has a question or a kind of examples that there is not")
    return page, ran


def _plain_step(step: Step) -> dict[str, Any]:
    told = {field.name: getattr(step, field.name) for field in fields(step)}
    for name in ("counts", "control"):
        told[name] = told[name] and asdict(told[name])
    show = _PLAIN.get(step.kind, lambda values: [v.item() if isinstance(v, np.generic) else v for v in values])
    told["shown"] = [
        {
            "original": show(one.original),
            "guess": None if one.guess is None else show(one.guess),
            "read": bool(one.read),
        }
        for one in step.shown
    ]
    return told


def _plain_picture(image: Any) -> dict[str, Any]:
    """Return an image (C, H, W) in [0, 1] in 256 levels, as it is shown."""
    levels = (np.clip(np.asarray(image), 0, 1) * 255).round().astype(np.uint8)
    return {"shape": list(levels.shape), "levels": base64.b64encode(levels.tobytes()).decode()}


def _picture(told: object, where: str) -> np.ndarray:
    shape = told.get("shape") if isinstance(told, dict) else None
    if not isinstance(told, dict) or not fits(shape, Sequence[int]) or shape is None or len(shape) != 3:
        raise ValueError(f"{where} is no picture")
    try:
        levels = np.frombuffer(base64.b64decode(str(told.get("levels")), validate=True), np.uint8)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where} is no picture") from error
    if shape[0] not in (1, 3) or min(shape) < 1 or len(levels) > LARGEST_PICTURE:
        raise ValueError(f"{where} is no picture")
    return levels.reshape(shape) / 255


def _values(told: object, where: str) -> tuple[float, ...]:
    if not isinstance(told, list) or not all(isinstance(one, int | float) for one in told):
        raise ValueError(f"{where} is {beginning(told)}, not a list of numbers")
    return tuple(told)


def _step(told: object, where: str) -> Step:
    kind = told.get("kind") if isinstance(told, dict) else None
    show = _CHECKED.get(str(kind), _values)
    example = partial(made, Example, original=show, guess=lambda v, w: None if v is None else show(v, w))
    return made(
        Step,
        told,
        where,
        counts=_counts,
        control=_counts,
        labels=lambda value, place: None if value is None else _labels(value, place),
        shown=partial(each, example, at_least=0),
    )


def _labels(told: object, where: str) -> tuple[int, ...]:
    if not fits(told, Sequence[int]) or not isinstance(told, list) or len(told) != 2:
        raise ValueError(f"{where} is {beginning(told)}, not two whole numbers")
    return tuple(told)


def _counts(told: object, where: str) -> Counts | None:
    if told is None:
        return None
    found = made(Counts, told, where, words=partial(made, Words))
    words = (found.words.read, found.words.there, found.words.wrong, found.words.texts)
    probabilities = [p for p in (found.luck, found.chance, found.identified_by_chance) if p is not None]
    counted = [value for value in vars(found).values() if isinstance(value, int)]
    possible = min(*counted, *words) >= 0 and found.images <= MOST_COUNTED and found.groups <= found.judged
    if not possible or not all(0 <= p <= 1 for p in probabilities):
        raise ValueError(f"figures of {where} contradict each other")
    return found


def _estimate(told: object, where: str) -> Estimate | None:
    return None if told is None else made(Estimate, told, where)


def _like(table: Mapping[str, Any], told: object, where: str) -> Mapping[str, Any]:
    """Check a mapping whose keys and types are those of ``table``; text that begins a sentence is not empty."""
    if not isinstance(told, dict) or set(told) != set(table):
        raise ValueError(f"{where} is {beginning(told)}, not a mapping of {', '.join(table)}")
    for name, annotation in table.items():
        if not fits(told[name], annotation) or (told[name] == "" and name == "what"):
            raise ValueError(f"{where}.{name} is {beginning(told[name])}, not {in_words(annotation)}")
    return told


def _pairs(told: object, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(told, list) or not all(fits(pair, Sequence[str]) and len(pair) == 2 for pair in told):
        raise ValueError(f"{where} is {beginning(told)}, not a list of names and values")
    return tuple((name, value) for name, value in told)


_PLAIN: Mapping[str, Callable[[Any], Any]] = {"image": _plain_picture}
"""Kind of examples -> how one becomes JSON; of others it is a list of numbers."""

_CHECKED: Mapping[str, Callable[[object, str], Any]] = {"image": _picture}
"""Kind of examples -> how one is taken from JSON."""

_PARTS: Mapping[str, Callable[[object, str], object]] = {
    "steps": partial(each, _step, at_least=0),
    "survivors": partial(each, partial(made, Survivor, found=_estimate, control=_estimate), at_least=0),
    "findings": partial(each, partial(_like, FINDING), at_least=0),
    "lines": partial(each, partial(_like, LINE), at_least=0),
    "volumes": partial(each, partial(_like, VOLUME), at_least=0),
    "facts": _pairs,
    "environment": _pairs,
}
