"""The surrogate model: updates of many local steps matched by one gradient on the way."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy import reconstruct
from fl_privacy.attacks import SurrogateModel
from fl_privacy.attacks.auto.attack import ON_THE_WAY, StageState, begin_race
from fl_privacy.attacks.auto.sub_attacks import most_attempts
from fl_privacy.attacks.gradient_inversion import sme
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.errors import UserError
from fl_privacy.types import Batch, LocalPlan, Observation
from tests.attacks.gradient_inversion.test_adam_step import after_adam, image, lenet


def after(
    epochs: int, *, images: torch.Tensor, labels: torch.Tensor, number: int = 0, net: nn.Module | None = None
) -> Observation:
    """Train a client for some epochs of one image a step, and observe its weights."""
    net = net or lenet()
    work = deepcopy(net)
    steps = torch.optim.SGD(work.parameters(), lr=0.01)
    for _ in range(epochs):
        for place in torch.randperm(len(images)):
            steps.zero_grad()
            nn.functional.cross_entropy(work(images[place][None]), labels[place][None]).backward()
            steps.step()
    plan = LocalPlan(shares="delta", lr=0.01, epochs=epochs, batch_size=1)
    told = {"input_shape": (1, 16, 16), "num_examples": len(images), "loss": "cross_entropy"}
    return Observation.of_update(net, work.state_dict(), plan, number=number, **told)


@pytest.mark.long
def test_a_model_on_the_way_explains_many_steps_of_an_image_better_than_the_one_sent() -> None:
    seen = after(20, images=image(), labels=torch.tensor([3]))
    between = reconstruct(seen, "sme", iterations=150)
    sent = reconstruct(seen, "sme", iterations=150, between=0.0, between_lr=0.0)
    assert between.loss < sent.loss / 10
    assert 0.3 < float(between.notes[-1].split(" at ")[1].split()[0]) < 0.6


def test_auto_takes_it_where_steps_over_several_images_are_too_many_to_be_replayed() -> None:
    images = torch.stack([image()[0], 1 - image()[0]])
    seen = after(20, images=images, labels=torch.tensor([0, 3]))
    found = reconstruct(seen, "auto", evaluations=25)
    assert found.member == "surrogate model" and found.batch.inputs.shape == images.shape


def test_a_start_on_the_way_takes_the_place_of_another_attempt() -> None:
    """More attempts would leave each fewer evaluations, and the best one a worse start."""
    group = Group({0: after(5, images=image(), labels=torch.tensor([3]))})
    given = Batch(torch.full((1, 1, 16, 16), 0.5), torch.tensor([3]))
    for found_by, more in ((ON_THE_WAY, 0), ("exact", 1)):
        race, _ = begin_race(StageState(group=group, seed=0, evaluations=600, starts={0: [(given, found_by)]}))
        assert race.most == most_attempts(600) + more


def test_victims_do_not_depend_on_each_other_and_seeds_repeat() -> None:
    net = lenet()
    one = after(2, images=image(), labels=torch.tensor([3]), net=net)
    other = after(2, images=1 - image(), labels=torch.tensor([3]), number=1, net=net)
    both, alone = reconstruct([one, other], "sme", iterations=5), reconstruct(one, "sme", iterations=5)
    assert torch.equal(both[0].batch.inputs, alone.batch.inputs)


class Undecided(nn.Module):
    """A network whose way depends on its inputs, which no call over many victims can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lenet()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (B, 1, 16, 16) to logits."""
        return self.inner(inputs) if float(inputs.detach().sum()) > -1 else self.inner(-inputs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "optimizer"),
    [
        pytest.param(net, optimizer, marks=[pytest.mark.fuzz] if later else [], id=f"{optimizer}-{way}")
        for net, way, optimizer, later in (
            (lenet(), "at once", "adam", False),
            (Undecided(), "one by one", "sgd", False),
            (lenet(), "at once", "sgd", True),
            (Undecided(), "one by one", "adam", True),
        )
    ],
)
def test_victims_together_are_found_as_each_alone(net: nn.Module, optimizer: str) -> None:
    seen = [
        after(3, images=torch.cat([image() * share, 1 - image()]), labels=torch.tensor([0, 3]), number=number, net=net)
        for number, share in enumerate((0.3, 0.6, 1.0))
    ]
    seen = [replace(one, plan=replace(one.plan, optimizer=optimizer)) for one in seen]
    together = reconstruct(seen, "sme", iterations=40)
    for one, own in zip(together, [reconstruct(each, "sme", iterations=40) for each in seen], strict=True):
        torch.testing.assert_close(one.batch.inputs, own.batch.inputs)
        torch.testing.assert_close(torch.tensor(one.history), torch.tensor(own.history), rtol=1e-4, atol=1e-5)


def test_models_of_many_values_are_attacked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sizes, of = lenet(), list[int](), sme._Between.of
    seen = [after(2, images=image(), labels=torch.tensor([3]), number=number, net=net) for number in range(3)]
    monkeypatch.setattr(sme, "_VALUES", 2 * sum(value.numel() for value in net.parameters()))
    monkeypatch.setattr(sme._Between, "of", lambda prepared, some: sizes.append(len(some)) or of(prepared, some))
    assert [one.failure for one in reconstruct(seen, "sme", iterations=2)] == [None] * 3
    assert sizes == [2, 1]


def test_gradients_are_refused_in_a_line_and_settings_are_checked() -> None:
    net = lenet()
    gradient = torch.autograd.grad(nn.functional.cross_entropy(net(image()), torch.tensor([3])), list(net.parameters()))
    observed = Observation.of_gradients(net, gradient, input_shape=(1, 16, 16), batch_size=1)
    assert "but got a gradient" in reconstruct(observed, "sme").failure
    assert "got one of Adam" in reconstruct(after_adam()[0], "sme").failure
    with pytest.raises(UserError, match=r"attack\.between is expected"):
        SurrogateModel(between=2)


@pytest.mark.parametrize("attack", ["sme", "auto"])
def test_inputs_that_are_no_images_are_refused_in_a_line(attack: str) -> None:
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(2, 20)
    work = deepcopy(net)
    steps = torch.optim.SGD(work.parameters(), lr=0.01)
    for _ in range(5):
        steps.zero_grad()
        nn.functional.cross_entropy(work(inputs), torch.tensor([0, 1])).backward()
        steps.step()
    plan = LocalPlan(shares="delta", lr=0.01, steps=5, batch_size=2)
    seen = Observation.of_update(net, work.state_dict(), plan, input_shape=(20,), num_examples=2, loss="cross_entropy")
    assert reconstruct(seen, attack).failure.startswith("Images (C, H, W) are expected, but the model takes inputs")
