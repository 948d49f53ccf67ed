"""Integrated Gradients and Neuron Shapley: their sums, exact values of small games, and their draws."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.defenses.robust_data import (
    integrated_gradients,
    integrated_gradients_of_step,
    neuron_shapley,
    shapley_of_elements,
)
from fl_privacy.models.gradients import batch_loss
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState

from ..harness import flat, local_step


def gradient_at(step, values):
    return replace(step, sent=ModelState(values, step.sent.buffers)).gradients().gradients


def loss_at(step, values):
    return float(batch_loss(step.model, ModelState(values, step.sent.buffers), step.batch)[0])


def test_integrated_gradients_add_up_to_the_change_of_the_loss():
    step = local_step()
    found = integrated_gradients_of_step(step, points=50)
    zero = {name: torch.zeros_like(value) for name, value in step.sent.parameters.items()}
    change = loss_at(step, step.sent.parameters) - loss_at(step, zero)
    assert float(flat(found).sum()) == pytest.approx(change, abs=1e-4)


def test_integrated_gradients_are_exact_of_a_quadratic():
    values = {"a": torch.tensor([1.0, -2.0, 3.0])}
    found = integrated_gradients(values, lambda at: {"a": 2 * at["a"]}, points=4)
    torch.testing.assert_close(found["a"], values["a"] ** 2)


def test_those_of_a_step_are_those_of_its_gradients():
    few, many = local_step(), local_step(examples=20)
    for step in (few, many):
        values = {name: value.detach() for name, value in step.sent.parameters.items()}
        one_by_one = integrated_gradients(values, lambda at, step=step: gradient_at(step, at), points=5)
        torch.testing.assert_close(integrated_gradients_of_step(step, points=5), one_by_one)


def test_layers_that_cannot_be_batched_are_integrated_one_by_one():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 14 * 14, 5))
    found = integrated_gradients_of_step(local_step(model), points=3)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert flat(found).isfinite().all()


def small_game():
    """Two neurons and two outputs on eight examples that the first neuron alone tells apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))
    inputs = torch.randn(8, 4, generator=derive_generator(1, "inputs"))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 0, 0, 0], [0, 0, 0.1, 0]]))
        model[2].weight.copy_(torch.tensor([[-2.0, 0.1], [2.0, 0.1]]))
    step = local_step(model)
    return replace(step, batch=Batch(inputs, (inputs[:, 0] > 0).long()))


def exact_shapley(step):
    """Average over all orders, of a model whose neurons are replaced by what they say on average."""
    model, x, y = step.model, step.batch.inputs, step.batch.labels
    with torch.no_grad():
        usual = model[0](x).mean(0), model(x).mean(0)

        def loss(gone):
            hidden = model[0](x)
            hidden = torch.where(torch.tensor([0 in gone, 1 in gone]), usual[0], hidden)
            out = torch.where(torch.tensor([2 in gone, 3 in gone]), usual[1], model[2](hidden.relu()))
            return float(nn.functional.cross_entropy(out, y))

        found, orders = torch.zeros(4), list(itertools.permutations(range(4)))
        for order in orders:
            for k, neuron in enumerate(order):
                found[neuron] += (loss(set(order[: k + 1])) - loss(set(order[:k]))) / len(orders)
        return found, loss({0, 1, 2, 3}) - loss(set())


def test_neuron_shapley_comes_to_the_exact_values_of_a_small_game():
    exact, rise = exact_shapley(small_game())
    found = neuron_shapley(small_game(), permutations=600)
    values = torch.cat([found["0"], found["2"]])
    assert exact.sum().item() == pytest.approx(rise, abs=1e-5)
    assert (values - exact).abs().max() < 0.15 * exact.abs().max()
    assert found["0"][0] > found["0"][1]


def test_neuron_shapley_is_seeded():
    first, again, other = (
        neuron_shapley(replace(small_game(), rng=derive_generator(seed, "defense")), permutations=1)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first["0"], again["0"])
    assert not torch.equal(first["0"], other["0"])


def test_every_element_of_a_neuron_has_its_value():
    step = local_step()
    values, elements = neuron_shapley(local_step(), permutations=2), shapley_of_elements(step, permutations=2)
    assert elements.keys() == step.sent.parameters.keys()
    for name, value in elements.items():
        assert value.shape == step.sent.parameters[name].shape
        assert torch.equal(value.flatten(1)[:, 0] if value.dim() > 1 else value, values[name.rpartition(".")[0]])
