"""What the experiments on inference share: runs that are skipped once they have finished, and tables.

Not a command of its own.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder import Finding, Run, read_run
from fl_privacy.runs.run import run_experiment
from fl_privacy.runs.run_location import Monitor, plain_loop


def finished_run(overrides: Sequence[str], out: Path) -> Run:
    """Find or make the run that ``overrides`` describe, in ``out``."""
    config = compose_run([*overrides, f"out={out}", "baseline=false"])
    return read_run(run_experiment(config, plain_loop, Monitor()))


def told(finding: Finding, name: str) -> str:
    """Format a measure with its interval, in percent except AUC; a dash where there is none."""
    measure = finding.measures.get(name)
    if measure is None:
        return "failed" if finding.failure else "-"
    values = (measure.value, measure.low, measure.high)
    value, low, high = (f"{v:.3f}" if name in ("auc", "error", "correlation") else f"{100 * v:.1f}" for v in values)
    bound = (
        ""
        if measure.bound is None
        else f" (<= {measure.bound:.3f})"
        if name == "auc"
        else f" (<= {100 * measure.bound:.1f})"
    )
    return f"{value} [{low}, {high}]{bound}"


def show(cells: Iterable[object]) -> None:
    """Print a row of a Markdown table at once."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(cells: Sequence[str]) -> None:
    """Print the first two rows of a Markdown table."""
    show(cells)
    show(["---"] * len(cells))
