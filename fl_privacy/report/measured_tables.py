"""Measured defenses in tables, from which advice is given: of a sweep, of a benchmark, of a file."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.report.readings import Reading
from fl_privacy.report.recommendation import Candidate, asked_of, candidate_of
from fl_privacy.report.trade_off import DefenseRow
from fl_privacy.results import Attacker, Measure

Threat = Literal["honest", "adaptive", "malicious"]
"""Attackers that count: those that know nothing of the defense, those that know it as well, or servers that do not
follow the protocol, too."""

THREATS: tuple[Threat, ...] = get_args(Threat)

FORMAT = 2
MEASURED = "measured.json"
"""Name of the tables in the folder of a benchmark."""

SHIPPED = Path(__file__).resolve().parent / "measured"
"""Files that come with the package, as ``fl-privacy advise --save FILE`` writes them."""


@dataclass(frozen=True, kw_only=True)
class MeasuredDefense:
    """A defense at one strength, as it was trained and attacked; figures are of the worst attack under each threat.

    Attributes:
        name: in words.
        overrides: that ask for it.
        accuracy: in the end, in [0, 1].
        by_threat: what attackers read; without those that were not measured.
        seconds: that the defense takes one client in one round; NaN where that is unknown.
        upload_bytes: of one client's update, likewise.
        epsilon: spent in the end; ``None`` where there is no guarantee.
        delta: of the epsilon; ``None`` where that is unknown, which promises little.
    """

    name: str
    overrides: tuple[str, ...]
    accuracy: float
    by_threat: Mapping[Threat, Candidate]
    seconds: float
    upload_bytes: float
    epsilon: float | None
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """What a sweep, or one training of a benchmark, measured.

    Attributes:
        settings: overrides of all of it, such as ``data=mnist_mini``.
        attacks: names.
        weights: of the model that was attacked, ``initial``, ``final`` or ``both``.
        command: that measured it.
        defenses: undefended first.
        unknown: names of those that are not in it, since not all of them has been measured.
    """

    settings: tuple[str, ...]
    attacks: tuple[str, ...]
    weights: str
    command: str
    defenses: tuple[MeasuredDefense, ...]
    unknown: tuple[str, ...] = ()

    def matches(self, wanted: Sequence[str]) -> bool:
        """Whether it is of the settings ``wanted``."""
        return set(wanted) <= set(self.settings)


def measured_rows(
    rows: Sequence[DefenseRow], overrides: Sequence[Sequence[str]]
) -> tuple[tuple[MeasuredDefense, ...], tuple[str, ...]]:
    """The rows of a sweep that finished, the undefended one first, and the names of those that did not.

    Nothing is told without the undefended one.
    """
    asked = asked_of([finding for row in rows for finding in row.findings])
    found = [_measured_row(row, own, asked) for row, own in zip(rows, overrides, strict=True)]
    if not found or found[0] is None:
        return (), tuple(row.name for row in rows)
    unknown = tuple(row.name for row, known in zip(rows, found, strict=True) if known is None)
    return tuple(known for known in found if known is not None), unknown


def _measured_row(row: DefenseRow, overrides: Sequence[str], asked: set[str]) -> MeasuredDefense | None:
    """``None`` unless all of it finished; those that know the defense count where each attack had one."""
    if not row.complete or row.training is None or row.accuracy is None:
        return None
    heard: dict[Threat, list[Reading]] = {"honest": [r for r in row.readings if r.attacker is Attacker.PLAIN]}
    adaptive = {versus.attack for versus in row.leakage if versus.attacker is Attacker.ADAPTIVE}
    if not row.outcome.strength or adaptive == set(row.outcome.attacks):
        heard["adaptive"] = list(row.readings)
    found: dict[Threat, Candidate] = {}
    for threat, read in heard.items():
        candidate = candidate_of(
            read, name=row.name, accuracy=row.accuracy, pmm=row.pmm, findings=row.findings, asked=asked
        )
        if candidate is None:
            return None
        found[threat] = candidate
    upload, privacy = row.training.upload, row.training.privacy
    return MeasuredDefense(
        name=row.name,
        overrides=tuple(overrides),
        accuracy=row.accuracy,
        by_threat=found,
        seconds=upload["defense_seconds"].mean if "defense_seconds" in upload else math.nan,
        upload_bytes=upload["upload_bytes"].mean if "upload_bytes" in upload else math.nan,
        epsilon=privacy.epsilon if privacy else None,
        delta=privacy.delta if privacy else None,
    )


def write_tables(path: Path, tables: Sequence[MeasuredTable]) -> None:
    """Write ``tables`` as JSON; what is infinite, as a bound from a single image, is null."""
    plain = {"format": FORMAT, "tables": [asdict(table) for table in tables]}
    write_whole(path, json.dumps(_finite(plain), indent=1) + "\n")


def read_tables(path: Path) -> tuple[MeasuredTable, ...]:
    """Inverse of ``write_tables``.

    Raises:
        UserError: there are none.
    """
    wrong = UserError(f"{path} is expected to hold tables as `fl-privacy advise --save` writes them, but does not.")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw["format"] != FORMAT or not raw["tables"]:
            raise wrong
        return tuple(_table(told, wrong) for told in raw["tables"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise wrong from error


def _table(told: dict[str, Any], wrong: UserError) -> MeasuredTable:
    listed = {name: told.pop(name) for name in ("settings", "attacks", "unknown")}
    if not all(fits(found, list[str]) for found in listed.values()):
        raise wrong
    defenses = tuple(_defense(entry) for entry in told.pop("defenses"))
    if len(defenses) < 2:
        raise wrong
    lists = {name: tuple(found) for name, found in listed.items()}
    return MeasuredTable(defenses=defenses, **lists, **told)  # type: ignore[arg-type]


def _defense(entry: dict[str, Any]) -> MeasuredDefense:
    threats = {name: _candidate(told) for name, told in entry.pop("by_threat").items()}
    overrides = tuple(entry.pop("overrides"))
    figures = {name: math.nan if entry[name] is None else entry[name] for name in ("seconds", "upload_bytes")}
    return MeasuredDefense(**{**entry, **figures, "by_threat": threats, "overrides": overrides})


def _candidate(told: dict[str, Any]) -> Candidate:
    inferred = {about: m and Measure(**m) for about, m in told.pop("inferred").items()}
    figures = {name: math.inf if told[name] is None else told[name] for name in ("psnr", "upper", "largest")}
    return Candidate(**{**told, **figures, "inferred": inferred})


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
