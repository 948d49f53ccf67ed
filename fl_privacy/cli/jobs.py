"""Run one experiment or a sweep."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fl_privacy.cli.faults import STOPPING, NothingReconstructedError, in_a_line, recognized
from fl_privacy.errors import UserError, say

LOADING = "Loading PyTorch"  # said first, since a silent terminal looks dead

if TYPE_CHECKING:
    from fl_privacy.runs.config import RunSettings
    from fl_privacy.runs.paper import PaperTable
    from fl_privacy.runs.run_location import Command, Monitor


def run_jobs(
    command: Command,
    overrides: Sequence[str],
    *,
    multirun: bool,
    show_config: bool,
    console: Console,
    open_page: bool = False,
) -> None:
    """Run ``command`` with ``overrides`` or, if ``multirun``, with each combination of their listed values.

    A sweep goes on after a failed job, and ends with a ``UserError``. The result and the page are printed last.
    ``NothingReconstructedError`` if an attack failed on all of its victims.
    """
    from fl_privacy.runs.config.compose import compose_run, expand_sweep, override_keys, to_yaml  # noqa: PLC0415  (Hydra)

    if not multirun and any(text.startswith(("experiment=", "paper=")) for text in overrides):
        from fl_privacy.runs.paper import paper_table  # noqa: PLC0415  (Hydra)

        if (table := paper_table(command, overrides)) is not None:
            _run_paper(table, console, show_config=show_config, open_page=open_page)
            return
    jobs = expand_sweep(overrides) if multirun else [list(overrides)]
    with _loading():
        configs = [compose_run(jobs[0])]
    configs += [compose_run(job) for job in jobs[1:]]
    privacy = configs[0].privacy
    if not multirun and privacy.epsilon is not None and configs[0].choices["defense"] == "none":  # a sweep may have it
        raise UserError(
            f"privacy.epsilon={privacy.epsilon:g} is expected with a defense whose noise it sets, but got defense=none;"
            " set defense=dp_sgd, or privacy.epsilon=null."
        )
    if show_config:
        for config in configs:
            say(to_yaml(config))
        return
    from fl_privacy.cli.console import RichMonitor  # noqa: PLC0415
    from fl_privacy.runs.run_location import RunLocation  # noqa: PLC0415

    monitor, folder = RichMonitor(console), None
    if not multirun and configs[0].captured is None and privacy.epsilon is None:  # these change the settings
        folder = RunLocation(command, configs[0]).finished_before(monitor)
    if folder is None:
        say(LOADING)
        with _loading():
            from fl_privacy.runs import attack, run  # noqa: F401, PLC0415
        for job, config in zip(jobs, configs, strict=True) if command == "attack" else ():
            attack.expect_not_taken(config, override_keys(job))
    if not multirun:
        folder = folder or run_job(command, configs[0], monitor)
        from fl_privacy.report.headline import PAGE, run_in_words  # noqa: PLC0415

        end_with(run_in_words(folder), folder / PAGE if configs[0].page else folder, open_page=open_page)
        expect_reconstructions([folder])
        return
    _run_sweep(command, jobs, configs, console, open_page=open_page)


def _run_paper(table: PaperTable, console: Console, *, show_config: bool, open_page: bool) -> None:
    from fl_privacy.runs.config.compose import merge_overrides, to_yaml  # noqa: PLC0415

    planned = [job for of_line in table.runs().values() for jobs in of_line for job in jobs]  # or an error, early
    if show_config:
        say("\n".join(to_yaml(config) for _, config in planned))
        return
    say(LOADING)
    from fl_privacy.cli.console import RichMonitor  # noqa: PLC0415
    from fl_privacy.report import write_report  # noqa: PLC0415
    from fl_privacy.report.headline import run_in_words  # noqa: PLC0415
    from fl_privacy.runs.folder.records import write_paper  # noqa: PLC0415
    from fl_privacy.runs.paper import record_of  # noqa: PLC0415

    table, changes = table.with_data(), {}
    if table.evaluator is not None:
        from fl_privacy.cli.train_networks import train  # noqa: PLC0415

        data = [f"data={table.settings().choices['data']}"]
        changes["evaluator"] = str(train(merge_overrides(data, table.evaluator[table.form]), console=console))
    folders: dict[str, list[list[Path]]] = {name: [] for name in table.lines}
    for name, of_line in reversed(table.runs().items()):
        for jobs in reversed(of_line):
            console.rule(escape(name), style="dim")
            folders[name].insert(0, [])
            for command, config in jobs:
                looks = {f"defense.{key}": value for key, value in changes.items() if key in config.defense}
                folders[name][0].append(run_job(command, config.changed({**changes, **looks}), RichMonitor(console)))
    main = next(iter(folders.values()))[0][-1]
    write_paper(main, record_of(table, folders))
    end_with(run_in_words(main), write_report([main]) if planned[0][1].page else main, open_page=open_page)
    expect_reconstructions([main])


@contextmanager
def _loading() -> Iterator[None]:
    if not gc.isenabled() or "fl_privacy.runs.run" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _run_sweep(
    command: Command, jobs: Sequence[list[str]], configs: Sequence[RunSettings], console: Console, *, open_page: bool
) -> None:
    from fl_privacy.cli.console import RichMonitor  # noqa: PLC0415
    from fl_privacy.runs.study import write_plan  # noqa: PLC0415

    with suppress(*STOPPING):  # an error that keeps a job from starting is reported at its turn
        write_plan(command, configs)
    folders, failed = [], []
    for number, (job, config) in enumerate(zip(jobs, configs, strict=True), 1):
        console.rule(f"{number}/{len(jobs)} {escape(' '.join(job))}", style="dim")
        try:
            folders.append(run_job(command, config, RichMonitor(console)))
        except STOPPING as error:
            if (fault := recognized(error)) is None:
                raise
            failed.append(f"{' '.join(job)}: {in_a_line(fault)}")
            console.print(f"[red]error: {escape(failed[-1])}[/red]", highlight=False)
    if folders:
        from fl_privacy.report import write_report  # noqa: PLC0415
        from fl_privacy.report.headline import answers_of  # noqa: PLC0415

        end_with(answers_of(folders), write_report(folders, None), open_page=open_page)
    if failed:
        raise UserError(f"{len(failed)} of {len(jobs)} runs failed; mend and repeat. The first: {failed[0]}")
    expect_reconstructions(folders)


def end_with(sentence: str, page: Path, *, open_page: bool) -> None:
    """Print ``sentence`` and then ``page``, the path of a page or folder; open it if ``open_page``."""
    say(f"{sentence}\n{page}")
    if open_page:
        open_in_browser(page)


def open_in_browser(page: Path) -> None:
    """Open ``page``, or print that there is no browser."""
    import webbrowser  # noqa: PLC0415  (needed by --open alone)

    if not webbrowser.open(page.absolute().as_uri()):
        say("No browser was found here: copy the page to where there is one, it needs no network.", aside=True)


def run_job(command: Command, config: RunSettings, monitor: Monitor, *, early: int | None = None) -> Path:
    """Run ``command`` with the settings ``config``, and return the folder; the model after round ``early`` is kept."""
    from fl_privacy.cli.backends import backend_of  # noqa: PLC0415
    from fl_privacy.runs.attack import attack_experiment  # noqa: PLC0415
    from fl_privacy.runs.run import run_experiment  # noqa: PLC0415

    if command == "attack":
        return attack_experiment(config, monitor)
    return run_experiment(config, backend_of(config), monitor, early=early)


def expect_reconstructions(folders: Sequence[Path]) -> None:
    """Raise ``NothingReconstructedError`` if an attack in ``folders`` failed on all victims."""
    from fl_privacy.runs.folder.read import failed_attackers  # noqa: PLC0415

    failed = [(folder, *found) for folder in folders for found in failed_attackers(folder).items()]
    if failed:
        folder, attacker, reason = failed[0]
        which = "" if len(folders) == 1 else f" in {len({f for f, *_ in failed})} of {len(folders)} runs, the first of"
        raise NothingReconstructedError(
            f"The {attacker} attack failed on all victims{which} ({folder}), which says nothing about privacy:"
            f" {reason.rstrip('.')}. What was recorded stays until overwrite=true attacks again."
        )
