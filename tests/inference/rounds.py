"""A few rounds of small clients that learn random labels by heart, and what a server reads of them."""

from functools import cache

import torch
from torch import nn

from fl_privacy.attacks.inference import ReadRound
from fl_privacy.defenses import ClientState, none
from fl_privacy.federation import local_update
from fl_privacy.federation.client import local_batches
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, VictimId

CLIENTS = (0, 3, 4, 7)
OWN, OTHERS, CLASSES, SHAPE = 16, 32, 4, (1, 8, 8)
PLAN = LocalPlan(shares="delta", lr=0.2, epochs=4, batch_size=8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(96, 48),
        nn.Tanh(),
        nn.Linear(48, CLASSES),
    )


@cache
def asked() -> Batch:
    """Make the clients' own examples, client by client, and others; labels mean nothing."""
    rng, number = derive_generator(3, "asked"), len(CLIENTS) * OWN + OTHERS
    return Batch(torch.rand(number, *SHAPE, generator=rng), torch.randint(CLASSES, (number,), generator=rng))


@cache
def public() -> Batch:
    rng = derive_generator(4, "public")
    return Batch(torch.rand(96, *SHAPE, generator=rng), torch.randint(CLASSES, (96,), generator=rng))


@cache
def _observations(number: int) -> tuple[tuple[Observation, ...], ...]:
    model, found = network(), []
    sent = ModelState.of(model)
    for round in range(1, number + 1):
        replies = []
        for place, client in enumerate(CLIENTS):
            order = local_batches(OWN, PLAN, derive_generator(5, round, client))
            own = Batch(asked().inputs[place * OWN :][:OWN], asked().labels[place * OWN :][:OWN])
            result = local_update(
                model, sent, [Batch(own.inputs[i], own.labels[i]) for i in order], num_examples=OWN, plan=PLAN,
                defense=none(), state=ClientState(), rng=derive_generator(6), private_rng=derive_generator(7),
            )  # fmt: skip
            replies.append(
                Observation(
                    id=VictimId(round, client), model=model, sent=sent, upload=result.upload, plan=PLAN.in_round(round),
                    input_shape=SHAPE, num_classes=CLASSES,
                )
            )  # fmt: skip
        mean = {n: torch.stack([o.upload.tensors[n] for o in replies]).mean(0) for n in sent.parameters}
        sent = ModelState({n: p + mean[n] for n, p in sent.parameters.items()})
        found.append(tuple(replies))
    return tuple(found)


def rounds(number: int) -> list[ReadRound]:
    """Make what an attacker has of ``number`` rounds, the first of them always the same."""
    return [ReadRound(observations=o, candidates=asked(), public=public(), seed=0) for o in _observations(4)[:number]]
