"""Which measured defense to take: the cheapest that costs little accuracy and behind which nothing was read.

Measured defenses in tables, from which advice is given: of a sweep, of a benchmark, of a file.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from fl_privacy.checks import fits, in_words
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.foreign_files import read_text
from fl_privacy.inference.kinds import About
from fl_privacy.metrics import METRICS
from fl_privacy.metrics.roc import promises_little
from fl_privacy.modality import modality_judged_by
from fl_privacy.report.numbers import percent, seconds, size
from fl_privacy.report.recommendation import doubts, goal_in_words, leakage_in_words, nothing_told, read_of
from fl_privacy.report.trade_off import DefenseRow
from fl_privacy.results import Attacker, Candidate, Measure, Reading
from fl_privacy.results.candidates import ROUNDING, asked_of, candidate_of, comparable, unread_undefended
from fl_privacy.results.readings import Extent

Threat = Literal["honest", "adaptive", "malicious"]
"""Attackers that count: those that know nothing of the defense, those that know it as well, or servers that do not
follow the protocol, too."""

THREATS: tuple[Threat, ...] = get_args(Threat)

T = TypeVar("T")

FORMAT = 3
MEASURED = "measured.json"
"""Name of the tables in the folder of a benchmark."""

SHIPPED = Path(__file__).resolve().parent / "measured"
"""Files that come with the package, as ``fl-privacy advise --save FILE`` writes them."""


@dataclass(frozen=True, kw_only=True)
class MeasuredDefense:
    """A defense at one strength as it was trained and attacked, with figures of the worst attack under each threat.

    Attributes:
        name: in words.
        overrides: that ask for it.
        accuracy: in the end, in [0, 1].
        by_threat: what attackers read; without those that were not measured.
        seconds: that the defense takes one client in one round; NaN where that is unknown.
        upload_bytes: of one client's update, as ``seconds``.
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
    """Measurements of a sweep, or of one training of a benchmark.

    Attributes:
        settings: overrides of all of it, such as ``data=mnist_mini``.
        attacks: names.
        weights: of the model that was attacked, ``initial``, ``final`` or ``both``.
        command: that measured it.
        defenses: undefended first.
        unknown: names of those that are not in it, since not all of them has been measured.
        when: last day of the measurement and version of this package, or empty.
        attackers: overrides of every attack, such as ``threat_model=strongest``; empty in files of older versions,
            whose attackers knew no likelihoods, no priors and no blind deconvolution.
    """

    settings: tuple[str, ...]
    attacks: tuple[str, ...]
    weights: str
    command: str
    defenses: tuple[MeasuredDefense, ...]
    unknown: tuple[str, ...] = ()
    when: str = ""
    attackers: tuple[str, ...] = ()

    @property
    def by_the_strongest(self) -> bool:
        """Say whether the strongest attacker of such examples tried: only then is a defense recommended."""
        return "auto" in self.attacks and any(each in self.attackers for each in self.strongest)

    @property
    def strongest(self) -> tuple[str, ...]:
        """Return the overrides of the attackers that are strong enough: of texts and rows none has a prior."""
        images = all(modality_judged_by(c.judged_by).pixels for d in self.defenses for c in d.by_threat.values())
        return (STRONGEST,) if images else (STRONGEST, ADAPTIVE)

    def matches(self, wanted: Sequence[str]) -> bool:
        """Say whether the table was measured with the settings ``wanted``."""
        return set(wanted) <= set(self.settings)


def when_measured(environments: Iterable[Mapping[str, Any]]) -> str:
    """Name the last day and the versions of this package that ``environments`` of runs have; empty if none says."""
    told = [environment for environment in environments if environment]
    days = [str(environment["date"]).partition("T")[0] for environment in told if "date" in environment]
    packages = [environment.get("packages", {}) for environment in told]
    versions = sorted({str(package["fl-privacy"]) for package in packages if "fl-privacy" in package})
    return ", ".join([*([max(days)] if days else []), *(f"fl-privacy {version}" for version in versions)])


def measured_rows(
    rows: Sequence[DefenseRow], overrides: Sequence[Sequence[str]]
) -> tuple[tuple[MeasuredDefense, ...], tuple[str, ...]]:
    """Return the rows of a sweep that finished, the undefended one first, and the names of those that did not.

    Nothing is returned without the undefended one.
    """
    asked = asked_of([finding for row in rows for finding in row.findings])
    found = [_measured_row(row, own, asked) for row, own in zip(rows, overrides, strict=True)]
    if not found or found[0] is None:
        return (), tuple(row.name for row in rows)
    unknown = tuple(row.name for row, known in zip(rows, found, strict=True) if known is None)
    return tuple(known for known in found if known is not None), unknown


def _measured_row(row: DefenseRow, overrides: Sequence[str], asked: set[str]) -> MeasuredDefense | None:
    """Build the row of a defense; ``None`` unless all its jobs finished.

    Attackers that know the defense count where each attack had one.
    """
    if not row.complete or row.training is None or row.accuracy is None:
        return None
    heard: dict[Threat, list[Reading]] = {"honest": [r for r in row.readings if r.attacker is Attacker.PLAIN]}
    adaptive = {versus.attack for versus in row.leakage if versus.attacker is Attacker.ADAPTIVE}
    if row.outcome.undefended or not _defends(overrides) or adaptive == set(row.outcome.attacks):
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


def _defends(overrides: Sequence[str]) -> bool:
    """Say whether there is a defense to know of; what is trained and uploaded alone, everybody knows."""
    return any(o.startswith("defense=") and o != "defense=none" for o in overrides)


def write_tables(path: Path, tables: Sequence[MeasuredTable]) -> None:
    """Write ``tables`` as JSON; what is infinite, as a bound from a single image, is null."""
    plain = {"format": FORMAT, "tables": [asdict(table) for table in tables]}
    write_whole(path, json.dumps(_finite(plain), indent=1) + "\n")


def read_tables(path: Path) -> tuple[MeasuredTable, ...]:
    """Return the tables that ``write_tables`` wrote, trusting nothing in the file.

    Raises:
        UserError: there are none, or a field of one is not what it may be.
    """
    try:
        raw = json.loads(read_text(path))
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"it is of no format {FORMAT}")
        return _each(_table, raw.get("tables"), "tables", at_least=1)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is expected to hold tables as `fl-privacy advise --save` writes them, but"
            f" {' '.join(str(error).split())[:200]}; measure and save them anew."
        ) from error


def _table(told: object, where: str) -> MeasuredTable:
    return _made(MeasuredTable, told, where, defenses=partial(_each, _defense, at_least=2))


def _defense(told: object, where: str) -> MeasuredDefense:
    unknown = partial(_figure, missing=math.nan)
    threats = partial(_named, _candidate, get_args(Threat))
    found = _made(MeasuredDefense, told, where, by_threat=threats, seconds=unknown, upload_bytes=unknown)
    if not 0 <= found.accuracy <= 1 or not found.by_threat:
        raise ValueError(f"{where} has no accuracy between 0 and 1, or nothing that was read")
    return found


def _candidate(told: object, where: str) -> Candidate:
    unbounded = partial(_figure, missing=math.inf)
    figures = dict.fromkeys(("psnr", "upper", "largest"), unbounded)
    found = _made(Candidate, told, where, inferred=partial(_named, _measure, tuple(About)), **figures)
    least = min(found.exact, found.identified, found.groups, found.failures, found.unjudged)
    counts = found.exact + found.identified <= found.read <= found.images and found.images > 0 and least >= 0
    highest = min(found.upper, found.largest)
    if not counts or not (found.psnr <= highest or math.isclose(found.psnr, highest)):
        raise ValueError(f"figures of {where} contradict each other")
    if found.judged_by not in METRICS or not 0 <= found.accuracy <= 1:
        raise ValueError(f"{where} has no accuracy between 0 and 1, or is judged by a metric that there is not")
    return found


def _measure(told: object, where: str) -> Measure | None:
    return None if told is None else _made(Measure, told, where)


def _made(kind: type[T], told: object, where: str, **parts: Callable[[object, str], object]) -> T:
    """Build a dataclass from JSON; fields are plain values but for ``parts``, which are made from (value, place)."""
    if not isinstance(told, dict):
        raise ValueError(f"{where} is {_shown(told)}")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, field in known.items() if field.default is field.default_factory is MISSING}
    if wrong := sorted(needed ^ needed.intersection(told)) or sorted(told.keys() - known):
        raise ValueError(f"{where} should {'have' if wrong[0] in needed else 'not have'} {wrong[0]}")
    hints, values = get_type_hints(kind), {}
    for name, value in told.items():
        if name not in parts and not fits(value, hints[name]):
            raise ValueError(f"{where}.{name} is {_shown(value)}, not {in_words(hints[name])}")
        plain = tuple(value) if isinstance(value, list) else value
        values[name] = parts[name](value, f"{where}.{name}") if name in parts else plain
    return kind(**values)


def _each(make: Callable[[object, str], T], told: object, where: str, *, at_least: int) -> tuple[T, ...]:
    if not isinstance(told, list) or len(told) < at_least:
        raise ValueError(f"{where} is {_shown(told)}, not a list of at least {at_least}")
    return tuple(make(entry, f"{where}[{number}]") for number, entry in enumerate(told))


def _named(make: Callable[[object, str], T], names: Collection[str], told: object, where: str) -> dict[str, T]:
    if not isinstance(told, dict) or not set(told) <= set(names):
        raise ValueError(f"{where} is {_shown(told)}, not a mapping of some of {', '.join(names)}")
    return {name: make(entry, f"{where}.{name}") for name, entry in told.items()}


def _figure(told: object, where: str, *, missing: float) -> float:
    if told is None:
        return missing
    if not isinstance(told, int | float) or not fits(told, float):
        raise ValueError(f"{where} is {_shown(told)}, not {in_words(float | None)}")
    return told


def _shown(value: object) -> str:
    """Return the beginning of a value that may be long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


STRONGEST, ADAPTIVE = "threat_model=strongest", "threat_model=adaptive"
"""Of the attacks one of which has to have been tried before a defense is recommended; of images the former."""

LITTLE_TIME = 0.01
"""Seconds; less is nothing beside a client's training, and differs from one measurement to the next."""


def advice_from(
    table: MeasuredTable, *, accuracy_loss: float, threat: Threat, psnr_below: float | None = None
) -> list[str]:
    """Say in sentences which defense within both bounds is cheapest, or that there is none and what comes nearest.

    Also what it does not protect from. Cheap is little time, to a digit and from ``LITTLE_TIME`` on, then few bytes,
    then little that is read.

    Args:
        table: what was measured.
        accuracy_loss: percentage points below the undefended accuracy, at most.
        threat: whose attacks count.
        psnr_below: dB that no attacked image may reach either, nor the upper end of the mean's 95 % interval.

    Raises:
        UserError: nobody measured that threat, or images were read of some and texts of others.
    """
    undefended, *defended = table.defenses
    known = [d for d in defended if threat in d.by_threat]
    if threat not in undefended.by_threat or not known:
        raise _not_measured(table, threat)
    candidates = [d.by_threat[threat] for d in (undefended, *known)]
    if not comparable(candidates):
        raise UserError("A table of images, or one of texts, is expected, but got both; name settings of one of them.")
    if quiet := unread_undefended([replace(candidates[0], undefended=True)]):
        return [f"Measured on {_measured_on(table)}: {len(known)} defenses. {nothing_told(quiet)}"]
    affordable = [d for d in known if d.accuracy >= undefended.accuracy - accuracy_loss / 100 - ROUNDING]
    safe = [d for d in affordable if d.by_threat[threat].unread(psnr_below)]
    allowed = f"{accuracy_loss:g} points of accuracy"
    lines = [
        f"Measured on {_measured_on(table)}: {len(known)} defenses, of which {len(affordable)} cost at most"
        f" {allowed} and {len(safe)} of these have {goal_in_words(candidates, psnr_below)}.",
        *_unknown([*table.unknown, *(d.name for d in defended if d not in known)]),
        f"Undefended: {_figures(undefended, undefended, threat)}.",
    ]
    if not table.by_the_strongest:
        return [*lines, *_not_by_the_strongest(table, affordable, threat)]
    if safe:
        best = min(safe, key=lambda d: (_cost(d), _leak(d, threat)))
        lines.append(
            f"Take {best.name} ({' '.join(best.overrides)}), the cheapest: {_figures(best, undefended, threat)}."
        )
        return [*lines, *_not_protected(best, table, threat)]
    lines.append(f"None does both: no defense here costs at most {allowed} and hides every one.")
    if affordable:
        least = min(affordable, key=lambda d: _leak(d, threat))
        lines.append(
            f"The least is read behind {least.name}, which is not enough: {_figures(least, undefended, threat)}."
        )
    hiding = [d for d in known if d.by_threat[threat].unread(psnr_below)]
    if hiding:
        costly = max(hiding, key=lambda d: d.accuracy)
        lines.append(f"Enough, at a higher price, is {costly.name}: {_figures(costly, undefended, threat)}.")
        return [*lines, *_not_protected(costly, table, threat)]
    return lines


def _measured_on(table: MeasuredTable) -> str:
    return " ".join(table.settings) + (f" ({table.when})" if table.when else "")


def _not_by_the_strongest(table: MeasuredTable, affordable: Sequence[MeasuredDefense], threat: Threat) -> list[str]:
    """Recommend nothing, and say who tried and who did not."""
    missing = table.strongest[-1]
    knows = "knows the defense's likelihood and public images" if missing == STRONGEST else "knows the defense"
    lines = [
        f"Nothing is recommended: tried were {', '.join(table.attacks)}"
        f" ({' '.join(table.attackers) or 'of an older version'}), and not attack=auto with {missing}, which joins"
        f" all uploads and {knows}. Measure again by `{table.command}`."
    ]
    if affordable:
        least = min(affordable, key=lambda d: _leak(d, threat))
        lines.append(f"Of what was tried, least was read of {least.name}: {read_of(least.by_threat[threat])}.")
    return lines


def _not_measured(table: MeasuredTable, threat: Threat) -> UserError:
    known = dict.fromkeys(threat for defense in table.defenses[1:] for threat in defense.by_threat)
    remedy = (
        "`fl-privacy benchmark` measures it" if threat == "malicious" else "threat_model=adaptive in a grid measures it"
    )
    return UserError(
        f"threat is expected to be one that was measured, {' or '.join(known)}, but got {threat}; {remedy}."
    )


def _unknown(names: Sequence[str]) -> list[str]:
    """Name in a sentence what was not measured to its end, and may be better or worse than all else."""
    return [f"Not known, since not all of it was measured: {', '.join(names)}."] if names else []


def _cost(defense: MeasuredDefense) -> tuple[float, float]:
    """Return the time and bytes of an upload, infinite where unknown."""
    took = max(defense.seconds, LITTLE_TIME) if math.isfinite(defense.seconds) else math.inf
    return float(f"{took:.0e}"), defense.upload_bytes if math.isfinite(defense.upload_bytes) else math.inf


def _leak(defense: MeasuredDefense, threat: Threat) -> Extent:
    return defense.by_threat[threat].extent


def _figures(defense: MeasuredDefense, undefended: MeasuredDefense, threat: Threat) -> str:
    loss = 100 * (undefended.accuracy - defense.accuracy)
    took = seconds(defense.seconds) if math.isfinite(defense.seconds) else "unknown time"
    sent = size(defense.upload_bytes) if math.isfinite(defense.upload_bytes) else "unknown bytes"
    return (
        f"accuracy {percent(defense.accuracy)} ({0.0 - loss:+.1f} points),"
        f" {leakage_in_words(defense.by_threat[threat])}; {took} and {sent} an upload"
    )


_STRONGER: Mapping[Threat, Mapping[Threat, str]] = {
    "honest": {"adaptive": "who knows the defense", "malicious": "a malicious server"},
    "adaptive": {"malicious": "a malicious server"},
    "malicious": {},
}
"""Attackers that count -> those that were not asked for, and what they are called."""


def _not_protected(defense: MeasuredDefense, table: MeasuredTable, threat: Threat) -> list[str]:
    found, lines = defense.by_threat[threat], []
    little = defense.epsilon is not None and promises_little(
        epsilon=defense.epsilon, delta=1.0 if defense.delta is None else defense.delta
    )
    delta = "an unknown delta" if defense.delta is None else f"delta {defense.delta:.3g}"
    if doubted := doubts(found):
        lines.append(doubted)
    if threat == "honest" and "adaptive" not in defense.by_threat:
        lines.append("Against who knows the defense it was not measured.")
    for other, who in _STRONGER[threat].items():
        if (more := defense.by_threat.get(other)) is not None:
            lines.append(f"Against {who} it was not asked for: there {read_of(more)}.")
    lines.append(
        "It gives no guarantee of differential privacy."
        if defense.epsilon is None
        else f"Its guarantee is an epsilon of {defense.epsilon:.3g} at {delta} in the end"
        f"{', which promises little' * little}."
    )
    weights = {"initial": " a trained model,", "final": " an untrained model,"}.get(table.weights, "")
    server = "other malicious servers" if "malicious" in defense.by_threat else "malicious servers"
    inference = "other inference" if found.inferred else "membership and other inference"
    lines.append(f"Tried: {', '.join(table.attacks)} by {' '.join(table.attackers)}.")
    lines.append(
        f"Not tested: attacks other than {', '.join(table.attacks)} and longer ones,{weights} other data, batches and"
        f" models, {server}, colluding clients, {inference}."
    )
    return lines
