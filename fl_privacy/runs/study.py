"""Plan the jobs of a study: each defense of a grid or track is trained once and attacked in every cell."""

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
from typing import Generic, TypeVar

from fl_privacy.checks import fits
from fl_privacy.defenses import Defense
from fl_privacy.errors import UserError, in_one_line
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import expanded, read_text
from fl_privacy.runs.app_captures import app_captures, as_captured
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.runs.config._options import options
from fl_privacy.runs.config.building import own_modules
from fl_privacy.runs.config.compose import override_keys
from fl_privacy.runs.config.keys import is_within
from fl_privacy.runs.config.study import AttackCell, GridPoint, Study, grid_points
from fl_privacy.runs.destination import Command, Destination
from fl_privacy.runs.folder import is_finished
from fl_privacy.runs.folder.ongoing import write_planned
from fl_privacy.runs.folder.records import dump_json, parse_json
from fl_privacy.runs.folder.study import StudyEntry
from fl_privacy.runs.privacy import calibrated, noise_for_budget

S = TypeVar("S", bound=Study)

REFINER = "refiner"
"""Defense that needs an evaluation network."""

PROBLEMS = "problems.json"
"""File in the folder of a study with reasons of failed jobs."""


@dataclass(frozen=True)
class Job:
    """One run or attack of a study, and the folder of its results."""

    command: Command
    config: RunSettings
    folder: Path

    @property
    def finished(self) -> bool:
        return is_finished(self.folder)


@dataclass(frozen=True, kw_only=True)
class PlannedPoint:
    """Jobs of a defense at one strength; ``early`` trains the first rounds alone, for cells that attack their model."""

    point: GridPoint
    trainings: Mapping[str, Job]
    early: Mapping[str, Job]
    attacks: Mapping[AttackCell, Job]


@dataclass(frozen=True, kw_only=True)
class StudyPlan(Generic[S]):
    """All jobs of a study, whose folders are in ``out``."""

    study: S
    out: Path
    points: tuple[PlannedPoint, ...]

    def stages(self) -> Iterator[list[Job]]:
        trainings = [job for planned in self.points for job in (*planned.trainings.values(), *planned.early.values())]
        for stage in (trainings, [job for planned in self.points for job in planned.attacks.values()]):
            yield list({job.folder: job for job in stage}.values())

    @property
    def evaluators(self) -> dict[Path, tuple[str, ...]]:
        return {_evaluator_file(self.out, self.study, name): own for name, own in self.study.evaluators.items()}

    def entries(self, problems: Mapping[str, str] | None = None) -> list[StudyEntry]:
        """Return the result folders of each point; ``problems`` maps folder names of failed jobs to reasons."""
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
    """Write the names of the folders that ``command`` will fill, for the live page.

    Jobs that can't start are left out; there is no plan for captures of an app, whose note names their folder.
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
        with suppress(OSError):  # the jobs report it
            write_planned(out, names)


def _evaluator_file(out: Path, study: Study, training: str) -> Path:
    return out / f"evaluator-{list(study.trainings).index(training)}.safetensors"


class _Composed:
    """Configurations of a study's jobs; shared parts are composed once, since Hydra is slow."""

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
    """Return the reasons why jobs failed last, by folder name."""
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
    """Save ``problems`` for later pages."""
    if out.is_dir():
        write_whole(out / PROBLEMS, dump_json(dict(problems), indent=1))


def _planned(study: Study, point: GridPoint, composed: _Composed) -> PlannedPoint:
    early_ones = {plan.training for plan in study.attacks.values() if plan.state == "early"}

    def changes(training: str, **further: object) -> dict[str, object]:
        looks = f"defense={REFINER}" in point.overrides and training in study.evaluators
        own = {"defense.evaluator": str(_evaluator_file(composed.out, study, training))} if looks else {}
        named = {"name": study.entry[point.family]} if point.family in study.entry else {}
        return {**named, **own, **further}

    def planned(command: Command, config: RunSettings) -> Job:
        return Job(command, config, Destination(command, calibrated(config)).path)

    def training(name: str, *, early: bool) -> Job:
        return planned("run", composed(point, study.training(point, name, early=early), changes(name)))

    trainings = {name: training(name, early=False) for name in study.trainings}
    early = {name: training(name, early=True) for name in sorted(early_ones)}
    noise = {name: noise_for_budget(job.config) for name, job in trainings.items()}

    def attack(cell: AttackCell) -> Job:
        plan = study.attacks[cell]
        model = {"untrained": None, "early": early.get(plan.training), "trained": trainings[plan.training]}[plan.state]
        weights = {"weights": str(model.folder)} if model else {}
        own = changes(plan.training, **weights, **noise[plan.training])
        return planned("attack", composed(point, study.attacking(point, cell), own))

    return PlannedPoint(
        point=point, trainings=trainings, early=early, attacks={cell: attack(cell) for cell in study.cells}
    )


def find_entry(entry: str, strengths: Sequence[str]) -> tuple[list[GridPoint], str]:
    """Return the points of the user's defense ``entry``, and the SHA-256 of its code; ``UserError`` if there is none.

    Args:
        entry: ``my_defense.py`` with one function that returns a ``Defense``, ``my_defense.py:function``,
            ``package.module.function``, or the name of a plugin's option of ``defense=``.
        strengths: ``defense.KEY=VALUE``, of which one may list several values.
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
            f" of a registered defense, but got {entry!r}."
        )
    function = _function_in(module, name)
    overrides = ["defense=custom", f"defense._target_={module.__name__}.{function}", *strengths]
    content = Path(module.__file__).read_bytes() if module.__file__ else module.__name__.encode()
    return list(grid_points(function, overrides)), hashlib.sha256(content).hexdigest()


def _module_in(path: Path) -> ModuleType:
    path = expanded(path).resolve()
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
    """Return ``name``, or the name of the one function of ``module`` annotated to return a ``Defense``."""
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
