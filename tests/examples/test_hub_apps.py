"""The apps for Flower Hub are built, installed and checked by Flower's own code."""

import hashlib
import importlib
import tomllib
from functools import partial
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files, get_fab_filename
from flwr.cli.install import install_from_fab
from flwr.cli.utils import collect_files

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.cli.main import run_command_line
from tests.flower.test_audit import EXAMPLES, run_in, started
from tests.flower.untouched_apps import attacked_only, rung, written_once

APPS = ("audited-quickstart", "defended-quickstart")


@pytest.mark.parametrize("name", APPS)
def test_a_hub_app_is_built_installed_and_accepted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())
    content, about = build_fab_from_files(collect_files(EXAMPLES / name))
    assert (about.fab_format_version, about.flwr_version_min, about.flwr_version_target) == (1, "1.41", "1.41.0")
    bundle = tmp_path / get_fab_filename(config, hashlib.sha256(content).hexdigest())
    bundle.write_bytes(content)
    installed = install_from_fab(bundle, install_dir=tmp_path / "home")
    assert installed.parent == tmp_path / "home" / "apps"
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {path.name for path in installed.iterdir()}
    assert read_app(installed).name == name
    capsys.readouterr()
    assert run_command_line(["audit", str(bundle), "--check"]) == 0
    assert "all that it imports at its start are here" in capsys.readouterr().out


def test_both_hub_apps_train_alike() -> None:
    tasks = {(EXAMPLES / name / name.replace("-", "_") / "task.py").read_text() for name in APPS}
    licenses = {(EXAMPLES / name / "LICENSE").read_text() for name in APPS}
    assert len(tasks) == 1 and licenses == {(EXAMPLES.parent / "LICENSE").read_text()}


@pytest.mark.long
def test_the_audited_app_shows_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "audited-quickstart"))
    client, server = (importlib.import_module(f"audited_quickstart.{side}_app") for side in ("client", "server"))
    few = {"attack": "auto attack.evaluations=60", "victims": 2}  # beside what the app asks for
    monkeypatch.setattr(server, "audit", partial(server.audit, **few))
    config = {"num-server-rounds": 1, "local-epochs": 1, "learning-rate": 0.1, "batch-size": 32}
    started(client, server, 2, {**config, "audit": str(tmp_path)})
    (leak, *_) = run_in(tmp_path).summary.attacked
    assert leak.metrics["psnr"].mean > 20


@pytest.mark.fuzz
def test_noise_of_the_defended_app_hides_what_its_gradients_show(tmp_path: Path) -> None:
    asked = AppAuditRequest(nodes=2, rounds=1, victims=2, out=tmp_path, seconds=60.0)
    with written_once(), attacked_only({"gradient", "one"}):
        record = audit_app(read_app(EXAMPLES / "defended-quickstart"), asked).content
    assert rung(record, "one")["counts"]["read"] == 0 < rung(record, "gradient")["counts"]["read"]
