"""Every run and attack that the papers' tables name starts from a fresh clone: two steps, on sets of a few images.

`make test-all` starts one of each experiment and attack, `make fuzz` all of them.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_privacy.cli.main import run_command_line
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork
from fl_privacy.models.pretrained.evaluator_files import save_evaluator
from fl_privacy.runs.config import compose_run, expand_sweep
from tests.docs.published_commands import ROOT, expanded_calls
from tests.experiment.runs import undrawn

hf = pytest.importorskip("datasets")

SETS = {
    "cifar10": (32, "RGB", 10), "cifar10_exact": (32, "RGB", 10), "cifar100": (32, "RGB", 100),
    "cifar100_samples": (32, "RGB", 100),
    "svhn": (32, "RGB", 10), "mnist": (28, "L", 10), "fashion_mnist": (28, "L", 10), "lfw": (64, "RGB", 5),
    "celeba": (64, "RGB", 2), "imagenet_sample": (64, "RGB", 25), "tiny_imagenet": (64, "RGB", 20),
}  # fmt: skip
"""Side, mode and classes."""
SMALL = {"iterations": 2, "critics": 2, "images_per_class": 2, "outer_steps": 1, "inner_steps": 1}
"""Of defenses that train a network or images of their own."""
KINDS = ("experiment", "attack")
LEFT_OUT = ("out", "weights", "victims", "films", "evaluator", "defense.evaluator", "intercept.rounds")


def kinds(words: list[str]) -> set[str]:
    return {words[0], *(word for word in words if word.split("=")[0] in KINDS)}


def shortest(calls: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """List the runs and attacks: few that have one of each kind among them, and the others."""
    runs = [words for program, *words in calls if program == "fl-privacy" and words[0] in ("run", "attack")]
    first, missing = [], set().union(*map(kinds, runs))
    while missing:
        first.append(max(runs, key=lambda words: len(kinds(words) & missing)))
        missing -= kinds(first[-1])
    return first, [words for words in runs if words not in first]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a few pictures of noise under the name of each set."""
    root, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, (side, mode, classes) in SETS.items():
        (root / name).mkdir()
        shape = (side, side, 3) if mode == "RGB" else (side, side)
        kinds = {"image": hf.Image(), "label": hf.ClassLabel(num_classes=classes)}
        if name == "celeba":
            kinds |= {"Smiling": hf.Value("bool"), "celeb_id": hf.Value("int32")}
        for split, number in (("train", max(60, classes)), ("test", max(12, classes))):
            pictures = [Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)) for _ in range(number)]
            labels = [n % classes for n in range(number)]
            told = {"image": pictures, "label": labels, "Smiling": [n % 2 == 0 for n in labels], "celeb_id": labels}
            rows = {column: told[column] for column in kinds}
            hf.Dataset.from_dict(rows, features=hf.Features(kinds)).to_parquet(root / name / f"{split}.parquet")
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluator") / "evaluator.safetensors"
    save_evaluator(EvaluationNetwork(input_shape=(3, 32, 32), widths=(2, 2, 2)), path, {})
    return path


def shortened(words: list[str], evaluator: Path, out: Path) -> list[str]:
    """Return a call of two steps: the settings as they are, but for how much is computed."""
    command, *given = words
    judged = any(word.startswith("evaluator=") for word in given)
    given = expand_sweep([w for w in given if "=" in w and w.split("=")[0] not in LEFT_OUT])[0]
    config: Any = compose_run(given)
    few = ["victims=1", "films=0", f"out={out}", "baseline=false", "candidates=12"]
    few += [f"evaluator={evaluator}"] if judged else []
    few += [f"defense.evaluator={evaluator}"] if "evaluator" in (config.defense or {}) else []
    few += [f"defense.{name}={most}" for name, most in SMALL.items() if (config.defense or {}).get(name, 0) > most]
    few += ["batch_size=8"] if config.batch_size > 8 else []
    few += ["attack.iterations=2"] if "iterations" in (config.attack or {}) else []
    few += ["attack.evaluations=20"] if "evaluations" in (config.attack or {}) else []
    few += ["attack.restarts=1"] if (config.attack or {}).get("restarts") else []
    few += ["data.image_size=32"] if (config.data["image_size"] or 0) > 32 else []
    few += ["model.width=8"] if (config.model.get("width") or 0) > 16 else []
    if command == "run":
        few += ["federation.rounds=2", "evaluate_every=2", "intercept.rounds=last"]
        few += ["federation.clients=3"] if config.federation.clients > 3 else []
        plan = config.federation.plan
        few += ["federation.plan.batch_size=4"] if (plan.get("batch_size") or 0) > 4 and not plan.get("epochs") else []
        few += ["federation.plan.epochs=1"] if (plan.get("epochs") or 0) > 1 else []
        few += ["federation.plan.steps=2"] if (plan.get("steps") or 0) > 2 else []
        few += ["federation.plan.lr_drops=[]"] if plan.get("lr_drops") else []
    return [command, *given, *few]


@pytest.fixture
def started(
    data: Path, evaluator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Return a function that starts calls and lists those that fail, with what they say."""
    monkeypatch.setenv("FL_PRIVACY_DATA", str(data))

    def start(calls: list[list[str]]) -> list[str]:
        failed = []
        for number, words in enumerate(calls):
            short = shortened(words, evaluator, tmp_path / str(number))
            with undrawn():
                status = run_command_line(short)
            said = capsys.readouterr()
            if status != 0:
                failed.append(f"{' '.join(short)}\n{status}: {said.err[-600:]}")
        return failed

    return start


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return expanded_calls(tmp_path_factory.mktemp("shell"))


@pytest.mark.long
def test_one_command_of_each_kind_starts(calls: list[list[str]], started: Any) -> None:
    first, _ = shortest(calls)
    assert len(first) > 8
    assert started(first) == []


@pytest.mark.long
@pytest.mark.fuzz
def test_all_other_commands_start(calls: list[list[str]], started: Any) -> None:
    assert started(shortest(calls)[1]) == []


@pytest.mark.long
@pytest.mark.fuzz
def test_every_script_starts(calls: list[list[str]]) -> None:
    for script in sorted({words[0] for program, *words in calls if program == "python"}):
        ran = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=False)
        assert ran.returncode == 0 and re.search("usage:", ran.stdout), script
