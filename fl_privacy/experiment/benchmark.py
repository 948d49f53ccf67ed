"""The jobs of a benchmark: every defense of a track is trained, and attacked in every one of its cells."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_privacy.checks import fits
from fl_privacy.config import RunSettings, compose_run
from fl_privacy.config.grid import GridPoint
from fl_privacy.config.keys import is_within, keys_of
from fl_privacy.config.overrides import override_keys
from fl_privacy.config.settings import Role
from fl_privacy.config.track import AttackCell, Track
from fl_privacy.data import Examples
from fl_privacy.errors import UserError
from fl_privacy.experiment.build import build_dataset
from fl_privacy.experiment.trade_off import Job, planned_job
from fl_privacy.files import write_whole
from fl_privacy.foreign_files import read_text
from fl_privacy.report.benchmark import Measured, Tried, measured_of, read_standings
from fl_privacy.report.benchmark_json import benchmark_as_plain
from fl_privacy.report.benchmark_page import render_benchmark
from fl_privacy.report.measured_tables import MEASURED, MeasuredTable, write_tables
from fl_privacy.results import read_environment, read_summary
from fl_privacy.results.records import dump_json, parse_json

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
        """What can be done side by side, stage after stage: trainings, then attacks; each job once."""
        trainings = [job for planned in self.points for job in (*planned.trainings.values(), *planned.early.values())]
        for stage in (trainings, [job for planned in self.points for job in planned.attacks.values()]):
            yield list({job.folder: job for job in stage}.values())

    @property
    def evaluators(self) -> dict[Path, tuple[str, ...]]:
        """Files of the evaluation networks that its defenses look with, and how ``train-evaluator`` makes them."""
        return {_evaluator_file(self.out, self.track, name): own for name, own in self.track.evaluators.items()}

    def measured(self) -> Measured:
        """What came out of it so far."""
        problems = read_problems(self.out)
        jobs = [job for stage in self.stages() for job in stage]
        done = [job.folder for job in jobs if job.finished]
        found = [read_environment(folder) for folder in done]
        summaries = [summary for folder in done if (summary := read_summary(folder)) is not None]
        return Measured(
            track=self.track,
            standings=read_standings([self._tried(planned, problems) for planned in self.points]),
            code=sorted({str(environment["code"]) for environment in found if "code" in environment}),
            data=_data_hashes(self.points[0]),
            seconds=sum(summary.seconds.total or 0.0 for summary in summaries),
            jobs=len(jobs),
            jobs_done=len(done),
            hardware=", ".join(sorted({_hardware(environment) for environment in found})),
        )

    def write(self) -> Path:
        """The page over what has finished, its figures as JSON and the tables for ``fl-privacy advise``, one for each
        training; returns the page."""
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

    def _table(self, measured: Measured, training: str) -> MeasuredTable | None:
        """What was measured of one training; ``None`` unless the undefended one and a defense finished."""
        uploads = {name for name, kind in self.track.uploads.items() if kind.training == training}
        own = [standing.of_training(training, uploads) for standing in measured.standings]
        found = [measured_of(standing) for standing in own]
        known = tuple(defense for defense in found if defense is not None)
        if not uploads or found[0] is None or len(known) < 2:
            return None
        servers = dict.fromkeys(c.server for c in self.track.cells if c.server and c.uploads in uploads)
        return MeasuredTable(
            settings=_deciding((*self.track.settings, *self.track.trainings[training])),
            attacks=("auto", *servers),
            weights="both",
            command=f"fl-privacy benchmark {self.track.name}",
            defenses=known,
            unknown=tuple(s.tried.name for s, told in zip(own, found, strict=True) if told is None),
        )

    def _tried(self, planned: PlannedPoint, problems: Mapping[str, str]) -> Tried:
        point = planned.point
        return Tried(
            family=point.family,
            strength=point.strength,
            overrides=point.overrides,
            own=point.family in self.track.entry,
            trainings={name: job.folder for name, job in planned.trainings.items()},
            attacks={cell: job.folder for cell, job in planned.attacks.items()},
            problems=problems,
        )


def plan_benchmark(track: Track) -> Benchmark:
    """The jobs of ``track``.

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
        """What ``overrides`` say, those of ``point`` included, but for ``changes`` of them by dotted key."""
        keys = override_keys(point.overrides)
        if not all(key == "defense" or key.startswith("defense.") for key in keys):
            return compose_run(overrides).changed(changes)
        if point not in self._defenses:
            self._defenses[point] = compose_run(point.overrides)
        own = self._defenses[point]
        rest = tuple(o for o, key in zip(overrides, override_keys(overrides), strict=True) if key not in keys)
        if rest not in self._shared:
            self._shared[rest] = compose_run(rest)
        of_point = {"defense": own.defense, "choices.defense": own.choices.defense}
        return self._shared[rest].changed({**of_point, **changes})


def read_problems(out: Path) -> dict[str, str]:
    """Why jobs failed when they were last tried, by their folder's name."""
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
    """SHA-256 of the images and labels of each data set that the trainings use, by its name."""
    found = {}
    for job in planned.trainings.values():
        config = job.config
        name = str(config.choices.data)
        if name in found:
            continue
        dataset, content = build_dataset(config.data), hashlib.sha256()
        for split in (dataset.train, dataset.test):
            if isinstance(split, Examples):
                for tensor in (split.images, split.labels):
                    content.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
                    content.update(tensor.contiguous().numpy().tobytes())
        found[name] = content.hexdigest()
    return found


def _deciding(overrides: Sequence[str]) -> tuple[str, ...]:
    """Those that figures depend on."""
    keys = override_keys(overrides)
    return tuple(o for o, key in zip(overrides, keys, strict=True) if not is_within(key, keys_of(Role.RUNTIME)))


def _hardware(environment: Mapping[str, Any]) -> str:
    gpus = environment.get("gpus") or []
    return f"{environment.get('cpu', 'unknown')}{''.join(f' and {gpu}' for gpu in gpus)}"
