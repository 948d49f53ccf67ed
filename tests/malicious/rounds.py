"""Clients with real digits, and what a malicious server reads of them."""

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from fl_privacy.attacks.malicious import ServerAttack
from fl_privacy.data import Dataset, Examples, load_data
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.federation import Client
from fl_privacy.models import MLP, LeNet, ResNet10, build_model
from fl_privacy.types import LocalPlan, ModelState, Observation, VictimId

NETWORKS = {
    "lenet": (LeNet, {"activation": "relu"}),
    "mlp": (MLP, {"widths": (400, 200)}),
    "resnet": (ResNet10, {"width": 8}),
}


@cache
def digits() -> Dataset:
    return load_data("mnist_mini")


def network(name: str, seed: int = 0) -> nn.Module:
    made, options = NETWORKS[name]
    return build_model(made, seed=seed, in_channels=1, image_size=28, num_classes=10, mean=[0.5], std=[0.25], **options)


def public() -> torch.Tensor:
    return digits().test.batch(shuffled(digits().test, 500)).inputs


def shuffled(examples: Examples, number: int, first: int = 0) -> torch.Tensor:
    """Digits come sorted by class."""
    return torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[first : first + number]


def client(model: nn.Module, plan: LocalPlan, *, id: int = 0, examples: int = 100) -> Client:
    mine = shuffled(digits().train, examples, id * examples)
    return Client(id=id, examples=digits().train, indices=mine, model=model, plan=plan, seed=0)


def probed(
    attack: ServerAttack,
    name: str,
    batch_size: int,
    *,
    plan: LocalPlan | None = None,
    defense: Defense | None = None,
) -> tuple[ServerAttack, Observation, Client]:
    """``attack`` with public images, what it intercepted of a batch, and whose that was."""
    attack = attack.informed(public())
    model = attack.architecture(network(name), (1, 28, 28), 1)
    asked = client(model, plan or LocalPlan(batch_norm="eval"), examples=max(100, batch_size))
    asked = replace(asked, defense=defense or asked.defense)

    def ask(sent: ModelState):
        return asked.probe(sent, ClientState(), round=1, probe=0, batch_size=batch_size).upload

    sent, upload = attack.question(model, ModelState.of(model), 0, ask)
    return attack, observation(model, sent, upload, asked.plan), asked


def observation(model: nn.Module, sent: ModelState, upload, plan: LocalPlan, id: int = 0) -> Observation:
    return Observation(
        id=VictimId(1, id, 0),
        model=model,
        sent=sent,
        upload=upload,
        plan=plan,
        input_shape=(1, 28, 28),
        num_classes=10,
    )
