"""The folder of a run: what is recorded while it goes on, and how it is read back."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.results.candidates import Candidate
    from fl_privacy.results.counts import Counts
    from fl_privacy.results.environment import describe_environment
    from fl_privacy.results.findings import Finding, Measure
    from fl_privacy.results.folder import RunFolder, folder_name
    from fl_privacy.results.identity import Identity
    from fl_privacy.results.node_cost import append_node_cost
    from fl_privacy.results.ongoing import is_finished
    from fl_privacy.results.pictures import Film, Pair, Sentence, TextFilm
    from fl_privacy.results.read import (
        Baseline,
        PartitionTable,
        Run,
        find_baseline,
        read_environment,
        read_run,
        read_summary,
    )
    from fl_privacy.results.readings import Reading
    from fl_privacy.results.summary import Leakage, Recognized, Summary, Traced
    from fl_privacy.results.verdict import Verdict, verdict_of
    from fl_privacy.victim_ids import Attacker

_HOMES = {
    "fl_privacy.results.candidates": ("Candidate",),
    "fl_privacy.results.counts": ("Counts",),
    "fl_privacy.results.environment": ("describe_environment",),
    "fl_privacy.results.findings": (
        "Finding",
        "Measure",
    ),
    "fl_privacy.results.folder": (
        "folder_name",
        "RunFolder",
    ),
    "fl_privacy.results.identity": ("Identity",),
    "fl_privacy.results.node_cost": ("append_node_cost",),
    "fl_privacy.results.ongoing": ("is_finished",),
    "fl_privacy.results.pictures": (
        "Film",
        "Pair",
        "Sentence",
        "TextFilm",
    ),
    "fl_privacy.results.read": (
        "Baseline",
        "find_baseline",
        "PartitionTable",
        "read_environment",
        "read_run",
        "read_summary",
        "Run",
    ),
    "fl_privacy.results.readings": ("Reading",),
    "fl_privacy.results.summary": (
        "Leakage",
        "Recognized",
        "Summary",
        "Traced",
    ),
    "fl_privacy.results.verdict": (
        "Verdict",
        "verdict_of",
    ),
    "fl_privacy.victim_ids": ("Attacker",),
}

__all__ = [
    "Attacker",
    "Baseline",
    "Candidate",
    "Counts",
    "Film",
    "Finding",
    "Identity",
    "Leakage",
    "Measure",
    "Pair",
    "PartitionTable",
    "Reading",
    "Recognized",
    "Run",
    "RunFolder",
    "Sentence",
    "Summary",
    "TextFilm",
    "Traced",
    "Verdict",
    "append_node_cost",
    "describe_environment",
    "find_baseline",
    "folder_name",
    "is_finished",
    "read_environment",
    "read_run",
    "read_summary",
    "verdict_of",
]

__getattr__ = on_demand(__name__, _HOMES)
