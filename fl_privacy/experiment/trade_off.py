"""A sweep over defenses: each is trained once, and attacked by every attack of the grid."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fl_privacy.config import RunSettings, compose_run
from fl_privacy.config.grid import Grid, GridPoint
from fl_privacy.config.overrides import merge_overrides
from fl_privacy.errors import UserError
from fl_privacy.experiment.calibration import calibrated, noise_for_budget
from fl_privacy.experiment.captured import as_captured
from fl_privacy.experiment.foreign_captures import app_captures
from fl_privacy.experiment.run_folder import Command, Destination
from fl_privacy.report.trade_off import SweepEntry
from fl_privacy.results import is_finished
from fl_privacy.results.ongoing import write_planned


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
        """Whether there is nothing left to do."""
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
        """What can be done side by side, stage after stage."""
        yield list(self.trainings)
        yield [job for of_point in self.attacks for job in of_point.values()]

    def outcomes(self) -> list[SweepEntry]:
        """Where the results of each point are, once there are any."""
        return [
            SweepEntry(
                family=point.family,
                strength=point.strength,
                training=training.folder,
                attacks={name: job.folder for name, job in attacks.items()},
            )
            for point, training, attacks in zip(self.grid.points, self.trainings, self.attacks, strict=True)
        ]


def plan_sweep(grid: Grid) -> Sweep:
    """The jobs of ``grid``.

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
    """The attack faces the noise that the training was calibrated to, whatever its own data are."""
    weights = training.folder if grid.weights == "final" else None
    noise = noise_for_budget(training.config)
    overrides = [f"{key}={'null' if value is None else repr(value)}" for key, value in noise.items()]
    return merge_overrides(grid.attacking(point, attack, weights), overrides)


def planned_job(command: Command, config: RunSettings) -> Job:
    """The job of ``command`` with ``config``; ``UserError`` if its privacy budget can't be met."""
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
