"""Write and load the files of an audit: ``audit.json``, and an app's ``record.json``."""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fl_privacy.checks import beginning, each, fits, made
from fl_privacy.effects import from_plain, to_plain
from fl_privacy.errors import UserError
from fl_privacy.files import write_private
from fl_privacy.files.foreign import read_text
from fl_privacy.measure.answer import QUESTIONS, Answer, Scenario, Shown
from fl_privacy.measure.counts import Counts, Words
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.audit_page import AuditRecord, levels_of, render_audit
from fl_privacy.report.audit_parts import Captured, CountedLeak, Line, Volume
from fl_privacy.types.plan import Normalization

PAGE, RECORD, WHOLE = "report.html", "audit.json", "record.json"
"""Files of an audit: the page, its figures for programs, and an app's whole record, from which both are made."""

APP_DIGEST = "SHA-256 of the app's files"  # its name in a record's environment, see ``files_digest``
LARGEST_PICTURE, LARGEST_RECORD = 1 << 24, 1 << 24  # most values of a picture, and bytes of a strategy's record
LARGEST_NUMBER, MOST_COUNTED, MOST_ANSWERS, MOST_SHOWN, MOST_VALUES = 1 << 63, 10_000, 100, 1000, 1 << 21
"""Limits of a record: largest whole number, examples of an answer, answers, letters of a headline, and values."""


def write_audit(folder: Path, record: AuditRecord) -> Mapping[str, Any]:
    """Write ``audit.json`` and, for an app, its page and full record, with mode 0600; return ``audit.json``'s data."""
    content = plain_app(record) if record.captured is None else _plain_captured(record.captured)
    if record.captured is None:
        write_private(folder / PAGE, render_audit(record))
        write_private(folder / WHOLE, record_to_json(record))
    write_private(folder / RECORD, json.dumps(content, indent=1, default=str))
    return content


def read_captured(folder: Path) -> Captured | None:
    """Load what a strategy's audit wrote about its clients to ``audit.json``; ``None`` if there is no such file.

    ``UserError`` if the file is damaged, or was written by the audit of an app instead of a strategy.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    wrong = UserError(f"{path} is expected to be as an audit wrote it, but is damaged; remove it.")
    try:
        note = json.loads(path.read_text()) if path.stat().st_size <= LARGEST_RECORD else None
    except (ValueError, RecursionError) as error:
        raise wrong from error
    if not isinstance(note, dict):
        raise wrong
    if note.get("command") in ("audit APP", "audit-update"):
        raise UserError(
            f"{folder} is expected to hold captured updates, but is an audit of an app or of files, which keeps none;"
            " wrap the app's strategy in fl_privacy.audit(...)."
        )
    kinds: dict[str, Any] = {
        "model": str,
        "mean": list[float] | None,
        "std": list[float] | None,
        "fingerprints": Mapping[str, list[str]],
        "rates_estimated": bool,
        "normalizations": Mapping[str, Mapping[str, list[float] | None]],
        "defenses": Mapping[str, list[Any]],
        "another_site": Mapping[str, Any] | None,
    }
    note = {"rates_estimated": False, "normalizations": {}, "defenses": {}, "another_site": None, **note}
    if any(key not in note or not fits(note[key], kind) for key, kind in kinds.items()):
        raise wrong
    if not all(re.fullmatch(r"[0-9]{1,9}", client) for client in (*note["normalizations"], *note["defenses"])):
        raise wrong

    def normalization(plain: Mapping[str, Any]) -> Normalization | None:
        mean, std = plain.get("mean"), plain.get("std")
        return None if mean is None or std is None else Normalization(mean, std)

    site = note["another_site"]
    if site is not None and (site.keys() != {"counts", "sites"} or type(site["sites"]) is not int or site["sites"] < 2):
        raise wrong
    try:
        of_site = None if site is None else (_counts(site["counts"], "another_site"), site["sites"])
    except ValueError as error:
        raise wrong from error
    return Captured(
        model=note["model"],
        normalization=normalization(note),
        normalizations={int(client): normalization(plain) for client, plain in note["normalizations"].items()},
        defense=from_plain(note.get("defense", [])),
        defenses={int(client): from_plain(plain) for client, plain in note["defenses"].items()},
        fingerprints=note["fingerprints"],
        rates_estimated=note["rates_estimated"],
        site=of_site,
    )


def _plain_captured(captured: Captured) -> dict[str, Any]:
    def plain(one: Normalization | None) -> dict[str, Any]:
        return {"mean": None, "std": None} if one is None else asdict(one)

    return {
        "model": captured.model,
        **plain(captured.normalization),
        "normalizations": {str(client): plain(one) for client, one in captured.normalizations.items()},
        "defense": to_plain(captured.defense),
        "defenses": {str(client): to_plain(parts) for client, parts in captured.defenses.items()},
        "fingerprints": dict(captured.fingerprints),
        "rates_estimated": captured.rates_estimated,
        **(
            {}
            if captured.site is None
            else {"another_site": {"counts": asdict(captured.site[0]), "sites": captured.site[1]}}
        ),
    }


def plain_app(record: AuditRecord) -> dict[str, Any]:
    """Return the content of an app's ``audit.json``."""
    plain = ("app", "headline", "further", "tone", "going_on", "broken", "nodes", "rounds", "models")
    return {
        "command": "audit APP" if record.subject == "app" else "audit-update",
        **{name: getattr(record, name) for name in plain},
        **({"network_alone": record.network_alone} if record.network_alone else {}),
        "findings": [asdict(finding) for finding in record.findings],
        "rungs": [_plain_examples(answer) for answer in record.steps],
        "survivors": [_plain_aggregate(answer) for answer in record.aggregate],
        "inventory": [asdict(line) for line in record.lines],
        **{name: getattr(record, name) for name in ("stated", "problems", "notes")},
        "facts": dict(record.facts),
        "seconds": record.seconds,
        **({"figures": dict(record.figures)} if record.figures else {}),
        **({} if record.before is None else {"defense": record.defense, "before": plain_app(record.before)}),
    }


def _plain_examples(answer: Answer) -> Mapping[str, Any]:
    counts, control = (one.as_plain() if isinstance(one, Counts) else None for one in (answer.counts, answer.control))
    return {
        "rung": answer.scenario.name,
        "observer": answer.observer,
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


def _plain_aggregate(answer: Answer) -> Mapping[str, Any]:
    estimates = (one if isinstance(one, Estimate) else None for one in (answer.estimate, answer.control))
    kept = ("value", "low", "high")
    found, control = (one and {name: round(getattr(one, name), 4) for name in kept} for one in estimates)
    return {
        "name": answer.question,
        "title": QUESTIONS[answer.question].title,
        "made": answer.scenario.uploads,
        "found": found,
        "control": control,
        "told": answer.leaks,
        "reason": answer.reason,
        "seconds": round(answer.seconds, 1),
        "notes": list(answer.notes),
    }


def read_audit(folder: Path) -> AuditRecord:
    """Load the record of an app's audit; ``UserError`` if missing or damaged."""
    try:
        return record_of_json(read_text(folder / WHOLE))
    except ValueError as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder / WHOLE} is expected to be as `fl-privacy audit` wrote it, but is not: {said}; audit again."
        ) from error


def folder_name(app: str) -> str:
    """Return the name of the folder for the audit of ``app``."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in app)[:60] or "app"
    return f"audit-{safe}"


def terminal_line(record: AuditRecord, path: Path) -> str:
    """Return the line that the terminal shows at the end of an audit."""
    lines = [record.headline, *record.further, *(record.problems[:1] if record.silent and not record.silence else ())]
    said = [one if len(one) <= MOST_SHOWN else f"{one[:MOST_SHOWN]} …" for one in lines]
    return f"audit: {'. '.join(each.rstrip('.') for each in said)}. Page: {path}".replace("?. ", "? ")


def record_to_json(record: AuditRecord) -> str:
    """Serialize an app's record, with the examples that the page shows."""
    return json.dumps(_plain_record(record), default=lambda one: asdict(one) if is_dataclass(one) else str(one))  # type: ignore[arg-type]


def _plain_record(record: AuditRecord) -> dict[str, Any]:
    content = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "captured"}
    content["answers"] = [_plain_answer(answer) for answer in record.answers]
    return content | ({} if record.before is None else {"before": _plain_record(record.before)})


def record_of_json(content: bytes | str) -> AuditRecord:
    """Parse a record from ``record_to_json``; ``ValueError`` if invalid."""

    def whole(text: str) -> int:
        if abs(found := int(text)) > LARGEST_NUMBER:
            raise ValueError(f"it has a whole number beyond {LARGEST_NUMBER}")
        return found

    text = content if isinstance(content, str) else content.decode()
    if sum(map(text.count, "[{,")) > MOST_VALUES:  # values take a hundred times the memory of their text
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        record = made(AuditRecord, json.loads(text, parse_int=whole), "page", **_PARTS)
    except (RecursionError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(f"it can't be read: {type(error).__name__}") from error
    if sum(len(one.answers) for one in (record, record.before) if one is not None) > MOST_ANSWERS:
        raise ValueError(f"it has more than {MOST_ANSWERS} answers")
    return record


def _plain_answer(answer: Answer) -> dict[str, Any]:
    plain = _PLAIN.get(answer.kind, lambda values: [v.item() if isinstance(v, np.generic) else v for v in values])

    def show(value: Any) -> Any:
        return None if value is None else plain(value)

    content = {field.name: getattr(answer, field.name) for field in fields(answer) if field.name != "among"}
    content["shown"] = [
        {"original": show(one.original), "guess": show(one.guess), "reconstructed": bool(one.reconstructed)}
        for one in answer.shown
    ]
    return content


def _plain_picture(image: Any) -> dict[str, Any]:
    levels = levels_of(image)
    return {"shape": list(levels.shape), "levels": base64.b64encode(levels.tobytes()).decode()}


def _answer(plain: object, where: str) -> Answer:
    kind, question = (plain.get("kind"), plain.get("question")) if isinstance(plain, dict) else (None, None)
    show = _unless_none(_CHECKED.get(str(kind), _NUMBERS))
    return made(
        Answer,
        plain,
        where,
        scenario=partial(made, Scenario),
        counts=_COUNTS,
        estimate=_ESTIMATE,
        control=_COUNTS if question == "examples" else _ESTIMATE,
        labels=_unless_none(_LABELS),
        among=_refused,
        shown=partial(each, partial(made, Shown, original=show, guess=show), at_least=0),
    )


def _picture(plain: object, where: str) -> np.ndarray:
    shape, levels = (plain.get("shape"), plain.get("levels")) if isinstance(plain, dict) else (None, None)
    try:
        found = np.frombuffer(base64.b64decode(str(levels), validate=True), np.uint8)
        usable = shape is not None and fits(shape, Sequence[int]) and len(shape) == 3 and min(shape) > 0
        if not usable or shape is None or shape[0] not in (1, 3) or len(found) > LARGEST_PICTURE:
            raise ValueError("its shape is none of a picture")
        return found.reshape(shape) / 255
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where} is no picture") from error


def _counts(plain: object, where: str) -> Counts:
    found = made(Counts, plain, where, words=partial(made, Words))
    words = (found.words.read, found.words.there, found.words.wrong, found.words.texts)
    probabilities = [p for p in (found.luck, found.chance, found.identified_by_chance) if p is not None]
    counted = [value for value in vars(found).values() if isinstance(value, int)]
    possible = min(*counted, *words) >= 0 and found.images <= MOST_COUNTED and found.groups <= found.judged
    if not possible or not all(0 <= p <= 1 for p in probabilities):
        raise ValueError(f"figures of {where} contradict each other")
    return found


def _unless_none(read: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
    return lambda plain, where: None if plain is None else read(plain, where)


def _list(plain: object, where: str, *, what: str, right: Callable[[list[Any]], bool]) -> tuple[Any, ...]:
    if not isinstance(plain, list) or not right(plain):
        raise ValueError(f"{where} is {beginning(plain)}, not {what}")
    return tuple(tuple(one) if isinstance(one, list) else one for one in plain)


def _refused(plain: object, where: str) -> NoReturn:
    raise ValueError(f"{where} is not part of what a sandbox sends")


_PLAIN: Mapping[str, Callable[[Any], Any]] = {"image": _plain_picture}
_CHECKED: Mapping[str, Callable[[object, str], Any]] = {"image": _picture}
"""Kind of examples -> conversion to JSON, and checked conversion from it; others are lists of numbers."""

_COUNTS, _ESTIMATE = _unless_none(_counts), _unless_none(partial(made, Estimate))
_NUMBERS = partial(_list, what="a list of numbers", right=lambda plain: all(isinstance(v, int | float) for v in plain))
_LABELS = partial(_list, what="two whole numbers", right=lambda plain: len(plain) == 2 and fits(plain, Sequence[int]))
_PAIRS = partial(
    _list,
    what="a list of names and values",
    right=lambda plain: all(fits(pair, Sequence[str]) and len(pair) == 2 for pair in plain),
)

_PARTS: Mapping[str, Callable[[object, str], object]] = {
    "answers": partial(each, _answer, at_least=0),
    "findings": partial(each, partial(made, CountedLeak), at_least=0),
    "lines": partial(each, partial(made, Line), at_least=0),
    "volumes": partial(each, partial(made, Volume), at_least=0),
    "facts": _PAIRS,
    "environment": _PAIRS,
    "captured": _refused,
    "before": _unless_none(
        lambda plain, where: made(AuditRecord, plain, where, **{**_PARTS, "before": _unless_none(_refused)})
    ),
}
"""Field of a record -> checked conversion from JSON."""
