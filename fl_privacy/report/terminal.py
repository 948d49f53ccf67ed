"""What a command says at its end: who read what of how many, and what to do about it."""

from collections.abc import Sequence
from pathlib import Path

from fl_privacy.errors import visible
from fl_privacy.report.headline import headline_of
from fl_privacy.runs.folder import Run, read_run, verdict_of
from fl_privacy.runs.folder.verdict import Ground, Verdict
from fl_privacy.types.modality import ROWS, TEXTS

PAGE = "report.html"
"""Of a run, in its folder."""

_NO_PROOF = "That tells of this attack and is no proof of protection: try attack=auto attack.budget=thorough."

_TO_DO = {
    Ground.BOUNDED: "Keep the noise as it is: with less of it nothing bounds what a better attack reads.",
    Ground.UNREAD: _NO_PROOF,
    Ground.BY_CHANCE: _NO_PROOF,
    Ground.TOLD: "Put noise on what clients upload (defense=dp_sgd), or upload less often.",
    Ground.REHEARSED: "Have clients answer probes, so that uploads of their own are attacked.",
    Ground.UNTOLD: "Attack examples as well: attack=auto.",
    Ground.NOTHING: "Attack examples: attack=auto.",
    Ground.OLDER: "Run it again.",
    Ground.NO_TRUTH: "Give the audit the data that clients train on, so that guesses can be compared with them.",
    Ground.FAILED: "The page says why; nothing of privacy follows from it.",
}

_GRIDS = {TEXTS: "text", ROWS: "tables"}
"""What measures defenses of examples that are no images."""


def run_in_words(run_dir: Path) -> str:
    """Say in two sentences what came of the run in ``run_dir`` and what to do."""
    return answer_of(read_run(run_dir))


def answer_of(run: Run) -> str:
    """Say what ``run`` found, and what to do about it."""
    verdict = verdict_of(run)
    return visible(f"{headline_of(verdict).text}. {to_do(verdict, run.path)}".replace("?.", "?"))


def to_do(verdict: Verdict, run_dir: Path | None = None) -> str:
    """Say what follows from ``verdict`` for who owns the clients."""
    if verdict.ground is Ground.READ:
        grid = _GRIDS.get(verdict.modality, "quick")
        if verdict.facts.undefended:
            return f"Defend the clients: `fl-privacy trade-off {grid}` shows which defense stops it at what cost."
        return f"This defense does not stop it: make it stronger, or take another one by `fl-privacy trade-off {grid}`."
    return _TO_DO.get(verdict.ground, "The page says what it rests on.")


def answers_of(run_dirs: Sequence[Path]) -> str:
    """Say what came of several runs: how many of them were read of, and which most."""
    runs = [read_run(path) for path in run_dirs]
    verdicts = [verdict_of(run) for run in runs]
    read = [(verdict, run) for verdict, run in zip(verdicts, runs, strict=True) if verdict.ground is Ground.READ]
    if not read:
        return f"Examples were read in none of {len(runs)} runs. {_NO_PROOF}"
    most, run = max(read, key=lambda pair: pair[0].counts.read / max(1, pair[0].counts.judged))
    text = headline_of(most).text
    return visible(
        f"Examples were read in {len(read)} of {len(runs)} runs; most in {run.path.name}:"
        f" {text[0].lower()}{text[1:]}. The page compares them."
    )
