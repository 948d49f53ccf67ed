"""The figures of a benchmark as JSON, after the schema ``benchmark.schema.json`` beside this file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_privacy.metrics import Statistic
from fl_privacy.report.benchmark import Board, DefenseStanding, Measured
from fl_privacy.report.benchmark_page import why_incomplete
from fl_privacy.report.measured_tables import THREATS
from fl_privacy.results import Candidate, Reading

FORMAT = 2
SCHEMA = Path(__file__).resolve().parent / "benchmark.schema.json"


def benchmark_as_plain(measured: Measured) -> dict[str, Any]:
    """All of it; what a clock showed is under ``clock`` alone, and the rest is the same whenever it is measured."""
    track = measured.track
    return {
        "format": FORMAT,
        "track": {
            "name": track.name,
            "version": track.version,
            "about": track.about,
            "sha256": track.sha256,
            "cells": [
                {"title": c.title, "uploads": c.uploads, "state": c.state, "server": c.server or None}
                for c in track.cells
            ],
            "accuracy_loss": list(track.accuracy_loss),
            "left_out": dict(track.left_out),
        },
        "code": list(measured.code),
        "data": dict(measured.data),
        "jobs": {"planned": measured.jobs, "finished": measured.jobs_done},
        "settings": [_setting(standing) for standing in measured.standings],
        "boards": [_board(board) for board in measured.boards],
        "clock": {
            "seconds": round(measured.seconds, 1),
            "hardware": measured.hardware,
            "defense_seconds": {s.tried.name: _known(s.seconds) for s in measured.standings},
        },
    }


def _setting(standing: DefenseStanding) -> dict[str, Any]:
    tried = standing.tried
    accuracies = {name: summary.final_accuracy for name, summary in standing.trainings.items()}
    candidates = {threat: standing.candidate(threat) for threat in THREATS}
    return {
        "defense": tried.family,
        "strength": tried.strength,
        "overrides": list(tried.overrides),
        "entered": tried.own,
        "accuracy": accuracies,
        "accuracy_loss": _known(standing.loss),
        "epsilon": _known(standing.epsilon),
        "upload_bytes": _known(standing.upload_bytes),
        "worst": {threat: found and _worst(found) for threat, found in candidates.items()},
        "readings": [_reading(cell.title, r) for cell, found in standing.readings.items() for r in found],
        "incomplete": why_incomplete(standing) or None,
    }


def _worst(found: Candidate) -> dict[str, Any]:
    return {
        "psnr": found.psnr,
        "psnr_at_most": found.upper,
        "largest": found.largest,
        "read": found.read,
        "exact": found.exact,
        "identified": found.identified,
        "read_at_most": found.at_most,
        "images": found.images,
        "unjudged": found.unjudged,
        "victims": found.groups,
        "failures": found.failures,
        "by": found.by,
    }


def _reading(cell: str, reading: Reading) -> dict[str, Any]:
    return {
        "cell": cell,
        "attacker": str(reading.attacker),
        "images": reading.leakage.images,
        "failures": reading.counts.failures,
        "counts": reading.counts.as_plain(),
        "metrics": {
            name: _statistic(s) for name in ("psnr", "ssim", "lpips") if (s := reading.statistic(name)) is not None
        },
        "attacks": dict(reading.leakage.members),
    }


def _statistic(statistic: Statistic) -> dict[str, Any]:
    interval = statistic.ci95
    return {
        "mean": statistic.mean,
        "ci95": list(interval) if interval else None,
        "median": statistic.median,
        "min": statistic.min,
        "max": statistic.max,
        "n": statistic.n,
        "groups": statistic.groups,
    }


def _board(board: Board) -> dict[str, Any]:
    return {
        "threat": board.threat,
        "accuracy_loss": board.accuracy_loss,
        "ranked": [_place(standing) for standing in board.ranked],
        "beyond": [_place(standing) for standing in board.beyond],
    }


def _place(standing: DefenseStanding) -> Mapping[str, str]:
    return {"defense": standing.tried.family, "strength": standing.tried.strength}


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
