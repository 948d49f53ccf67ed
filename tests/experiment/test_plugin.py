"""Everything that a plugin adds works as what the package brings: it is listed, run, captured and reported."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from fl_privacy.measure import METRICS, Metric, register_metric
from fl_privacy.runs.config.parse import config_folders
from fl_privacy.runs.config.settings import register_plugin_metrics
from tests.experiment.runs import TINY, run

PLUGIN = Path(__file__).parents[1] / "plugin"
PARTS = ("data=stripes", "model=one_layer", "defense=scaled", "attack=uniform")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(PLUGIN)
    for cached in (config_folders, register_plugin_metrics):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    METRICS.pop("darkness", None)
    sys.modules.pop("stripes", None)
    for cached in (config_folders, register_plugin_metrics):
        cached.cache_clear()


@pytest.mark.usefixtures("installed")
def test_its_parts_are_run_reported_and_captured(tmp_path: Path) -> None:
    done = run("run", *TINY[:4], *PARTS, "defense.factor=0.25", "intercept.save=true", out=tmp_path)
    assert done.status == 0
    assert done.path.name.startswith("stripes-one_layer-fedsgd-scaled-uniform-")
    assert all(image["darkness"] == pytest.approx(0, abs=1e-3) for image in done.records("image"))
    distortions = done.records("update_distortion")
    assert distortions and all(d["signal_to_distortion"] == pytest.approx(4 / 3) for d in distortions)
    page = (done.path / "report.html").read_text()
    assert "Darkness" in page and "Mean of the difference." in page and "factor 0.25" in page
    again = run("attack", f"captured={done.path}", "attack=uniform", "attack.level=0.25", out=tmp_path)
    assert again.status == 0
    assert again.json("summary.json")["metrics"]["darkness"]["mean"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.usefixtures("installed")
def test_its_parts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["list"]) == 0
    said = capsys.readouterr().out
    for line in ("stripes", "one_layer", "scaled", "uniform", "darkness", "Mean of the difference."):
        assert line in said


@pytest.mark.usefixtures("installed")
def test_one_kind_of_parts_is_listed_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["list", "metrics", "partition="]) == 0
    said = capsys.readouterr().out
    assert "darkness" in said and "dirichlet" in said and "one_layer" not in said
    assert run_command_line(["list", "defences"]) == 2
    assert "did you mean defense?" in capsys.readouterr().err


def test_a_metric_takes_no_name_that_is_taken() -> None:
    metric = Metric(function=None, leaks="low", title="Another", description="Of no use.")
    for name in ("psnr", "image", "no name"):
        with pytest.raises(UserError, match="metric"):
            register_metric(name, metric)


def test_a_module_in_the_working_directory_goes_by_its_own_name(tmp_path: Path) -> None:
    own = ("model=custom", "model._target_=tests.experiment.strangers.Net", "attack=none", "baseline=false")
    assert run("run", *TINY[:3], *own, out=tmp_path).path.name.startswith("mnist_mini-Net-fedsgd-none-none-")
