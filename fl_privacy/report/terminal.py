"""Summarize a command's result for the terminal, with the next step."""

from collections.abc import Sequence
from pathlib import Path

from fl_privacy.errors import visible
from fl_privacy.report.headline import headline_of
from fl_privacy.runs.folder import read_run, verdict_of
from fl_privacy.runs.folder.verdict import Ground, Verdict
from fl_privacy.types.modality import ROWS, TEXTS

PAGE = "report.html"
"""Page in a run's folder."""

_NO_PROOF = "This describes the attack and is no proof of protection: try attack=auto attack.budget=thorough."

_TO_DO = {
    Ground.BOUNDED: "Keep the noise as it is: with less noise nothing bounds what a better attack reconstructs.",
    Ground.UNREAD: _NO_PROOF,
    Ground.BY_CHANCE: _NO_PROOF,
    Ground.TOLD: "Put noise on what clients upload (defense=dp_sgd), or upload less often.",
    Ground.REHEARSED: "Have clients answer probes, so that uploads of their own are attacked.",
    Ground.UNTOLD: "Attack examples as well: attack=auto.",
    Ground.NOTHING: "Attack examples: attack=auto.",
    Ground.OLDER: "Run it again.",
    Ground.NO_TRUTH: "Give the audit the data that clients train on, to compare guesses with.",
    Ground.FAILED: "The page says why; this says nothing about privacy.",
}

_GRIDS = {TEXTS: "text", ROWS: "tables"}
"""Modality other than images -> grid that measures its defenses."""


def run_in_words(run_dir: Path) -> str:
    """Describe the result of the run in ``run_dir`` and the next step."""
    run = read_run(run_dir)
    verdict = verdict_of(run)
    return visible(f"{headline_of(verdict).text}. {to_do(verdict)}".replace("?.", "?"))


def to_do(verdict: Verdict) -> str:
    """Recommend the next step to the owner of the clients."""
    if verdict.ground is Ground.READ:
        grid = _GRIDS.get(verdict.modality, "quick")
        measure = f"`fl-privacy trade-off {grid}`"
        if verdict.facts.undefended:
            return f"Defend the clients: {measure} shows which defense prevents this at what cost."
        return f"This defense does not prevent it: make it stronger, or choose another by {measure}."
    return _TO_DO.get(verdict.ground, "The page names the evidence.")


def answers_of(run_dirs: Sequence[Path]) -> str:
    """Describe the results of one or several runs, and name the one that leaks most."""
    if len(run_dirs) == 1:
        return run_in_words(run_dirs[0])
    runs = [read_run(path) for path in run_dirs]
    read = [(verdict, run) for run in runs if (verdict := verdict_of(run)).ground is Ground.READ]
    if not read:
        return f"None of {len(runs)} runs reconstructed an example. {_NO_PROOF}"
    most, run = max(read, key=lambda pair: pair[0].counts.read / max(1, pair[0].counts.judged))
    text = headline_of(most).text
    return visible(
        f"{len(read)} of {len(runs)} runs reconstructed examples; most in {run.path.name}:"
        f" {text[0].lower()}{text[1:]}. The page compares them."
    )
