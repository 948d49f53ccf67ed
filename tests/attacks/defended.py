"""Victims behind a defense, for the tests of attacks that know it."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.federation.training import join_private
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Tensors, VictimId
from tests.attacks.victims import CLASSES, observe, smooth_net


def smooth_images(count: int, *, seed: int = 0) -> Batch:
    """(count, 2, 8, 8) without fine detail, as natural images are, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((count, 2, 3, 3), generator=generator).double()
    images = F.interpolate(coarse, size=8, mode="bilinear", align_corners=True)
    return Batch(images, torch.randint(CLASSES, (count,), generator=generator))


def protected(observation: Observation, batch: Batch, defense: Defense, *, seed: int = 0) -> Observation:
    """``observation`` of the gradient of ``batch``, had the client defended itself and shared what its plan says."""
    rng, state = torch.Generator().manual_seed(seed), ClientState()
    step = LocalStep(observation.model, observation.sent, batch, observation.plan, state, rng)
    tensors = observation.upload.tensors
    if defense.loss:
        tensors = _own_gradient(observation, batch, defense, state)
    for on_gradient in defense.gradient:
        tensors = on_gradient(tensors, step)
    if observation.plan.shares != "gradient":
        tensors = {name: -observation.plan.lr * g for name, g in tensors.items()}
    for on_upload in defense.upload:
        tensors = on_upload(tensors, state, rng)
    if observation.plan.shares == "weights":
        tensors = {name: observation.sent.parameters[name] + delta for name, delta in tensors.items()}
    return replace(observation, upload=replace(observation.upload, tensors=tensors))


def _own_gradient(observation: Observation, batch: Batch, defense: Defense, state: ClientState) -> Tensors:
    """Of the client's own loss, by what it was sent."""
    model, rng = observation.model, torch.Generator().manual_seed(1)
    for on_model in defense.model:
        model = on_model(model, state, rng)
    values = join_private(model, observation.sent, state)
    plan = observation.plan
    found = loss_gradients(model, values, batch, loss_scale=plan.loss_scale, changes=defense.loss).gradients
    return {name: found[name] for name in observation.sent.parameters}


def victims(defense: Defense, *, count: int = 2, rounds: int = 1, plan: LocalPlan | None = None) -> list[Observation]:
    """Round by round ``count`` victims of one image each, told the labels; every round sends other weights."""
    truth = smooth_images(count)
    found = []
    for number in range(rounds):
        model = smooth_net(seed=number)
        for k in range(count):
            batch = Batch(truth.inputs[k : k + 1], truth.labels[k : k + 1])
            seen = observe(model, batch, plan=plan, id=VictimId(number, 0, k), told=True)
            found.append(protected(seen, batch, defense, seed=100 * number + k))
    model = found[-1].model
    return [replace(o, model=model, sent=ModelState(o.sent.parameters)) for o in found]


def informed(observations: list[Observation], defense: Defense, *, rounds_known: bool = False) -> list[Observation]:
    """Give the attacker of the observations the defense, and which updates come from the same examples."""
    return [o.given(defense=defense.parts, same_data=o.id.source if rounds_known else None) for o in observations]
