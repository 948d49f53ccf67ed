"""SPN's loss against its formula, and what stays with a client."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.defenses import ClientState, Defense, LocalStep, compose, dp_noise, dp_sgd, none, refiner, spn
from fl_privacy.defenses._soteria import gradient_sensitivity
from fl_privacy.defenses._spn import PolarizationHead, polarization_loss
from fl_privacy.errors import UserError
from fl_privacy.federation import plain_rounds
from fl_privacy.models import AlexNet, DLNet, ResNet10
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState
from tests.federation import harness as federation

from ..harness import (
    changed_gradient,
    clean_gradient,
    flat,
    local_step,
    private_step,
    run,
    small_evaluator,
    small_model,
)


def sample(classes: int = 5, bits: int = 7, examples: int = 4):
    rng = derive_generator(0, "codes")
    outputs = torch.randn(examples, bits, generator=rng).requires_grad_()
    codes = 2.0 * torch.randint(2, (classes, bits), generator=rng) - 1
    return outputs, codes, torch.randint(classes, (examples,), generator=rng)


@pytest.mark.parametrize("margin", [1.0, 1.5])
def test_the_loss_and_its_gradient_are_the_formula(margin):
    outputs, codes, labels = sample()
    expected, slope = 0.0, torch.zeros_like(outputs)
    for b, label in enumerate(labels.tolist()):
        for k in range(outputs.shape[1]):
            gap = margin - (outputs[b, k] * codes[label, k]).item()
            expected += max(gap, 0.0) / len(labels)
            slope[b, k] = -codes[label, k] / len(labels) if gap > 0 else 0.0
    loss = polarization_loss(outputs, codes, labels, margin)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, slope)


def test_soft_labels_weight_the_classes():
    outputs, codes, labels = sample()
    one_hot = nn.functional.one_hot(labels, len(codes)).float()
    torch.testing.assert_close(
        polarization_loss(outputs, codes, one_hot, 1.0), polarization_loss(outputs, codes, labels, 1.0)
    )


def test_the_gradient_is_that_of_a_plain_two_headed_network():
    defense, step = spn(alpha1=0.7, alpha2=0.3, bits=16, margin=1.5), local_step()
    found = changed_gradient(defense, step)
    private = defense.model[0](step.model, ClientState(), derive_generator(0, "private"))
    head = next(m for m in private.modules() if isinstance(m, PolarizationHead))
    public = small_model()
    features = public[:5](step.batch.inputs)
    gaps = 1.5 - (features @ head.weight.T + head.bias) * head.codes[step.batch.labels]
    loss = 0.7 * nn.functional.cross_entropy(public[5](features), step.batch.labels) + 0.3 * gaps.relu().sum(1).mean()
    expected = torch.autograd.grad(loss, list(public.parameters()))
    for (name, _), gradient in zip(public.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], gradient)


def test_the_private_head_leaves_the_public_model_as_it_was():
    step = local_step()
    before = ModelState.of(step.model).parameters
    changed_gradient(spn(), step)
    assert list(before) == [name for name, _ in step.model.named_parameters()]
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())


def trained(defense: Defense, plan=federation.FEDAVG, rounds: int = 2):
    server, recording = federation.server(plan), federation.Recording()
    kept = recording.follow(
        plain_rounds(
            server,
            federation.clients(plan, defense),
            rounds=rounds,
            audit=federation.probes(1),
            interceptor=recording.interceptor(plan),
        )
    )
    return server, recording, kept


@pytest.mark.parametrize("plan", [federation.FEDAVG, federation.FEDSGD], ids=["delta", "gradient"])
def test_without_its_loss_it_is_plain_federated_averaging_bit_for_bit(plan):
    (plain, seen, _), (server, ours, kept) = trained(none(), plan), trained(spn(alpha2=0), plan)
    federation.assert_same_state(plain.state, server.state)
    federation.assert_same_observations(seen.observations, ours.observations)
    assert set(kept[0].tensors) == {f"private/out.spn.{part}" for part in ("weight", "bias", "codes")}


def test_each_client_has_a_head_of_its_own_that_survives():
    defense = spn(bits=8)
    _, _, first = trained(defense, rounds=1)
    _, _, second = trained(defense, rounds=2)
    codes = [first[client].tensors["private/out.spn.codes"] for client in first]
    assert not torch.equal(codes[0], codes[1]) and not torch.equal(codes[1], codes[2])
    for client in first:
        before, after = first[client].tensors, second[client].tensors
        assert torch.equal(before["private/out.spn.codes"], after["private/out.spn.codes"])
        assert not torch.equal(before["private/out.spn.weight"], after["private/out.spn.weight"])


def test_a_probe_meets_the_head_that_the_first_round_starts_from():
    client = replace(federation.clients(defense=spn())[0], plan=federation.FEDSGD)
    model = spn().model[0](client.model, ClientState(), derive_generator(11, "client", 0, "private"))
    head = next(m for m in model.modules() if isinstance(m, PolarizationHead))
    sent = ModelState.of(client.model)
    drawn = ClientState({f"private/out.spn.{name}": t for name, t in head.state_dict().items()})
    for round in (1, 7):
        fresh = client.probe(sent, ClientState(), round=round, probe=0, batch_size=2).upload
        kept = client.probe(sent, drawn, round=round, probe=0, batch_size=2).upload
        federation.assert_same_tensors(fresh.tensors, kept.tensors)


@pytest.mark.parametrize(
    ("model_class", "options", "layer", "features"),
    [(DLNet, {}, None, 12 * 16), (AlexNet, {"width": 4}, None, 256), (ResNet10, {"width": 4}, None, 32),
     (AlexNet, {"width": 4}, "classifier.0", 16 * 4)],
)  # fmt: skip
def test_it_finds_the_features_of_any_model(model_class, options, layer, features):
    model = model_class(in_channels=3, image_size=16, num_classes=5, **options)
    step = local_step(model)
    private = spn(layer=layer, bits=9).model[0](model, ClientState(), derive_generator(0))
    head = next(m for m in private.modules() if isinstance(m, PolarizationHead))
    assert head.weight.shape == (9, features) and head.codes.shape == (5, 9)
    moved, clean = changed_gradient(spn(layer=layer), step), clean_gradient(step)
    assert any(not torch.allclose(moved[name], clean[name]) for name in clean)


def test_several_private_layers_are_a_deeper_second_head():
    defense, step = spn(alpha1=0.7, alpha2=0.3, bits=16, widths=[9, 4]), local_step()
    found = changed_gradient(defense, step)
    private = defense.model[0](step.model, ClientState(), derive_generator(0, "private"))
    head = next(m for m in private.modules() if isinstance(m, PolarizationHead))
    assert [tuple(layer.weight.shape) for layer in head.before] == [(9, 144), (4, 9)] and head.weight.shape == (16, 4)
    public = small_model()
    features = public[:5](step.batch.inputs)
    inner = (features @ head.before[0].weight.T + head.before[0].bias).relu()
    inner = (inner @ head.before[1].weight.T + head.before[1].bias).relu()
    gaps = 1.0 - (inner @ head.weight.T + head.bias) * head.codes[step.batch.labels]
    loss = 0.7 * nn.functional.cross_entropy(public[5](features), step.batch.labels) + 0.3 * gaps.relu().sum(1).mean()
    expected = torch.autograd.grad(loss, list(public.parameters()))
    for (name, _), gradient in zip(public.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], gradient)


def test_one_private_layer_is_what_it_was_before_there_were_more():
    alone, named = (
        spn(bits=8, **o).model[0](small_model(), ClientState(), derive_generator(0)) for o in ({}, {"widths": []})
    )
    assert alone.state_dict().keys() == named.state_dict().keys()
    assert all(torch.equal(t, named.state_dict()[name]) for name, t in alone.state_dict().items())
    assert "widths" not in spn().parts[0].settings and spn(widths=[3]).parts[0].settings["widths"] == [3]


def test_all_private_layers_are_trained_and_survive():
    _, _, first = trained(spn(bits=8, widths=[6], bound=0.5), rounds=1)
    _, _, second = trained(spn(bits=8, widths=[6], bound=0.5), rounds=2)
    for client in first:
        before, after = first[client].tensors, second[client].tensors
        assert before.keys() == {
            f"private/out.spn.{name}" for name in ("weight", "bias", "codes", "before.0.weight", "before.0.bias")
        }
        assert not torch.equal(before["private/out.spn.before.0.weight"], after["private/out.spn.before.0.weight"])


@pytest.mark.parametrize("bound", [None, 0.05])
def test_the_head_starts_like_the_layer_beside_it_or_as_told(bound):
    model = DLNet(in_channels=3, image_size=16, num_classes=5, init="uniform_0.3")
    private = spn(bits=64, bound=bound).model[0](model, ClientState(), derive_generator(0))
    head = next(m for m in private.modules() if isinstance(m, PolarizationHead))
    expected = (bound or 0.3) / 3**0.5
    assert head.weight.std().item() == pytest.approx(expected, rel=0.05)
    assert head.weight.abs().max().item() <= (bound or 0.32)


def test_the_public_head_is_not_perturbed():
    step = local_step()
    moved, clean = changed_gradient(spn(alpha2=5.0), step), clean_gradient(step)
    torch.testing.assert_close(moved["5.weight"], clean["5.weight"])
    torch.testing.assert_close(moved["5.bias"], clean["5.bias"])


def test_wrong_models_and_settings_are_named():
    convolutional = nn.Sequential(nn.Conv2d(3, 5, 16), nn.Flatten())
    for defense, model, words in [
        (spn(), convolutional, "expected to get a model with a linear layer"),
        (spn(layer="fc"), small_model(), "expected to be one of 5"),
    ]:
        with pytest.raises(UserError, match=words):
            defense.model[0](model, ClientState(), torch.Generator())
    spatial = nn.Sequential(nn.Linear(16, 5), nn.Flatten(), nn.Linear(3 * 16 * 5, 5))
    step: LocalStep = local_step(spatial)
    with pytest.raises(UserError, match="expects one vector per example"):
        changed_gradient(spn(layer="0"), step)
    wrong = [{"alpha1": 0}, {"alpha2": -1}, {"bits": 0}, {"bits": 1.5}, {"margin": 0.5}, {"bound": 0}]
    for options in (*wrong, {"widths": 64}, {"widths": [0]}, {"widths": "64"}, {"widths": [6.5]}):
        with pytest.raises(UserError, match=next(iter(options))):
            spn(**options)


class OutFirst(nn.Module):
    """Its output layer is registered before the layer in front of it, which has ``width`` outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out, self.body = nn.Linear(width, 5), nn.Linear(768, width)

    def forward(self, x):
        return self.out(self.body(x.flatten(1)).sigmoid())


def test_the_head_is_at_the_layer_that_makes_the_logits_or_the_user_is_told():
    with pytest.raises(UserError, match=r"body, to make the logits.* set defense.layer=out"):
        changed_gradient(spn(), local_step(OutFirst(8)))
    step = local_step(OutFirst(8))
    moved, clean = changed_gradient(spn(layer="out"), step), clean_gradient(step)
    assert not torch.allclose(moved["body.weight"], clean["body.weight"])
    with pytest.raises(UserError, match="each of 5 classes, but it has 3"):
        changed_gradient(spn(layer="out"), local_step(OutFirst(3)))


@pytest.mark.parametrize("others", [none(), dp_sgd()], ids=["alone", "per sample"])
def test_a_head_on_the_pixels_that_would_protect_nothing_is_refused(others):
    step = local_step(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)))
    with pytest.raises(UserError, match="public layers before its private head, but got none before 1"):
        run(compose(spn(), others), clean_gradient(step), step)


RECOMPUTING = {
    "per sample": dp_sgd(clip_norm=1e3, noise_multiplier=0),
    "robust batch": refiner(epsilon=1e3, alpha=0.0, beta=0.0, iterations=1, lr=1e-9, evaluator=small_evaluator()),
    "robust examples": refiner(
        epsilon=1e3, alpha=0.0, beta=0.0, iterations=1, lr=1e-9, match="example", evaluator=small_evaluator()
    ),
}


@pytest.mark.parametrize("name", RECOMPUTING)
def test_defenses_that_compute_the_gradient_anew_keep_the_private_loss(name):
    step = local_step()
    expected = changed_gradient(spn(alpha2=0.5), step)
    found = run(compose(spn(alpha2=0.5), RECOMPUTING[name]), clean_gradient(step), local_step())
    for tensor, value in expected.items():
        torch.testing.assert_close(found[tensor], value, atol=1e-5, rtol=1e-4)


def test_the_sensitivity_is_that_of_the_own_loss():
    step = private_step(spn(alpha2=50.0), local_step())
    loud, quiet = (
        gradient_sensitivity(s, directions=2, rng=derive_generator(0, "signs"))["0.weight"]
        for s in (step, replace(step, changes=()))
    )
    assert loud > 2 * quiet


def test_only_what_is_uploaded_is_clipped():
    """The private head's gradient, which is large here, takes no part of the norm, and none of the noise."""
    client = replace(
        federation.clients(defense=compose(spn(alpha2=100.0), dp_noise(at="gradient", scale=0, clip_norm=0.1)))[0],
        plan=federation.FEDSGD,
    )
    upload = client.probe(ModelState.of(client.model), ClientState(), round=1, probe=0, batch_size=2).upload
    norm = torch.cat([t.flatten() for t in upload.tensors.values()]).norm()
    assert norm.item() == pytest.approx(0.1, rel=1e-4)


def test_dp_sgd_clips_private_parameters_with_the_others():
    """They see single examples and shape the uploads to come: unclipped, they would break the bound."""
    step = private_step(spn(alpha2=100.0), local_step(examples=2))
    public = {name: t for name, t in step.sent.parameters.items() if "spn" not in name}
    found = dp_sgd(clip_norm=0.1, noise_multiplier=0).gradient[0](public, step)
    assert found.keys() == step.sent.parameters.keys() > public.keys()
    assert flat(found).norm() <= 0.1 * (1 + 1e-6) and found["5.spn.weight"].any()


def test_labels_may_be_probabilities():
    step = local_step()
    soft = Batch(step.batch.inputs, nn.functional.one_hot(step.batch.labels, 5).float())
    defense = spn(alpha2=0.5)
    hard, mixed = (changed_gradient(defense, replace(step, batch=batch)) for batch in (step.batch, soft))
    for name in hard:
        torch.testing.assert_close(hard[name], mixed[name])


def test_changes_of_the_loss_run_in_order_on_one_pass():
    calls = []

    class Counting(nn.Linear):
        def forward(self, inputs):
            calls.append(1)
            return super().forward(inputs)

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), Counting(8, 5))
    step = local_step(model)
    defense = spn()
    private = defense.model[0](model, ClientState(), derive_generator(0))
    loss_gradients(private, ModelState.of(private), step.batch, changes=(*defense.loss, *spn(alpha2=0).loss))
    assert len(calls) == 1
