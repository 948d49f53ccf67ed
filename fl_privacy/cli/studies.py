"""Rank, compare and recommend defenses from many runs: ``benchmark``, ``trade-off`` and ``advise``."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from fl_privacy.checks import number, one_of, whole
from fl_privacy.cli.completion import Jobs, OnlyReport, OpenPage, Overrides, PsnrBelow, complete_override
from fl_privacy.cli.faults import STOPPING, Interrupted, Terminal, in_a_line, interruptible, recognized
from fl_privacy.cli.jobs import LOADING, end_with, expect_reconstructions, run_job
from fl_privacy.errors import UserError, say
from fl_privacy.federation.cores import processes_that_fit, shared_among
from fl_privacy.files import CONFIG_DIR, sharing

if TYPE_CHECKING:
    from fl_privacy.runs.config.study import Track
    from fl_privacy.runs.folder.study import MeasuredTable
    from fl_privacy.runs.study import Job, StudyPlan


def benchmark(  # noqa: PLR0917
    track: Annotated[str, typer.Argument(help="smoke, laptop, full, table, or your own YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings that don't affect figures: out=FOLDER device=cuda; defense.KEY=A,B tries the entry at two"
            " strengths.",
            autocompletion=complete_override,
        ),
    ] = None,
    entry: Annotated[
        str | None, typer.Option(help="Your own defense: my_defense.py, my_defense.py:FUNCTION or an import path.")
    ] = None,
    jobs: Jobs = None,
    only_report: OnlyReport = False,
    open_page: OpenPage = False,
) -> None:
    """Run a fixed set of experiments (a track) and rank defenses by what attackers reconstruct.

    `fl-privacy benchmark smoke --jobs 2` takes minutes; a killed one resumes. With `--entry my_defense.py
    defense.share=0.01,0.1` your defense is ranked, too. `fl-privacy advise --table FOLDER` then recommends a defense.
    """
    processes = _processes(jobs)
    strengths = [override for override in overrides or [] if override.startswith("defense.")]
    if strengths and entry is None:
        raise UserError(f"{strengths[0]} is expected with --entry, but got none; add --entry, or leave it out.")
    from fl_privacy.runs.config.study import load_track  # noqa: PLC0415

    loaded = load_track(track, [override for override in overrides or [] if override not in strengths])
    say(LOADING)
    if entry is not None:
        from fl_privacy.runs.study import find_entry  # noqa: PLC0415

        loaded = loaded.entered(*find_entry(entry, strengths))
    _rank(loaded, processes, Terminal(), only_report=only_report, open_page=open_page)


def _rank(track: Track, processes: int, console: Console, *, only_report: bool, open_page: bool) -> None:
    from fl_privacy.report.benchmark_page import benchmark_in_words  # noqa: PLC0415
    from fl_privacy.runs.study import measured_by, plan_study, read_problems, write_benchmark, write_problems  # noqa: PLC0415

    with console.status("Planning") if console.is_terminal else nullcontext():
        planned = plan_study(track)
    if planned.evaluators and not only_report:
        from fl_privacy.cli.train_networks import train  # noqa: PLC0415

        for file, own in planned.evaluators.items():
            console.print(f"Evaluation network {file}", highlight=False)
            file.parent.mkdir(parents=True, exist_ok=True)
            train([*own, f"out='{file}'"], console=console)
    failed = read_problems(planned.out)
    for stage, problems in _stages(planned, processes, console, only_report=only_report):
        if not only_report:
            failed = {folder: why for folder, why in failed.items() if folder not in {j.folder.name for j in stage}}
            failed |= problems
            write_problems(planned.out, failed)
    measured = measured_by(planned)
    end_with(benchmark_in_words(measured), write_benchmark(planned, measured), open_page=open_page)
    if failed and not only_report:
        raise UserError(f"{len(failed)} jobs failed and count as unknown; mend and repeat. The first: {_first(failed)}")


def trade_off(  # noqa: PLR0917
    grid: Annotated[str, typer.Argument(help="A name that `fl-privacy list` shows, or your own YAML file.")],
    overrides: Overrides = None,
    jobs: Jobs = None,
    only_report: OnlyReport = False,
    psnr_below: PsnrBelow = None,
    open_page: OpenPage = False,
) -> None:
    """Compare accuracy and leakage of a grid's defenses at every strength, on one page with curves.

    Each defense is trained once and then attacked by every attack of the grid. A killed sweep resumes. Overrides apply
    to all jobs: `trade-off quick federation.rounds=50 victims=5 --jobs 2`.
    """
    processes, console = _processes(jobs), Terminal()
    from fl_privacy.runs.config.study import load_grid  # noqa: PLC0415

    loaded = load_grid(grid, overrides or [])
    say(LOADING)
    from fl_privacy.report import trade_off_in_words, write_trade_off  # noqa: PLC0415
    from fl_privacy.runs.folder.ongoing import write_planned  # noqa: PLC0415
    from fl_privacy.runs.study import plan_study, write_sweep_table  # noqa: PLC0415

    sweep = plan_study(loaded)
    if not only_report:
        write_planned(sweep.out, [job.folder.name for stage in sweep.stages() for job in stage])
    failed: dict[str, str] = {}
    for _, problems in _stages(sweep, processes, console, only_report=only_report):
        failed |= problems
    entries = sweep.entries()
    page = write_trade_off(entries, sweep.out / "trade_off.html", psnr_below=psnr_below)
    write_sweep_table(sweep, grid, overrides or [])
    end_with(trade_off_in_words(entries, psnr_below=psnr_below), page, open_page=open_page)
    if failed:
        raise UserError(
            f"All jobs are expected to finish, but {len(failed)} failed and are not on the page; correct the cause and"
            f" repeat the command. The first: {_first(failed)}"
        )
    expect_reconstructions([job.folder for job in list(sweep.stages())[-1] if job.finished])


def _first(failed: Mapping[str, str]) -> str:
    return ": ".join(next(iter(failed.items())))


STAGES = ("Training", "Attacking")


def _stages(
    plan: StudyPlan[Any], processes: int, console: Console, *, only_report: bool
) -> Iterator[tuple[list[Job], dict[str, str]]]:
    with sharing():
        for position, (title, stage) in enumerate(zip(STAGES, plan.stages(), strict=True), 1):
            numbered = f"{title} (stage {position} of {len(STAGES)})"  # the time left is the stage's alone
            left = [job for job in stage if not job.finished]
            said = f"{title}: {len(stage)} jobs, {len(stage) - len(left)} of them finished already"
            console.print(said, highlight=False)
            yield stage, {} if only_report else do_all(numbered, left, processes, console)


BYTES_OF_A_JOB = 3 * 2**29  # largest memory of a job, which bounds the number of parallel jobs


def _processes(asked: int | None) -> int:
    return processes_that_fit(BYTES_OF_A_JOB) if asked is None else whole("--jobs", asked, at_least=1, example=2)


def do_all(title: str, jobs: Sequence[Job], processes: int, console: Console) -> dict[str, str]:
    """Run ``jobs`` in ``processes`` processes; return folder name -> error for each job that failed."""
    from fl_privacy.cli.console import Underway  # noqa: PLC0415

    failed: dict[str, str] = {}
    underway = Underway(title, [job.folder for job in jobs], console)

    def on_done(job: Job, problem: str | None) -> None:
        line = underway.ended(job.folder)
        if problem is not None:
            failed[job.folder.name] = problem
            console.print(f"[red]error: {escape(f'{job.folder.name}: {problem}')}[/red]", highlight=False)
        elif not console.is_terminal:
            console.print(escape(line), highlight=False)

    with underway.shown():
        run_in_processes(jobs, processes, on_done=on_done)
    return failed


ACCURACY_LOSS, THREAT, PSNR_BELOW, BATCH_SIZE = "accuracy_loss", "threat", "psnr_below", "batch_size"
ASKED = {ACCURACY_LOSS: "2", THREAT: "adaptive", PSNR_BELOW: "", BATCH_SIZE: ""}
"""Option -> default, empty for none; all other keys are settings of the measurement."""
_EXAMPLES = {ACCURACY_LOSS: "2", PSNR_BELOW: "12", BATCH_SIZE: "4"}
KNOWN: tuple[Literal["honest", "adaptive", "malicious"], ...] = ("honest", "adaptive", "malicious")


def advise(
    asked: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="accuracy_loss=2 (points, at most), threat=adaptive, honest or malicious, psnr_below=DB,"
            " batch_size=4 (examples behind an upload), and the settings that were measured: data=mnist_mini"
            " model=lenet.",
        ),
    ] = None,
    grid: Annotated[str | None, typer.Option(help="Use the runs of this grid (trade-off).")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Use the folder of a trade-off or benchmark, or a file that --save wrote.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the tables used, as JSON.")] = None,
) -> None:
    """Recommend the cheapest defense that costs little accuracy and behind which nothing was reconstructed.

    A defense is recommended only for the attacked batch size, and only if the attack beat a guess without the update.
    For texts, noise and rounding are considered, with one text an upload. Each measurement that fits the given settings
    has its own answer. `fl-privacy trade-off GRID`, then `fl-privacy advise --grid GRID accuracy_loss=5`, answers from
    your runs; `fl-privacy advise --table runs/benchmark_laptop threat=malicious` from a benchmark. Shipped:
    `data=mnist_mini` (images), `data=adult` (rows), `data=sst2` or `data=ag_news` (texts).
    """
    bounds, settings = dict(ASKED), list[str]()
    for argument in asked or []:
        key, _, value = re.sub(r"\s*<=?\s*", "=", argument, count=1).partition("=")
        if key in ASKED:
            bounds[key] = value
        else:
            settings.append(argument)
    if grid is not None and table is not None:
        raise UserError("--grid and --table are expected one at a time, but got both; leave one out.")
    one_of(THREAT, bounds[THREAT], KNOWN)
    threat: Any = bounds[THREAT]
    wishes: dict[str, Any] = {ACCURACY_LOSS: _number(ACCURACY_LOSS, bounds[ACCURACY_LOSS])}
    if below := bounds[PSNR_BELOW]:
        wishes[PSNR_BELOW] = _number(PSNR_BELOW, below)
    if size := bounds[BATCH_SIZE]:
        asked_size = int(size) if size.isdecimal() else _number(BATCH_SIZE, size)
        wishes[BATCH_SIZE] = whole(BATCH_SIZE, asked_size, at_least=1, example=4)  # type: ignore[arg-type]
        settings = [*settings, f"{BATCH_SIZE}={size}"] if grid else settings
    tables = _in_file(table, settings) if table else [_of_grid(grid, settings)] if grid else _shipped(settings)
    if save is not None:
        from fl_privacy.runs.folder.study import write_tables  # noqa: PLC0415

        write_tables(save, tables)
    from fl_privacy.report.advice import advice_from  # noqa: PLC0415

    found, refused = list[str](), list[UserError]()
    for one in tables:
        try:
            found.append("\n".join(advice_from(one, threat=threat, **wishes)))
        except UserError as error:
            refused.append(UserError(f"Not answered from {' '.join(one.settings)}: {error}"))
    if not found:
        raise refused[0]
    say("\n\n".join([*found, *map(str, refused)]))


def _number(key: str, value: str) -> float:
    try:
        return number(key, float(value), at_least=0, example=float(_EXAMPLES[key]))
    except ValueError as error:
        raise UserError(f"{key} is expected to be a number, but got {value!r}; try {key}={_EXAMPLES[key]}.") from error


def _in_file(path: Path, settings: Sequence[str]) -> list[MeasuredTable]:
    from fl_privacy.runs.folder.study import MEASURED, read_tables  # noqa: PLC0415

    file = path / MEASURED if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"--table is expected to be the folder of a trade-off or benchmark that measured at least one defense, or a"
            f" file that --save wrote, but there is no {file}; run `fl-privacy trade-off` or `fl-privacy benchmark`"
            " first."
        )
    tables = read_tables(file)
    if found := [table for table in tables if table.matches(settings)]:
        return found
    there = "; ".join(" ".join(table.settings) for table in tables)
    raise UserError(f"Measured settings are expected, but got {' '.join(settings)}; take those of {file}: {there}.")


def _shipped(settings: Sequence[str]) -> list[MeasuredTable]:
    from fl_privacy.report.advice import SHIPPED  # noqa: PLC0415
    from fl_privacy.runs.folder.study import read_tables  # noqa: PLC0415

    tables = [table for path in sorted(SHIPPED.glob("*.json")) for table in read_tables(path)]
    if found := [table for table in tables if table.matches(settings)]:
        return found
    from fl_privacy.runs.config import compose_run  # noqa: PLC0415  (Hydra)

    compose_run(list(settings))  # a name that does not exist is not one to measure
    measure = " ".join([next((grid for grid in map(_grid_for, settings) if grid), "quick"), *settings])
    raise UserError(
        f"Settings that were measured are expected, but got {' '.join(settings)}; what came with the package is of"
        f" {', '.join(sorted({table.settings[0] for table in tables}))}. Measure yours by `fl-privacy trade-off"
        f" {measure}`, then `fl-privacy advise --grid {measure}`."
    )


def _grid_for(setting: str) -> str:
    key, _, name = setting.partition("=")
    file = CONFIG_DIR / "data" / f"{name}.yaml"
    if key != "data" or not name.isidentifier() or not file.is_file():
        return ""
    text, grids = file.read_text(encoding="utf-8"), {"load_table": "tables", "load_text": "text"}
    return next((grid for loader, grid in grids.items() if loader in text), "")


def _of_grid(name: str, settings: Sequence[str]) -> MeasuredTable:
    from fl_privacy.runs.config.study import load_grid  # noqa: PLC0415

    grid = load_grid(name, settings)
    from fl_privacy.runs.study import plan_study, sweep_table  # noqa: PLC0415

    return sweep_table(plan_study(grid), name, settings)


GRACE_SECONDS = 20.0
_stopped = threading.Event()


def run_in_processes(jobs: Sequence[Job], processes: int, *, on_done: Callable[[Job, str | None], None]) -> None:
    """Run ``jobs`` in processes; call ``on_done(job, error or None)`` after each; ``UserError`` if a process died."""
    if not jobs:
        return
    from fl_privacy.federation.processes import end_workers, worker_processes  # noqa: PLC0415

    workers = min(processes, len(jobs))
    waiting: dict[Future[str | None], Job] = {}
    try:
        with worker_processes(workers, threads=1, environment=shared_among(workers), prepare=_stop_at_sigterm) as pool:
            for job in jobs:
                waiting[pool.submit(_do, job)] = job
        for done in as_completed(waiting):
            on_done(waiting[done], done.result())
    except BrokenProcessPool as error:
        raise UserError(
            "A worker is expected to live as long as its jobs, but one was killed, perhaps for lack of memory;"
            " lower --jobs and start again, finished jobs are kept."
        ) from error
    except BaseException:
        end_workers(waiting, patience=GRACE_SECONDS)
        raise


def _stop_at_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: _stopped.set())


def _do(job: Job) -> str | None:
    from fl_privacy.cli.console import WrittenMonitor  # noqa: PLC0415

    if _stopped.is_set():
        return "interrupted"
    try:
        with interruptible():
            run_job(job.command, job.config, WrittenMonitor(job.folder), early=job.early)
    except Interrupted:
        _stopped.set()
        return "interrupted"
    except STOPPING as error:
        if (fault := recognized(error)) is None:
            raise
        return in_a_line(fault)
    return None
