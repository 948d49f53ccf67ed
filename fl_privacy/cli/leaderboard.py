"""``fl-privacy benchmark``; a wrong track is told before PyTorch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fl_privacy.cli.completion import complete_override
from fl_privacy.errors import UserError

if TYPE_CHECKING:
    from fl_privacy.experiment.benchmark import Benchmark


def benchmark(
    track: Annotated[str, typer.Argument(help="smoke, laptop, full, or your own YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="What leaves figures as they are, such as out=FOLDER device=cuda; defense.KEY=A,B are strengths of the"
            " entry.",
            autocompletion=complete_override,
        ),
    ] = None,
    entry: Annotated[
        str | None,
        typer.Option("--entry", help="Your own defense: my_defense.py, my_defense.py:FUNCTION or an import path."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="How many at once, one CPU thread each.")] = 1,
    only_report: Annotated[bool, typer.Option("--only-report", help="Write the page over what has finished.")] = False,
) -> None:
    """Rank defenses by what attackers read: a fixed track, one leaderboard.

    `fl-privacy benchmark smoke --jobs 2` takes minutes; killed and started again, it goes on where it stopped. With
    `--entry my_defense.py defense.share=0.01,0.1` your own defense is ranked beside the shipped ones.
    `fl-privacy advise --table FOLDER` answers from what was measured.
    """
    run_benchmark(track, overrides or [], entry=entry, processes=jobs, only_report=only_report, console=Console())


def run_benchmark(
    name: str, overrides: Sequence[str], *, entry: str | None, processes: int, only_report: bool, console: Console
) -> None:
    """Do what is left of the track ``name`` and write its page.

    Raises:
        UserError: the track or the entry is wrong, or jobs failed.
    """
    if processes < 1:
        raise UserError(f"--jobs is expected to be at least 1, but got {processes}.")
    strengths = [override for override in overrides if override.startswith("defense.")]
    if strengths and entry is None:
        raise UserError(f"{strengths[0]} is expected with --entry, whose strength it sets; the track fixes all others.")
    from fl_privacy.cli.jobs import say_what_takes_time  # noqa: PLC0415  (help goes without)
    from fl_privacy.cli.trade_off import do_all  # noqa: PLC0415
    from fl_privacy.config.track import load_track  # noqa: PLC0415

    track = load_track(name, [override for override in overrides if override not in strengths])
    say_what_takes_time()
    if entry is not None:
        from fl_privacy.experiment.benchmark_entry import find_entry  # noqa: PLC0415

        track = track.entered(*find_entry(entry, strengths))
    from fl_privacy.experiment.benchmark import plan_benchmark, read_problems, write_problems  # noqa: PLC0415

    with console.status("Planning") if console.is_terminal else nullcontext():
        planned = plan_benchmark(track)
    if not only_report:
        _make_evaluators(planned, console)
    failed = read_problems(planned.out)
    for title, stage in zip(("Training", "Attacking"), planned.stages(), strict=True):
        left = [job for job in stage if not job.finished]
        console.print(f"{title}: {len(stage)} jobs, {len(stage) - len(left)} of them finished already", highlight=False)
        if not only_report:
            failed = {folder: why for folder, why in failed.items() if folder not in {j.folder.name for j in stage}}
            failed |= do_all(title, left, processes, console)
            write_problems(planned.out, failed)
    print(planned.write())
    if failed and not only_report:
        raise UserError(
            f"{len(failed)} jobs failed, and what they would have measured counts as unknown; the first:"
            f" {': '.join(next(iter(failed.items())))}"
        )


def _make_evaluators(planned: Benchmark, console: Console) -> None:
    """Train the evaluation networks that defenses look with, or find them trained."""
    if not planned.evaluators:
        return
    from fl_privacy.cli.evaluator import train  # noqa: PLC0415

    for file, overrides in planned.evaluators.items():
        console.print(f"Evaluation network {file}", highlight=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        train([*overrides, f"out='{file}'"], console=console)
