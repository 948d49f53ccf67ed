"""What an update itself tells of how its client trained."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fl_privacy.attacks.gradient_inversion.grouping import group_victims, victims_of
from fl_privacy.federation.interception import at_typical_rates, describe_model, recognize_training
from fl_privacy.federation.interception.infer_plan import estimated_lr
from fl_privacy.types import LocalPlan, ModelState, Observation, Upload, VictimId


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def observed(*, examples: int = 1, steps: int = 1, lr: float = 0.1, mode: str = "train", **plan: Any) -> Observation:
    torch.manual_seed(1)
    net = Net()
    net.drop.p = 0.0
    sent = ModelState.of(net)
    images, labels = torch.rand(examples, 1, 6, 6), torch.arange(examples) % 3
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    net.norm.train(mode == "train")
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    got = ModelState.of(net)
    return Observation(
        id=VictimId(1, 0, 0),
        model=net,
        sent=sent,
        upload=Upload(tensors=got.parameters, buffers=got.buffers, num_examples=examples),
        plan=LocalPlan(**{"shares": "weights", "epochs": 1, "batch_size": 32, **plan}),
        input_shape=(1, 6, 6),
        num_classes=3,
    )


@pytest.mark.parametrize(
    ("seen", "told", "plan", "line"),
    [
        ({}, (), {"batch_norm": "train"}, "are the values sent plus a step: weights"),
        ({"mode": "eval"}, (), {"batch_norm": "eval"}, "evaluation mode"),
        (
            {"steps": 3, "examples": 2},
            ("epochs",),
            {"steps": 3, "epochs": None},
            "says 1 local steps on 2 examples, but batch norm counted 3",
        ),
        (
            {"shares": "delta"},
            ("shares",),
            {"shares": "weights"},
            "said to be a delta, but are the values sent plus a step",
        ),
        ({"lr": 0.1}, ("lr",), {}, "The plan's learning rate is 0.01, but"),
    ],
)
def test_a_plan_is_corrected(seen: dict[str, Any], told: tuple[str, ...], plan: dict[str, Any], line: str) -> None:
    found, said = recognize_training(observed(**seen), told)
    assert {name: getattr(found.plan, name) for name in plan} == plan
    assert line in " ".join(said)


@pytest.mark.parametrize(
    ("told", "expected"),
    [((), {"epochs": 1, "batch_size": 2}), (("batch_size",), {"epochs": 3, "batch_size": 32})],
)
def test_the_number_of_local_steps_is_counted(told: tuple[str, ...], expected: dict[str, int]) -> None:
    plan = recognize_training(observed(steps=3, examples=6), told)[0].plan
    assert {name: getattr(plan, name) for name in expected} == expected


def test_a_change_of_the_weights_is_told_from_weights() -> None:
    weights = observed()
    change = replace(weights, upload=replace(weights.upload, tensors=weights.update()))
    found, said = recognize_training(change)
    assert found.plan.shares == "delta" and "taken as the change" in " ".join(said)


@pytest.mark.parametrize("lr", [0.003, 0.1, 1.0])
def test_the_learning_rate_of_one_step_is_estimated(lr: float) -> None:
    found = estimated_lr(observed(lr=lr))
    assert found is not None and lr / 2 < found < lr * 2
    plan = recognize_training(observed(lr=lr))[0].plan
    assert plan.lr == found


def test_dropout_is_told() -> None:
    assert "1 layer of dropout" in " ".join(describe_model(Net()))
    assert not describe_model(nn.Linear(2, 2))


def test_rates_of_single_images_are_the_median_of_their_round_unless_far_off() -> None:
    rates = {(1, 0): 0.09, (1, 1): 0.1, (1, 2): 0.12, (1, 3): 0.9, (2, 0): 0.05}
    seen = [
        replace(o, id=VictimId(*id, 0), plan=replace(o.plan, lr=lr))
        for (id, lr), o in zip(rates.items(), [observed()] * 5, strict=True)
    ]
    many = replace(observed(examples=2), id=VictimId(1, 4, 0))
    found = at_typical_rates([*seen, many])
    assert [o.plan.lr for o in found] == pytest.approx([0.11, 0.11, 0.11, 0.9, 0.05, many.plan.lr])
    assert [o.id for o in found] == [o.id for o in [*seen, many]]
    together = group_victims(victims_of(enumerate(found[:3])))
    assert len(together) == 1 and len(group_victims(victims_of(enumerate(seen[:3])))) == 3
