"""Clients that keep their own batch norm are told from those that train what they are sent."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_privacy.federation.interception import recognize_training
from fl_privacy.federation.interception.infer_plan import moved_apart, norm_names
from fl_privacy.models import ResNet20
from fl_privacy.types import LocalPlan, ModelState, Observation, Upload, VictimId
from tests.flower.foreign_app import CLASSES, SHAPE, Net

LR = 0.1


def trained(net, *, steps=1, optimizer=torch.optim.SGD, shape=SHAPE):
    images = torch.rand(1, *shape, generator=torch.Generator().manual_seed(3))
    own, made = copy.deepcopy(net).train(), None
    made = optimizer(own.parameters(), lr=LR)
    for _ in range(steps):
        made.zero_grad()
        cross_entropy(own(images), torch.tensor([1])).backward()
        made.step()
    return own, images


def sent_net():
    torch.manual_seed(0)
    return Net()


def with_own_norms(net):
    own = copy.deepcopy(net)
    rng = torch.Generator().manual_seed(1)
    own.norm.weight.data += 2 * torch.rand(8, generator=rng)
    own.norm.bias.data += torch.randn(8, generator=rng)
    return own


def observed(sent, after, *, left_out=()):
    state, uploaded = ModelState.of(sent), ModelState.of(after)
    kept = {name: value for name, value in uploaded.parameters.items() if name not in left_out}
    known = {name: value for name, value in state.parameters.items() if name not in left_out}
    return Observation(
        id=VictimId(1, 0, 0),
        model=sent,
        sent=ModelState(known, state.buffers),
        upload=Upload(tensors=kept, buffers=uploaded.buffers, num_examples=1),
        plan=LocalPlan(lr=LR, shares="weights", steps=1),
        input_shape=SHAPE,
        num_classes=CLASSES,
    )


def agreement(observation, images):
    """Cosine of the update and the gradient of the true image at the values that the attack takes for sent."""
    net = copy.deepcopy(observation.model).train()
    net.load_state_dict({**net.state_dict(), **observation.assumed().parameters})
    cross_entropy(net(images), torch.tensor([1])).backward()
    update = observation.update()
    ours = torch.cat([-parameter.grad.flatten() for n, parameter in net.named_parameters() if n in update])
    theirs = torch.cat([update[n].flatten() for n, _ in net.named_parameters() if n in update])
    return float(torch.cosine_similarity(ours, theirs, dim=0))


def test_uploaded_values_of_a_kept_batch_norm_are_what_the_attack_computes_with():
    net = sent_net()
    after, images = trained(with_own_norms(net))
    seen = observed(net, after)
    known, said = recognize_training(seen, {"lr"})
    assert any("keep their own batch norm, as in FedBN: it moved by up to" in sentence for sentence in said)
    assert agreement(known, images) > 0.99 and agreement(seen, images) < 0.9
    assert not known.upload.tensors.keys() & norm_names(net)
    assert list(known.sent.parameters) == list(seen.sent.parameters)
    shared = replace(seen, plan=replace(seen.plan, shares="delta"), upload=replace(seen.upload, tensors=seen.update()))
    torch.testing.assert_close(recognize_training(shared, {"lr"})[0].sent.parameters, known.sent.parameters)


def test_batch_norm_that_never_travels_is_taken_as_the_model_is_made_and_said():
    net = sent_net()
    after, images = trained(net)
    known, said = recognize_training(observed(net, after, left_out=norm_names(net)), {"lr"})
    assert any("stays with the clients: norm.bias and 1 more are not in the messages" in sentence for sentence in said)
    assert list(known.sent.parameters) == [name for name, _ in net.named_parameters()]
    assert agreement(known, images) > 0.99


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_steps_on_what_was_sent_are_not_taken_for_a_kept_batch_norm(steps, optimizer):
    torch.manual_seed(0)
    for net, shape in ((sent_net(), SHAPE), (ResNet20(in_channels=3, image_size=16, num_classes=4), (3, 16, 16))):
        after, _ = trained(net, steps=steps, optimizer=optimizer, shape=shape)
        change = {n: p - dict(net.named_parameters())[n] for n, p in after.named_parameters()}
        assert moved_apart(change, norm_names(net)) is None
    assert moved_apart({"norm.weight": torch.ones(8)}, {"norm.weight"}) is None, "nothing else was trained"
