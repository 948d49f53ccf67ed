"""Networks that compute their layers again on the way back are attacked, and trained privately, like others."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from fl_privacy import Observation, reconstruct
from fl_privacy.defenses import dp_sgd
from fl_privacy.flower import train_step
from fl_privacy.models.unwrap_model import without_checkpointing
from fl_privacy.types import Certainty

SHAPE = (1, 4, 4)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.front = nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.ReLU())
        self.head = nn.Linear(40, 5)

    def forward(self, images: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.head(self.front(images))
        if self.reentrant and torch.is_grad_enabled() and not images.requires_grad:
            images = images.detach().requires_grad_()
        return self.head(checkpoint.checkpoint(self.front, images, use_reentrant=self.reentrant))


def images(count: int) -> Tensor:
    return torch.rand((count, *SHAPE), generator=torch.Generator().manual_seed(0))


def seen(reentrant: bool | None, count: int) -> Observation:
    net = Checkpointed(reentrant)
    F.cross_entropy(net(images(count)), torch.arange(count)).backward()
    return Observation.of_gradients(net, [p.grad for p in net.parameters()], input_shape=SHAPE, batch_size=count)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_they_are_solved_exactly_and_searched_as_without(reentrant: bool, count: int) -> None:
    assert reconstruct(seen(reentrant, count), "auto").certainty is Certainty.PROVEN
    found, plain = (reconstruct(seen(one, count), "idlg", iterations=2) for one in (reentrant, None))
    assert found.batch is not None and plain.batch is not None
    assert torch.equal(found.batch.inputs, plain.batch.inputs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_private_training_clips_each_example_as_without(reentrant: bool) -> None:
    clipped = []
    for one in (reentrant, None):
        net = Checkpointed(one)
        with train_step(dp_sgd(clip_norm=0.5, noise_multiplier=0.0), net, seed=0) as step:
            step(images(3), torch.arange(3))
        clipped.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*clipped)


def test_it_is_on_again_afterwards_and_off_within() -> None:
    net, calls = Checkpointed(False), list[int]()
    net.front[1].register_forward_hook(lambda *_: calls.append(1))
    with without_checkpointing(), without_checkpointing():
        net(images(1)).sum().backward()
    assert len(calls) == 1
    net(images(1)).sum().backward()
    assert len(calls) == 3
