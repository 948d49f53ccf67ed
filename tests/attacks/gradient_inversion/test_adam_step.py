"""What a single step of Adam leaves of the gradient behind it."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks import AutoAttack
from fl_privacy.attacks.gradient_inversion.infer_client import disclosed, without_adam
from fl_privacy.measure.images import psnr
from fl_privacy.types import LocalPlan, Observation, Upload

LR = 0.01
"""Of the client: the larger, the finer the quotient that weights in single precision keep."""


def lenet() -> nn.Module:
    """Build a small LeNet with PyTorch's initial values."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, 2, 2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, 1, 2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(768, 10),
    )


def image() -> torch.Tensor:
    """Draw a smooth image (1, 1, 16, 16) in [0, 1]."""
    rows, columns = torch.meshgrid(torch.linspace(0, 3, 16), torch.linspace(0, 2, 16), indexing="ij")
    return (0.5 + 0.5 * torch.sin(2 * rows + columns * rows))[None, None]


def after_adam(steps: int = 1, **options: float) -> tuple[Observation, dict[str, torch.Tensor]]:
    """Return the update of a client by Adam, and the gradient of its first step."""
    net, images, labels = lenet(), image(), torch.tensor([3])
    work = deepcopy(net)
    optimizer, first = torch.optim.Adam(work.parameters(), lr=LR, **options), {}
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(work(images), labels).backward()
        first = first or {name: p.grad.clone() for name, p in work.named_parameters()}
        optimizer.step()
    change = {n: (a - b).detach() for (n, a), b in zip(work.named_parameters(), net.parameters(), strict=True)}
    plan = LocalPlan(shares="delta", lr=LR, optimizer="adam", steps=steps, **options)
    base = Observation.of_gradients(net, first, input_shape=(1, 16, 16), batch_size=1, loss="cross_entropy")
    return replace(base, plan=plan, upload=Upload(tensors=change, num_examples=1)), first


def test_bounds_hold_and_small_gradients_are_known() -> None:
    observation, gradient = after_adam()
    found = without_adam(observation)
    assert found.plan.shares == "gradient" and found.knowledge.bounds is not None
    known = 0
    for name, (low, high) in found.knowledge.bounds.items():
        own = low.isfinite() & high.isfinite()
        sent, true = found.upload.tensors[name], gradient[name]
        assert (~own).all() or ((sent - true).abs()[own] <= 0.25 * true.abs()[own]).float().mean() > 0.97, name
        assert (sent.sign() == true.sign())[true.abs() > 1e-9].float().mean() > 0.99, name
        known += int(own.sum())
    assert known > 80
    assert any("Adam reveals" in note for note in found.notes)


def test_an_l2_penalty_is_taken_off() -> None:
    observation, gradient = after_adam(weight_decay=1e-6)
    found = without_adam(observation)
    assert found.knowledge.bounds is not None
    for name, (low, _) in found.knowledge.bounds.items():
        own = low.isfinite()
        off = (found.upload.tensors[name] - gradient[name]).abs()[own]
        assert not len(off) or (off <= 0.25 * gradient[name].abs()[own] + 2e-7).float().mean() > 0.95, name


@pytest.mark.parametrize("change", ["steps", "defense"])
def test_other_updates_stay_as_they_are(change: str) -> None:
    observation, _ = after_adam(steps=2 if change == "steps" else 1)
    if change == "defense":
        observation = observation.given(defense=("anything",))
    assert without_adam(observation) is observation


@pytest.mark.parametrize(("factor", "said"), [(3.0, "3 learning rates"), (0.1, "0.1 learning rates"), (0.0, "0 learn")])
def test_steps_that_are_not_as_long_as_adams_are_said_and_kept(factor: float, said: str) -> None:
    observation, _ = after_adam()
    other = {name: factor * value for name, value in observation.upload.tensors.items()}
    observation = replace(observation, upload=replace(observation.upload, tensors=other))
    found = without_adam(observation)
    assert found.upload is observation.upload and found.plan is observation.plan and found.knowledge.bounds is None
    assert said in found.notes[-1] and without_adam(found) is found


@pytest.mark.long
def test_auto_reads_an_image_behind_it_and_its_label() -> None:
    observation, _ = after_adam()
    (found,) = AutoAttack(evaluations=600)([observation], seed=0)
    assert found.batch is not None and found.batch.labels.tolist() == [3]
    assert float(psnr(found.batch.inputs, image())) > 17
    assert any("Adam reveals" in note for note in found.notes)


def test_disclosed_keeps_texts_and_gradients() -> None:
    observation, gradient = after_adam()
    shared = replace(observation, plan=LocalPlan(), upload=Upload(tensors=gradient, num_examples=1))
    assert disclosed([shared])[0].observation.knowledge.bounds is None
