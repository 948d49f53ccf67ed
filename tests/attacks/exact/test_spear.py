"""Sparse directions that blind searches rarely find, or that differences of others hide, and what a search costs."""

import torch
from torch import nn

from fl_privacy.attacks.exact import ExactInversion, spear
from fl_privacy.models import MLP
from fl_privacy.types import Batch, Certainty
from tests.attacks.exact.test_exact import worst
from tests.attacks.victims import CLASSES, observe


def network(widths: tuple[int, ...], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP(in_channels=1, image_size=6, num_classes=CLASSES, widths=widths, activation="relu")


def images(count: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(count, 1, 6, 6, generator=rng), torch.randint(CLASSES, (count,), generator=rng))


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def test_the_difference_of_two_columns_that_is_sparser_than_a_third_is_not_taken_for_one():
    """Two images that are nearly the same, of one class: what comes back from them differs in few neurons."""
    model, truth = network((64,)), images(3)
    first, second = linears(model)[:2]
    with torch.no_grad():
        first.bias.uniform_(-0.4, 0.4)
        second.weight.mul_(1e-6)  # all examples of a class send the same back
    inputs = truth.inputs.clone()
    inputs[1] = inputs[0] + 0.3 * (inputs[1] - 0.5)
    near = Batch(inputs, torch.tensor([0, 0, 1]))
    (found,) = ExactInversion(rounds=8)([observe(model, near)], seed=0)
    assert found.certainty is Certainty.PROVEN
    assert worst(found, near) < 1e-2


def test_an_active_neuron_that_nothing_comes_back_through_is_no_reason_to_search_on():
    """What reproduces the whole update to rounding is consistent with it, though signs and zeros disagree."""
    model, truth = network((64, 16)), images(6)
    first, second = linears(model)[:2]
    with torch.no_grad():
        before = first(truth.inputs.flatten(1))
        then = second(before.relu())
        gated = int((then[1] - then[0]).argmax())
        second.bias[gated] -= (then[0, gated] + then[1, gated]) / 2  # on for the second image, off for the first
        cut = ((before[0] > 0) & (before[1] > 0)).nonzero().flatten()[:2]
        second.weight[:gated, cut] = 0
        second.weight[gated + 1 :, cut] = 0
    (found,) = ExactInversion()([observe(model, truth)], seed=0)
    assert found.certainty is not Certainty.APPROXIMATE
    assert worst(found, truth) < 1e-2


def search_of(weight: torch.Tensor, basis: torch.Tensor) -> spear._Search:
    gradient = spear._Gradient(weight, weight[:, 0], (weight, weight[:, 0]), basis)
    return spear._Search(gradient, torch.Generator().manual_seed(0), 32)


def test_neurons_that_no_example_reaches_say_nothing_of_a_direction():
    """With them, the null vectors of any few rows would count as sparse, and their number would have no end."""
    reached = torch.linalg.qr(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).double())[0]
    basis = torch.cat([torch.zeros(20, 4).double(), reached])
    search = search_of(basis, basis)
    for _ in range(20):
        search.extended()
    assert search.hopeless
    assert search.pool.directions.shape[1] == 0


def test_a_search_keeps_no_more_directions_than_it_can_compare(monkeypatch):
    monkeypatch.setattr(spear, "_KEPT", 10)
    model = network((64,))
    linears(model)[1].weight.data.mul_(1e-3)
    seen = observe(model, Batch(images(6).inputs, torch.zeros(6, dtype=torch.long)))
    weight = next(iter(seen.upload.tensors.values()))
    basis = spear.column_space(weight, 6)
    assert basis is not None
    search = search_of(weight, basis)
    sizes = []
    for _ in range(8):
        search.extended()
        sizes.append(search.pool.directions.shape[1])
    assert max(sizes) == 10
