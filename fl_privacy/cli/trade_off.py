"""``fl-privacy trade-off``; a wrong grid is told before PyTorch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fl_privacy.cli.jobs import expect_reconstructions, say_what_takes_time
from fl_privacy.config.grid import load_grid
from fl_privacy.errors import UserError
from fl_privacy.results.ongoing import write_planned

if TYPE_CHECKING:
    from fl_privacy.experiment.trade_off import Job


def run_trade_off(
    grid: str,
    overrides: Sequence[str],
    *,
    processes: int,
    only_report: bool,
    psnr_below: float | None,
    console: Console,
) -> None:
    """Do what is left of the grid ``grid`` and write the page over all of it.

    Raises:
        UserError: the grid is wrong, or jobs of it failed.
        NothingReconstructedError: an attack failed on all of its victims.
    """
    if processes < 1:
        raise UserError(f"--jobs is expected to be at least 1, but got {processes}.")
    loaded = load_grid(grid, overrides)
    say_what_takes_time()
    from fl_privacy.experiment.trade_off import plan_sweep  # noqa: PLC0415
    from fl_privacy.report import write_trade_off  # noqa: PLC0415

    sweep = plan_sweep(loaded)
    if not only_report:
        write_planned(sweep.out, [job.folder.name for stage in sweep.stages() for job in stage])
    failed: list[str] = []
    for title, stage in zip(("Training", "Attacking"), sweep.stages(), strict=True):
        left = [job for job in stage if not job.finished]
        console.print(f"{title}: {len(stage)} jobs, {len(stage) - len(left)} of them finished already", highlight=False)
        if not only_report:
            failed += [f"{folder}: {why}" for folder, why in do_all(title, left, processes, console).items()]
    page = write_trade_off(sweep.outcomes(), sweep.out / "trade_off.html", psnr_below=psnr_below)
    print(page)
    if failed:
        raise UserError(f"{len(failed)} jobs failed, the page leaves them out; the first: {failed[0]}")
    expect_reconstructions([job.folder for job in list(sweep.stages())[-1] if job.finished])


def do_all(title: str, jobs: Sequence[Job], processes: int, console: Console) -> dict[str, str]:
    """Do ``jobs`` in so many processes; returns what went wrong, by the folder's name of each job that failed."""
    from fl_privacy.cli.underway import Underway  # noqa: PLC0415
    from fl_privacy.cli.workers import run_in_processes  # noqa: PLC0415

    failed: dict[str, str] = {}
    underway = Underway(title, [job.folder for job in jobs], console)

    def on_done(job: Job, problem: str | None) -> None:
        told = underway.ended(job.folder)
        if problem is not None:
            failed[job.folder.name] = problem
            console.print(f"[red]error: {escape(f'{job.folder.name}: {problem}')}[/red]", highlight=False)
        elif not console.is_terminal:
            console.print(escape(told), highlight=False)

    with underway.shown():
        run_in_processes(jobs, processes, on_done=on_done)
    return failed
