"""The same training without defense, among the runs already made."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.results.identity import training_hash
from fl_privacy.results.read import read_identity
from fl_privacy.results.records import parse_json


@dataclass(frozen=True)
class Baseline:
    """A finished undefended run: its folder and its final test accuracy in [0, 1]."""

    path: Path
    accuracy: float


def find_baseline(out: Path, config: Mapping[str, Any]) -> Baseline | None:
    """The finished undefended run in folder ``out`` whose training differs from ``config`` in the defense alone."""
    wanted = training_hash(config)
    for summary in sorted(out.glob("*/summary.json")):
        try:
            identity = read_identity(summary.with_name("run.json"))
            accuracy = parse_json(summary.read_text())["final_accuracy"]
        except (
            UserError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # no use as a baseline, and no reason to stop another run
            continue
        if identity.undefended and identity.training == wanted and isinstance(accuracy, float | int):
            return Baseline(summary.parent, accuracy)
    return None
