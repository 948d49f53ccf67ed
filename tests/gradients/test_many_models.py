"""Many models trained at once are those trained one after the other."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_privacy.defenses import ClientState, none
from fl_privacy.federation import local_update
from fl_privacy.models import ViT
from fl_privacy.models.gradients import (
    ManyModels,
    local_orders,
    many_models,
    many_models as many_convolutions,
    models_at_once,
)
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState

POOL = Batch(torch.rand(40, 2, 6, 6, generator=derive_generator(0)), torch.arange(40) % 3)


def network(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, bias=not norm),
        nn.BatchNorm2d(5) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(80, 3),
    )


@pytest.mark.parametrize("alone_from", [0, math.inf], ids=["large", "small"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        LocalPlan(shares="delta", lr=0.1, epochs=2, batch_size=5, momentum=0.9, weight_decay=1e-3),
        LocalPlan(shares="delta", lr=0.01, steps=3, batch_size=4, optimizer="adam"),
        LocalPlan(lr=0.1),
    ],
    ids=["momentum", "adam", "gradient"],
)
def test_many_are_one_by_one(plan: LocalPlan, norm: bool, alone_from: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_convolutions, "_FILLS", alone_from)
    model, subsets = network(norm), torch.stack([torch.randperm(40)[:12] for _ in range(3)])
    sent = ModelState.of(model)
    order = local_orders(subsets, plan, derive_generator(1))
    found = ManyModels.copies(model, sent, 3).trained(POOL, order, plan)
    for place in range(3):
        batches = [Batch(POOL.inputs[rows[place]], POOL.labels[rows[place]]) for rows in order]
        alone = local_update(
            model, sent, batches, num_examples=12, plan=plan, defense=none(), state=ClientState(),
            rng=derive_generator(2), private_rng=derive_generator(3),
        ).upload  # fmt: skip
        values = found[place]
        for name, parameter in values.parameters.items():
            moved = parameter - sent.parameters[name]
            expected = alone.tensors[name] * (-plan.lr if plan.shares == "gradient" else 1)
            torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-5)
        for name, buffer in alone.buffers.items():
            torch.testing.assert_close(values.buffers[name], buffer)
        with torch.no_grad():
            expected = torch.func.functional_call(
                model.eval(), {**values.parameters, **values.buffers}, (POOL.inputs[:7],)
            )
        torch.testing.assert_close(
            found.measured(POOL, lambda logits, _: logits)[place, :7], expected, rtol=1e-4, atol=1e-5
        )


def test_orders_visit_each_example_once_an_epoch() -> None:
    subsets = torch.stack([torch.randperm(40)[:11] for _ in range(4)])
    order = local_orders(subsets, LocalPlan(shares="delta", epochs=2, batch_size=4), derive_generator(0))
    assert [rows.shape[1] for rows in order] == [4, 4, 3] * 2
    for half in (order[:3], order[3:]):
        assert torch.equal(torch.cat(half, 1).sort(1).values, subsets.sort(1).values)
    assert not torch.equal(order[0], order[3])


def test_large_models_are_trained_few_at_a_time() -> None:
    assert models_at_once(network(False), 32) == 256
    assert models_at_once(nn.Linear(8192, 4096), 32) == 1


def test_what_an_evaluation_writes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many models with large maps would fill the memory otherwise."""
    model, seen = network(True), []
    many = ManyModels.copies(model, ModelState.of(model), 3)
    whole = many.measured(POOL, lambda logits, _: logits)
    monkeypatch.setattr(many_models, "_WRITTEN", 60_000)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    torch.testing.assert_close(many.measured(POOL, lambda logits, _: logits), whole)
    assert len(seen) > 3 and max(seen) < 20


def test_each_model_takes_gradients_of_a_length_at_most() -> None:
    model, plan = network(norm=False), LocalPlan(shares="delta", lr=0.5, steps=1, batch_size=6)
    order = [torch.stack([torch.arange(6), torch.arange(6, 12)])]
    models = ManyModels.copies(model, ModelState.of(model), 2)

    def moved(longest: float) -> torch.Tensor:
        values = models.trained(POOL, order, plan, longest=longest).values.parameters
        return torch.cat([(p - models.values.parameters[n]).flatten(1) for n, p in values.items()], 1) / plan.lr

    free = moved(math.inf)
    lengths = free.norm(dim=1)
    between = float(lengths.mean())
    expected = free * (between / lengths).clamp_max(1)[:, None]
    assert lengths.min() < between < lengths.max()
    torch.testing.assert_close(moved(between), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error:.*performance drop")
def test_many_with_attention_are_one_by_one() -> None:
    torch.manual_seed(0)
    model = ViT(in_channels=2, image_size=6, num_classes=3, patch_size=2, depth=1, token_width=8, mlp_width=8, heads=2)
    sent, plan = ModelState.of(model), LocalPlan(shares="delta", lr=0.1, steps=2, batch_size=4)
    subsets = torch.stack([torch.randperm(40)[:12] for _ in range(2)])
    order = local_orders(subsets, plan, derive_generator(1))
    found = ManyModels.copies(model, sent, 2).trained(POOL, order, plan)
    logits = found.measured(POOL, lambda outputs, labels: outputs[:, 0])
    for place in range(2):
        batches = [Batch(POOL.inputs[rows[place]], POOL.labels[rows[place]]) for rows in order]
        alone = local_update(
            model, sent, batches, num_examples=12, plan=plan, defense=none(), state=ClientState(),
            rng=derive_generator(2), private_rng=derive_generator(3),
        )  # fmt: skip
        for name, delta in alone.upload.tensors.items():
            assert torch.allclose(found[place].parameters[name] - sent.parameters[name], delta, atol=1e-6)
        assert torch.allclose(
            logits[place], functional_call(model, found[place].parameters, POOL.inputs)[:, 0], atol=1e-5
        )
