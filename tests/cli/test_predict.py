"""``fl-privacy predict`` answers in a sentence, and in one line about a wrong option."""

import json

import pytest

from fl_privacy.cli.main import run_command_line


def test_a_network_is_predicted_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["predict", "model=mlp", "--shape", "1x8x8", "--classes", "3"]) == 0
    assert capsys.readouterr().out.startswith("reconstructible: ")
    asked = ["predict", "model=resnet20", "model.width=4", "batch_size=8", "--json"]
    assert run_command_line(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "not by these attacks" and found["layers"][0]["unknowns"] == 8 * 3 * 32 * 32
    assert len(found["layers"]) > 19


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (["model=lenet", "--shape", "3x32"], "--shape is expected to be CHANNELSxHEIGHTxWIDTH"),
        (["model=lenet", "--classes", "1"], "--classes is expected"),
        (["model=nope"], "nope"),
        (["model=mlp", "defense=dp_noise"], "defense=dp_noise"),
        (["model=mlp", "server=imprint"], "server=imprint"),
        (["model=mlp", "threat_model=another_site"], "threat_model.observer=another_site"),
        (["model=mlp", "weights=runs/trained"], "weights=runs/trained"),
        (["data=mnist_mini", "--classes", "3"], "expected without data="),
    ],
)
def test_a_wrong_option_is_one_line(asked: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["predict", *asked]) != 0
    said = capsys.readouterr().err.strip()
    assert line in said and len(said.splitlines()) == 1


def test_frozen_layers_and_the_data_of_a_setting_count(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "data.name=mnist_mini", "model=mlp"]
    assert run_command_line([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["unknowns"] == 28 * 28
    assert run_command_line([*asked, "federation.plan.frozen=[features.0.weight]"]) == 0
    assert capsys.readouterr().out.startswith("unknown: ")
