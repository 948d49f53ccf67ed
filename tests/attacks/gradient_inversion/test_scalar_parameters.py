"""A parameter that is a single number, as a temperature or the weight of a skipped block is, is one like any other."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import Observation
from fl_privacy.attacks import AutoAttack, dlg
from fl_privacy.models.gradients import GradientSketch, clipped_sum, gradient_products, sketched_examples
from fl_privacy.types import Batch, LocalPlan, ModelState


class Scaled(nn.Module):
    """A linear layer times a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.layer = nn.Parameter(torch.tensor(1.5)), nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, 4, 4) -> (B, 4)."""
        logits: Tensor = self.scale * self.layer(images.flatten(1))
        return logits


def parts() -> tuple[Scaled, ModelState, Batch]:
    model = Scaled()
    images = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return model, ModelState(dict(model.named_parameters()), {}), Batch(images, torch.arange(3))


@pytest.mark.parametrize("attack", [dlg(iterations=2), AutoAttack(evaluations=25)])
def test_a_model_with_one_is_attacked(attack) -> None:
    model, _, batch = parts()
    loss = F.cross_entropy(model(batch.inputs[:1]), batch.labels[:1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    (found,) = attack([Observation.of_gradients(model, gradients, input_shape=(1, 4, 4))], seed=0)
    assert found.batch is not None and found.failure is None


def test_examples_of_a_model_with_one_are_clipped_and_compared() -> None:
    model, state, batch = parts()
    total, _ = clipped_sum(model, state, batch, 1e9, plan=LocalPlan())
    loss = F.cross_entropy(model(batch.inputs), batch.labels, reduction="sum")
    expected = dict(zip(total, torch.autograd.grad(loss, [state.parameters[n] for n in total]), strict=True))
    for name, value in total.items():
        torch.testing.assert_close(value, expected[name])
    direction = {name: value.detach() for name, value in expected.items()}
    products, _ = gradient_products(model, state, batch, [direction], plan=LocalPlan())
    squared = torch.stack([value.square().sum() for value in direction.values()]).sum()
    torch.testing.assert_close(products.sum(), squared)
    sketch = GradientSketch.of(direction, torch.Generator().manual_seed(0))
    assert len(sketched_examples(model, state, batch, LocalPlan(), sketch)) == 3
