"""Each attack, defense, server, model, study and backend runs on a GPU; ``make test-gpu``.

``FL_PRIVACY_TEST_DEVICE=cpu make test-gpu`` rehearses the commands where there is none.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from fl_privacy.cli.main import run_command_line
from tests.experiment.runs import run

from .parts import COMMANDS

DEVICE = os.environ.get("FL_PRIVACY_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]
NEEDED = {"ray": "ray", "flower": "flwr", "defense-local_dp_mod": "flwr"}
GENERATOR = ["images=40", "data.image_size=28", "steps=4", "latent=4", "width=2", "batch_size=8"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of forty short sentences of two classes."""
    words = ["a", "fine", "dull", "warm", "film", "plot", "image", "acts", "joy", "ends", "cast", "songs"]
    folder = tmp_path_factory.mktemp("texts")
    for label, shift in (("bad", 0), ("good", 5)):
        lines = [" ".join(words[(shift + k * step) % len(words)] for k in range(3, 9)) for step in range(1, 21)]
        (folder / f"{label}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with a generator that was trained for a moment."""
    file = tmp_path_factory.mktemp("generator") / "generator.safetensors"
    assert run_command_line(["train-generator", *GENERATOR, f"device={DEVICE}", f"out={file}"]) == 0
    return file


@pytest.mark.parametrize("name", COMMANDS)
def test_a_part_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip(NEEDED.get(name, "torch"))
    line = COMMANDS[name] if DEVICE != "cpu" else COMMANDS[name].replace("num_gpus=0.5", "num_gpus=0")
    for file in ("texts", "generator"):
        if f"{{{file}}}" in line:
            line = line.replace(f"{{{file}}}", str(request.getfixturevalue(file)))
    command, *settings = line.split()
    if command == "train-evaluator":
        assert run_command_line([command, *settings, f"device={DEVICE}", f"out={tmp_path / 'e.safetensors'}"]) == 0
        return
    done = run(command, *settings, f"device={DEVICE}", out=tmp_path)
    assert done.status == 0
    if command in ("run", "attack"):
        assert bool(done.json("environment.json")["gpus"]) == torch.cuda.is_available()
        failures = [json.dumps(victim) for victim in done.records("victim") if victim.get("failure")]
        assert not failures
