"""The command that trains a generator of images, and attacks with it."""

import signal
from pathlib import Path

import pytest
import torch

from fl_privacy.cli.faults import Interrupted
from fl_privacy.cli.main import run_command_line
from fl_privacy.models.pretrained.generator import load_generator
from fl_privacy.models.pretrained.generator_training import GeneratorTraining

pytest.importorskip("mlxtend")

TINY = ["train-generator", "images=40", "data.image_size=8", "steps=4", "latent=4", "width=2", "batch_size=8"]
ATTACK = ["attack", "data.image_size=8", "model=mlp", "attack=ggl", "attack.iterations=3", "victims=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the digits are decoded once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(folder))
    return folder


def test_trains_once_and_tells_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.safetensors"
    assert run_command_line([*TINY, f"out={file}"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == str(file)
    found = load_generator(file)
    assert found.provenance.words() == "mnist_mini, split train, 40 images"
    assert found.network.shape.num_classes == 10
    assert run_command_line([*TINY, f"out={file}"]) == 0
    assert "Found it trained" in capfd.readouterr().out
    assert run_command_line([*TINY, f"out={file}", "seed=1"]) == 2
    assert "overwrite=true" in capfd.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["g.safetensors"]


def test_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, stopped, step = tmp_path / "whole", tmp_path / "stopped", GeneratorTraining._step
    assert run_command_line([*TINY, f"out={whole}"]) == 0

    def interrupted(self: GeneratorTraining, number: int) -> tuple[float, float]:
        if number == 2:
            raise Interrupted(signal.SIGINT)
        return step(self, number)

    monkeypatch.setattr(GeneratorTraining, "_step", interrupted)
    assert run_command_line([*TINY, f"out={stopped}"]) == 130
    assert "the same command goes on from there" in capfd.readouterr().err
    assert not stopped.exists()
    monkeypatch.setattr(GeneratorTraining, "_step", step)
    kept = stopped.with_name("stopped.training").read_bytes()
    assert run_command_line([*TINY, "seed=1", f"out={stopped}"]) == 2
    assert "is of another that was stopped" in " ".join(capfd.readouterr().err.split())
    assert stopped.with_name("stopped.training").read_bytes() == kept
    short, long = tmp_path / "short", tmp_path / "stopped"
    short.with_name("short.training").write_bytes(long.with_name("stopped.training").read_bytes())
    assert run_command_line([*TINY, "steps=1", f"out={short}"]) == 2
    assert "set steps=2" in capfd.readouterr().err
    assert run_command_line([*TINY, "steps=2", f"out={short}"]) == 0
    assert load_generator(short).provenance.steps == 2
    short.unlink()
    capfd.readouterr()
    assert run_command_line([*TINY, f"out={stopped}"]) == 0
    assert "Going on after 2 of 4 steps" in capfd.readouterr().out
    one, other = (load_generator(file).network.state_dict() for file in (whole, stopped))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stopped", "whole"]


def test_without_out_it_goes_into_the_cache_by_its_settings(cache: Path) -> None:
    for settings in ([], [], ["seed=1"], ["split=test", "conditional=false"]):
        assert run_command_line([*TINY, *settings]) == 0
    assert len(list(cache.glob("generator-mnist_mini-train-1x8x8-*.safetensors"))) == 2
    (other,) = cache.glob("generator-mnist_mini-test-1x8x8-*.safetensors")
    assert load_generator(other).network.shape.num_classes == 0


def test_attacks_name_what_it_was_trained_on_and_spare_those(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, everything = tmp_path / "g.safetensors", [*TINY[2:], "images=null"]
    assert run_command_line(["train-generator", *everything, f"out={file}"]) == 0
    chosen = [*ATTACK, f"attack.generator={file}", f"out={tmp_path / 'runs'}"]
    assert run_command_line(chosen) == 0
    (page,) = (tmp_path / "runs").glob("*/report.html")
    assert "trained on mnist_mini, split train, 4,000 images" in page.read_text()
    capfd.readouterr()
    for refused in (
        [*chosen, "split=train"],
        ["run", *chosen[1:], "federation.rounds=1", "federation.clients=2"],
    ):
        assert run_command_line(refused) == 2
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert "trained on mnist_mini, split train, 4,000 images, with 100 %" in line


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ([*TINY, "steps=0"], "at least 1"),
        ([*TINY, "split=valid"], "one of train, test"),
        ([*TINY, "images=1"], "at least 2"),
        ([*TINY, "data.image_size=10"], "multiple of 4"),
        ([*TINY, "step=3"], "did you mean steps?"),
        ([*TINY, "width=x"], "whole number"),
        ([*TINY, "conditional=2"], "true or false"),
        (ATTACK, "fl-privacy train-generator"),
        ([*ATTACK, "attack.generator=missing"], "fl-privacy train-generator"),
        ([*ATTACK, "attack.optimizer=sgd"], "adam or cma"),
        ([*ATTACK, "attack=inverting_gradients", "attack.space=latent"], "pixels"),
    ],
)
def test_wrong_input_is_one_line(command: list[str], hint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(command) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert hint in error[0]
