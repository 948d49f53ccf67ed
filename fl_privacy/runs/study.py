"""Plan the jobs of a study, and write its results."""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from fl_privacy.checks import fits
from fl_privacy.data import images_of
from fl_privacy.defenses import Defense
from fl_privacy.errors import UserError, in_one_line
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import expanded
from fl_privacy.report.benchmark_page import MeasuredBenchmark, benchmark_as_plain, render_benchmark
from fl_privacy.runs.attack import app_captures, as_captured
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.runs.config.building import own_modules
from fl_privacy.runs.config.compose import merge_overrides, override_keys
from fl_privacy.runs.config.parse import options
from fl_privacy.runs.config.settings import Role, is_within, keys_of
from fl_privacy.runs.config.study import AttackCell, GridPoint, Study, Track, grid_points
from fl_privacy.runs.folder import is_finished, read_environment, read_summary
from fl_privacy.runs.folder.defense_choice import asked_of
from fl_privacy.runs.folder.ongoing import write_planned
from fl_privacy.runs.folder.read import failed_attackers, read_json
from fl_privacy.runs.folder.records import dump_json
from fl_privacy.runs.folder.study import (
    MEASURED,
    MeasuredTable,
    StudyEntry,
    measured_rows,
    read_study,
    when_measured,
    write_tables,
)
from fl_privacy.runs.privacy import calibrated, noise_for_budget
from fl_privacy.runs.run_location import Command, RunLocation
from fl_privacy.runs.weights import model_after

S = TypeVar("S", bound=Study)
REFINER = "refiner"  # defense that needs an evaluation network
PROBLEMS = "problems.json"  # file in the folder of a study with reasons of failed jobs


@dataclass(frozen=True)
class Job:
    """One run or attack of a study, and the folder of its results."""

    command: Command
    config: RunSettings
    folder: Path
    early: int | None = None  # round after which the model is kept, for attacks on that state

    @property
    def finished(self) -> bool:
        return is_finished(self.folder) and (self.early is None or (self.folder / model_after(self.early)).is_file())


@dataclass(frozen=True, kw_only=True)
class PlannedPoint:
    """Runs planned for one defense at one strength."""

    point: GridPoint
    trainings: Mapping[str, Job]
    attacks: Mapping[AttackCell, Job]


@dataclass(frozen=True, kw_only=True)
class StudyPlan(Generic[S]):
    """All jobs of a study; the jobs' folders are in ``out``."""

    study: S
    out: Path
    points: tuple[PlannedPoint, ...]

    def stages(self) -> Iterator[list[Job]]:
        # jobs that share a client's substitute examples are apart, so that the first has made them
        trainings = [planned.trainings[name] for name in self.study.trainings for planned in self.points]
        for stage in (trainings, [job for planned in self.points for job in planned.attacks.values()]):
            yield list({job.folder: job for job in stage}.values())

    @property
    def evaluators(self) -> dict[Path, tuple[str, ...]]:
        return {_evaluator_file(self.out, self.study, name): own for name, own in self.study.evaluators.items()}

    def entries(self, problems: Mapping[str, str] | None = None) -> list[StudyEntry]:
        """Return the result folders of each defense and strength; ``problems``: folder of a failed job -> reason."""
        return [
            StudyEntry(
                **vars(planned.point),
                own=planned.point.family in self.study.entry,
                trainings={name: job.folder for name, job in planned.trainings.items()},
                attacks={cell: job.folder for cell, job in planned.attacks.items()},
                problems=problems or {},
            )
            for planned in self.points
        ]


def plan_study(study: S) -> StudyPlan[S]:
    """Plan the jobs of ``study``; ``UserError`` if a configuration is wrong."""
    composed = _Composed(study)
    points = tuple(_planned(study, point, composed) for point in study.points)
    return StudyPlan(study=study, out=composed.out, points=points)


def write_plan(command: Command, configs: Sequence[RunSettings]) -> None:
    """Write the names of the folders that ``command`` will fill, for the live page; skip invalid configurations."""
    planned: dict[Path, list[str]] = {}
    for config in configs:
        with suppress(UserError):
            begun = calibrated(config)
            if begun.captured:
                if app_captures(begun.captured) is not None:
                    return
                begun = as_captured(begun)
            folder = RunLocation(command, begun).path
            planned.setdefault(folder.parent, []).append(folder.name)
    for out, names in planned.items():
        with suppress(OSError):  # the jobs report it
            write_planned(out, names)


def _evaluator_file(out: Path, study: Study, training: str) -> Path:
    return out / f"evaluator-{list(study.trainings).index(training)}.safetensors"


class _Composed:
    def __init__(self, study: Study) -> None:
        main = study.training(study.points[0], next(iter(study.trainings)))
        self.out = Path(compose_run([o for o in main if o.startswith("out=")]).out)
        self._shared: dict[tuple[str, ...], RunSettings] = {}
        self._defenses: dict[GridPoint, RunSettings] = {}

    def __call__(self, point: GridPoint, overrides: list[str], changes: Mapping[str, object]) -> RunSettings:
        keys = override_keys(point.overrides)
        others = [key for key in override_keys(overrides) if key not in keys]
        alone = "defense" in keys and all(is_within(key, ["defense"]) for key in keys)
        if not alone or any(is_within(key, ["defense"]) for key in others):
            return compose_run(overrides).changed(changes)
        if point not in self._defenses:
            self._defenses[point] = compose_run(point.overrides)
        own = self._defenses[point]
        rest = tuple(o for o, key in zip(overrides, override_keys(overrides), strict=True) if key not in keys)
        if rest not in self._shared:
            self._shared[rest] = compose_run(rest)
        of_point = {"defense": own.defense, "choices.defense": own.choices["defense"]}
        return self._shared[rest].changed({**of_point, **changes})


def read_problems(out: Path) -> dict[str, str]:
    """Return why jobs of the study in ``out`` failed at their last attempt, by folder name."""
    found = read_json(path := out / PROBLEMS)
    if found is not None and not fits(found, dict[str, str]):
        raise UserError(f"{path} is expected to name a reason for each job, but does not; remove it.")
    return dict(found or {})


def write_problems(out: Path, problems: Mapping[str, str]) -> None:
    """Save why jobs failed (folder name -> reason), for pages that are written later."""
    if out.is_dir():
        write_whole(out / PROBLEMS, dump_json(dict(problems), indent=1))


def _planned(study: Study, point: GridPoint, composed: _Composed) -> PlannedPoint:
    early_ones = {plan.training: study.early for plan in study.attacks.values() if plan.state == "early"}

    def changes(training: str, **further: object) -> dict[str, object]:
        looks = f"defense={REFINER}" in point.overrides and training in study.evaluators
        own = {"defense.evaluator": str(_evaluator_file(composed.out, study, training))} if looks else {}
        named = {"name": study.entry[point.family]} if point.family in study.entry else {}
        return {**named, **own, **further}

    def planned(command: Command, config: RunSettings, early: int | None = None) -> Job:
        if early is not None and early > config.federation.rounds:
            raise UserError(
                f"early is expected to be a round of each training, but is {early} of {config.federation.rounds};"
                " lower it."
            )
        job = Job(command, config, RunLocation(command, calibrated(config)).path, early)
        lacks_early = is_finished(job.folder) and not job.finished
        return replace(job, config=config.changed({"overwrite": True})) if lacks_early else job

    trainings = {
        name: planned("run", composed(point, study.training(point, name), changes(name)), early_ones.get(name))
        for name in study.trainings
    }
    noise = {name: noise_for_budget(job.config) for name, job in trainings.items()}

    def attack(cell: AttackCell) -> Job:
        plan = study.attacks[cell]
        folder = trainings[plan.training].folder
        model = {"untrained": None, "early": folder / model_after(study.early), "trained": folder}[plan.state]
        weights = {"weights": str(model)} if model else {}
        own = changes(plan.training, **weights, **noise[plan.training])
        return planned("attack", composed(point, study.attacking(point, cell), own))

    return PlannedPoint(point=point, trainings=trainings, attacks={cell: attack(cell) for cell in study.cells})


def find_entry(entry: str, strengths: Sequence[str]) -> tuple[list[GridPoint], str]:
    """Return the user's defense ``entry`` at each strength, and the SHA-256 of its code; ``UserError`` if missing.

    Args:
        entry: ``my_defense.py`` with one function that returns a ``Defense``, ``my_defense.py:function``,
            ``package.module.function``, or the name of a registered defense.
        strengths: overrides ``defense.KEY=VALUE``; one of them may list several values.
    """
    if entry in options("defense"):
        content = options("defense")[entry].read_bytes()
        return list(grid_points(entry, [f"defense={entry}", *strengths])), hashlib.sha256(content).hexdigest()
    path, _, name = entry.partition(":")
    if path.endswith(".py"):
        module = _module_in(Path(path))
    elif path.count("."):
        named, _, name = entry.rpartition(".")
        module = _module_called(named)
    else:
        raise UserError(
            f"--entry is expected to be a file as my_defense.py, an import path as package.module.function or the name"
            f" of a registered defense, but got {entry!r}; name one of these."
        )
    function = _function_in(module, name)
    overrides = ["defense=custom", f"defense._target_={module.__name__}.{function}", *strengths]
    content = Path(module.__file__).read_bytes() if module.__file__ else module.__name__.encode()
    return list(grid_points(function, overrides)), hashlib.sha256(content).hexdigest()


def _module_in(path: Path) -> ModuleType:
    path = expanded(path).resolve()
    if not path.is_file():
        raise UserError(f"--entry is expected to be a Python file, but there is no {path}; check the path.")
    name = path.stem
    if not name.isidentifier():
        raise UserError(f"--entry is expected to be a Python identifier with .py, but got {path.name}; rename it.")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = sys.modules.get(name) or find_spec(name)
    origin = getattr(found, "__file__", None) or getattr(found, "origin", None)
    if origin is None or Path(origin).resolve() != path:
        raise UserError(f"--entry is expected to be a file with a name of its own, but {name} is {origin}; rename it.")
    return _module_called(name)


def _module_called(name: str) -> ModuleType:
    try:
        with own_modules(name):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--entry is expected to be importable, but {name} can't be imported ({in_one_line(error)}); correct it."
        ) from error


def _function_in(module: ModuleType, name: str) -> str:
    if name:
        if not callable(getattr(module, name, None)):
            raise UserError(f"--entry is expected to name a function, but {module.__name__} has no {name}; define it.")
        return name
    annotated = (Defense, "Defense", "defenses.Defense", "fl_privacy.defenses.Defense")
    found = [
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
        if inspect.signature(function).return_annotation in annotated
    ]
    if len(found) != 1:
        there = f"has {', '.join(found)}" if found else "has none"
        raise UserError(
            f"--entry is expected to hold one function that is annotated to return a Defense, but {module.__name__}"
            f" {there}; name it as {module.__name__}.py:FUNCTION."
        )
    return found[0]


PAGE, FIGURES = "benchmark.html", "benchmark.json"  # files in the benchmark's folder, next to the tables


def measured_by(plan: StudyPlan[Track]) -> MeasuredBenchmark:
    """Collect the results of a benchmark from the runs (jobs) in its ``plan`` that have finished."""
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
    """Build the table of the sweep ``grid`` from its finished runs; ``UserError`` for fewer than two trainings."""
    study, entries = plan.study, plan.entries()
    rows = read_study(entries)
    asked = asked_of([finding for row in rows for finding in row.findings])
    known, unknown = measured_rows(rows, is_whole=lambda row: row.complete, asked=asked)
    command = f"fl-privacy trade-off {grid} {' '.join(overrides)}".rstrip()
    if len(known) < 2:
        raise UserError(f"At least 2 trainings of {grid} are expected, but {len(known)} finished; run `{command}`.")
    deciding = [override for override in overrides if not override.startswith("out=")]
    settings = [s for s in merge_overrides(study.settings, overrides) if not s.startswith("out=")]
    trained = next(iter(plan.points[0].trainings.values())).config.federation.plan["batch_size"] or "null"
    folders = {folder for entry in entries for folder in (entry.training, *entry.attacks.values())}
    return MeasuredTable(
        settings=tuple(merge_overrides(settings, [f"federation.plan.batch_size={trained}"])),
        attacks=tuple(cell.title for cell in study.cells),
        weights=study.weights(),
        command=" ".join(["fl-privacy trade-off", grid, *deciding]),
        defenses=known,
        unknown=unknown,
        when=when_measured(map(read_environment, folders)),
        attackers=_attackers(study, overrides),
    )


def write_sweep_table(plan: StudyPlan[Study], grid: str, overrides: Sequence[str]) -> None:
    """Save the table of the sweep ``grid`` next to its page; delete the file if too few trainings finished."""
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
