"""A client's round against the same training written with torch.optim."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.errors import UserError
from fl_privacy.federation import LocalResult, local_update
from fl_privacy.models.gradients import set_mode
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors
from tests.federation import harness


def batches(number: int) -> list[Batch]:
    data = harness.examples(6 * number)
    return [data.batch(indices) for indices in torch.arange(len(data)).split(6)]


def run(plan: LocalPlan, steps: int, **changes: Any) -> tuple[LocalResult, ClientState]:
    state = changes.pop("state", ClientState())
    settings: dict[str, Any] = {
        "num_examples": 6 * steps,
        "plan": plan,
        "defense": Defense(),
        "state": state,
        "rng": torch.Generator().manual_seed(0),
        "private_rng": torch.Generator().manual_seed(1),
    }
    result = local_update(harness.small_net(), ModelState.of(harness.small_net()), batches(steps), **settings | changes)
    return result, state


def reference(make_optimizer: Callable[[Any], torch.optim.Optimizer], plan: LocalPlan, steps: int) -> harness.SmallNet:
    model = harness.small_net()
    set_mode(model, plan.batch_norm)
    optimizer = make_optimizer(model.parameters())
    for batch in batches(steps):
        optimizer.zero_grad()
        (plan.loss_scale * nn.functional.cross_entropy(model(batch.inputs), batch.labels)).backward()
        optimizer.step()
    return model


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
    "adam": ({"optimizer": "adam", "weight_decay": 0.1}, lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
    "frozen norm": ({"batch_norm": "eval"}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "loss scale": ({"loss_scale": 3.0}, lambda p: torch.optim.SGD(p, lr=0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_delta_is_that_of_torch_optim(name: str) -> None:
    settings, make_optimizer = OPTIMIZERS[name]
    plan = LocalPlan(shares="delta", lr=0.1, steps=3, **settings)

    result, _ = run(plan, 3)

    before, after = harness.small_net(), reference(make_optimizer, plan, 3)
    for parameter, trained in after.named_parameters():
        expected = trained.detach() - before.get_parameter(parameter).detach()
        torch.testing.assert_close(result.upload.tensors[parameter], expected, rtol=1e-4, atol=1e-6)
    for buffer, value in after.named_buffers():
        torch.testing.assert_close(result.upload.buffers[buffer], value)


def test_weights_are_what_was_sent_plus_the_delta() -> None:
    weights, _ = run(LocalPlan(shares="weights", lr=0.1, steps=2), 2)
    delta, _ = run(LocalPlan(shares="delta", lr=0.1, steps=2), 2)

    for name, p in harness.small_net().named_parameters():
        torch.testing.assert_close(weights.upload.tensors[name], p.detach() + delta.upload.tensors[name])


def test_the_gradient_is_that_of_autograd() -> None:
    result, _ = run(harness.FEDSGD, 1)

    model, (batch,) = harness.small_net(), batches(1)
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(result.upload.tensors[name], p.grad)
    assert result.train_loss == pytest.approx(loss.item())


def test_the_loss_is_the_mean_over_the_steps() -> None:
    first, _ = run(harness.FEDAVG, 1)
    both, _ = run(harness.FEDAVG, 2)

    assert both.train_loss != pytest.approx(first.train_loss)
    assert first.seconds >= first.defense_seconds >= 0


def test_withheld_buffers_do_not_leave() -> None:
    result, _ = run(LocalPlan(shares="delta", buffers="withheld"), 1)

    assert result.upload.buffers == {}


def test_what_was_sent_is_left_as_it_was() -> None:
    sent = ModelState.of(harness.small_net())

    local_update(
        harness.small_net(),
        sent,
        batches(2),
        num_examples=12,
        plan=harness.FEDAVG,
        defense=Defense(),
        state=ClientState(),
        rng=torch.Generator(),
        private_rng=torch.Generator(),
    )

    harness.assert_same_state(sent, ModelState.of(harness.small_net()))


def test_hooks_run_in_order_at_their_places() -> None:
    calls: list[str] = []

    def data(name: str) -> Any:
        return lambda batch, state, rng: (calls.append(name), batch)[1]

    def gradient(name: str) -> Any:
        def hook(gradients: Any, step: LocalStep) -> Any:
            assert isinstance(step, LocalStep)
            calls.append(name)
            return {n: g * 2 for n, g in gradients.items()}

        return hook

    def upload(name: str) -> Any:
        return lambda update, state, rng: (calls.append(name), update)[1]

    defense = Defense(
        data=(data("d1"), data("d2")), gradient=(gradient("g1"), gradient("g2")), upload=(upload("u1"), upload("u2"))
    )
    defended, _ = run(LocalPlan(shares="delta", lr=0.1, steps=2), 2, defense=defense)

    assert calls == ["d1", "d2", "g1", "g2"] * 2 + ["u1", "u2"]
    plain, _ = run(LocalPlan(shares="delta", lr=0.4, steps=2), 2)
    torch.testing.assert_close(defended.upload.tensors["out.bias"], plain.upload.tensors["out.bias"])


@pytest.mark.parametrize("plan", [harness.FEDSGD, harness.FEDAVG], ids=["gradient", "delta"])
def test_private_parameters_train_and_stay(plan: LocalPlan) -> None:
    defense = Defense(model=(harness.with_private_head,))

    result, state = run(plan, 1, defense=defense)
    kept = {n: t.clone() for n, t in state.tensors.items()}
    run(plan, 1, defense=defense, state=state)

    assert set(result.upload.tensors) == {n for n, _ in harness.small_net().named_parameters()}
    assert set(state.tensors) == {"private/private.weight", "private/private.bias"}
    assert not torch.equal(kept["private/private.bias"], state.tensors["private/private.bias"])


def test_a_model_hook_may_not_rename_public_parameters() -> None:
    defense = Defense(model=(lambda model, state, rng: nn.Linear(3, 3),))

    with pytest.raises(UserError, match="keep the parameter names it was sent"):
        run(harness.FEDAVG, 1, defense=defense)


def test_gradient_hooks_get_what_is_uploaded_and_private_parameters_go_their_own_way() -> None:
    net, seen = harness.NetWithPrivateHead(), []

    def silence(tensors: Tensors, step: LocalStep) -> Tensors:
        seen.append(tensors.keys())
        return {name: torch.zeros_like(t) for name, t in tensors.items()}

    defense = Defense(model=(lambda model, state, rng: net,), gradient=(silence,))
    result, state = run(harness.FEDAVG, 2, defense=defense)

    assert seen == [ModelState.of(harness.small_net()).parameters.keys()] * 2
    assert not any(t.any() for t in result.upload.tensors.values())
    assert not torch.equal(state.tensors["private/private.weight"], net.private.weight)
