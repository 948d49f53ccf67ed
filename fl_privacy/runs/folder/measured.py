"""Save and load the measurements of studies, from which ``fl-privacy advise`` recommends defenses."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.checks import fits, in_words
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import read_text
from fl_privacy.measure import METRICS
from fl_privacy.measure.roc import Measure
from fl_privacy.runs.folder.defense_choice import Candidate
from fl_privacy.runs.folder.records import beginning, each, made
from fl_privacy.runs.folder.study import THREATS, StudyRow, Threat, threats_of
from fl_privacy.types.modality import modality_judged_by

T = TypeVar("T")
FORMAT = 3
MEASURED = "measured.json"  # name of the tables in the folder of a study
STRONGEST, ADAPTIVE = "threat_model=strongest", "threat_model=adaptive"
"""Attacks of which one must have been tried before a defense is recommended; for images, the former."""


@dataclass(frozen=True, kw_only=True)
class MeasuredDefense:
    """A defense at one strength, with figures of the worst attack under each threat."""

    name: str
    overrides: tuple[str, ...]
    accuracy: float  # final accuracy in [0, 1]
    by_threat: Mapping[Threat, Candidate]  # results by attackers, of measured threats only
    seconds: float  # defense time of one client in one round; NaN if not known
    upload_bytes: float  # size of one client's update; NaN if not known
    epsilon: float | None
    delta: float | None = None  # ``None`` if not known, which promises little


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """Measurements of a sweep, or of one training of a benchmark."""

    settings: tuple[str, ...]  # overrides of all jobs, such as ``data=mnist_mini``
    attacks: tuple[str, ...]
    weights: str  # attacked model, ``initial``, ``final`` or ``both``
    command: str
    defenses: tuple[MeasuredDefense, ...]
    unknown: tuple[str, ...] = ()  # names of defenses not fully measured
    when: str = ""  # last day of the measurement and version of this package, or empty
    # overrides of every attack, such as ``threat_model=strongest``; empty in older files, whose attackers had no
    # likelihoods, priors or blind deconvolution
    attackers: tuple[str, ...] = ()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return _batch_sizes(self.attackers, "batch_size") or (1,)

    @property
    def trained_batch_sizes(self) -> tuple[int, ...]:
        return _batch_sizes(self.settings, "federation.plan.batch_size")

    @property
    def by_the_strongest(self) -> bool:
        """Return ``True`` if the strongest attacker was tried; otherwise no defense is recommended."""
        return "auto" in self.attacks and any(each in self.attackers for each in self.strongest)

    @property
    def strongest(self) -> tuple[str, ...]:
        """Return the overrides of sufficiently strong attackers; for texts and rows none has a prior."""
        images = all(modality_judged_by(c.judged_by).pixels for d in self.defenses for c in d.by_threat.values())
        return (STRONGEST,) if images else (STRONGEST, ADAPTIVE)

    def matches(self, wanted: Sequence[str]) -> bool:
        return set(wanted) <= set(self.settings)


def _batch_sizes(overrides: Sequence[str], key: str) -> tuple[int, ...]:
    values = [value for name, _, value in (override.partition("=") for override in overrides) if name == key]
    return tuple(sorted({int(value) for value in values if value.isdecimal()}))


def when_measured(environments: Iterable[Mapping[str, Any]]) -> str:
    """Return the last day and this package's versions in ``environments``; empty if none has them."""
    told = [environment for environment in environments if environment]
    days = [str(environment["date"]).partition("T")[0] for environment in told if "date" in environment]
    packages = [environment.get("packages", {}) for environment in told]
    versions = sorted({str(package["fl-privacy"]) for package in packages if "fl-privacy" in package})
    return ", ".join([*([max(days)] if days else []), *(f"fl-privacy {version}" for version in versions)])


def measured_of(row: StudyRow, *, asked: Collection[str] = ()) -> MeasuredDefense | None:
    """Measure ``row`` under each threat that was tried; ``None`` if accuracy or leakage is not known."""
    cells, found = row.entry.attacks, dict[Threat, Candidate]()
    if row.accuracy is None:
        return None
    for threat in threats_of(cells):
        known = threat == "honest" or all(cell.server or row.knows_defense(cell) for cell in cells)
        if known and row.heard(threat):
            candidate = row.candidate(threat, asked=asked)
            if candidate is None:
                return None
            found[threat] = candidate
    return MeasuredDefense(
        name=row.name,
        overrides=row.entry.overrides,
        accuracy=row.accuracy,
        by_threat=found,
        seconds=row.seconds,
        upload_bytes=row.upload_bytes,
        epsilon=row.epsilon,
        delta=row.delta,
    )


def measured_rows(
    rows: Sequence[StudyRow], *, is_whole: Callable[[StudyRow], bool], asked: Collection[str] = ()
) -> tuple[tuple[MeasuredDefense, ...], tuple[str, ...]]:
    """Return the measured rows, if the undefended one is whole, and the names of the others."""
    found = [measured_of(row, asked=asked) if is_whole(row) else None for row in rows]
    if not found or found[0] is None:
        return (), tuple(row.name for row in rows)
    unknown = tuple(row.name for row, known in zip(rows, found, strict=True) if known is None)
    return tuple(known for known in found if known is not None), unknown


def write_tables(path: Path, tables: Sequence[MeasuredTable]) -> None:
    """Write ``tables`` as JSON; infinite bounds, as from a single image, are null."""
    plain = {"format": FORMAT, "tables": [asdict(table) for table in tables]}
    write_whole(path, json.dumps(_finite(plain), indent=1) + "\n")


def read_tables(path: Path) -> tuple[MeasuredTable, ...]:
    """Load the tables of ``write_tables``; ``UserError`` if there are none, or a field is invalid."""
    try:
        raw = json.loads(read_text(path))
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"it is of no format {FORMAT}")
        table = partial(made, MeasuredTable, defenses=partial(each, _defense, at_least=2))
        return each(table, raw.get("tables"), "tables", at_least=1)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is expected to hold tables as `fl-privacy advise --save` writes them, but"
            f" {' '.join(str(error).split())[:200]}; measure and save them anew."
        ) from error


def _defense(told: object, where: str) -> MeasuredDefense:
    unknown = partial(_figure, missing=math.nan)
    threats = partial(_named, _candidate, THREATS)
    found = made(MeasuredDefense, told, where, by_threat=threats, seconds=unknown, upload_bytes=unknown)
    if not 0 <= found.accuracy <= 1 or not found.by_threat:
        raise ValueError(f"{where} has no accuracy between 0 and 1, or nothing that was read")
    return found


def _candidate(told: object, where: str) -> Candidate:
    figures = dict.fromkeys(("psnr", "upper", "largest"), partial(_figure, missing=math.inf))
    measures = partial(_named, lambda one, of: None if one is None else made(Measure, one, of), tuple(About))
    found = made(Candidate, told, where, inferred=measures, **figures)
    least = min(found.exact, found.identified, found.groups, found.failures, found.unjudged)
    counts = found.exact + found.identified <= found.read <= found.images and found.images > 0 and least >= 0
    highest = min(found.upper, found.largest)
    if not counts or not (found.psnr <= highest or math.isclose(found.psnr, highest)):
        raise ValueError(f"figures of {where} contradict each other")
    if found.judged_by not in METRICS or not 0 <= found.accuracy <= 1:
        raise ValueError(f"{where} has no accuracy between 0 and 1, or is judged by a metric that there is not")
    return found


def _named(make: Callable[[object, str], T], names: Collection[str], told: object, where: str) -> dict[str, T]:
    if not isinstance(told, dict) or not set(told) <= set(names):
        raise ValueError(f"{where} is {beginning(told)}, not a mapping of some of {', '.join(names)}")
    return {name: make(entry, f"{where}.{name}") for name, entry in told.items()}


def _figure(told: object, where: str, *, missing: float) -> float:
    if told is None:
        return missing
    if not isinstance(told, int | float) or not fits(told, float):
        raise ValueError(f"{where} is {beginning(told)}, not {in_words(float | None)}")
    return told


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
