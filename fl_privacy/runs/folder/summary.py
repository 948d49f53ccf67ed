"""Compute accuracy, leakage and cost of a run from its records."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from fl_privacy.measure import METRICS, NOT_METRICS, Statistic, aggregate, pmm
from fl_privacy.measure.counts import Counts, count
from fl_privacy.measure.intervals import ANY_VALUE, is_split
from fl_privacy.measure.outcome import ImageScore
from fl_privacy.measure.registry import LARGEST_PSNR, TABLE_METRIC, TEXT_METRIC
from fl_privacy.measure.roc import Finding, finding_of, promises_little
from fl_privacy.runs.folder.records import records_of
from fl_privacy.types.modality import IMAGES, MODALITIES
from fl_privacy.types.victim_ids import Attacker, VictimId


@dataclass(frozen=True, kw_only=True)
class Recognized:
    """Number of images (``recognizable`` of ``n``) that count as reconstructed by a paper's threshold ``value``."""

    metric: str
    value: float
    leaks: Literal["above", "below"]
    source: str
    recognizable: int
    n: int


@dataclass(frozen=True, kw_only=True)
class Traced(Statistic):
    """Share of images whose most similar reconstruction is another client's; ``chance``: that of random guesses."""

    attacked: float
    queries: int  # number of queried images
    participants: int  # number of clients
    chance: float


@dataclass(frozen=True, kw_only=True)
class LeakageResult:
    """Leakage to one attacker in one round; an image attacked in two rounds counts in both."""

    attacker: Attacker = Attacker.PLAIN
    round: int = 0
    attack: str = ""  # name of the attack, if there are several
    # statistics by name, over the images on which the attack did not fail; intervals are over uploads
    metrics: Mapping[str, Statistic] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    thresholds: tuple[Recognized, ...] = ()
    tracing: Traced | None = None
    label_sources: Mapping[str, int] = field(default_factory=dict)  # source of labels -> number of images
    # attacker's own certainty -> number of images, see :class:`fl_privacy.types.Certainty`
    certainties: Mapping[str, int] = field(default_factory=dict)
    # sub-attack that reconstructed them -> number of images; empty for a single attack
    members: Mapping[str, int] = field(default_factory=dict)
    images: int = 0  # number of attacked images
    failures: int = 0  # number of images on which the attack failed
    # mean excess of the guesses' main metric over that of the best guess without the update; for images aligned PSNR
    # of at most ``LARGEST_PSNR``. ``None`` if no control was measured.
    over_control: float | None = None

    @property
    def main(self) -> str:
        return next((modality.metric for modality in MODALITIES if modality.metric in self.metrics), IMAGES.metric)

    def statistic(self, metric: str) -> Statistic | None:
        return self.metrics.get(metric)

    def counted_by(self, metric: str) -> Recognized | None:
        return next((bound for bound in self.thresholds if bound.metric == metric), None)

    def among(self, others: Sequence["LeakageResult"]) -> str:
        words = [f"{self.attacker} attacker"] if len({other.attacker for other in others}) > 1 else []
        words += [self.attack] if len({other.attack for other in others}) > 1 else []
        words += [f"round {self.round}"] if len({other.round for other in others}) > 1 else []
        return ", ".join(words)

    def as_plain(self) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(self).items() if name not in ("attacker", "round", "attack")}
        return {**figures, "counts": self.counts.as_plain()}


@dataclass(frozen=True, kw_only=True)
class TestedRound:
    """A tested round, its accuracy in [0, 1] and the epsilon spent so far, if any."""

    round: int
    accuracy: float
    epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Epsilon spent after the last round, with delta and the protected unit."""

    epsilon: float | None  # privacy budget spent; ``None`` without a guarantee
    delta: float
    accountant: str
    missing: str | None  # reason why there is no guarantee
    unit: str | None = None  # protected unit, ``example`` or ``client``; ``None`` if not recorded
    covered: bool = False  # ``True`` if the accountant's assumptions hold for the sampling of batches in this run
    rounds: int = 0

    @property
    def promises_little(self) -> bool:
        return self.epsilon is not None and promises_little(epsilon=self.epsilon, delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Durations in seconds; ``defense``: sum over clients; ``total``: wall time, ``None`` if it was interrupted."""

    training: float
    defense: float | None
    attack: float
    adaptive: float
    total: float | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Results of a run: leakage by each attack, accuracy, privacy budget and costs."""

    finished: bool
    attacked: tuple[LeakageResult, ...]
    countermeasures: tuple[str, ...]  # adaptive attacker's measures against the defense, a sentence each
    batch_norm: tuple[str, ...]  # batch norm modes in the attacked uploads, none for models without
    update_distortion: Mapping[str, Statistic]  # defense's change to updates, by figure
    upload: Mapping[str, Statistic]  # ``upload_bytes`` and ``defense_seconds`` of one client's reply in one round
    privacy: Spent | None
    tested: tuple[TestedRound, ...]
    final_accuracy: float | None  # accuracy in [0, 1]; ``None`` if nothing was tested
    undefended_accuracy: float | None
    pmm: float | None
    seconds: Seconds
    upload_bytes: int
    inferred: tuple[Finding, ...] = ()

    def last_by(self, attacker: Attacker) -> LeakageResult | None:
        return next((found for found in reversed(self.attacked) if found.attacker == attacker), None)

    @property
    def plain(self) -> LeakageResult:
        return self.last_by(Attacker.PLAIN) or LeakageResult()

    @property
    def adaptive(self) -> LeakageResult | None:
        return self.last_by(Attacker.ADAPTIVE)

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        del content["finished"], content["countermeasures"]
        seconds = content["seconds"].pop("adaptive")
        adaptive = None
        if self.adaptive is not None:
            adaptive = {**self.adaptive.as_plain(), "countermeasures": self.countermeasures, "seconds": seconds}
        attacked = [
            {"round": round, **dict.fromkeys(Attacker), **{found.attacker: found.as_plain() for found in of_round}}
            for round, of_round in groupby(self.attacked, key=lambda found: found.round)
        ]
        status = "finished" if self.finished else "interrupted"
        return {"status": status, **self.plain.as_plain(), **content, "adaptive": adaptive, "attacked": attacked}


_SHARE, _SIZE = (0.0, 1.0), (0.0, float("inf"))
_RANGES = {"cosine": (-1.0, 1.0), "zeros": _SHARE, "solvable": _SHARE} | dict.fromkeys(
    ("signal_to_distortion", "contraction", "error_bound", "condition", "upload_bytes", "defense_seconds", "distance"),
    _SIZE,
)
"""Ranges of figures that are not metrics."""


def summarize(
    records: Sequence[Mapping[str, Any]],
    *,
    finished: bool,
    undefended_accuracy: float | None,
    total_seconds: float | None,
) -> Summary:
    """Summarize the records of a run; ``undefended_accuracy``: accuracy of the same training without a defense."""
    rounds = [r for r in records if r["kind"] == "round"]
    plain, adaptive = (records_of(records, "attack", attacker) for attacker in Attacker)
    tested = [
        TestedRound(round=r["round"], accuracy=r["accuracy"], epsilon=r.get("epsilon"))
        for r in rounds
        if r.get("accuracy") is not None
    ]
    accuracy = tested[-1].accuracy if tested else None
    replies = [(r, len(r["clients"])) for r in rounds if r["clients"]]
    uploads = {
        "upload_bytes": [r["upload_bytes"] / number for r, number in replies],
        "defense_seconds": [took / number for r, number in replies if (took := r["defense_seconds"]) is not None],
    }
    return Summary(
        finished=finished,
        attacked=tuple(_attacked(records)),
        countermeasures=tuple(dict.fromkeys(sentence for a in adaptive for sentence in a["countermeasures"])),
        batch_norm=tuple(sorted({mode for a in plain if (mode := a.get("batch_norm"))})),
        update_distortion=_statistics(
            [r for r in records if r["kind"] == "update_distortion"],
            group=lambda record: VictimId.parse(str(record["id"])).source,
        ),
        upload={n: s for n, values in uploads.items() if (s := aggregate(values, within=_SIZE))} | _on_node(records),
        privacy=_spent(records, rounds),
        tested=tuple(tested),
        final_accuracy=accuracy,
        undefended_accuracy=undefended_accuracy,
        pmm=pmm(accuracy, undefended_accuracy) if accuracy is not None and undefended_accuracy else None,
        seconds=Seconds(
            training=_total(rounds, "seconds"),
            defense=None if any(r["defense_seconds"] is None for r in rounds) else _total(rounds, "defense_seconds"),
            attack=_total(plain, "seconds"),
            adaptive=_total(adaptive, "seconds"),
            total=total_seconds,
        ),
        upload_bytes=int(_total(rounds, "upload_bytes")),
        inferred=tuple(finding_of(r) for r in records if r["kind"] == "inference"),
    )


def _on_node(records: Sequence[Mapping[str, Any]]) -> dict[str, Statistic]:
    last = next((r for r in reversed(records) if r["kind"] == "node"), None)
    if last is None:
        return {}
    columns = {"node_cpu_seconds": last["cpu_seconds"], "node_joules": last["joules"]}
    columns["node_peak_bytes"] = last["peak_bytes"] if last["fits"] else None
    columns["node_fits"] = float(last["fits"])
    return {name: s for name, value in columns.items() if value is not None and (s := aggregate([value], within=_SIZE))}


def _spent(records: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]]) -> Spent | None:
    stated = next((r for r in records if r["kind"] == "privacy"), None)
    if stated is None:
        return None
    return Spent(
        epsilon=rounds[-1].get("epsilon") if rounds else None,
        delta=stated["delta"],
        accountant=stated["accountant"],
        missing=stated["missing"],
        unit=stated.get("unit"),
        covered=stated.get("covered") is True,
        rounds=len(rounds),
    )


def _attacked(records: Sequence[Mapping[str, Any]]) -> Iterator[LeakageResult]:
    images, traced = ({a: records_of(records, kind, a) for a in Attacker} for kind in ("image", "tracing"))
    for round in sorted({image["round"] for found in images.values() for image in found}):
        for attacker in Attacker:
            own, tracing = ([r for r in kind[attacker] if r["round"] == round] for kind in (images, traced))
            if own:
                yield _leakage(own, tracing, round, attacker)


def _leakage(
    images: Sequence[Mapping[str, Any]], traced: Sequence[Mapping[str, Any]], round: int, attacker: Attacker
) -> LeakageResult:
    columns = {name: [value for _, value in pairs] for name, pairs in _columns(images).items()}
    sources = Counter(v["label_source"] for v in images if v.get("label_source") and not v["failure"])
    scores = [(str(record["id"]), ImageScore.of_record(record)) for record in images]
    return LeakageResult(
        attacker=attacker,
        round=round,
        metrics=_statistics(images, group=lambda image: image["id"]),
        counts=count(scores),
        thresholds=tuple(
            Recognized(
                metric=name,
                value=metric.threshold.value,
                leaks=metric.side,
                source=metric.threshold.source,
                recognizable=sum(map(metric.is_leak, columns[name])),
                n=len(columns[name]),
            )
            for name, metric in METRICS.items()
            if metric.threshold and columns.get(name)
        ),
        tracing=_tracing(traced),
        label_sources=dict(sources),
        certainties=dict(Counter(v["certainty"] for v in images if v.get("failure") is None)),
        members=dict(Counter(v["member"] for v in images if v["member"] and v.get("failure") is None).most_common()),
        images=len(images),
        failures=sum(r.get("failure") is not None for r in images),
        over_control=_over_control([score for _, score in scores if score.failure is None]),
    )


def _over_control(scores: Iterable[ImageScore]) -> float | None:
    over = [
        min(found, LARGEST_PSNR) - control
        for score in scores
        for found, control in (
            (score.values.get(TEXT_METRIC), score.compared.control_f1),
            (score.values.get(TABLE_METRIC), score.compared.control_cells),
            (score.compared.aligned_psnr, score.compared.control_psnr),
        )
        if found is not None and control is not None
    ]
    return sum(over) / len(over) if over else None


def _tracing(traced: Sequence[Mapping[str, Any]]) -> Traced | None:
    distance = aggregate([r["distance"] for r in traced], within=_SHARE)
    if distance is None:
        return None
    participants = [r["participants"] for r in traced]
    return Traced(
        **asdict(distance),
        attacked=sum(r["attacked_distance"] for r in traced) / len(traced),
        queries=sum(r["queries"] for r in traced),
        participants=max(participants),
        chance=sum(1 - 1 / number for number in participants) / len(participants),
    )


def _columns(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[Mapping[str, Any], float]]]:
    columns: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
    for record in records:
        if record.get("failure") is None:
            for name, value in record.items():
                if name not in NOT_METRICS and isinstance(value, int | float):
                    columns.setdefault(name, []).append((record, float(value)))
    return columns


def _statistics(
    records: Iterable[Mapping[str, Any]], *, group: Callable[[Mapping[str, Any]], str]
) -> dict[str, Statistic]:
    found = {}
    for name, pairs in _columns(records).items():
        within = METRICS[name].range if name in METRICS else _RANGES.get(name, ANY_VALUE)
        statistic = aggregate([v for _, v in pairs], groups=[group(record) for record, _ in pairs], within=within)
        if statistic is not None:
            split = name in METRICS and is_split([v for _, v in pairs], groups=statistic.groups)
            found[name] = replace(statistic, ci95=None) if split else statistic
    return found


def _total(records: Iterable[Mapping[str, Any]], field: str) -> float:
    return sum(record.get(field) or 0 for record in records)
