"""Figures of a run in the loggers that others have."""

import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fl_privacy import log_run
from fl_privacy.errors import UserError
from fl_privacy.report.loggers import scalars_of
from fl_privacy.runs.folder import read_run
from tests.report import kinds
from tests.results.runs import record


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs"), label="run", undefended=True)


class Writer:
    """As TensorBoard's."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: dict[str, str] = {}
        self.flushed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name] = text

    def flush(self) -> None:
        self.flushed = True


def test_a_writer_of_tensorboard_gets_all_figures_by_round(trained: Path) -> None:
    writer = Writer()
    assert log_run(trained, writer) == len(writer.scalars) == len(list(scalars_of(read_run(trained))))
    assert {round for name, _, round in writer.scalars if name == "fl_privacy/plain/share_read"} == {1, 12}
    assert all(value == 1.0 for name, value, _ in writer.scalars if name == "fl_privacy/plain/share_read")
    assert writer.flushed and "6 of 6 attacked images" in writer.texts["fl_privacy/verdict"]


def test_tensorboards_own_files_hold_them(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    number = log_run(trained, f"tensorboard:{tmp_path}")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"]) == number
    assert [one.step for one in events.Scalars("fl_privacy/plain/psnr_mean")] == [1, 12]


def test_an_active_run_of_mlflow_is_used_and_not_ended(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, float, int]] = []
    ended: list[bool] = []

    def log_metric(name: str, value: float, step: int) -> None:
        logged.append((name, value, step))

    mlflow: Any = ModuleType("mlflow")
    mlflow.log_metric = log_metric
    mlflow.set_tag = lambda name, value: None
    mlflow.active_run, mlflow.end_run = object, partial(ended.append, True)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert log_run(trained, "mlflow") == len(logged) and not ended
    mlflow.active_run = lambda: None
    assert log_run(str(trained), "mlflow") == len(logged) // 2 and ended


def test_a_run_of_wandb_keeps_its_own_steps(trained: Path) -> None:
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=logged.append, summary={}, define_metric=lambda *_, **__: None)
    log_run(trained, run)
    assert [one["fl_privacy/round"] for one in logged] == sorted({one["fl_privacy/round"] for one in logged})
    assert logged[-1]["fl_privacy/plain/share_read"] == 1.0
    assert "6 of 6 attacked images" in run.summary["fl_privacy/verdict"]


def test_what_is_no_logger_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("tensorboard", "comet", object()):
        with pytest.raises(UserError, match="expected"):
            log_run(trained, wrong)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        log_run(trained, "wandb")


def test_a_run_of_texts_and_one_that_nobody_attacked_have_theirs(tmp_path: Path) -> None:
    names = {name for name, _, _ in scalars_of(read_run(kinds.texts(tmp_path)))}
    assert "fl_privacy/plain/token_f1_mean" in names
    names = {name for name, _, _ in scalars_of(read_run(kinds.nothing(tmp_path)))}
    assert "fl_privacy/test_accuracy" in names and not any("share" in name for name in names)


def test_an_infinite_epsilon_is_no_100_and_an_infinite_psnr_is(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    figures = [("fl_privacy/epsilon", math.inf, 1), ("fl_privacy/plain/psnr_mean", math.inf, 1), ("x", math.nan, 1)]
    monkeypatch.setattr("fl_privacy.report.loggers._figures", lambda run: figures)
    assert [value for _, value, _ in scalars_of(read_run(trained))] == [math.inf, 100.0]
