"""Run folders as rows that ``make results`` reads: settings, accuracy and the statistics of each attack.

    python experiments/collect_rows.py runs/refiner_rows --out experiments/rows/refiner_rows

A line of ``rows.jsonl`` for each attacked round and attacker of every finished run under the folders, or one without an
attack; of inference attacks one for each method, of a trade-off one for each CAP, of a search for policies one for each
single operation and for each number of random ones. Only ``run.json``, ``environment.json``, ``summary.json``,
``trade_off_cap.json``, the accuracies in ``metrics.jsonl`` and a search's ``scores.jsonl`` and ``config.yaml`` are
read: no image, text, update or record of a single victim gets into a row. Of paths only the last part is kept. Rows of
runs that are there already are replaced, those of other runs stay.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import rankdata

from fl_privacy.files import write_whole

Row = dict[str, Any]

LEFT_OUT = ("out", "overwrite", "name", "choices", "command", "captured")
"""Settings that say where a run is, not what it measures."""

COPIED = ("metrics", "thresholds", "tracing", "label_sources", "certainties", "members", "images", "failures")
KEPT = {"mean", "ci95", "n", "median", "min", "max"}


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings into dotted names and values, without ``_target_`` and unset ones."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif name != "_target_" and value is not None:
            yield f"{prefix}{name}", Path(value).name if isinstance(value, str) and "/" in value else value


def statistics(leakage: Mapping[str, Any]) -> Row:
    """Collect an attacker's statistics in a round, without what follows from the rest."""
    found = {name: leakage[name] for name in COPIED[1:] if leakage.get(name)}
    found["recognizable"] = {t["metric"]: t["recognizable"] for t in found.pop("thresholds", ())}
    return {**{name: shortened(statistic) for name, statistic in leakage["metrics"].items()}, **found}


def shortened(statistic: Mapping[str, Any]) -> Row:
    """Keep the fields of a statistic that do not follow from the rest."""
    return {key: value for key, value in statistic.items() if key in KEPT}


def rows_of(folder: Path) -> list[Row]:
    """Collect the rows of the run in ``folder``; none if it is unfinished or of an older version."""
    summary = json.loads((folder / "summary.json").read_text())
    if summary["status"] != "finished" or "attacked" not in summary:
        return []
    told = json.loads((folder / "run.json").read_text())
    environment = json.loads((folder / "environment.json").read_text())
    config = told["config"]
    common: Row = {
        "run": folder.name,
        **config["choices"],
        "command": config["command"],
        "version": {name: environment["packages"][name] for name in ("fl-privacy", "torch")},
        "settings": dict(sorted(flat({k: v for k, v in config.items() if k not in LEFT_OUT}))),
        **{name: summary[name] for name in ("final_accuracy", "pmm") if summary.get(name) is not None},
        "seconds": summary["seconds"],
    }
    if distortion := summary.get("update_distortion"):
        common["distortion"] = {name: shortened(statistic) for name, statistic in distortion.items()}
    if (privacy := summary.get("privacy")) and privacy.get("epsilon") is not None:
        common["epsilon_spent"] = privacy["epsilon"]
        common["about_epsilon"] = round(privacy["epsilon"]) if math.isfinite(privacy["epsilon"]) else "infinite"
    reached = accuracies(folder)
    attacked = [
        {
            **common,
            **reached.get(entry["round"], {}),
            "round": entry["round"],
            "attacker": who,
            **statistics(entry[who]),
        }
        for entry in summary["attacked"]
        for who in ("plain", "adaptive")
        if entry.get(who)
    ]
    inferred = [{**common, **finding} for finding in map(inference, summary.get("inferred", ()))]
    return [*attacked, *inferred] or [common]


def accuracies(folder: Path) -> dict[int, Row]:
    """Collect the accuracy after each evaluated round of training, by its number."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines if line.startswith('{"kind": "round"')]
    return {one["round"]: {"accuracy": one["accuracy"]} for one in rounds if one.get("accuracy") is not None}


def inference(finding: Mapping[str, Any]) -> Row:
    """Collect the measures of an inference method, without its curve."""
    names = ("about", "method", "positives", "negatives", "epsilon", "proven_epsilon")
    return {**{name: finding.get(name) for name in names}, **finding["measures"]}


def caps_under(folders: Sequence[Path]) -> list[Row]:
    """Collect the caps that trade-offs wrote, a row for each mechanism, distance and attack."""
    found = [path for folder in folders for path in sorted(folder.rglob("trade_off_cap.json"))]
    return [{"run": f"{path.parent.name}, CAP", **cap} for path in found for cap in json.loads(path.read_text())]


SEARCHED = ("variant", "policies", "images_per_class", "training.epochs", "training.share", "model.width")
"""Settings of a search that its scores hang on, besides data and network."""


def searches_under(folders: Sequence[Path]) -> list[Row]:
    """Collect the scores of finished searches for transformation policies."""
    found = {path.parent for folder in folders for path in folder.rglob("scores.jsonl")}
    whole = sorted(folder for folder in found if (folder / "policies.json").is_file())
    return [row for folder in whole for row in search_rows(folder)]


def search_rows(folder: Path) -> list[Row]:
    """Collect a row for each single operation, ranked by privacy, and for the first random policies by their number."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    settings = dict(flat(config))
    common: Row = {"run": folder.name, "command": "search-policies"}
    common |= {name: config["choices"][name] for name in ("data", "model")}
    common |= {name: settings[name] for name in SEARCHED if name in settings}
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    plain, singles = scores[0], [score for score in scores if score["policy"].isdigit()]
    drawn = [score["privacy"] for score in scores if "-" in score["policy"]]
    ranks = rankdata([score["privacy"] for score in singles]).tolist()
    kept = ("policy", "privacy", "accuracy", "altered")
    rows = [{**common, **{name: plain[name] for name in kept}}]
    for score, rank in zip(singles, ranks, strict=True):
        rows.append({**common, **{name: score[name] for name in kept}, "rank": rank})
    for number in (number for number in (500, 1500, 5000) if number <= config["policies"]):
        some = drawn[:number]
        figures = {"least": min(some), "mean": sum(some) / len(some), "most": max(some)}
        rows.append({**common, "policy": f"first {number}", **figures})
    return rows


def runs_under(folders: Sequence[Path]) -> list[Path]:
    """List the folders of runs with a summary, without those that were replaced."""
    found = {path.parent for folder in folders for path in folder.rglob("summary.json")}
    return sorted(folder for folder in found if (folder / "run.json").is_file() and "-previous-" not in folder.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="runs, or what they lie in")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = runs_under(options.folders)
    found = {folder: rows_of(folder) for folder in runs}
    rows = [row for own in found.values() for row in own]
    rows += caps_under(options.folders) + searches_under(options.folders)
    path = options.out / "rows.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    names = {row["run"] for row in rows}
    kept = [row for row in before if row["run"] not in names]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in [*kept, *rows]))
    for folder in (folder for folder, own in found.items() if not own):
        print(f"{folder} has not finished, or was written by an older version: left out")
    print(f"{len(runs)} runs, {len(rows)} rows, {len(kept)} kept: {path} ({path.stat().st_size >> 10} KiB)")


if __name__ == "__main__":
    main()
