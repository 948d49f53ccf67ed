"""Default settings train: accuracies on the embedded digits."""

from pathlib import Path

import pytest

from tests.experiment.runs import run

DEFAULTS = [
    ("lenet", "fedavg", 5, 0.7),
    ("mlp", "fedavg", 5, 0.7),
    ("lenet5", "fedavg", 8, 0.6),
    ("lenet", "fedsgd", 40, 0.7),
    ("mlp", "fedsgd", 60, 0.6),
]
"""Model, federation, rounds, accuracy to reach; guessing reaches 0.1."""


@pytest.mark.parametrize(("model", "federation", "rounds", "least"), DEFAULTS)
def test_every_default_learns_the_digits(
    tmp_path: Path, model: str, federation: str, rounds: int, least: float
) -> None:
    settings = (f"model={model}", f"federation={federation}", f"federation.rounds={rounds}")
    trained = run("run", *settings, f"evaluate_every={rounds}", "attack=none", out=tmp_path)
    assert trained.status == 0
    assert trained.json("summary.json")["final_accuracy"] > least


def test_many_steps_in_a_round_do_not_shake_the_model(tmp_path: Path) -> None:
    """On colored 32x32 images, as of CIFAR-10, a learning rate of 0.05 ends below 0.85 here, and diverges there."""
    settings = ("model=lenet", "federation=fedavg", "federation.clients=1", "federation.rounds=1")
    colored = ("data.image_size=32", "data.channels=3", "federation.plan.epochs=2")
    trained = run("run", *settings, *colored, "attack=none", out=tmp_path)
    assert trained.json("summary.json")["final_accuracy"] > 0.88
