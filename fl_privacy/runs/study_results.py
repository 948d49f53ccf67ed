"""Write the results of a study: pages, figures as JSON, and tables for ``fl-privacy advise``."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from fl_privacy.data import images_of
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.report.benchmark_page import MeasuredBenchmark, benchmark_as_plain, render_benchmark
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config.compose import merge_overrides, override_keys
from fl_privacy.runs.config.keys import is_within, keys_of
from fl_privacy.runs.config.settings import Role
from fl_privacy.runs.config.study import Study, Track
from fl_privacy.runs.folder import is_finished, read_environment, read_summary
from fl_privacy.runs.folder.defense_choice import asked_of
from fl_privacy.runs.folder.measured import MEASURED, MeasuredTable, measured_rows, when_measured, write_tables
from fl_privacy.runs.folder.read import failed_attackers
from fl_privacy.runs.folder.records import dump_json
from fl_privacy.runs.folder.study import read_study
from fl_privacy.runs.study import PlannedPoint, StudyPlan, read_problems

PAGE, FIGURES = "benchmark.html", "benchmark.json"
"""Files in the benchmark's folder, next to the tables."""


def measured_by(plan: StudyPlan[Track]) -> MeasuredBenchmark:
    """Return the results so far."""
    jobs = [job for stage in plan.stages() for job in stage]
    done = [job.folder for job in jobs if job.finished]
    found = [read_environment(folder) for folder in done]
    machines = {" and ".join([str(e.get("cpu", "unknown")), *(e.get("gpus") or [])]) for e in found}
    summaries = [summary for folder in done if (summary := read_summary(folder)) is not None]
    return MeasuredBenchmark(
        track=plan.study,
        standings=read_study(plan.entries({**_failures(plan), **read_problems(plan.out)})),
        code=sorted({str(environment["code"]) for environment in found if "code" in environment}),
        data=_data_hashes(plan.points[0]),
        seconds=sum(summary.seconds.total or 0.0 for summary in summaries),
        jobs=len(jobs),
        jobs_done=len(done),
        hardware=", ".join(sorted(machines)),
    )


def write_benchmark(plan: StudyPlan[Track], measured: MeasuredBenchmark) -> Path:
    """Write the page, its figures as JSON and a table for each training; return the page."""
    write_whole(plan.out / FIGURES, dump_json(benchmark_as_plain(measured), indent=1) + "\n")
    tables = [table for name in plan.study.trainings if (table := _table(plan.study, measured, name)) is not None]
    if tables:
        write_tables(plan.out / MEASURED, tables)
    else:
        (plan.out / MEASURED).unlink(missing_ok=True)
    page = plan.out / PAGE
    write_whole(page, render_benchmark(measured))
    return page


def sweep_table(plan: StudyPlan[Study], grid: str, overrides: Sequence[str]) -> MeasuredTable:
    """Build the table of a trade-off's finished jobs; ``UserError`` unless one and the undefended one finished."""
    study, entries = plan.study, plan.entries()
    rows = read_study(entries)
    asked = asked_of([finding for row in rows for finding in row.findings])
    known, unknown = measured_rows(rows, is_whole=lambda row: row.complete, asked=asked)
    command = f"fl-privacy trade-off {grid} {' '.join(overrides)}".rstrip()
    if len(known) < 2:
        raise UserError(f"Runs of the grid {grid} are expected to have finished, but too few did; run `{command}`.")
    deciding = [override for override in overrides if not override.startswith("out=")]
    folders = {folder for entry in entries for folder in (entry.training, *entry.attacks.values())}
    return MeasuredTable(
        settings=tuple(s for s in merge_overrides(study.settings, overrides) if not s.startswith("out=")),
        attacks=tuple(cell.title for cell in study.cells),
        weights=study.weights(),
        command=" ".join(["fl-privacy trade-off", grid, *deciding]),
        defenses=known,
        unknown=unknown,
        when=when_measured(map(read_environment, folders)),
        attackers=_attackers(study, overrides),
    )


def write_sweep_table(plan: StudyPlan[Study], grid: str, overrides: Sequence[str]) -> None:
    """Write the table of a trade-off next to its page, unless too little finished; see ``sweep_table``."""
    file = plan.out / MEASURED
    try:
        write_tables(file, [sweep_table(plan, grid, overrides)])
    except UserError:
        file.unlink(missing_ok=True)


def _table(track: Track, measured: MeasuredBenchmark, training: str) -> MeasuredTable | None:
    uploads = {name for name, kind in track.uploads.items() if kind.training == training}
    own = [standing.of_training(training, uploads) for standing in measured.standings]
    known, unknown = measured_rows(own, is_whole=lambda r: r.loss is not None and not r.missing("malicious"))
    if not uploads or len(known) < 2:
        return None
    folders = {path for row in own for path in (*row.entry.trainings.values(), *row.entry.attacks.values())}
    servers = dict.fromkeys(c.server for c in track.cells if c.server and c.uploads in uploads)
    overrides = (*track.settings, *track.trainings[training])
    keys = override_keys(overrides)
    return MeasuredTable(
        settings=tuple(o for o, key in zip(overrides, keys, strict=True) if not is_within(key, keys_of(Role.RUNTIME))),
        attacks=("auto", *servers),
        weights=track.weights(training),
        command=f"fl-privacy benchmark {track.name}",
        defenses=known,
        unknown=unknown,
        when=when_measured(map(read_environment, filter(is_finished, folders))),
        attackers=(*track.attack, *_batch_sizes(track.uploads[name].attack for name in uploads)),
    )


def _attackers(study: Study, overrides: Sequence[str]) -> tuple[str, ...]:
    keys = set(override_keys(study.attack))
    own = [o for o, key in zip(overrides, override_keys(overrides), strict=True) if key in keys]
    return (
        *(override for override in merge_overrides(study.attack, own) if not override.startswith(_BATCH_SIZE)),
        *_batch_sizes(merge_overrides(plan.overrides) for plan in study.attacks.values()),
    )


_BATCH_SIZE = "batch_size="


def _batch_sizes(attacks: Iterable[Sequence[str]]) -> tuple[str, ...]:
    single = f"{_BATCH_SIZE}1"
    return tuple(sorted({next((o for o in reversed(own) if o.startswith(_BATCH_SIZE)), single) for own in attacks}))


def _failures(plan: StudyPlan[Track]) -> dict[str, str]:
    """Return reasons of finished attacks that failed on all victims, by folder name, without malicious servers.

    A malicious server may find none of its target images.
    """
    attacks = [pair for planned in plan.points for pair in planned.attacks.items()]
    done = [job.folder for cell, job in attacks if not cell.server and job.finished]
    return {folder.name: next(iter(found.values())) for folder in done if (found := failed_attackers(folder))}


def _data_hashes(planned: PlannedPoint) -> dict[str, str]:
    found = {}
    for job in planned.trainings.values():
        config = job.config
        name = str(config.choices["data"])
        if name in found:
            continue
        dataset, content = build_dataset(config.data), hashlib.sha256()
        for split in (dataset.train, dataset.test):
            if (images := images_of(split)) is not None:
                for tensor in (images.images, images.labels):
                    content.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
                    content.update(tensor.contiguous().numpy().tobytes())
        found[name] = content.hexdigest()
    return found
