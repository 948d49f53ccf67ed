"""What an app's own training gives away, and the privacy test of a build."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.transforms.functional import normalize

from fl_privacy.attacks.gradient_inversion.grouping import group_victims, victims_of
from fl_privacy.auditing.regression import measure_training
from fl_privacy.cli.main import run_command_line
from fl_privacy.defenses import dp_noise, pruning, spn
from fl_privacy.errors import UserError
from fl_privacy.types import Batch, Observation, Reconstruction
from tests.experiment.runs import run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "privacy_test"

BUILDS = """
import os, sys, pytest
from pathlib import Path
options = ["-q", "-p", "no:cacheprovider", "-p", "fl_privacy.auditing.regression.plugin"]
statuses = []
for size, more in (("8", []), *[("8", ["--fl-privacy"])] * ("whole" in sys.argv), ("1", ["--fl-privacy"])):
    os.environ["BATCH_SIZE"] = size
    for name in ("app", "test_leakage"):
        sys.modules.pop(name, None)
    if size == "1":  # a far weaker attack sees it too
        test, usual = Path("test_leakage.py"), "auto attack.budget=quick"
        assert usual in test.read_text()
        test.write_text(test.read_text().replace(usual, "inverting_gradients attack.iterations=60"))
    print("BUILD")
    statuses.append(int(pytest.main([*options, *more])))
print("STATUSES", statuses)
"""


def pictures(count: int) -> list[tuple[torch.Tensor, int]]:
    drawn = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(0)) / 255
    drawn[:, :, 0, 0], drawn[:, :, 0, 1] = 0, 1
    return [(image, index % 3) for index, image in enumerate(drawn)]


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 3))


def train(model: nn.Module, loader: torch.utils.data.DataLoader) -> None:
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)


def test_single_images_behind_a_linear_layer_are_read_and_noise_hides_them() -> None:
    told = {"model": net, "train": train, "data": pictures(6), "images": 6, "attack": "analytic"}
    open_, noisy = measure_training(**told), measure_training(**told, defense=dp_noise(scale=0.1, clip_norm=1.0))
    assert min(open_.values) > 30 and max(noisy.values) < 20
    assert open_.victims == noisy.victims and open_.uploads == tuple(range(6)) and (open_.read, noisy.read) == (6, 0)


@pytest.mark.parametrize("knowing", [True, False])
def test_of_an_attacker_that_knows_the_defense_and_one_that_does_not_the_better_counts(knowing: bool) -> None:
    images = torch.stack([image for image, _ in pictures(6)])

    def attack(observations: Sequence[Observation], *, seed: int) -> list[Reconstruction]:
        return [
            Reconstruction(
                id=o.id,
                batch=Batch(
                    images[[o.id.probe]] + (0.01 if (o.knowledge.defense is not None) is knowing else 0.5),
                    torch.zeros(1, dtype=torch.int64),
                ),
            )
            for o in observations
        ]

    told = {"model": net, "train": train, "data": pictures(6), "images": 6, "attack": attack}
    assert min(measure_training(**told, defense=pruning(rate=0.5)).values) > 39
    assert (min(measure_training(**told).values) > 39) is not knowing


def test_single_images_are_attacked_together() -> None:
    """Learning rates that are estimated for each differ in late digits, which would part them."""
    seen: list[Observation] = []

    def attack(observations: Sequence[Observation], *, seed: int) -> list[Reconstruction]:
        seen.extend(observations)
        return [Reconstruction(id=o.id, batch=None, failure="none") for o in observations]

    with pytest.raises(UserError):
        measure_training(model=net, train=train, data=pictures(6), images=6, attack=attack)
    assert len(group_victims(victims_of(enumerate(seen)))) == 1


def test_images_are_judged_as_they_were_before_their_normalization() -> None:
    plain = [(image, label) for image, label in pictures(6)]
    brought = [(normalize(image, [0.5], [0.25]), label) for image, label in plain]
    told = {"model": net, "train": train, "images": 6, "attack": "analytic"}
    assert measure_training(**told, data=brought).victims == measure_training(**told, data=plain).victims
    assert min(measure_training(**told, data=brought).values) > 30


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"images": 7, "batch_size": 2}, "multiple of batch_size=2"),
        ({"images": 8}, "holds 6"),
        ({"train": lambda model, loader: None}, "left it as it was"),
        ({"train": lambda model, loader: 1 / 0}, "ZeroDivisionError"),
        ({"model": lambda: 3}, "torch.nn.Module"),
        ({"defense": spn()}, "on the upload alone"),
        ({"attack": "none"}, "expected to name an attack"),
        ({"metric": "label_correct"}, "metric is expected"),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict, line: str) -> None:
    told = {"model": net, "train": train, "data": pictures(6), "images": 6, "attack": "analytic", **change}
    with pytest.raises(UserError, match=line) as error:
        measure_training(**told)
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("build", ["short", pytest.param("whole", marks=pytest.mark.fuzz)])
def test_the_example_s_build_passes_and_fails_with_batches_of_one(build: str, tmp_path: Path) -> None:
    folder = tmp_path / "privacy_test"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BUILDS, build], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert f"STATUSES {[0] * (2 if build == 'whole' else 1) + [1]}" in done.stdout, done.stdout + done.stderr
    _, skipped, *passed, failed = done.stdout.split("BUILD")
    assert "s " in skipped
    assert all("no more than before" in said for said in passed)
    assert "The uploads leak more than before: mean PSNR" in failed and "--fl-privacy-update" in failed


def test_a_run_is_checked_by_a_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = ("attack", "model=mlp", "attack=analytic", "victims=6", "data.image_size=8")
    defended = run(*common, "defense=dp_noise", "defense.scale=0.05", out=tmp_path).path
    open_ = run(*common, out=tmp_path).path
    baseline = f"--baseline={tmp_path / 'kept.json'}"
    capfd.readouterr()
    expected = ((defended, [], 2), (defended, ["--update"], 0), (defended, [], 0), (open_, [], 1))
    for folder, more, status in expected:
        assert run_command_line(["check-leakage", str(folder), baseline, *more]) == status
    said = capfd.readouterr()
    assert "write it by --update" in said.err
    assert "leak no more than before" in said.out and "leak more than before" in said.out.splitlines()[-1]
