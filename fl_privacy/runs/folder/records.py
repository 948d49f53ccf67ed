"""Write, load and check ``metrics.jsonl`` (one record a line), ``paper.json`` and other files of a run."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from fl_privacy.checks import fits, in_words
from fl_privacy.errors import UserError
from fl_privacy.files import UNENCODABLE, shipped, write_whole
from fl_privacy.files.foreign import read_text
from fl_privacy.measure import METRICS
from fl_privacy.measure.roc import FINDING
from fl_privacy.runs.config.parse import select
from fl_privacy.runs.config.settings import sections
from fl_privacy.runs.folder.identity import Identity
from fl_privacy.types.victim_ids import Attacker, VictimId

if TYPE_CHECKING:
    from fl_privacy.measure import VictimScore
    from fl_privacy.measure.outcome import ImageScore

Text = Mapping[str, str]
Number = float | None  # A number; NaN becomes null in JSON

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "Number": Number, "Text": Text}
_TYPES |= {"str | None": str | None, "list[int]": list[int], "list[str]": list[str], "list[Number]": list[Number]}
RECORDS: dict[str, dict[str, Any]] = {
    kind: {field: _TYPES[name] for field, name in fields.items()}
    for kind, fields in shipped(__file__, "records.json").items()
}
RECORDS["inference"] = FINDING
"""Kind of record -> type of each field. Other kinds and fields have plain values."""

_WORDS = ("words_read", "words_there", "words_false", "words_of")
OPTIONAL: dict[str, dict[str, Any]] = {
    "attack": {"batch_norm": Literal["train", "eval"] | None},
    "image": dict.fromkeys(("candidates", "control_cells", "chance", "word_chance", *_WORDS), Number),
}
"""Kind of record -> type of each field that it may lack."""

_OF_NODE = ("memory", "peak_bytes", "cpu_seconds", "joules", "repeats")
_OF_ROUND = ("seconds", "defense_seconds", "upload_bytes", "delta", "distance", "attacked_distance")
AMOUNTS = frozenset((*_OF_ROUND, *_OF_NODE, *OPTIONAL["image"]))  # fields with finite numbers from 0
MOST = 1e18  # largest such amount
PARTITION: dict[str, Any] = {"class_names": list[str], "counts": list[list[int]]}
ENVIRONMENT: dict[str, Any] = {"date": str, "packages": Text, "gpus": list[str]}
SENTENCES = list[str]
PARTS = list[Mapping[str, str | None]]
LARGEST = 10**12  # largest whole number that can be a count here
_SIZES = ("batch_size", "federation.plan.batch_size")  # settings that pages compute with
_PLAIN = str | float | bool | None
_OPTIONAL = frozenset({"date", "packages", "gpus"})


def wrong_field(content: object, fields: Mapping[str, Any]) -> str | None:
    """Describe the first error in a mapping that should have ``fields`` (key -> type); ``None`` if it is valid."""
    if not isinstance(content, Mapping):
        return f"it is {_shown(content)}, no mapping"
    for name, annotation in fields.items():
        if name not in content:
            if name in _OPTIONAL:
                continue
            return f"{name} is missing"
        if not fits(content[name], annotation) or _is_uncounted(content[name]):
            return f"{name} is expected to be {in_words(annotation)}, but is {_shown(content[name])}"
    return None


def wrong_identity(content: object) -> str | None:
    """Describe the error in the content of ``run.json``; ``None`` if valid."""
    if (wrong := wrong_field(content, get_type_hints(Identity))) or not isinstance(content, Mapping):
        return wrong
    config = content["config"]
    strange = [name for name in sections() if not isinstance(config.get(name, {}), Mapping)]
    strange += [name for name in _SIZES if not fits(size := select(config, name), int | None) or _is_uncounted(size)]
    return f"its config.{strange[0]} is {_shown(select(config, strange[0]))}" if strange else None


def wrong_partition(content: object) -> str | None:
    """Describe the error in the content of ``partition.json``; ``None`` if valid."""
    if (wrong := wrong_field(content, PARTITION)) or not isinstance(content, Mapping):
        return wrong
    names, counts = content["class_names"], content["counts"]
    uneven = not names or not counts or any(len(row) != len(names) for row in counts)
    return "it has no count for each client and class" if uneven or any(map(_is_uncounted, counts)) else None


def wrong_record(record: Mapping[str, Any]) -> str | None:
    """Describe the error in a record of ``metrics.jsonl``; ``None`` if valid."""
    kind = record["kind"]
    fields = RECORDS.get(kind) if isinstance(kind, str) else None
    if not isinstance(kind, str) or not fits(record.get("attacker", "plain"), Literal["plain", "adaptive"]):
        return "its kind or attacker is none"
    if fields is None:
        return None
    if wrong := wrong_field(record, fields):
        return f"of a {kind}, {wrong}"
    if "id" in fields:
        try:
            VictimId.parse(record["id"])
        except ValueError:
            return f"of a {kind}, id is {_shown(record['id'])}"
    for name, value in record.items():
        annotation = OPTIONAL.get(kind, {}).get(name, Number | bool if name in METRICS else _PLAIN)
        amount = value is None or (isinstance(value, int | float) and fits(value, float) and 0 <= value <= MOST)
        if (name not in fields and not fits(value, annotation)) or (name in AMOUNTS and not amount):
            return f"of a {kind}, {name} is {_shown(value)}"
    return "of a tracing, participants is 0" if record.get("participants", 1) < 1 else None


def _is_uncounted(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(not 0 <= v <= LARGEST for v in values if isinstance(v, int))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


MOST_BYTES = 1 << 29  # largest file of records
SYNC_EVERY = 5.0  # seconds between syncs to disk; lines survive the death of the process in any case


class RecordWriter:
    """Appends records to a file as lines of JSON."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", errors=UNENCODABLE)
        self._synced = time.monotonic()

    def append(self, record: Mapping[str, Any]) -> None:
        self._file.write(dump_json(record) + "\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_EVERY:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records, and a note on a missing file or a cut-off last line; ``UserError`` for other damage."""
    if not path.is_file():
        return [], [f"{path.name} is missing"]
    if path.stat().st_size > MOST_BYTES:
        raise UserError(
            f"{path} is expected to hold a run's records, but has {path.stat().st_size >> 20} MiB, more than"
            f" {MOST_BYTES >> 20}; remove it."
        )
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode())
            if not isinstance(record, dict) or "kind" not in record:
                raise ValueError("not a record")
            if wrong := wrong_record(record):
                raise ValueError(wrong)
            records.append(record)
        except ValueError as error:
            if number < len(lines):
                raise UserError(
                    f"{path} is expected to hold a JSON record a line, but line {number} is damaged ({error});"
                    " remove that line."
                ) from error
            return records, [f"the last line of {path.name} is cut off"]
    return records, []


def image_record(score: VictimScore, one: ImageScore, **further: object) -> dict[str, Any]:
    """Return the record of the example ``one`` in ``score``, with ``further`` fields before the metrics."""
    return {
        "id": str(score.id),
        "round": score.id.round,
        "client": score.id.client,
        "image": one.image,
        **further,
        **one.values,
        **one.compared.as_record(),
        "label_source": score.label_source,
        "certainty": str(one.certainty),
        "member": score.member,
        "attack_loss": score.attack_loss,
        "failure": one.failure,
    }


def records_of(records: Iterable[Mapping[str, Any]], kind: str, attacker: Attacker) -> list[Mapping[str, Any]]:
    """Return the records of one kind and attacker; a record without attacker counts as ``Attacker.PLAIN``."""
    return [r for r in records if r["kind"] == kind and r.get("attacker", Attacker.PLAIN) == attacker]


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Write ``value`` as standard JSON: infinities become ``"inf"`` and ``"-inf"``, NaN becomes null."""
    return json.dumps(_standard(value), allow_nan=False, indent=indent, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """Parse the output of ``dump_json``; lone surrogates, which pages can't hold, are escaped."""
    try:
        return _restored(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _standard(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return None
        case float() if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        case Mapping():
            return {str(key): _standard(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_standard(entry) for entry in value]
    return value


def _restored(value: Any) -> Any:
    match value:
        case "inf" | "-inf":
            return float(value)
        case str() if not value.isascii():
            return value.encode(errors=UNENCODABLE).decode()
        case dict():
            return {key.encode(errors=UNENCODABLE).decode(): _restored(entry) for key, entry in value.items()}
        case list():
            return [_restored(entry) for entry in value]
    return value


PAPER = "paper.json"
_MOST_OF_PAPER = 1 << 20
_TEXTS = ("title", "at", "ours", "about", "picture")
_LISTS = {"notes": list[str], "columns": list[str], "strips": list[list[str]], "lines": list[Mapping[str, Any]]}
FIELDS: Mapping[str, Any] = {**dict.fromkeys(_TEXTS, str), **_LISTS}
"""Types of the record's fields. ``at`` names data and network of the published figures, ``ours`` those of this
package's, and ``strips`` rows of the picture: title, line, and kind of image (a field of ``Pair``)."""

LINE: Mapping[str, Any] = {"name": str, "folders": list[list[str]], "figures": list[list[float | None]]}
"""Types of a line's fields: names of the runs of each strength, which lie next to the record's folder, and for each
column the published figure, this package's, the ends of its 95 % interval and the number of examples or strengths;
``None`` if not known."""


def write_paper(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a paper's table with our figures, ``record``, to ``paper.json``."""
    write_whole(folder / PAPER, dump_json(record, indent=1))


def read_paper(folder: Path) -> Mapping[str, Any] | None:
    """Load ``paper.json``, a published table next to our figures; ``None`` if absent, ``UserError`` if damaged."""
    if not (folder / PAPER).is_file():
        return None
    try:
        found = parse_json(read_text(folder / PAPER, _MOST_OF_PAPER))
        wrong = wrong_field(found, FIELDS) or next(filter(None, (wrong_field(of, LINE) for of in found["lines"])), None)
        if not wrong:
            sizes = {(len(figure), 5) for of in found["lines"] for figure in of["figures"]}
            sizes |= {(len(strip), 3) for strip in found["strips"]}
            sizes |= {(len(of["figures"]), len(found["columns"])) for of in found["lines"]}
            names = [name for of in found["lines"] for runs in of["folders"] for name in runs]
            wrong = "a list has another length" if any(own != expected for own, expected in sizes) else None
            wrong = (
                "a folder has more than a name" if any(Path(n).name != n or n in {"", ".."} for n in names) else wrong
            )
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise UserError(f"{folder / PAPER} is expected to hold a paper's table, but {wrong}; remove it.")
    assert isinstance(found, Mapping)
    return found
