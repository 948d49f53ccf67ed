from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_privacy.attacks.gradient_inversion.labels import (
    _to_labels,
    choose_labels,
    guessed_outputs,
    infer_labels,
    nearest_counts,
    output_layer,
    policy_for,
    usual_outputs,
)
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.losses import Loss
from fl_privacy.types import Batch, ModelState, Observation

CLASSES = 6


def _model(bias: bool) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Sigmoid(), nn.Linear(32, CLASSES, bias=bias))


def _inferred(labels: list[int], bias: bool) -> list[int]:
    model = _model(bias)
    generator = torch.Generator().manual_seed(3)
    batch = Batch(torch.rand((len(labels), 3, 4, 4), generator=generator), torch.tensor(labels))
    gradient = loss_gradients(model, ModelState.of(model), batch).gradients
    layer = output_layer(model, CLASSES)
    assert layer == ("3.weight", "3.bias" if bias else None)
    outputs = guessed_outputs(model, torch.rand((64, 3, 4, 4), generator=generator), layer[0])
    found = infer_labels(gradient, layer, len(labels), *outputs)
    assert found is not None
    return found.tolist()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("label", range(CLASSES))
def test_the_label_of_one_image_is_exact(label: int, bias: bool) -> None:
    assert _inferred([label], bias) == [label]


def test_for_the_label_of_one_image_no_input_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(bias=True)
    batch = Batch(torch.rand(1, 3, 4, 4), torch.tensor([4]))
    gradients = loss_gradients(model, ModelState.of(model), batch).gradients
    observation = Observation.of_gradients(model, list(gradients.values()), input_shape=(3, 4, 4))
    monkeypatch.setattr(model, "forward", lambda _: pytest.fail("the model was asked"))
    found, source = choose_labels(observation, "auto", model, loss_scale=1.0, seed=0)
    assert found is not None and found.tolist() == [4] and source == "inferred"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("labels", [[1, 1], [0, 2, 2, 2], [0, 1, 2, 3, 4, 5, 5, 5], [3] * 16])
def test_counts_of_repeated_labels_are_found_at_initialization(labels: list[int], bias: bool) -> None:
    assert _inferred(labels, bias) == labels


def test_counts_are_whole_and_sum_to_the_batch() -> None:
    assert _to_labels(torch.tensor([1.6, -0.2, 0.5, 0.4]), 3).tolist() == [0, 0, 2]
    assert _to_labels(torch.tensor([2.9, 2.2, 0.0]), 3).tolist() == [0, 0, 1]
    assert _to_labels(torch.zeros(3), 2).tolist() == [0, 1]
    assert _to_labels(torch.tensor([10.0, 3.2, 0.1]), 4).tolist() == [0, 0, 0, 0]
    assert _to_labels(torch.tensor([5.0, 3.2, 2.1]), 4).tolist() == [0, 0, 0, 1]
    assert _to_labels(torch.tensor([1e30, 1e9, -1e30]), 3).tolist() == [0, 0, 0]  # in no time


def test_a_withheld_layer_yields_nothing() -> None:
    assert infer_labels({}, ("w", "b"), 1, torch.zeros(2), torch.ones(3)) is None
    assert output_layer(nn.Linear(3, 4), 5) is None


def test_the_next_likely_counts_differ_in_one_label():
    expected = torch.tensor([1.6, -0.2, 1.5, 0.1])
    assert [found.tolist() for found in nearest_counts(expected, 3, 3)] == [[0, 0, 2], [0, 2, 2], [0, 2, 3]]
    assert len(nearest_counts(torch.tensor([1.0, 0.0]), 1, 5)) == 2


def _usual(weight: float, bias: float) -> torch.Tensor:
    """Make expected outputs of a model that depends on inputs by ``weight``, and has biases of scale ``bias``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES))
    with torch.no_grad():
        model[1].weight.copy_(weight * torch.randn(CLASSES, 48))
        model[1].weight.sub_(model[1].weight.mean(1, keepdim=True))
        model[1].bias.copy_(bias * torch.arange(CLASSES))
    found, features = usual_outputs(model, (3, 4, 4), ("1.weight", "1.bias"), torch.Generator().manual_seed(0))
    assert float(found.sum()) == pytest.approx(1) and features.shape == (48,)
    return found


def test_answers_that_are_the_same_for_all_images_are_those_of_a_client() -> None:
    assert torch.allclose(_usual(0.0, 0.5), (0.5 * torch.arange(CLASSES)).softmax(0), atol=1e-5)


def test_answers_that_hang_on_the_image_say_nothing_of_how_often_a_class_is() -> None:
    assert float((_usual(30.0, 0.5) - 1 / CLASSES).abs().max()) < 0.05


def _own_answers(spread: float, *, constant: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make expected outputs without and with a client's update, and the mean output of its own examples.

    They differ by ``spread`` and have features in common that noise has not.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES))
    with torch.no_grad():
        model[1].weight.copy_(0.3 * torch.randn(CLASSES, 48))
        model[1].bias.copy_(constant * torch.linspace(0, 1, CLASSES))
    images = (torch.rand(3, 4, 4) + spread * torch.randn(32, 3, 4, 4)).clamp(0, 1)
    batch = Batch(images, torch.arange(32) % CLASSES)
    gradient = loss_gradients(model, ModelState.of(model), batch).gradients
    layer = ("1.weight", "1.bias")
    asked = [usual_outputs(model, (3, 4, 4), layer, torch.Generator().manual_seed(0), g)[0] for g in (None, gradient)]
    with torch.no_grad():
        return asked[0], asked[1], model(images).softmax(1).mean(0)


def test_the_update_tells_what_a_clients_examples_have_in_common() -> None:
    blind, seeing, true = _own_answers(0.02)
    assert float(seeing.sum()) == pytest.approx(1)
    assert float((seeing - true).norm()) < 0.75 * float((blind - true).norm())


def test_examples_that_have_nothing_in_common_change_nothing() -> None:
    """The features that a few unlike examples seem to share are none of any of them."""
    blind, seeing, true = _own_answers(3.0)
    assert float((seeing - true).norm()) < 1.1 * float((blind - true).norm())


def test_a_layer_that_was_withheld_in_part_is_no_evidence() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES))
    layer = ("1.weight", "1.bias")
    gradients = ({}, {"1.bias": torch.ones(CLASSES)}, None)
    found = [usual_outputs(model, (3, 4, 4), layer, torch.Generator().manual_seed(0), g)[0] for g in gradients]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    zero = {"1.weight": torch.zeros(CLASSES, 48), "1.bias": torch.zeros(CLASSES)}
    assert usual_outputs(model, (3, 4, 4), layer, torch.Generator().manual_seed(0), zero)[0].isfinite().all()


@pytest.mark.parametrize(
    ("takes", "remedy"), [("both", "attack.labels=optimize"), ("indices", "threat_model=knows_labels")]
)
def test_remedies_for_labels_that_a_loss_hides_work(takes: Literal["both", "indices"], remedy: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    loss = Loss("own", F.cross_entropy, targets="bits", takes=takes)
    gradients = torch.autograd.grad(model(torch.rand(2, 4)).sum(), list(model.parameters()))
    seen = Observation.of_gradients(model, gradients, input_shape=4, batch_size=2)
    seen = replace(seen, loss=loss, num_classes=3)
    asked = partial(choose_labels, model=model, loss_scale=1.0, seed=0)
    with pytest.raises(NotAttackableError, match=remedy):
        asked(seen, "infer")
    if takes == "both":
        assert asked(seen, "optimize") == (None, "optimized")
    else:
        assert asked(seen.given(labels=torch.tensor([0, 1])), "auto")[1] == "known"


def test_labels_behind_one_logit_are_inferred_and_not_optimized() -> None:
    """A last layer with one output before a sigmoid is an output layer for two classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    loss = nn.functional.binary_cross_entropy_with_logits(model(torch.rand(1, 4)), torch.ones(1, 1))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    seen = Observation.of_gradients(model, gradients, input_shape=4, batch_size=1, loss="bce")
    seen = replace(seen, num_classes=2)
    assert policy_for(seen) == "auto"
    withheld = {name: value for name, value in seen.upload.tensors.items() if not name.startswith("2.")}
    assert policy_for(replace(seen, upload=replace(seen.upload, tensors=withheld))) == "optimize"
