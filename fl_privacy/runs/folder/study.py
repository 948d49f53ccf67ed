"""Load a study's results, and save tables for ``advise``."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.checks import beginning, each, fits, in_words, made
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import read_text
from fl_privacy.measure import METRICS, Statistic, pmm
from fl_privacy.measure.roc import Finding, Measure
from fl_privacy.runs.config.settings import UNDEFENDED, AttackCell, GridPoint
from fl_privacy.runs.folder.defense_choice import Candidate, candidate_of, least_over_control
from fl_privacy.runs.folder.ongoing import is_finished
from fl_privacy.runs.folder.read import Run, read_run, read_summary
from fl_privacy.runs.folder.summary import LeakageResult, Summary
from fl_privacy.types.victim_ids import Attacker

Threat = Literal["honest", "adaptive", "malicious"]
"""Attackers that count: only those that do not know the defense, or also adaptive ones, or also malicious servers."""

THREATS: tuple[Threat, ...] = get_args(Threat)


@dataclass(frozen=True)
class Versus:
    """One attack with one attacker: plain, adaptive (knows the defense), or ``worst``, whichever leaks more."""

    attack: str
    attacker: Attacker | Literal["worst"]


@dataclass(frozen=True, kw_only=True)
class StudyEntry(GridPoint):
    """Folders of the jobs (trainings and attacks) that a study runs with one defense at one strength."""

    own: bool = False  # ``True`` if the user entered it
    trainings: Mapping[str, Path]  # folder of each training by name, the main one first
    attacks: Mapping[AttackCell, Path]
    problems: Mapping[str, str] = field(default_factory=dict)  # folder name of a failed job -> reason

    @property
    def name(self) -> str:
        return f"{self.family} ({self.strength})" if self.strength else self.family

    @property
    def undefended(self) -> bool:
        return self.family == UNDEFENDED

    @property
    def training(self) -> Path:
        return next(iter(self.trainings.values()))


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyRow:
    """Results of a defense at one strength."""

    entry: StudyEntry
    trainings: Mapping[str, Summary]
    undefended: Mapping[str, float]  # accuracy of the same trainings without a defense, in [0, 1]
    readings: Mapping[AttackCell, tuple[LeakageResult, ...]]  # leakage in each finished cell, round by round
    attacks: Mapping[AttackCell, Run] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def training(self) -> Summary | None:
        return self.trainings.get(next(iter(self.entry.trainings)))

    @property
    def trained(self) -> bool:
        return len(self.trainings) == len(self.entry.trainings)

    @property
    def complete(self) -> bool:
        return self.trained and all(self.readings.get(cell) for cell in self.entry.attacks)

    @property
    def accuracy(self) -> float | None:
        return self.training.final_accuracy if self.training else None

    @property
    def pmm(self) -> float | None:
        undefended = self.undefended.get(next(iter(self.entry.trainings)))
        return pmm(self.accuracy, undefended) if self.accuracy is not None and undefended else None

    @property
    def losses(self) -> dict[str, float]:
        found = {name: s.final_accuracy for name, s in self.trainings.items() if name in self.undefended}
        return {name: 100 * (self.undefended[name] - a) for name, a in found.items() if a is not None}

    @property
    def loss(self) -> float | None:
        return max(self.losses.values()) if len(self.losses) == len(self.entry.trainings) else None

    @property
    def seconds(self) -> float:
        return self._most("defense_seconds")

    @property
    def upload_bytes(self) -> float:
        return self._most("upload_bytes")

    @property
    def epsilon(self) -> float | None:
        spent = [s.privacy.epsilon if s.privacy else None for s in self.trainings.values()]
        known = [epsilon for epsilon in spent if epsilon is not None]
        return max(known) if known and len(known) == len(spent) else None

    @property
    def delta(self) -> float | None:
        return max((s.privacy.delta for s in self.trainings.values() if s.privacy), default=None)

    @property
    def upload(self) -> Mapping[str, Statistic]:
        return self.training.upload if self.training else {}

    @property
    def update_distortion(self) -> Mapping[str, Statistic]:
        return next((own for run in self.attacks.values() if (own := run.summary.update_distortion)), {})

    @property
    def findings(self) -> list[Finding]:
        summaries = [*self.trainings.values(), *(run.summary for run in self.attacks.values())]
        return [finding for summary in summaries for finding in summary.inferred]

    @property
    def all_readings(self) -> list[LeakageResult]:
        return [reading for found in self.readings.values() for reading in found]

    @cached_property
    def leakage(self) -> Mapping[Versus, LeakageResult]:
        return {
            Versus(cell.title, attacker): own[-1]
            for cell, found in self.readings.items()
            for attacker in Attacker
            if (own := [reading for reading in found if reading.attacker == attacker])
        }

    def statistic(self, versus: Versus, metric: str) -> Statistic | None:
        leakage = self.leakage.get(versus)
        return leakage.metrics.get(metric) if leakage else None

    def heard(self, threat: Threat, uploads: str | None = None) -> list[LeakageResult]:
        return [
            reading
            for cell, found in self.readings.items()
            for reading in found
            if uploads in (None, cell.uploads)
            and (threat == "malicious" or not cell.server)
            and (threat in ("malicious", "adaptive") or reading.attacker is Attacker.PLAIN)
        ]

    def knows_defense(self, cell: AttackCell) -> bool:
        defends = any(o.startswith("defense=") and o != "defense=none" for o in self.entry.overrides)
        known = any(reading.attacker is Attacker.ADAPTIVE for reading in self.readings.get(cell, ()))
        return known or self.entry.undefended or not defends

    def candidate(
        self, threat: Threat = "malicious", uploads: str | None = None, *, asked: Collection[str] = ()
    ) -> Candidate | None:
        """Return the defense with its worst results under attackers no more powerful than ``threat``.

        ``None`` if no example was scored. ``uploads``: kind of upload; ``None``: all kinds. ``asked``: inferences, such
        as membership, that must have been measured.
        """
        candidate = candidate_of(
            self.heard(threat, uploads),
            name=self.name,
            accuracy=self.accuracy if self.trained else None,
            pmm=self.pmm,
            findings=self.findings,
            asked=asked,
            undefended=self.entry.undefended,
        )
        if candidate is None:
            return None
        passive = self.heard("honest" if threat == "honest" else "adaptive", uploads)
        return replace(candidate, over_control=least_over_control(passive))

    def missing(self, threat: Threat) -> list[AttackCell]:
        """List attacks, no stronger than ``threat``, that did not finish or ran without knowing the defense."""

        def known(cell: AttackCell) -> bool:
            found = self.readings.get(cell, ())
            read = any(cell.server or (r.statistic(r.main) and not r.failures) for r in found)
            asked = threat == "malicious" or not cell.server
            return (read or not asked) and (threat == "honest" or bool(cell.server) or self.knows_defense(cell))

        return [cell for cell in self.entry.attacks if not known(cell)]

    def of_training(self, name: str, uploads: Collection[str]) -> "StudyRow":
        def own(cells: Mapping[AttackCell, Any]) -> dict[AttackCell, Any]:
            return {cell: value for cell, value in cells.items() if cell.uploads in uploads}

        entry = replace(self.entry, trainings={name: self.entry.trainings[name]}, attacks=own(self.entry.attacks))
        trained = {training: summary for training, summary in self.trainings.items() if training == name}
        return replace(self, entry=entry, trainings=trained, readings=own(self.readings), attacks=own(self.attacks))

    def _most(self, figure: str) -> float:
        return max((s.upload[figure].mean for s in self.trainings.values() if figure in s.upload), default=math.nan)


def threats_of(cells: Iterable[AttackCell]) -> tuple[Threat, ...]:
    """Return the kinds of attacker in the attacks ``cells``, the most powerful last."""
    tried = any(cell.server for cell in cells)
    return tuple(threat for threat in THREATS if tried or threat != "malicious")


def read_study(entries: Sequence[StudyEntry]) -> list[StudyRow]:
    """Return a row of results for each defense and strength in ``entries``, from those of its jobs that finished."""
    trained = [
        {name: s for name, path in entry.trainings.items() if (s := read_summary(path)) is not None}
        for entry in entries
    ]
    undefended: dict[str, float] = {}
    for entry, found in zip(entries, trained, strict=True):
        for name, summary in found.items():
            if entry.undefended and summary.final_accuracy is not None:
                undefended.setdefault(name, summary.final_accuracy)
    attacks = [{cell: read_run(path) for cell, path in entry.attacks.items() if is_finished(path)} for entry in entries]
    return [
        StudyRow(
            entry=entry,
            trainings=trainings,
            undefended=undefended,
            readings={
                cell: tuple(replace(read, attack=cell.title) for read in run.summary.attacked)
                for cell, run in found.items()
            },
            attacks=found,
        )
        for entry, trainings, found in zip(entries, trained, attacks, strict=True)
    ]


T = TypeVar("T")
FORMAT = 3
MEASURED = "measured.json"  # name of the tables in the folder of a study
STRONGEST = "threat_model=strongest"  # attacker that must have been tried before a defense is recommended


@dataclass(frozen=True, kw_only=True)
class MeasuredDefense:
    """A defense at one strength, with figures of the worst attack under each threat."""

    name: str
    overrides: tuple[str, ...]
    accuracy: float  # final accuracy in [0, 1]
    by_threat: Mapping[Threat, Candidate]  # worst results; threats not measured are missing
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
    # overrides of every attack, such as ``threat_model=strongest``; empty in older files
    attackers: tuple[str, ...] = ()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return _batch_sizes(self.attackers, "batch_size") or (1,)

    @property
    def trained_batch_sizes(self) -> tuple[int, ...]:
        return _batch_sizes(self.settings, "federation.plan.batch_size")

    def matches(self, wanted: Sequence[str]) -> bool:
        return set(wanted) <= set(self.settings)


def _batch_sizes(overrides: Sequence[str], key: str) -> tuple[int, ...]:
    values = [value for name, _, value in (override.partition("=") for override in overrides) if name == key]
    return tuple(sorted({int(value) for value in values if value.isdecimal()}))


def when_measured(environments: Iterable[Mapping[str, Any]]) -> str:
    """Return the latest date and the versions of fl-privacy in ``environments`` as text; empty if none has them."""
    stated = [environment for environment in environments if environment]
    days = [str(environment["date"]).partition("T")[0] for environment in stated if "date" in environment]
    packages = [environment.get("packages", {}) for environment in stated]
    versions = sorted({str(package["fl-privacy"]) for package in packages if "fl-privacy" in package})
    return ", ".join([*([max(days)] if days else []), *(f"fl-privacy {version}" for version in versions)])


def measured_of(row: StudyRow, *, asked: Collection[str] = ()) -> MeasuredDefense | None:
    """Return the measurements of ``row``; ``None`` if accuracy, leakage or an inference (``asked``) is unknown."""
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
    """Return measurements of the rows for which ``is_whole`` is true, and the names of all rows without measurements.

    ``asked``: inferences, such as membership, that must be measured.
    """
    found = [measured_of(row, asked=asked) if is_whole(row) else None for row in rows]
    if not found or found[0] is None:
        return (), tuple(row.name for row in rows)
    unknown = tuple(row.name for row, known in zip(rows, found, strict=True) if known is None)
    return tuple(known for known in found if known is not None), unknown


def write_tables(path: Path, tables: Sequence[MeasuredTable]) -> None:
    """Write ``tables`` as JSON; infinite ends of intervals, as from a single image, become null."""
    plain = {"format": FORMAT, "tables": [asdict(table) for table in tables]}
    write_whole(path, json.dumps(_finite(plain), indent=1) + "\n")


def read_tables(path: Path) -> tuple[MeasuredTable, ...]:
    """Load the tables that ``write_tables`` wrote; ``UserError`` if there are none, or a field is invalid."""
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


def _defense(plain: object, where: str) -> MeasuredDefense:
    unknown = partial(_figure, missing=math.nan)
    threats = partial(_named, _candidate, THREATS)
    found = made(MeasuredDefense, plain, where, by_threat=threats, seconds=unknown, upload_bytes=unknown)
    if not 0 <= found.accuracy <= 1 or not found.by_threat:
        raise ValueError(f"{where} has no accuracy between 0 and 1, or nothing that was read")
    return found


def _candidate(plain: object, where: str) -> Candidate:
    figures = dict.fromkeys(("psnr", "upper", "largest"), partial(_figure, missing=math.inf))
    measures = partial(_named, lambda one, of: None if one is None else made(Measure, one, of), tuple(About))
    found = made(Candidate, plain, where, inferred=measures, **figures)
    least = min(found.exact, found.identified, found.groups, found.failures, found.unjudged)
    counts = found.exact + found.identified <= found.read <= found.images and found.images > 0 and least >= 0
    highest = min(found.upper, found.largest)
    if not counts or not (found.psnr <= highest or math.isclose(found.psnr, highest)):
        raise ValueError(f"figures of {where} contradict each other")
    if found.judged_by not in METRICS or not 0 <= found.accuracy <= 1:
        raise ValueError(f"{where} has no accuracy between 0 and 1, or is judged by a metric that there is not")
    return found


def _named(make: Callable[[object, str], T], names: Collection[str], plain: object, where: str) -> dict[str, T]:
    if not isinstance(plain, dict) or not set(plain) <= set(names):
        raise ValueError(f"{where} is {beginning(plain)}, not a mapping of some of {', '.join(names)}")
    return {name: make(entry, f"{where}.{name}") for name, entry in plain.items()}


def _figure(plain: object, where: str, *, missing: float) -> float:
    if plain is None:
        return missing
    if not isinstance(plain, int | float) or not fits(plain, float):
        raise ValueError(f"{where} is {beginning(plain)}, not {in_words(float | None)}")
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
