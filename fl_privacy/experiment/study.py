"""The jobs of a study: each defense of a grid or track is trained once, and attacked by every attack or in every cell.

A user's own defense is one of them, found in a file or by its import path.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fl_privacy.checks import fits
from fl_privacy.config import RunSettings, compose_run
from fl_privacy.config._options import options
from fl_privacy.config.building import own_modules
from fl_privacy.config.compose import merge_overrides, override_keys
from fl_privacy.config.keys import is_within, keys_of
from fl_privacy.config.settings import Role
from fl_privacy.config.study import AttackCell, Grid, GridPoint, Track, grid_points
from fl_privacy.data import images_of
from fl_privacy.defenses import Defense
from fl_privacy.errors import UserError, in_one_line
from fl_privacy.experiment.app_captures import app_captures, as_captured
from fl_privacy.experiment.build import build_dataset
from fl_privacy.experiment.privacy import calibrated, noise_for_budget
from fl_privacy.experiment.run_folder import Command, Destination
from fl_privacy.files import write_whole
from fl_privacy.foreign_files import read_text
from fl_privacy.report.benchmark import Measured
from fl_privacy.report.benchmark_page import benchmark_as_plain, benchmark_in_words, render_benchmark
from fl_privacy.results import is_finished, read_environment, read_summary
from fl_privacy.results.measured import MEASURED, MeasuredTable, measured_rows, write_tables
from fl_privacy.results.ongoing import write_planned
from fl_privacy.results.read import failed_attackers
from fl_privacy.results.records import dump_json, parse_json
from fl_privacy.results.study import StudyEntry, read_study


@dataclass(frozen=True)
class Job:
    """A run or an attack.

    Attributes:
        command: which of the two.
        config: what it is given.
        folder: where its results are once it has finished.
    """

    command: Command
    config: RunSettings
    folder: Path

    @property
    def finished(self) -> bool:
        """Say whether there is nothing left to do."""
        return is_finished(self.folder)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All jobs of a grid.

    Attributes:
        out: the folder of their folders.
        trainings: one for each point of the grid, in its order.
        attacks: by name, for each point.
        grid: what they come from.
    """

    out: Path
    trainings: tuple[Job, ...]
    attacks: tuple[Mapping[str, Job], ...]
    grid: Grid

    def stages(self) -> Iterator[list[Job]]:
        """Yield what can be done side by side, stage after stage."""
        yield list(self.trainings)
        yield [job for of_point in self.attacks for job in of_point.values()]

    def entries(self) -> list[StudyEntry]:
        """Return where the results of each point are, once there are any."""
        return [
            StudyEntry(
                family=point.family,
                strength=point.strength,
                overrides=point.overrides,
                trainings={"": training.folder},
                attacks={AttackCell(attack=name): job.folder for name, job in attacks.items()},
            )
            for point, training, attacks in zip(self.grid.points, self.trainings, self.attacks, strict=True)
        ]


def plan_sweep(grid: Grid) -> Sweep:
    """Plan the jobs of ``grid``.

    Raises:
        UserError: the configuration of one is wrong.
    """
    trainings = tuple(planned_job("run", compose_run(grid.training(point))) for point in grid.points)
    attacks = tuple(
        {name: planned_job("attack", compose_run(_attacking(grid, point, training, name))) for name in grid.attacks}
        for point, training in zip(grid.points, trainings, strict=True)
    )
    return Sweep(out=trainings[0].folder.parent, trainings=trainings, attacks=attacks, grid=grid)


def _attacking(grid: Grid, point: GridPoint, training: Job, attack: str) -> list[str]:
    """Return the overrides of an attack; it faces the noise that the training was calibrated to."""
    weights = training.folder if grid.weights == "final" else None
    noise = noise_for_budget(training.config)
    overrides = [f"{key}={'null' if value is None else repr(value)}" for key, value in noise.items()]
    return merge_overrides(grid.attacking(point, attack, weights), overrides)


def planned_job(command: Command, config: RunSettings) -> Job:
    """Plan the job of ``command`` with ``config``; ``UserError`` if its privacy budget can't be met."""
    return Job(command, config, Destination(command, calibrated(config)).path)


def write_plan(command: Command, configs: Sequence[RunSettings]) -> None:
    """Write down which folders ``command`` is going to fill with ``configs``, for whoever watches.

    Jobs that can't begin are left out, they tell why when it is their turn; and where a job attacks what an app
    uploaded, whose notes name its folder, there is no plan.
    """
    planned: dict[Path, list[str]] = {}
    for config in configs:
        with suppress(UserError):
            begun = calibrated(config)
            if begun.captured:
                if app_captures(begun.captured) is not None:
                    return
                begun = as_captured(begun)
            folder = Destination(command, begun).path
            planned.setdefault(folder.parent, []).append(folder.name)
    for out, names in planned.items():
        with suppress(OSError):  # the jobs say that nothing can be written there
            write_planned(out, names)


REFINER = "refiner"
"""The defense that looks at images with an evaluation network."""

PAGE, FIGURES, PROBLEMS = "benchmark.html", "benchmark.json", "problems.json"
"""Files in the benchmark's folder, beside the table for ``fl-privacy advise``."""


@dataclass(frozen=True, kw_only=True)
class PlannedPoint:
    """A defense at one strength: its jobs.

    Attributes:
        point: of the track.
        trainings: by name.
        early: those of the first rounds alone, where a cell attacks their model.
        attacks: by cell.
    """

    point: GridPoint
    trainings: Mapping[str, Job]
    early: Mapping[str, Job]
    attacks: Mapping[AttackCell, Job]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """All jobs of a track.

    Attributes:
        track: what they come from.
        out: the folder of their folders.
        points: in the order of the track.
    """

    track: Track
    out: Path
    points: tuple[PlannedPoint, ...]

    def stages(self) -> Iterator[list[Job]]:
        """Yield what can be done side by side, stage after stage: trainings, then attacks; each job once."""
        trainings = [job for planned in self.points for job in (*planned.trainings.values(), *planned.early.values())]
        for stage in (trainings, [job for planned in self.points for job in planned.attacks.values()]):
            yield list({job.folder: job for job in stage}.values())

    @property
    def evaluators(self) -> dict[Path, tuple[str, ...]]:
        """Return files of the evaluation networks that the track needs, and how ``train-evaluator`` makes them."""
        return {_evaluator_file(self.out, self.track, name): own for name, own in self.track.evaluators.items()}

    def measured(self) -> Measured:
        """Return what came out of it so far."""
        problems = read_problems(self.out)
        jobs = [job for stage in self.stages() for job in stage]
        done = [job.folder for job in jobs if job.finished]
        found = [read_environment(folder) for folder in done]
        summaries = [summary for folder in done if (summary := read_summary(folder)) is not None]
        return Measured(
            track=self.track,
            standings=read_study([self._entry(planned, problems) for planned in self.points]),
            code=sorted({str(environment["code"]) for environment in found if "code" in environment}),
            data=_data_hashes(self.points[0]),
            seconds=sum(summary.seconds.total or 0.0 for summary in summaries),
            jobs=len(jobs),
            jobs_done=len(done),
            hardware=", ".join(sorted({_hardware(environment) for environment in found})),
        )

    def write(self) -> Path:
        """Write the page over what has finished, its figures as JSON and the tables for ``fl-privacy advise``.

        One table for each training. Returns the page.
        """
        measured = self.measured()
        write_whole(self.out / FIGURES, dump_json(benchmark_as_plain(measured), indent=1) + "\n")
        tables = [table for name in self.track.trainings if (table := self._table(measured, name)) is not None]
        if tables:
            write_tables(self.out / MEASURED, tables)
        else:
            (self.out / MEASURED).unlink(missing_ok=True)
        page = self.out / PAGE
        write_whole(page, render_benchmark(measured))
        return page

    def in_words(self) -> str:
        """Say which defense leaks least, as far as it was measured."""
        return benchmark_in_words(self.measured())

    def _table(self, measured: Measured, training: str) -> MeasuredTable | None:
        """Build the table of one training; ``None`` unless the undefended one and a defense finished."""
        uploads = {name for name, kind in self.track.uploads.items() if kind.training == training}
        own = [standing.of_training(training, uploads) for standing in measured.standings]
        known, unknown = measured_rows(own, is_whole=lambda r: r.loss is not None and not r.missing("malicious"))
        if not uploads or len(known) < 2:
            return None
        servers = dict.fromkeys(c.server for c in self.track.cells if c.server and c.uploads in uploads)
        return MeasuredTable(
            settings=_deciding((*self.track.settings, *self.track.trainings[training])),
            attacks=("auto", *servers),
            weights="both",
            command=f"fl-privacy benchmark {self.track.name}",
            defenses=known,
            unknown=unknown,
            attackers=tuple(self.track.attack),
        )

    def _entry(self, planned: PlannedPoint, problems: Mapping[str, str]) -> StudyEntry:
        point = planned.point
        return StudyEntry(
            family=point.family,
            strength=point.strength,
            overrides=point.overrides,
            own=point.family in self.track.entry,
            trainings={name: job.folder for name, job in planned.trainings.items()},
            attacks={cell: job.folder for cell, job in planned.attacks.items()},
            problems={**_failures(planned), **problems},
        )


def _failures(planned: PlannedPoint) -> dict[str, str]:
    """Return why attacks that finished failed on all of their victims, by their folder's name.

    Malicious servers are left out, who may find none of the images that they look for.
    """
    done = [job.folder for cell, job in planned.attacks.items() if not cell.server and job.finished]
    return {folder.name: next(iter(found.values())) for folder in done if (found := failed_attackers(folder))}


def plan_benchmark(track: Track) -> Benchmark:
    """Plan the jobs of ``track``.

    Raises:
        UserError: the configuration of one is wrong.
    """
    composed = _Composed(track)
    points = tuple(_planned(track, point, composed) for point in track.points)
    return Benchmark(track=track, out=composed.out, points=points)


def _evaluator_file(out: Path, track: Track, training: str) -> Path:
    return out / f"evaluator-{list(track.trainings).index(training)}.safetensors"


class _Composed:
    """Configurations of a track's jobs; what points share is composed once, since Hydra takes a while.

    Args:
        track: whose.
    """

    def __init__(self, track: Track) -> None:
        self.out = Path(compose_run([o for o in track.settings if o.startswith("out=")]).out)
        self._shared: dict[tuple[str, ...], RunSettings] = {}
        self._defenses: dict[GridPoint, RunSettings] = {}

    def __call__(self, point: GridPoint, overrides: list[str], changes: Mapping[str, object]) -> RunSettings:
        """Compose ``overrides``, those of ``point`` included, with ``changes`` of them by dotted key."""
        keys = override_keys(point.overrides)
        if not all(key == "defense" or key.startswith("defense.") for key in keys):
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
    """Return why jobs failed when they were last tried, by their folder's name."""
    path = out / PROBLEMS
    if not path.is_file():
        return {}
    try:
        found = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is expected to hold JSON, but is damaged ({error}); remove it.") from error
    if not fits(found, dict[str, str]):
        raise UserError(f"{path} is expected to name a reason for each job, but does not; remove it.")
    return dict(found)


def write_problems(out: Path, problems: Mapping[str, str]) -> None:
    """Keep them for the page of a later call."""
    if out.is_dir():
        write_whole(out / PROBLEMS, dump_json(dict(problems), indent=1))


def _planned(track: Track, point: GridPoint, composed: _Composed) -> PlannedPoint:
    cells = track.cells
    early_ones = {track.uploads[cell.uploads].training for cell in cells if cell.state == "early"}

    def changes(training: str, **further: object) -> dict[str, object]:
        looks = f"defense={REFINER}" in point.overrides and training in track.evaluators
        own = {"defense.evaluator": str(_evaluator_file(composed.out, track, training))} if looks else {}
        named = {"name": track.entry[point.family]} if point.family in track.entry else {}
        return {**named, **own, **further}

    def training(name: str, *, early: bool) -> Job:
        return planned_job("run", composed(point, track.training(point, name, early=early), changes(name)))

    trainings = {name: training(name, early=False) for name in track.trainings}
    early = {name: training(name, early=True) for name in sorted(early_ones)}

    def attack(cell: AttackCell) -> Job:
        name = track.uploads[cell.uploads].training
        models = {"untrained": None, "early": early.get(name), "trained": trainings[name]}
        model = models[cell.state]
        weights = str(model.folder) if model else None
        return planned_job("attack", composed(point, track.attacking(point, cell), changes(name, weights=weights)))

    attacks = {cell: attack(cell) for cell in cells}
    return PlannedPoint(point=point, trainings=trainings, early=early, attacks=attacks)


def _data_hashes(planned: PlannedPoint) -> dict[str, str]:
    """Return the SHA-256 of images and labels of each data set that the trainings use, by its name."""
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


def _deciding(overrides: Sequence[str]) -> tuple[str, ...]:
    """Keep the overrides that figures depend on."""
    keys = override_keys(overrides)
    return tuple(o for o, key in zip(overrides, keys, strict=True) if not is_within(key, keys_of(Role.RUNTIME)))


def _hardware(environment: Mapping[str, Any]) -> str:
    gpus = environment.get("gpus") or []
    return f"{environment.get('cpu', 'unknown')}{''.join(f' and {gpu}' for gpu in gpus)}"


def find_entry(entry: str, strengths: Sequence[str]) -> tuple[list[GridPoint], str]:
    """Return the points of the defense that ``entry`` names, and the SHA-256 of the code that makes it.

    Args:
        entry: ``my_defense.py`` with one function that returns a ``Defense``, ``my_defense.py:function``,
            ``package.module.function``, or the name of an option of ``defense=`` that a plugin registers.
        strengths: ``defense.KEY=VALUE``, of which one may list several values.

    Raises:
        UserError: there is no such defense.
    """
    if entry in options("defense"):
        content = options("defense")[entry].read_bytes()
        return _points(entry, [f"defense={entry}", *strengths]), hashlib.sha256(content).hexdigest()
    path, _, name = entry.partition(":")
    if path.endswith(".py"):
        module = _module_in(Path(path))
    elif path.count("."):
        named, _, name = entry.rpartition(".")
        module = _module_called(named)
    else:
        raise UserError(
            f"--entry is expected to be a file as my_defense.py, an import path as package.module.function or the name"
            f" of a registered defense, but got {entry!r}."
        )
    function = _function_in(module, name)
    overrides = ["defense=custom", f"defense._target_={module.__name__}.{function}", *strengths]
    return _points(function, overrides), _source_hash(module)


def _points(family: str, overrides: Sequence[str]) -> list[GridPoint]:
    return list(grid_points(family, overrides))


def _module_in(path: Path) -> ModuleType:
    """Import the module in the file ``path``, which worker processes can import as well."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"--entry is expected to be a Python file, but there is no {path}.")
    name = path.stem
    if not name.isidentifier():
        raise UserError(f"--entry is expected to be a file that can be imported, but {path.name} can't; rename it.")
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
        raise UserError(f"--entry names {name}, which can't be imported: {in_one_line(error)}") from error


def _function_in(module: ModuleType, name: str) -> str:
    """Return ``name``, or the name of the one function of ``module`` that is declared to return a ``Defense``."""
    if name:
        if not callable(getattr(module, name, None)):
            raise UserError(f"--entry names the function {name}, but {module.__name__} has none.")
        return name
    found = [
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_") and _returns_defense(function)
    ]
    if len(found) != 1:
        there = f"has {', '.join(found)}" if found else "has none"
        raise UserError(
            f"--entry is expected to hold one function that is annotated to return a Defense, but {module.__name__}"
            f" {there}; name it as {module.__name__}.py:FUNCTION."
        )
    return found[0]


def _returns_defense(function: object) -> bool:
    annotation = inspect.signature(function).return_annotation  # type: ignore[arg-type]
    return annotation is Defense or annotation in ("Defense", "defenses.Defense", "fl_privacy.defenses.Defense")


def _source_hash(module: ModuleType) -> str:
    file = module.__file__
    return hashlib.sha256(Path(file).read_bytes() if file else module.__name__.encode()).hexdigest()
