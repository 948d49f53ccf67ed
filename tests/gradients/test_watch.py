from pathlib import Path

import pytest
import torch
from torch import nn

import fl_privacy
from fl_privacy.models.gradients import clipped_sum, loss_gradients
from fl_privacy.models.gradients.hooks import entering, leaving, owners, replaced_input
from fl_privacy.types import Batch, LocalPlan, ModelState


def model() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def test_calls_come_in_order_with_what_entered_and_what_left():
    net, inputs = model(), torch.rand(2, 4)
    with entering(owners(net)) as entered, leaving({**owners(net), "": net}) as left:
        logits = net(inputs)
    assert [call.name for call in entered] == ["1", "3"]
    assert [call.name for call in left] == ["1", "3", ""]
    assert torch.equal(entered[0].inputs, inputs) and left[-1].output is logits


def test_an_output_can_be_exchanged_on_the_way_and_so_can_an_input():
    net = model()
    with leaving({"1": net[1]}, lambda module, given, output: output * 0) as left:
        changed = net(torch.rand(2, 4))
    assert torch.equal(changed, net[3].bias.expand(2, 2)) and not left[0].output.any()
    with replaced_input(net[3], torch.zeros_like):
        assert torch.equal(net(torch.rand(2, 4)), net[3].bias.expand(2, 2))


def test_nothing_is_watched_after_an_error():
    net = model()
    with pytest.raises(RuntimeError), entering(owners(net)) as calls:
        net(torch.rand(2, 5))
    net(torch.rand(2, 4))
    assert len(calls) == 1


def test_nobody_else_watches_layers():
    """Hooks that change a model's inputs or outputs make another model of it, and live where models are made."""
    root = Path(fl_privacy.__file__).parent
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if "register_forward" in path.read_text()}
    makers = {"models/build.py", "attacks/malicious/imprint.py", "models/unwrap_model.py"}
    apps = {"flower/opacus_watch.py"}  # the batches of somebody else's model
    assert found - makers - apps == {"models/gradients/hooks.py"}


class ByName(nn.Module):
    """A layer called by the name of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(12, 6), nn.Linear(6, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.layer(input=images.flatten(1))))


def test_arguments_may_be_given_by_name():
    net, images = ByName(), torch.rand(3, 3, 2, 2)
    with entering(owners(net)) as entered, leaving(owners(net)) as left:
        net(images)
    assert [call.name for call in entered] == [call.name for call in left] == ["layer", "last"]
    assert all(torch.equal(call.inputs, images.flatten(1)) for call in (entered[0], left[0]))
    state, batch = ModelState.of(net), Batch(images, torch.tensor([0, 1, 0]))
    clipped, _ = clipped_sum(net, state, batch, 1e6, plan=LocalPlan())
    expected = loss_gradients(net, state, batch).gradients
    for name, value in expected.items():
        torch.testing.assert_close(clipped[name] / 3, value)
