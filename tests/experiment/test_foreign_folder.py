"""A run's folder that somebody else sent: attacking what it captured runs nothing that it names."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.experiment.runs import Run, run

ATTACK = ("attack.iterations=3",)
STRANGERS = "tests.experiment.strangers"


@pytest.fixture
def sent(undefended: Run, tmp_path: Path) -> Path:
    """Copy a run with captures, to be tampered with."""
    return Path(shutil.copytree(undefended.path, tmp_path / "sent"))


def tampered(folder: Path, *changes: tuple[str, str], both: bool = False) -> Path:
    """``folder`` with ``changes`` in its configuration, with ``both`` without the record that tells."""
    config = folder / "config.yaml"
    text = config.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    config.write_text(text)
    if both:
        (folder / "run.json").unlink()
    return folder


MODEL = "  _target_: fl_privacy.models.LeNet\n"
DATA = "data:\n  _target_: fl_privacy.data.load_data\n  name: mnist_mini\n"


@pytest.mark.parametrize("both", [False, True])
def test_a_command_in_place_of_a_model_is_not_run(sent: Path, both: bool, tmp_path: Path, capfd) -> None:
    mark = tmp_path / "mark"
    evil = f"  _target_: subprocess.getoutput\n  cmd: touch {mark}\n"
    tampered(sent, (MODEL, evil), both=both)
    assert run("attack", f"captured={sent}", *ATTACK, out=tmp_path / "out").status == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "trust=subprocess.getoutput" in error[0]
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (("  root: null\n", "  root: ${oc.env:HOME}\n"), "refers to something else"),
        ((DATA, DATA.replace("mnist_mini", "mnist")), "trust=mnist"),
        (("seed: 0\n", "seed: zero\n"), "seed"),
        (("batch_size: 1\n", "batch_size: [1]\n"), "batch_size"),
        (("intercept:\n", "intercept:\n  spy: 1\n"), "intercept.spy"),
        (("  activation: tanh\n", "  activation: [tanh]\n"), "model.activation"),
        (("  width: 12\n", "  width: 12\n  depth: 3\n"), "model.depth"),
    ],
)
def test_what_was_captured_is_checked_like_any_configuration(
    change: tuple[str, str], hint: str, sent: Path, tmp_path: Path, capfd
) -> None:
    tampered(sent, change, both=True)
    assert run("attack", f"captured={sent}", *ATTACK, out=tmp_path / "out").status == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1 and hint in error[0], error


def test_a_configuration_that_was_changed_after_the_run_is_noticed(sent: Path, tmp_path: Path, capfd) -> None:
    tampered(sent, ("seed: 0\n", "seed: 7\n"))
    assert run("attack", f"captured={sent}", *ATTACK, out=tmp_path / "out").status == 2
    assert "its seed is not the one in run.json" in capfd.readouterr().err


def test_a_model_of_the_users_own_is_attacked_when_trusted(tmp_path: Path, capfd) -> None:
    settings = ("federation.clients=2", "federation.rounds=1", "victims=2", "intercept.save=true", "attack=none")
    own = run("run", *settings, "model=custom", f"model._target_={STRANGERS}.Net", "+model.width=2", out=tmp_path)
    assert own.status == 0
    attack: Callable[..., Run] = lambda *more: run("attack", f"captured={own.path}", *ATTACK, *more, out=tmp_path)  # noqa: E731
    assert attack().status == 2
    assert f"trust={STRANGERS}.Net" in capfd.readouterr().err
    trusted, by_module = attack(f"trust={STRANGERS}.Net"), attack(f"trust=[{STRANGERS}]", "overwrite=true")
    assert trusted.status == by_module.status == 0
    assert trusted.path == by_module.path


@pytest.mark.parametrize("setting", ["model=mlp", "victims=1", "data=olivetti", "batch_size=3"])
def test_a_setting_that_captures_bring_along_is_not_ignored(setting: str, sent: Path, tmp_path: Path, capfd) -> None:
    assert run("attack", f"captured={sent}", setting, *ATTACK, out=tmp_path / "out").status == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1 and f"got {setting}; leave" in error[0], error


def test_a_pipe_among_captures_is_refused(sent: Path, tmp_path: Path, capfd) -> None:
    os.mkfifo(sent / "captures" / "round-1" / "client-9.json")
    assert run("attack", f"captured={sent}", *ATTACK, out=tmp_path / "out").status == 2
    assert "is a pipe" in capfd.readouterr().err
