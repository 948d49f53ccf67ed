"""Keeps the page of a benchmark for the site, and its boards for a table on ``docs/benchmark.md``.

    python docs/leaderboard.py runs/benchmark_laptop
    python docs/leaderboard.py                         # gives the kept pages the style sheet of today

It goes into ``docs/benchmarks``, by the name of the track, finished or not: page and table say what was not run.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kept_rows import escaped, markdown

KEPT = Path(__file__).resolve().parent / "benchmarks"
STYLE = KEPT.parents[1] / "fl_privacy" / "report" / "templates" / "style.css"
PAGE, FIGURES = "benchmark.html", "benchmark.json"
THREATS, LOSS = ("malicious", "adaptive"), 5.0
"""Of the board that is shown beside the page: the first of the attackers that the track has."""

READ_EXACTLY = 100.0
"""Decibel."""

KINDS = {"cells_right": ("rows", "cells right at most"), "token_f1": ("texts", "token F1 at most")}
"""Metric -> what was attacked and the head of its column, unless that was images."""

Figures = Mapping[str, Any]


def keep(folder: Path, kept: Path = KEPT) -> Path:
    """Copy what the site shows of the benchmark in ``folder``; returns the page."""
    if not all((folder / name).is_file() for name in (PAGE, FIGURES)):
        raise SystemExit(
            f"The folder of a benchmark is expected, but {folder} holds no {PAGE} with its {FIGURES}; run"
            " `fl-privacy benchmark TRACK --only-report` first."
        )
    found = json.loads((folder / FIGURES).read_text())
    name = found["track"]["name"]
    kept.mkdir(exist_ok=True)
    (kept / f"{name}.html").write_text((folder / PAGE).read_text())
    boards = {(b["threat"], b["accuracy_loss"]): b for b in found["boards"]}
    threat = next(threat for threat in THREATS if (threat, LOSS) in boards)
    board = boards[threat, LOSS]
    settings = {(s["defense"], s["strength"]): s for s in found["settings"]}
    told = {
        "track": {name: found["track"][name] for name in ("name", "version", "sha256")},
        "jobs": found["jobs"],
        "threat": threat,
        "ranked": [_place(settings[p["defense"], p["strength"]], threat) for p in board["ranked"]],
        "beyond": [p["defense"] for p in board["beyond"]],
    }
    (kept / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
    return kept / f"{name}.html"


def restyle(kept: Path = KEPT) -> list[Path]:
    """Give the pages in ``kept`` the style sheet of today, and nothing else; returns them."""
    pages, style = sorted(kept.glob("*.html")), f"<style>\n{STYLE.read_text()}\n\n</style>"
    for page in pages:
        page.write_text(re.sub(r"<style>.*?</style>", lambda _: style, page.read_text(), count=1, flags=re.DOTALL))
    return pages


def _place(setting: Figures, threat: str) -> Figures:
    worst = setting["worst"][threat]
    shown = ("metric", "mean", "mean_at_most", "read", "images", "read_at_most", "failures", "by")
    figures = {name: worst[name] for name in shown}
    own = {name: setting[name] for name in ("defense", "strength", "overrides", "accuracy_loss")}
    return {**own, **figures, "incomplete": bool(setting["incomplete"])}


def leaderboard(track: str, kept: Path = KEPT) -> str:
    """Render a leaderboard in Markdown, or a note that it is withdrawn where none is kept."""
    path = kept / f"{track}.json"
    if not path.is_file():
        return (
            "Withdrawn until it is measured again, since the rule by which it counted images was wrong in both"
            f" directions: `fl-privacy benchmark {track} --jobs 2`"
        )
    told = json.loads(path.read_text())
    planned, finished = told["jobs"]["planned"], told["jobs"]["finished"]
    rank, lines = 0, []
    for place in told["ranked"]:
        counts = place["overrides"] != ["defense=none"] and not place["incomplete"]
        rank += counts
        lines.append([str(rank) if counts else "", *_cells(place)])
    metric = next((place["metric"] for place in told["ranked"]), "psnr")
    kind, column = KINDS.get(metric, ("images", "PSNR at most, dB"))
    heads = ["rank", "defense", f"{kind} reconstructed", column, "worst attacker", "accuracy loss, points"]
    who = {"malicious": "Malicious servers", "adaptive": "Attackers that know the defense"}[told["threat"]]
    parts = [
        f"[The page of the track `{track}`](benchmarks/{track}.html), version {told['track']['version']}:"
        f" {finished} of {planned} jobs are done"
        + ("." if finished == planned else "; what is not is named there, and may leak more than all that is ranked.")
        + f" {who} count too, and defenses that cost at most {LOSS:g} points of accuracy; of each the strength that"
        " leaks least.",
        markdown(heads, lines),
    ]
    if told["beyond"]:
        parts.append(f"Cost more, or were not measured: {', '.join(told['beyond'])}.")
    return "\n\n".join(parts)


def _cells(place: Figures) -> list[str]:
    at_most = math.inf if place["mean_at_most"] is None else float(place["mean_at_most"])
    read = f"{place['read']} of {place['images']}"
    read += "" if place["read"] else f", up to {100 * place['read_at_most']:.0f} %"
    read += f"; an attack failed on {place['failures']}" if place["failures"] else ""
    name = f"{place['defense']} ({place['strength']})" if place["strength"] else place["defense"]
    return [
        escaped(f"{name}, in part not run" if place["incomplete"] else name),
        read,
        _mean(at_most, place["metric"]),
        escaped(place["by"]),
        f"{place['accuracy_loss']:.1f}",
    ]


def _mean(at_most: float, metric: str) -> str:
    """Format the upper end of a mean: in percent where the metric is a share, else in decibel."""
    if metric in KINDS:
        return f"{min(at_most, 1):.0%}"
    return f"{at_most:.1f}" if at_most <= READ_EXACTLY else f"> {READ_EXACTLY:g}"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit("usage: python docs/leaderboard.py [RUN_DIR]")
    print(*([keep(Path(sys.argv[1]))] if sys.argv[1:] else restyle()), sep="\n")
