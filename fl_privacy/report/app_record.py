"""Serialize the page on a Flower app as JSON, and write the files of an audit.

Data from a process that ran third-party code are checked before use.
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
from fl_privacy.measure.answer import QUESTIONS, Answer, Scenario, Shown
from fl_privacy.measure.counts import Counts, Words
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.untouched import AppPage, render_app
from fl_privacy.runs.folder.from_json import beginning, each, made

PAGE, RECORD = "report.html", "audit.json"
"""Files in the folder of an audit."""

LARGEST_PICTURE = 1 << 24
"""Most values of a picture."""

LARGEST_NUMBER, MOST_COUNTED, MOST_ANSWERS, MOST_SHOWN, MOST_VALUES = 1 << 63, 10_000, 100, 1000, 1 << 21
"""Limits of a page: whole numbers, examples of an answer, answers, characters of a headline, and values."""

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
    """Facts of an app's run that its page does not show.

    Attributes:
        models: name of a network -> number of replies with it.
        seconds: time of the training, and of all.
    """

    nodes: int
    rounds: int | None
    models: Mapping[str, int]
    seconds: Mapping[str, float]


def write_audit(folder: Path, page: AppPage, ran: Ran) -> Mapping[str, Any]:
    """Write page and record into ``folder``, readable only by their owner; return the record."""
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
        "rungs": [_plain_rung(answer) for answer in page.steps],
        "survivors": [_plain_survivor(answer) for answer in page.aggregate],
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
    """Return the folder name of an app's audit."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in app)[:60] or "app"
    return f"audit-{safe}"


def terminal_line(page: AppPage, path: Path) -> str:
    """Return the terminal's summary of a finished page."""
    told = [page.headline, *page.further, *(page.problems[:1] if page.silent else ())]
    said = [one if len(one) <= MOST_SHOWN else f"{one[:MOST_SHOWN]} …" for one in told]
    return f"audit: {'. '.join(each.rstrip('.') for each in said)}. Page: {path}"


def page_to_json(page: AppPage, ran: Ran) -> str:
    """Serialize a page and its run."""
    told = {field.name: getattr(page, field.name) for field in fields(page)}
    told["answers"] = [_plain_answer(answer) for answer in page.answers]
    return json.dumps({"page": told, "ran": asdict(ran)}, default=str)


def page_of_json(content: bytes | str) -> tuple[AppPage, Ran]:
    """Parse a page and its run from ``page_to_json``; ``ValueError`` if invalid."""

    def whole(text: str) -> int:
        if abs(found := int(text)) > LARGEST_NUMBER:
            raise ValueError("it has a number that nothing here counts to")
        return found

    text = content if isinstance(content, str) else content.decode()
    if sum(map(text.count, "[{,")) > MOST_VALUES:  # values take a hundred times the memory of their text
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        told = json.loads(text, parse_int=whole)
        if not isinstance(told, dict) or set(told) != {"page", "ran"}:
            raise ValueError(f"it is {beginning(told)}")
        page = made(AppPage, told["page"], "page", **_PARTS)
        ran = made(Ran, told["ran"], "ran")
    except (RecursionError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(f"it can't be read: {type(error).__name__}") from error
    if len(page.answers) > MOST_ANSWERS:
        raise ValueError(f"it has more than {MOST_ANSWERS} answers")
    return page, ran


def _plain_answer(answer: Answer) -> dict[str, Any]:
    told = {field.name: getattr(answer, field.name) for field in fields(answer)}
    for name in ("scenario", "counts", "estimate", "control"):
        told[name] = told[name] and asdict(told[name])
    show = _PLAIN.get(answer.kind, lambda values: [v.item() if isinstance(v, np.generic) else v for v in values])
    told["shown"] = [
        {
            "original": show(one.original),
            "guess": None if one.guess is None else show(one.guess),
            "reconstructed": bool(one.reconstructed),
        }
        for one in answer.shown
    ]
    return told


def _plain_rung(answer: Answer) -> Mapping[str, Any]:
    found = (answer.counts, answer.control)
    counts, control = (value.as_plain() if isinstance(value, Counts) else None for value in found)
    return {
        "rung": answer.scenario.name,
        "title": answer.scenario.title,
        "made": answer.scenario.uploads,
        "uploaded": answer.scenario.leaves,
        "kind": answer.kind,
        "counts": counts,
        "control": control,
        "labels": answer.labels and list(answer.labels),
        "reason": answer.reason,
        "seconds": round(answer.seconds, 1),
        "size": answer.scenario.examples,
        "notes": list(answer.notes),
    }


def _plain_survivor(answer: Answer) -> Mapping[str, Any]:
    def plain(value: object) -> Mapping[str, float] | None:
        if not isinstance(value, Estimate):
            return None
        return {"value": round(value.value, 4), "low": round(value.low, 4), "high": round(value.high, 4)}

    return {
        "name": answer.question,
        "title": QUESTIONS[answer.question].title,
        "made": answer.scenario.uploads,
        "found": plain(answer.estimate),
        "control": plain(answer.control),
        "told": answer.leaks,
        "reason": answer.reason,
        "seconds": round(answer.seconds, 1),
        "notes": list(answer.notes),
    }


def _plain_picture(image: Any) -> dict[str, Any]:
    """Return an image (C, H, W) in [0, 1] in 256 levels."""
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


def _answer(told: object, where: str) -> Answer:
    kind, question = (told.get("kind"), told.get("question")) if isinstance(told, dict) else (None, None)
    show = _CHECKED.get(str(kind), _values)
    return made(
        Answer,
        told,
        where,
        scenario=partial(made, Scenario),
        counts=_counts,
        estimate=_estimate,
        control=_counts if question == "examples" else _estimate,
        labels=lambda value, place: None if value is None else _labels(value, place),
        shown=partial(
            each,
            partial(made, Shown, original=show, guess=lambda v, w: None if v is None else show(v, w)),
            at_least=0,
        ),
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
"""Kind of examples -> conversion to JSON; others become lists of numbers."""

_CHECKED: Mapping[str, Callable[[object, str], Any]] = {"image": _picture}
"""Kind of examples -> checked conversion from JSON."""

_PARTS: Mapping[str, Callable[[object, str], object]] = {
    "answers": partial(each, _answer, at_least=0),
    "findings": partial(each, partial(_like, FINDING), at_least=0),
    "lines": partial(each, partial(_like, LINE), at_least=0),
    "volumes": partial(each, partial(_like, VOLUME), at_least=0),
    "facts": _pairs,
    "environment": _pairs,
}
