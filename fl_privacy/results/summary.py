"""What the records of a run add up to; the same for a finished run and for the rest of a killed one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fl_privacy.metrics import THRESHOLDS, Statistic, aggregate, pmm
from fl_privacy.results.records import Attacker, records_of

NOT_METRICS = frozenset(
    {"kind", "attacker", "id", "round", "client", "image", "label_source", "attack_loss", "failure"}
)
"""Fields of a victim's record that are no metric; any other number is one."""


def summarize(
    records: Sequence[Mapping[str, Any]],
    *,
    finished: bool,
    undefended_accuracy: float | None,
    total_seconds: float | None,
) -> dict[str, Any]:
    """The content of ``summary.json``.

    ``adaptive`` is what the adaptive attacker achieved, ``None`` if there was none; ``upload`` is of one client's reply
    in one round; ``batch_norm`` are its modes in the attacked uploads, none for models without; ``privacy`` is the
    epsilon spent in all rounds, ``None`` where nothing was trained.

    Args:
        records: of ``metrics.jsonl``.
        finished: whether the run came to its end.
        undefended_accuracy: final accuracy of the same training without defense, for PMM.
        total_seconds: of the whole run, wall time.
    """
    rounds = [r for r in records if r["kind"] == "round"]
    changed = metric_columns(r for r in records if r["kind"] == "perturbation")
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
        **_leakage(records, "plain"),
        "adaptive": _adaptive(records),
        "batch_norm": sorted({a["batch_norm"] for a in records_of(records, "attack", "plain") if a["batch_norm"]}),
        "perturbation": _statistics(changed),
        "upload": _statistics(upload),
        "privacy": _privacy(records, rounds),
        "rounds": tested,
        "final_accuracy": accuracy,
        "undefended_accuracy": undefended_accuracy,
        "pmm": pmm(accuracy, undefended_accuracy) if accuracy is not None and undefended_accuracy else None,
        "seconds": {
            "training": _total(rounds, "seconds"),
            "defense": _total(rounds, "defense_seconds"),
            "attack": _total(records_of(records, "attack", "plain"), "seconds"),
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


def _leakage(records: Sequence[Mapping[str, Any]], attacker: Attacker) -> dict[str, Any]:
    """What ``attacker`` achieved; ``tracing`` is over the rounds."""
    victims, traced = (records_of(records, kind, attacker) for kind in ("victim", "tracing"))
    columns = metric_columns(victims)
    sources = Counter(v["label_source"] for v in victims if v.get("label_source") and not v["failure"])
    return {
        "metrics": _statistics(columns),
        "thresholds": [
            {
                "metric": t.metric,
                "value": t.value,
                "leaks": t.leaks,
                "source": t.source,
                "recognizable": sum(map(t.is_leak, columns[t.metric])),
                "n": len(columns[t.metric]),
            }
            for t in THRESHOLDS
            if columns.get(t.metric)
        ],
        "tracing": _tracing(traced),
        "label_sources": dict(sources),
        "images": len(victims),
        "failures": sum(r.get("failure") is not None for r in victims),
    }


def _tracing(traced: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Distance over the rounds, also of the attacked images alone, beside that of guessing."""
    distance = aggregate([r["distance"] for r in traced])
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


def _adaptive(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    attacks = records_of(records, "attack", "adaptive")
    if not records_of(records, "victim", "adaptive"):
        return None
    return {
        **_leakage(records, "adaptive"),
        "countermeasures": list(dict.fromkeys(sentence for a in attacks for sentence in a["countermeasures"])),
        "seconds": _total(attacks, "seconds"),
    }


def metric_columns(victims: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Metric -> its values over the images that did not fail, those that could not be computed left out."""
    columns: dict[str, list[float]] = {}
    for victim in victims:
        if victim.get("failure") is None:
            for name, value in victim.items():
                if name not in NOT_METRICS and isinstance(value, int | float):
                    columns.setdefault(name, []).append(float(value))
    return columns


def _statistics(columns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {name: _plain(s) for name, values in columns.items() if (s := aggregate(values)) is not None}


def _plain(statistic: Statistic) -> dict[str, Any]:
    """As it reads back from JSON."""
    return asdict(statistic) | {"ci95": statistic.ci95 and list(statistic.ci95)}


def _total(records: Iterable[Mapping[str, Any]], field: str) -> float:
    return sum(record.get(field) or 0 for record in records)
