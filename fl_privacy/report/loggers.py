"""Log a run's figures to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.measure.registry import IMAGE_METRIC, LARGEST_PSNR
from fl_privacy.report.headline import headline_of
from fl_privacy.runs.folder import Run, read_run, verdict_of

PREFIX = "fl_privacy"  # prefix of all names, to distinguish them from the training's own
NAMED = ("tensorboard:FOLDER", "mlflow", "wandb")  # names accepted instead of a writer
Scalar = tuple[str, float, int]  # name, value, round


def log_run(run: Run | Path | str, to: Any) -> int:
    """Log a run's figures by round, and its verdict; return the number of figures.

    ``to``: ``SummaryWriter`` of TensorBoard or tensorboardX, the module ``mlflow``, or the result of ``wandb.init``; or
    ``tensorboard:FOLDER``, ``mlflow``, ``wandb``. ``UserError`` without a run or logger, or if its package is missing.
    """
    found = run if isinstance(run, Run) else read_run(Path(run))
    scalars = list(scalars_of(found))
    with ExitStack() as at_end:
        _write(_opened(to, at_end) if isinstance(to, str) else to, scalars, headline_of(verdict_of(found)).text)
    return len(scalars)


def scalars_of(run: Run) -> Iterator[Scalar]:
    """Yield (name, value, round) for each number of the run that is not NaN; an infinite PSNR becomes 100 dB."""
    decibels = f"{IMAGE_METRIC}_mean"
    for name, value, round in _figures(run):
        if not math.isnan(value):
            yield name, min(value, LARGEST_PSNR) if name.endswith(decibels) else value, round


def _figures(run: Run) -> Iterator[Scalar]:
    for tested in run.summary.tested:
        yield f"{PREFIX}/test_accuracy", float(tested.accuracy), tested.round
    for record in run.of_kind("round"):
        for name in ("train_loss", "test_loss", "epsilon"):
            if (value := record.get(name)) is not None:
                yield f"{PREFIX}/{name}", float(value), int(record["round"])
    for reading in verdict_of(run).readings:
        place, counts = f"{PREFIX}/{reading.attacker}", reading.counts
        if counts.judged:
            yield f"{place}/share_read", counts.read / counts.judged, reading.round
            yield f"{place}/share_read_at_most", float(counts.interval[1]), reading.round
        if (statistic := reading.statistic(reading.main)) is not None:
            yield f"{place}/{reading.main}_mean", float(statistic.mean), reading.round


def _write(writer: Any, scalars: list[Scalar], verdict: str) -> None:
    if hasattr(writer, "add_scalar"):
        for name, value, round in scalars:
            writer.add_scalar(name, value, round)
        writer.add_text(f"{PREFIX}/verdict", verdict, 0)
        writer.flush()
    elif hasattr(writer, "log_metric"):
        for name, value, round in scalars:
            writer.log_metric(name, value, step=round)
        writer.set_tag(f"{PREFIX}.verdict", verdict)
    elif hasattr(writer, "log"):
        # its step count only grows and is the training's: rounds are an axis of their own
        if hasattr(writer, "define_metric"):
            writer.define_metric(f"{PREFIX}/round")
            writer.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/round")
        for round in sorted({round for _, _, round in scalars}):
            writer.log({f"{PREFIX}/round": round} | {name: value for name, value, own in scalars if own == round})
        writer.summary[f"{PREFIX}/verdict"] = verdict
    else:
        raise UserError(
            "A writer of TensorBoard, mlflow, or a run of wandb is expected, but got"
            f" {type(writer).__name__}; name one of {', '.join(NAMED)}."
        )


def _opened(name: str, at_end: ExitStack) -> Any:
    kind, _, place = name.partition(":")
    if kind == "tensorboard" and place:
        return at_end.enter_context(closing(_package("torch.utils.tensorboard", "tensorboard").SummaryWriter(place)))
    if name == "mlflow":
        mlflow = _package("mlflow", "mlflow")
        if not mlflow.active_run():
            at_end.callback(mlflow.end_run)
        return mlflow
    if name == "wandb":
        wandb = _package("wandb", "wandb")
        if wandb.run is not None:
            return wandb.run
        run = wandb.init(project=PREFIX)
        at_end.callback(run.finish)
        return run
    raise UserError(f"A logger is expected to be one of {', '.join(NAMED)}, but got {name!r}; name one of these.")


def _package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"Logging is expected to find the package {package}, but it is not installed; run `pip install {package}`."
        ) from error
