"""Which measured defense to take: the cheapest that costs little accuracy and hides every image from every attacker."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.metrics import FEW
from fl_privacy.metrics.epsilon_bounds import promises_little
from fl_privacy.report.numbers import metric, percent, seconds, size
from fl_privacy.report.readings import Reading
from fl_privacy.report.recommendation import Candidate, candidate_of
from fl_privacy.report.trade_off import DefenseRow
from fl_privacy.results import Attacker

Threat = Literal["honest", "adaptive", "malicious"]
"""Attackers that count: those that know nothing of the defense, those that know it as well, or servers that do not
follow the protocol, too."""

THREATS: tuple[Threat, ...] = get_args(Threat)

ROUNDING = 1e-9
"""Of accuracies: a loss of exactly the bound is within it."""

FORMAT = 1
MEASURED = "measured.json"
"""Name of the table in the folder of a benchmark."""

SHIPPED = Path(__file__).resolve().parent / "measured"
"""Tables that come with the package, as ``fl-privacy advise --grid GRID --save FILE`` writes them."""


@dataclass(frozen=True, kw_only=True)
class MeasuredDefense:
    """A defense at one strength, as it was trained and attacked; figures are of the worst attack under each threat.

    Attributes:
        name: in words.
        overrides: that ask for it.
        accuracy: in the end, in [0, 1].
        by_threat: what attackers read.
        seconds: that the defense takes one client in one round.
        upload_bytes: of one client's update.
        epsilon: spent in the end; ``None`` where there is no guarantee.
    """

    name: str
    overrides: tuple[str, ...]
    accuracy: float
    by_threat: Mapping[Threat, Candidate]
    seconds: float
    upload_bytes: float
    epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """What a sweep measured.

    Attributes:
        settings: overrides of all of it, such as ``data=mnist_mini``.
        attacks: names.
        weights: of the model that was attacked, ``initial``, ``final`` or ``both``.
        command: that measured it.
        defenses: undefended first.
    """

    settings: tuple[str, ...]
    attacks: tuple[str, ...]
    weights: str
    command: str
    defenses: tuple[MeasuredDefense, ...]

    def matches(self, wanted: Sequence[str]) -> bool:
        """Whether it is of the settings ``wanted``."""
        return set(wanted) <= set(self.settings)


def measured_defense(row: DefenseRow, overrides: Sequence[str]) -> MeasuredDefense | None:
    """From a row of a sweep; ``None`` unless all of it finished."""
    if not row.complete or row.training is None or row.accuracy is None:
        return None
    heard: dict[Threat, list[Reading]] = {
        "honest": [r for r in row.readings if r.attacker is Attacker.PLAIN],
        "adaptive": list(row.readings),
    }
    found: dict[Threat, Candidate] = {}
    for threat, read in heard.items():
        candidate = candidate_of(read, name=row.name, accuracy=row.accuracy, pmm=row.pmm)
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
    )


def advice_from(table: MeasuredTable, *, accuracy_loss: float, threat: Threat, psnr_below: float) -> list[str]:
    """Sentences: the cheapest defense within both bounds, or that there is none and what comes nearest; and what it
    does not protect from.

    Cheap is little time, to a digit, then few bytes, then little that is read.

    Args:
        table: what was measured.
        accuracy_loss: at most so many percentage points below the undefended accuracy.
        threat: whose attacks count.
        psnr_below: dB that no attacked image may reach, nor the upper end of the mean's 95 % interval.

    Raises:
        UserError: nobody measured that threat.
    """
    if not all(threat in defense.by_threat for defense in table.defenses):
        raise UserError(
            f"threat is expected to be one that was measured, {' or '.join(table.defenses[0].by_threat)}, but got"
            f" {threat}; `fl-privacy benchmark` measures all of them."
        )
    undefended = table.defenses[0]
    enough = undefended.accuracy - accuracy_loss / 100 - ROUNDING
    affordable = [d for d in table.defenses[1:] if d.accuracy >= enough]
    safe = [d for d in affordable if d.by_threat[threat].keeps_all_below(psnr_below)]
    bound, allowed = metric(psnr_below, "psnr"), f"{accuracy_loss:g} points of accuracy"
    lines = [
        f"Measured on {' '.join(table.settings)}: {len(table.defenses) - 1} defenses, of which {len(affordable)} cost"
        f" at most {allowed} and {len(safe)} of these keep every attacked image below {bound}.",
        f"Undefended: {_figures(undefended, undefended, threat)}.",
    ]
    if safe:
        best = min(safe, key=lambda d: (*_cost(d), *_leak(d, threat)))
        lines.append(
            f"Take {best.name} ({' '.join(best.overrides)}), the cheapest: {_figures(best, undefended, threat)}."
        )
        return [*lines, *_not_protected(best, table, threat)]
    lines.append(f"None does both: no defense here costs at most {allowed} and hides every image.")
    if affordable:
        least = min(affordable, key=lambda d: _leak(d, threat))
        lines.append(f"Least is read of {least.name}, which is not enough: {_figures(least, undefended, threat)}.")
    hiding = [d for d in table.defenses[1:] if d.by_threat[threat].keeps_all_below(psnr_below)]
    if hiding:
        costly = max(hiding, key=lambda d: d.accuracy)
        lines.append(f"Enough, at a higher price, is {costly.name}: {_figures(costly, undefended, threat)}.")
        return [*lines, *_not_protected(costly, table, threat)]
    return lines


def _cost(defense: MeasuredDefense) -> tuple[float, float]:
    known = math.isfinite(defense.seconds)
    return float(f"{defense.seconds:.0e}") if known else math.inf, defense.upload_bytes


def _leak(defense: MeasuredDefense, threat: Threat) -> tuple[float, float]:
    found = defense.by_threat[threat]
    return found.recognizable / found.images, found.upper


def _figures(defense: MeasuredDefense, undefended: MeasuredDefense, threat: Threat) -> str:
    found = defense.by_threat[threat]
    at_most = metric(found.upper, "psnr") if math.isfinite(found.upper) else "unknown"
    loss = 100 * (undefended.accuracy - defense.accuracy)
    by = f" by the {found.by}" if found.by else ""
    return (
        f"accuracy {percent(defense.accuracy)} ({0.0 - loss:+.1f} points), the worst attack reads a mean PSNR of at"
        f" most {at_most}{by} and {found.recognizable} of {found.images} images recognizably, the best at"
        f" {metric(found.largest, 'psnr')}; {seconds(defense.seconds)} and {size(defense.upload_bytes)} an upload"
    )


def _not_protected(defense: MeasuredDefense, table: MeasuredTable, threat: Threat) -> list[str]:
    found, lines = defense.by_threat[threat], []
    little = defense.epsilon is not None and promises_little(epsilon=defense.epsilon, delta=0.0)
    if found.groups < FEW:
        lines.append(f"It rests on {found.groups} independent uploads, too few to rely on.")
    if threat == "honest":
        known = defense.by_threat["adaptive"]
        lines.append(
            f"Against who knows the defense it was not asked for: there at most {metric(known.upper, 'psnr')} and"
            f" {known.recognizable} of {known.images} recognizable."
        )
    lines.append(
        "It gives no guarantee of differential privacy."
        if defense.epsilon is None
        else f"Its guarantee is an epsilon of {defense.epsilon:.3g} in the end{', which promises little' * little}."
    )
    other = {"initial": " a trained model,", "final": " an untrained model,"}.get(table.weights, "")
    server = "other malicious servers" if threat == "malicious" else "malicious servers"
    lines.append(
        f"Not tested: attacks other than {', '.join(table.attacks)} and longer ones,{other} other data, batches and"
        f" models, {server}, colluding clients, membership and other inference."
    )
    return lines


def write_table(path: Path, table: MeasuredTable) -> None:
    """Write ``table`` as JSON; an infinite bound, of a single image, is null."""
    plain = {"format": FORMAT, **asdict(table)}
    write_whole(path, json.dumps(_finite(plain), indent=1) + "\n")


def read_table(path: Path) -> MeasuredTable:
    """Inverse of ``write_table``.

    Raises:
        UserError: it is none.
    """
    wrong = UserError(f"{path} is expected to be a table as `fl-privacy advise --save` writes it, but is not.")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw.pop("format") != FORMAT or not fits(raw["settings"], list[str]):
            raise wrong
        defenses = tuple(_defense(entry) for entry in raw.pop("defenses"))
        listed = {name: tuple(raw.pop(name)) for name in ("settings", "attacks")}
        return MeasuredTable(defenses=defenses, **listed, **raw)  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise wrong from error


def _defense(entry: dict[str, Any]) -> MeasuredDefense:
    threats = {name: Candidate(**_infinite(told)) for name, told in entry.pop("by_threat").items()}
    overrides = tuple(entry.pop("overrides"))
    figures = {name: math.nan if entry[name] is None else entry[name] for name in ("seconds", "upload_bytes")}
    return MeasuredDefense(**{**entry, **figures, "by_threat": threats, "overrides": overrides})


def _infinite(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "upper": math.inf if told["upper"] is None else told["upper"]}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
