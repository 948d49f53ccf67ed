"""A client with its own examples, to see what a defense makes of them."""

import torch

from fl_privacy.data import Examples
from fl_privacy.defenses import ClientState, Defense, LocalData
from fl_privacy.federation import Client
from fl_privacy.rng import derive_generator
from fl_privacy.types import LocalPlan, ModelState

from .harness import small_model

CLASSES = 5


def examples(number=60):
    """Blobs whose place and color tell the class, 3x16x16."""
    rng = derive_generator(0, "blobs")
    labels = torch.arange(number) % CLASSES
    y, x = torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="ij")
    at = (0.15 + 0.17 * labels + 0.1 * torch.rand(number, generator=rng)).view(-1, 1, 1)
    blob = torch.exp(-((x - at) ** 2 + (y - at) ** 2) / 0.03).unsqueeze(1)
    color = torch.stack([labels == 0, labels < 3, labels > 1], 1).view(-1, 3, 1, 1)
    images = 0.7 * blob * color + 0.3 * torch.rand(number, 3, 16, 16, generator=rng)
    return Examples((images * 255).round().byte(), labels, tuple("abcde"))


def defended_client(defense: Defense, *, id=0, seed=0, plan=None):
    return Client(
        id=id,
        examples=examples(),
        indices=torch.arange(60),
        model=small_model(),
        plan=plan or LocalPlan(),
        defense=defense,
        seed=seed,
    )


def sent():
    return ModelState.of(small_model())


def own_batch():
    return examples().batch(torch.arange(60))


def local_data(seed=0):
    return LocalData(num_classes=CLASSES, state=ClientState(), rng=derive_generator(seed))
