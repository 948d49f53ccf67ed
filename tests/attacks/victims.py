"""Small victims for the attack tests."""

import torch
from torch import nn

from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

FIRST = VictimId(0, 0, 0)
CLASSES = 5
SHAPE = (2, 8, 8)


def smooth_net(seed: int = 0) -> nn.Module:
    """Build a small LeNet whose gradient determines its input."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 8, 3, 2, padding=1), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return net.double()


def examples(count: int, *, seed: int = 1, shape: tuple[int, ...] = SHAPE) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand((count, *shape), generator=generator).double()
    return Batch(images, torch.randint(CLASSES, (count,), generator=generator))


def observe(
    model: nn.Module,
    batch: Batch,
    *,
    plan: LocalPlan | None = None,
    id: VictimId = FIRST,
    told: bool = False,
) -> Observation:
    """Compute what a server sees of a client that computes the gradient of ``batch``."""
    plan = plan or LocalPlan()
    sent = ModelState.of(model)
    result = loss_gradients(model, sent, batch, batch_norm=plan.batch_norm, loss_scale=plan.loss_scale)
    return Observation(
        id=id,
        model=model,
        sent=sent,
        upload=Upload(tensors=result.gradients, num_examples=len(batch)),
        plan=plan,
        input_shape=tuple(batch.inputs.shape[1:]),
        num_classes=CLASSES,
        knowledge=Knowledge(labels=batch.labels if told else None),
    )


def observations(
    model: nn.Module,
    count: int,
    *,
    plan: LocalPlan | None = None,
    told: bool = False,
    shape: tuple[int, ...] = SHAPE,
) -> list[Observation]:
    """``count`` victims with one image each."""
    batch = examples(count, shape=shape)
    return [
        observe(
            model, Batch(batch.inputs[i : i + 1], batch.labels[i : i + 1]), plan=plan, id=VictimId(0, 0, i), told=told
        )
        for i in range(count)
    ]


def error(guess: Batch | None, truth: Batch) -> float:
    assert guess is not None
    return float((guess.inputs - truth.inputs).square().mean())
