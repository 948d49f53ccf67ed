"""What is proven is what entered the first layer; if that is another than the client's example, a note says so."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import Observation, reconstruct
from fl_privacy.types import Certainty, Reconstruction

SHAPE = (1, 6, 6)
LABELS = torch.tensor([1, 3, 0])


def network(*front: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 5))


def images(count: int) -> Tensor:
    return torch.rand((count, *SHAPE), generator=torch.Generator().manual_seed(0))


def found(net: nn.Module, inputs: Tensor, labels: Tensor) -> Reconstruction:
    gradients = torch.autograd.grad(F.cross_entropy(net(inputs), labels), list(net.parameters()))
    return reconstruct(Observation.of_gradients(net, gradients, input_shape=SHAPE, batch_size=len(inputs)), "exact")


@pytest.mark.parametrize("count", [1, 3])
def test_behind_dropout_it_is_said_that_the_example_is_another(count: int) -> None:
    result = found(network(nn.Dropout(0.3)), images(count), LABELS[:count])
    assert result.batch is not None and result.certainty is Certainty.PROVEN
    assert float((result.batch.inputs[:, None] - images(count)).abs().flatten(2).amax(2).min()) > 0.3
    assert any("draws of the model's own, such as dropout" in note for note in result.notes)


@pytest.mark.parametrize("count", [1, 3])
def test_behind_mixup_it_is_said_that_examples_may_be_parts(count: int) -> None:
    mixed = 0.7 * images(count) + 0.3 * images(count + 1)[1:]
    labels = 0.7 * F.one_hot(LABELS[:count], 5).float() + 0.3 * F.one_hot((LABELS[:count] + 1) % 5, 5)
    result = found(network(), mixed, labels)
    assert result.certainty is Certainty.PROVEN
    assert any("mixed labels, as after mixup" in note for note in result.notes)


def test_plain_and_smoothed_labels_are_not_said_to_be_mixed() -> None:
    for labels in (LABELS, 0.9 * F.one_hot(LABELS[:1], 5).float() + 0.02):
        result = found(network(), images(len(labels)), labels)
        assert result.certainty is Certainty.PROVEN
        assert not any("What is proven" in note for note in result.notes)
