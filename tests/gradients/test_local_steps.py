from collections.abc import Callable

import pytest
import torch

from fl_privacy.attacks import idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion.targets import accumulated_gradient, as_gradient, needs_unrolling
from fl_privacy.models.gradients import Unrolled, VictimModel, frozen_copy, loss_gradients, victims
from fl_privacy.models.gradients.choose_method import step_slices
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId
from tests.attacks.victims import CLASSES, SHAPE, error, examples, smooth_net

PLANS = {
    "one step": LocalPlan(shares="delta", lr=0.1, steps=1),
    "weights": LocalPlan(shares="weights", lr=0.1, epochs=2, batch_size=2),
    "momentum": LocalPlan(shares="delta", lr=0.1, epochs=2, batch_size=2, momentum=0.9),
    "nesterov": LocalPlan(shares="delta", lr=0.1, steps=3, batch_size=2, momentum=0.8, nesterov=True, weight_decay=0.1),
    "short batch": LocalPlan(shares="delta", lr=0.1, epochs=1, batch_size=3, loss_scale=2.0),
    "adamw": LocalPlan(shares="delta", lr=0.01, steps=3, batch_size=4, optimizer="adamw", weight_decay=0.1),
    "adam": LocalPlan(shares="delta", lr=0.01, steps=3, batch_size=4, optimizer="adam"),
}


def observe_training(batch: Batch, plan: LocalPlan) -> Observation:
    """Observe a client that visits its examples in the order that the attacker assumes."""
    model = smooth_net()
    sent = ModelState.of(model)
    parameters = {name: p.clone().requires_grad_() for name, p in sent.parameters.items()}
    if plan.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters.values(), lr=plan.lr)
    elif plan.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters.values(), lr=plan.lr, weight_decay=plan.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            parameters.values(),
            lr=plan.lr,
            momentum=plan.momentum,
            nesterov=plan.nesterov,
            weight_decay=plan.weight_decay,
        )
    for step in step_slices(len(batch), plan):
        part = Batch(batch.inputs[step], batch.labels[step])
        result = loss_gradients(model, ModelState(parameters), part, loss_scale=plan.loss_scale)
        for name, parameter in parameters.items():
            parameter.grad = result.gradients[name]
        optimizer.step()
    trained = {name: p.detach() for name, p in parameters.items()}
    shared = trained if plan.shares == "weights" else {n: p - sent.parameters[n] for n, p in trained.items()}
    return Observation(
        id=VictimId(0, 0, 0),
        model=model,
        sent=sent,
        upload=Upload(tensors=shared, num_examples=len(batch)),
        plan=plan,
        input_shape=SHAPE,
        num_classes=CLASSES,
        knowledge=Knowledge(labels=batch.labels),
    )


@pytest.mark.parametrize("columns", [None, 0, victims._COLUMNS], ids=["vmap", "grouped", "columns"])
@pytest.mark.parametrize("name", PLANS)
def test_the_replay_of_the_truth_is_what_torch_trains(
    name: str, columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victims, "_COLUMNS", columns or 0)
    plan, batch = PLANS[name], examples(4)
    seen = observe_training(batch, plan)
    model = frozen_copy(seen.model, seen.sent, plan, device=torch.device("cpu"), dtype=torch.float64)
    both = torch.stack([batch.inputs, batch.inputs.flip(0)])
    replay = Unrolled(VictimModel(model, list(seen.upload.tensors), plan), None if columns is None else both)
    assert (replay._joined is None) == (columns is None)
    found = replay(both, torch.stack([batch.labels, batch.labels.flip(0)]))
    for key, expected in accumulated_gradient(seen).items():
        torch.testing.assert_close(found[key][0], expected, rtol=1e-6, atol=1e-8)


class _Mixing(torch.nn.Module):
    """Subtracts the mean of all images of a pass, which joins victims that have nothing to do with each other."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs - inputs.mean(0)


def _norm() -> torch.nn.Module:
    return torch.nn.GroupNorm(1, SHAPE[0]).double()


class _Asking(torch.nn.Module):
    """Network that asks its layers for their sizes, and uses one of them twice, by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.again = torch.nn.Conv2d(SHAPE[0], 4, 3, padding=1), torch.nn.Linear(4, 4)
        self.twice, self.head = self.again, torch.nn.Linear(4, CLASSES)
        self.head.register_forward_hook(lambda layer, given, output: 2 * output)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        maps = self.front(inputs).sigmoid().view(len(inputs), self.front.out_channels, -1).mean(2)
        return self.head(self.twice(self.again(maps.view(-1, self.again.in_features)).sigmoid()))


class _OfThree(torch.nn.Module):
    """Network that takes three images at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = smooth_net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert len(inputs) == 3
        return self.net(inputs)


@pytest.mark.parametrize(("network", "joint"), [(_Asking, True), (_OfThree, False)])
def test_networks_that_look_at_their_layers_or_batches_are_replayed(
    network: Callable[[], torch.nn.Module], joint: bool
) -> None:
    model, plan = network().double().requires_grad_(False), LocalPlan(shares="delta", lr=0.1, steps=2)
    victim_model = VictimModel(model, [name for name, _ in model.named_parameters()], plan)
    inputs = torch.rand((2, 3, *SHAPE), generator=torch.Generator().manual_seed(0)).double()
    replay, labels = Unrolled(victim_model, inputs), torch.tensor([[0, 1, 2], [2, 2, 1]])
    assert (replay._joined is not None) == joint
    torch.testing.assert_close(replay(inputs, labels), Unrolled(victim_model)(inputs, labels))


@pytest.mark.parametrize("layer", [_Mixing, _norm], ids=["mixes images", "has other parameters"])
def test_victims_are_replayed_apart_where_a_joint_pass_is_wrong(layer: Callable[[], torch.nn.Module]) -> None:
    model = torch.nn.Sequential(layer(), smooth_net()).requires_grad_(False)
    plan, names = LocalPlan(shares="delta", lr=0.1, steps=2), [name for name, _ in model.named_parameters()]
    trial = torch.rand((2, 3, *SHAPE), generator=torch.Generator().manual_seed(0)).double()
    assert Unrolled(VictimModel(model, names, plan), trial)._joined is None
    joined = Unrolled(VictimModel(smooth_net().requires_grad_(False), [*smooth_net().state_dict()], plan), trial)
    assert joined._joined is not None


@pytest.mark.parametrize(
    "plan", [PLANS["one step"], LocalPlan(shares="weights", steps=1, weight_decay=0.3, momentum=0.9)]
)
def test_one_step_is_a_gradient_in_disguise(plan: LocalPlan) -> None:
    batch = examples(2)
    seen = observe_training(batch, plan)
    assert not needs_unrolling(plan, 2, "unroll")
    expected = loss_gradients(seen.model, seen.sent, batch).gradients
    for name, gradient in as_gradient(seen).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-8)


def test_first_order_is_right_for_short_steps() -> None:
    plan = LocalPlan(shares="delta", lr=1e-6, steps=4, momentum=0.5)
    batch = examples(2)
    seen = observe_training(batch, plan)
    expected = loss_gradients(seen.model, seen.sent, batch).gradients
    for name, gradient in as_gradient(seen).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_images_are_found_through_several_local_steps() -> None:
    plan = LocalPlan(shares="weights", lr=0.05, epochs=3)
    batch = examples(1)
    seen = observe_training(batch, plan)
    found = idlg(iterations=40, restarts=3, dtype="float64")([seen], seed=0)[0]
    assert found.batch is not None and error(found.batch, batch) < 1e-3
    cheap = inverting_gradients(iterations=100, local_steps="first_order", dtype="float64")([seen], seed=0)[0]
    assert cheap.batch is not None and error(cheap.batch, batch) < 0.06
