"""What the records of a run add up to; the same for a finished run and for the rest of a killed one."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fl_privacy.metrics import METRICS, Statistic, aggregate, pmm
from fl_privacy.metrics.intervals import ANY_VALUE
from fl_privacy.results.records import Attacker, records_of

NOT_METRICS = frozenset(
    {"kind", "attacker", "id", "round", "client", "image", "label_source", "attack_loss", "failure"}
)
"""Fields of a victim's record that are no metric; any other number is one."""

_SHARE, _SIZE = (0.0, 1.0), (0.0, float("inf"))
_RANGES = {"cosine": (-1.0, 1.0), "zeros": _SHARE, "solvable": _SHARE} | dict.fromkeys(
    ("signal_to_perturbation", "contraction", "error_bound", "condition", "bytes", "defense_seconds", "distance"), _SIZE
)
"""What figures beside the metrics can be."""


def summarize(
    records: Sequence[Mapping[str, Any]],
    *,
    finished: bool,
    undefended_accuracy: float | None,
    total_seconds: float | None,
) -> dict[str, Any]:
    """The content of ``summary.json``.

    What leaked is of the last attacked round, by the plain attacker, and under ``adaptive`` by the adaptive one,
    ``None`` if there was none; ``attacked`` has the same of every attacked round, never mixed: an image attacked in two
    rounds is one image. ``upload`` is of one client's reply in one round; ``batch_norm`` are its modes in the attacked
    uploads, none for models without; ``privacy`` is the epsilon spent in all rounds, ``None`` where nothing was
    trained.

    Args:
        records: of ``metrics.jsonl``.
        finished: whether the run came to its end.
        undefended_accuracy: final accuracy of the same training without defense, for PMM.
        total_seconds: of the whole run, wall time.
    """
    rounds = [r for r in records if r["kind"] == "round"]
    attacked, attacks = _attacked(records), records_of(records, "attack", Attacker.PLAIN)
    replies = [(r, len(r["clients"])) for r in rounds if r["clients"]]
    upload = {
        "bytes": [r["bytes_up"] / number for r, number in replies],
        "defense_seconds": [r["defense_seconds"] / number for r, number in replies],
    }
    tested = [
        {"round": r["round"], "accuracy": r["accuracy"], "epsilon": r.get("epsilon")}
        for r in rounds
        if r.get("accuracy") is not None
    ]
    accuracy = tested[-1]["accuracy"] if tested else None
    return {
        "status": "finished" if finished else "interrupted",
        **next((entry["plain"] for entry in reversed(attacked) if entry["plain"]), _leakage([], [])),
        "adaptive": _adaptive(records, attacked),
        "attacked": attacked,
        "batch_norm": sorted(
            {a["batch_norm"] for a in records_of(records, "attack", Attacker.PLAIN) if a.get("batch_norm")}
        ),
        "perturbation": _statistics([r for r in records if r["kind"] == "perturbation"], group=_batch),
        "upload": {name: _plain(s) for name, values in upload.items() if (s := aggregate(values, within=_SIZE))},
        "privacy": _privacy(records, rounds),
        "rounds": tested,
        "final_accuracy": accuracy,
        "undefended_accuracy": undefended_accuracy,
        "pmm": pmm(accuracy, undefended_accuracy) if accuracy is not None and undefended_accuracy else None,
        "seconds": {
            "training": _total(rounds, "seconds"),
            "defense": _total(rounds, "defense_seconds"),
            "attack": _total(attacks, "seconds"),
            "total": total_seconds,
        },
        "bytes_uploaded": int(_total(rounds, "bytes_up")),
    }


def _privacy(records: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Epsilon after the last round, and what it refers to or why it is missing."""
    stated = next((r for r in records if r["kind"] == "privacy"), None)
    if stated is None:
        return None
    spent = rounds[-1].get("epsilon") if rounds else None
    return {"epsilon": spent, **{key: stated[key] for key in ("delta", "accountant", "missing")}}


def _attacked(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each attacker achieved in each attacked round, in order; ``None`` of one that did not attack it."""
    of_attacker = {a: tuple(records_of(records, kind, a) for kind in ("victim", "tracing")) for a in Attacker}
    rounds = sorted({victim["round"] for victims, _ in of_attacker.values() for victim in victims})
    found: list[dict[str, Any]] = []
    for round in rounds:
        entry: dict[str, Any] = {"round": round}
        for attacker, kinds in of_attacker.items():
            victims, traced = ([r for r in kind if r["round"] == round] for kind in kinds)
            entry[attacker] = _leakage(victims, traced) if victims else None
        found.append(entry)
    return found


def _leakage(victims: Sequence[Mapping[str, Any]], traced: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an attacker achieved in a round; intervals are over uploads, whose images were attacked together."""
    columns = {name: [value for _, value in pairs] for name, pairs in _columns(victims).items()}
    sources = Counter(v["label_source"] for v in victims if v.get("label_source") and not v["failure"])
    return {
        "metrics": _statistics(victims, group=lambda victim: victim["id"]),
        "thresholds": [
            {
                "metric": name,
                "value": metric.threshold.value,
                "leaks": metric.recognizable,
                "source": metric.threshold.source,
                "recognizable": sum(map(metric.is_leak, columns[name])),
                "n": len(columns[name]),
            }
            for name, metric in METRICS.items()
            if metric.threshold and columns.get(name)
        ],
        "tracing": _tracing(traced),
        "label_sources": dict(sources),
        "images": len(victims),
        "failures": sum(r.get("failure") is not None for r in victims),
    }


def _tracing(traced: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Distance, also of the attacked images alone, beside that of guessing."""
    distance = aggregate([r["distance"] for r in traced], within=_SHARE)
    if distance is None:
        return None
    participants = [r["participants"] for r in traced]
    return {
        **_plain(distance),
        "attacked": sum(r.get("attacked_distance", r["distance"]) for r in traced) / len(traced),
        "queries": sum(r["queries"] for r in traced),
        "participants": max(participants),
        "chance": sum(1 - 1 / number for number in participants) / len(participants),
    }


def _adaptive(records: Sequence[Mapping[str, Any]], attacked: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    last = next((entry["adaptive"] for entry in reversed(attacked) if entry["adaptive"]), None)
    if last is None:
        return None
    attacks = records_of(records, "attack", Attacker.ADAPTIVE)
    return {
        **last,
        "countermeasures": list(dict.fromkeys(sentence for a in attacks for sentence in a["countermeasures"])),
        "seconds": _total(attacks, "seconds"),
    }


def _columns(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[Mapping[str, Any], float]]]:
    """Figure -> its values with their records; those of failures and those that could not be computed left out."""
    columns: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
    for record in records:
        if record.get("failure") is None:
            for name, value in record.items():
                if name not in NOT_METRICS and isinstance(value, int | float):
                    columns.setdefault(name, []).append((record, float(value)))
    return columns


def _statistics(
    records: Iterable[Mapping[str, Any]], *, group: Callable[[Mapping[str, Any]], str]
) -> dict[str, dict[str, Any]]:
    """Of every figure in ``records``, where those of one ``group`` are not independent."""
    found = {}
    for name, pairs in _columns(records).items():
        within = METRICS[name].range if name in METRICS else _RANGES.get(name, ANY_VALUE)
        statistic = aggregate([v for _, v in pairs], groups=[group(record) for record, _ in pairs], within=within)
        if statistic is not None:
            found[name] = _plain(statistic)
    return found


def _batch(record: Mapping[str, Any]) -> str:
    """The same for updates of several rounds that come from the same examples, or from the same client's."""
    id = str(record["id"])
    return id.removeprefix(f"round-{record['round']}/")


def _plain(statistic: Statistic) -> dict[str, Any]:
    """As it reads back from JSON."""
    return asdict(statistic) | {"ci95": statistic.ci95 and list(statistic.ci95)}


def _total(records: Iterable[Mapping[str, Any]], field: str) -> float:
    return sum(record.get(field) or 0 for record in records)
