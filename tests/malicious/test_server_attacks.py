"""What each malicious server reads of real digits, and what it says of how sure it is."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fl_privacy.attacks import AnalyticInversion
from fl_privacy.attacks.malicious import (
    Fishing,
    Imprint,
    Inconsistent,
    Loki,
    MembershipTrap,
    ServerAttack,
    TrapWeights,
)
from fl_privacy.attacks.malicious.inconsistent import leaves_such_a_bias
from fl_privacy.attacks.malicious.server_attack import images_of_brightness, is_one_image
from fl_privacy.defenses import ClientState, Defense, dp_noise, dp_sgd, local_dp, quantization, selective_sharing
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Server, ServerPlan
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.server import weighted_mean
from fl_privacy.measure import evaluate
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.runs.server_attack import hand_over
from fl_privacy.types import Batch, Certainty, LocalPlan, ModelState, Observation, Reconstruction, Upload

from . import rounds

STEPS = LocalPlan(shares="delta", lr=1e-3, steps=4, batch_size=8)


def test_an_update_of_zeros_holds_no_image() -> None:
    pixels, alone = images_of_brightness(torch.zeros(4, 30).double(), torch.zeros(4), torch.ones(4), smallest=1e-3)
    assert len(pixels) == len(alone) == 0


@pytest.mark.parametrize("name", ["lenet", "mlp", "resnet"])
@pytest.mark.parametrize("activation", ["relu", "hardtanh"])
def test_an_imprint_holds_the_images_that_are_alone_in_their_bin(name: str, activation: str) -> None:
    attack, seen, asked = rounds.probed(Imprint(bins=128, activation=activation), name, 32)
    found = attack.read(seen)
    scores = evaluate(found, asked.victim_batch(0, 32)).images
    proven = [s.values["psnr"] for s in scores if s.certainty is Certainty.PROVEN]
    edges = attack.edges()
    bins = torch.bucketize(asked.victim_batch(0, 32).inputs.double().flatten(1).mean(1), edges)
    lone = (bins.unique(return_counts=True)[1] == 1).sum() - int((bins == 0).sum() == 1)
    assert len(proven) >= 0.8 * int(lone) >= 10
    assert min(proven) > 70
    assert found.certainty is (Certainty.PROVEN if len(proven) == len(found.batch) else Certainty.APPROXIMATE)


def test_a_mixture_is_never_called_an_image() -> None:
    attack, seen, asked = rounds.probed(Imprint(bins=4), "lenet", 32)
    found = attack.read(seen)
    for image, certainty in zip(found.batch.inputs, found.certainties, strict=True):
        error = (asked.victim_batch(0, 32).inputs - image).flatten(1).pow(2).mean(1).min()
        assert (certainty is Certainty.PROVEN) == bool(error < 1e-6)


@pytest.mark.parametrize(("plan", "least"), [(STEPS, 0.5), (replace(STEPS, momentum=0.9, weight_decay=5e-3), 0.4)])
def test_loki_reads_every_client_in_the_mean_of_all(plan: LocalPlan, least: float) -> None:
    attack = Loki(bins=128).informed(rounds.public())
    model, number = attack.architecture(rounds.network("lenet"), (1, 28, 28), 3), 32
    state, proven = ModelState.of(model), 0
    clients = [rounds.client(model, plan, id=k, examples=number) for k in range(3)]
    sent = [attack.craft(model, state, k) for k in range(3)]
    uploads = [c.update(s, ClientState(), round=1).upload for c, s in zip(clients, sent, strict=True)]
    mean = Upload(tensors=weighted_mean([u.tensors for u in uploads], [number] * 3), num_examples=3 * number)
    for k, asked in enumerate(clients):
        found = attack.read(rounds.observation(model, sent[k], mean, plan, k))
        truth = asked.examples.batch(asked.indices)
        scores = evaluate(found, truth).images
        sure = [s.values["psnr"] for s in scores if s.certainty is Certainty.PROVEN]
        assert all(psnr > 50 for psnr in sure)
        proven += len(sure)
    assert proven > least * 3 * number


@pytest.mark.parametrize("attack", [Imprint(bins=4), Loki(bins=4)])
def test_what_a_server_puts_into_a_model_starts_alike_in_every_process(attack: ServerAttack) -> None:
    model, before = rounds.network("lenet"), torch.get_rng_state()
    torch.manual_seed(1)
    one = attack.architecture(model, (1, 28, 28), 2).state_dict()
    torch.manual_seed(2)
    other = attack.architecture(model, (1, 28, 28), 2).state_dict()
    torch.set_rng_state(before)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_slice_for_each_client_is_expected() -> None:
    attack = Loki(bins=8).informed(rounds.public())
    model = attack.architecture(rounds.network("lenet"), (1, 28, 28), 2)
    with pytest.raises(UserError, match=r"in 0\.\.1 is expected, but got 2"):
        attack.craft(model, ModelState.of(model), 2)


def test_trap_weights_hold_more_images_than_an_untrained_layer() -> None:
    attack, seen, asked = rounds.probed(TrapWeights(), "mlp", 100)
    found = attack.read(seen)
    sure = [s for s in evaluate(found, asked.victim_batch(0, 100)).images if s.certainty is Certainty.PROVEN]
    assert len(sure) >= 25
    assert all(s.values["psnr"] > 55 for s in sure)
    fresh = ModelState.of(seen.model)
    honest = asked.probe(fresh, ClientState(), round=1, probe=0, batch_size=100).upload
    without = attack.read(replace(seen, sent=fresh, upload=honest))
    assert sum(c is Certainty.PROVEN for c in without.certainties) < len(sure) / 2


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_fishing_leaves_the_gradient_of_a_single_example(name: str) -> None:
    attack, seen, asked = rounds.probed(Fishing(), name, 64)
    alone = attack.read(seen)
    assert isinstance(alone, Observation)
    assert alone.upload.num_examples == 1
    truth = asked.victim_batch(0, 64)
    labels = alone.knowledge.labels
    apart = []
    for image in truth.inputs:
        own = loss_gradients(seen.model, seen.sent, Batch(image[None], labels)).gradients
        apart.append(
            sum(float((own[n] - t).square().sum()) for n, t in alone.upload.tensors.items())
            / sum(float(t.square().sum()) for t in alone.upload.tensors.values())
        )
    assert min(apart) < 1e-5
    assert sorted(apart)[1] > 0.01
    if name == "mlp":
        (found,) = AnalyticInversion()([alone], seed=0)
        assert float((found.batch.inputs - truth.inputs[apart.index(min(apart))]).abs().max()) < 1e-3


@pytest.mark.parametrize("plan", [LocalPlan(loss_scale=3.0), LocalPlan(shares="delta", lr=0.1)])
def test_fishing_counts_examples_whatever_their_gradients_are_multiplied_by(plan: LocalPlan) -> None:
    attack, seen, asked = rounds.probed(Fishing(), "mlp", 16, plan=plan)
    alone = attack.read(seen)
    assert isinstance(alone, Observation) and alone.upload.num_examples == 1
    (found,) = AnalyticInversion()([alone], seed=0)
    truth = asked.victim_batch(0, 16).inputs
    assert float((found.batch.inputs - truth).abs().flatten(1).amax(1).min()) < 1e-2


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_class_fishing_leaves_the_examples_of_the_class(scale: float) -> None:
    attack = Fishing(target=3).informed(rounds.public())
    model = rounds.network("lenet")
    asked, state = rounds.client(model, LocalPlan(loss_scale=scale)), ModelState.of(model)
    sent = attack.craft(model, state, 0)
    upload = asked.probe(sent, ClientState(), round=1, probe=0, batch_size=40).upload
    truth = asked.victim_batch(0, 40)
    chosen = truth.labels == 3
    found = attack.read(rounds.observation(model, sent, upload, asked.plan))
    assert isinstance(found, Observation)
    assert found.upload.num_examples == int(chosen.sum())
    own = loss_gradients(model, sent, Batch(truth.inputs[chosen], truth.labels[chosen]), loss_scale=scale).gradients
    for name, tensor in found.upload.tensors.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-3, atol=1e-4 * float(own[name].abs().max()))


@pytest.mark.parametrize("name", ["lenet", "mlp", "resnet"])
def test_all_but_one_client_are_silent(name: str) -> None:
    attack = Inconsistent(client=1).informed(rounds.public())
    model = rounds.network(name)
    plan, state = LocalPlan(shares="delta", lr=0.05, steps=2, batch_size=8, batch_norm="eval"), ModelState.of(model)
    mixed = attack.mixed(model, state)
    uploads = [
        rounds.client(model, plan, id=k, examples=16)
        .update(attack.craft(model, state, k), ClientState(), round=1)
        .upload
        for k in range(3)
    ]
    assert mixed <= {"classifier.bias"}
    for silent in (uploads[0], uploads[2]):
        assert all(not t.any() for n, t in silent.tensors.items() if n not in mixed)
    assert all(t.any() for t in uploads[1].tensors.values())
    mean = Upload(tensors=weighted_mean([u.tensors for u in uploads], [16] * 3), num_examples=48)
    found = attack.read(rounds.observation(model, state, mean, plan, 1))
    assert isinstance(found, Observation)
    for tensor_name, tensor in found.upload.tensors.items():
        torch.testing.assert_close(3 * tensor, uploads[1].tensors[tensor_name])
    assert isinstance(attack.read(rounds.observation(model, state, mean, plan, 0)), Reconstruction)


def test_a_membership_trap_is_right_about_every_image() -> None:
    train = rounds.digits().train
    members, others = train.batch(rounds.shuffled(train, 20)).inputs, rounds.public()
    attack = MembershipTrap().informed(torch.cat([members, others]))
    model = rounds.network("mlp")
    asked = rounds.client(model, LocalPlan(), examples=1000)
    sent = attack.craft(model, ModelState.of(model), 0)
    upload = asked.update(sent, ClientState(), round=1).upload
    told = attack.members(rounds.observation(model, sent, upload, asked.plan))
    assert told.tolist() == [True] * 20 + [False] * (len(told) - 20)
    assert len(told) == 50


def trapped(plan: LocalPlan, defense: Defense | None = None) -> tuple[MembershipTrap, Observation]:
    """20 members and 30 others asked about, and what a client with the members among its 50 images replied."""
    train = rounds.digits().train
    members = train.batch(rounds.shuffled(train, 20)).inputs
    attack = MembershipTrap().informed(torch.cat([members, rounds.public()]))
    model = rounds.network("mlp")
    asked = rounds.client(model, plan, examples=50)
    asked = replace(asked, defense=defense or asked.defense)
    sent = attack.craft(model, ModelState.of(model), 0)
    upload = asked.update(sent, ClientState(), round=1).upload
    return attack, rounds.observation(model, sent, upload, plan)


@pytest.mark.parametrize("shares", ["delta", "weights"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_weight_decay_springs_no_membership_trap(shares: str, optimizer: str) -> None:
    attack, seen = trapped(LocalPlan(shares=shares, lr=1e-2, optimizer=optimizer, weight_decay=1e-2))
    assert attack.members(seen).tolist() == [True] * 20 + [False] * 30
    found = attack.read(seen)
    assert found.certainties == (Certainty.PROVEN,) * 20


@pytest.mark.parametrize("defense", [local_dp(), dp_sgd(), dp_noise(scale=1e-5), dp_noise(scale=1e-9)])
def test_noise_springs_no_membership_trap_and_leaves_none_proven(defense: Defense) -> None:
    attack, seen = trapped(LocalPlan(), defense)
    assert not attack.members(seen)[20:].any()
    assert Certainty.PROVEN not in attack.read(seen).certainties


def test_a_membership_trap_that_local_steps_have_bent_proves_nothing() -> None:
    plan = LocalPlan(shares="weights", lr=1e-3, optimizer="adamw", weight_decay=1e-2, epochs=2, batch_size=10)
    attack, seen = trapped(plan)
    assert attack.members(seen)[20:].any()
    assert Certainty.PROVEN not in attack.read(seen).certainties


@pytest.mark.parametrize("attack", [TrapWeights(), MembershipTrap(), Inconsistent(), Fishing(target=10)])
def test_a_model_that_an_attack_can_t_use_is_one_line(attack: ServerAttack) -> None:
    attack = attack.informed(rounds.public())
    model = rounds.build_model(rounds.LeNet, seed=0, in_channels=1, image_size=28, num_classes=10, activation="tanh")
    with pytest.raises(UserError, match="expected"):
        attack.craft(model, ModelState.of(model), 5)


def test_what_is_rounded_coarsely_is_not_proven_to_be_one_image() -> None:
    """A bin that caught little holds few steps of secure aggregation's whole numbers: on levels, whatever they are."""
    step = 1e-9
    rows = step * torch.randint(0, 128, (1, 300), generator=torch.Generator().manual_seed(0)).double()
    low, high = torch.tensor([0.2]), torch.tensor([0.3])
    _, blind = images_of_brightness(rows, low, high, smallest=0.0)
    _, alone = images_of_brightness(rows, low, high, smallest=0.0, rounding=step / 2)
    assert blind.all() and not alone.any()
    image = torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(1)).double() / 255
    bright = image.mean(1)
    _, alone = images_of_brightness(1e3 * image, bright - 0.05, bright + 0.05, smallest=0.0, rounding=step / 2)
    assert alone.all()


@pytest.mark.parametrize("defense", [selective_sharing(share=0.3), quantization(bits=4)])
def test_nothing_is_proven_of_an_update_that_shows_a_defense(defense: Defense) -> None:
    attack, seen, _ = rounds.probed(Imprint(bins=64), "lenet", 8, defense=defense)
    found = attack.read(seen)
    assert isinstance(found, Reconstruction) and found.batch is not None
    assert Certainty.PROVEN not in found.certainties


@pytest.mark.parametrize(
    "levels", [[32, 224], [0, 200], [0, 85, 170, 255], [20, 60, 130, 240], list(range(0, 256, 36))]
)
def test_mixtures_of_images_of_few_levels_are_not_proven(levels: list[int]) -> None:
    """Their values come near to levels by chance; photographs of many levels are proven all the same."""
    rng = torch.Generator().manual_seed(len(levels))
    images = torch.tensor(levels)[torch.randint(0, len(levels), (400, 3, 300), generator=rng)].double() / 255
    shares = torch.rand(400, 3, generator=rng, dtype=torch.float64) + 0.05
    shares[::2, 2] = 0
    mixtures = (images * (shares / shares.sum(1, keepdim=True))[:, :, None]).sum(1)
    assert int(is_one_image(mixtures).sum()) == 0
    photographs = torch.randint(0, 256, (50, 300), generator=rng).double() / 255
    assert bool(is_one_image(photographs + 1e-6).all())


@pytest.mark.parametrize("step", [4, 6, 8, 10, 16])
def test_two_images_of_multiples_mixed_half_and_half_are_not_proven(step: int) -> None:
    """Half of a sum of multiples of 8 is a multiple of 4: whole, and of more than enough levels."""
    rng = torch.Generator().manual_seed(step)
    images = step * torch.randint(0, 255 // step + 1, (100, 2, 300), generator=rng).double() / 255
    assert not bool(is_one_image(images.mean(1)).any())
    for shares in ((0.5 + 1e-4, 0.5 - 1e-4), *([(0.25, 0.75)] if step % 8 == 0 else [])):
        assert not bool(is_one_image((images * torch.tensor(shares)[:, None]).sum(1)).any())
    rows, bright = images.mean(1)[:8] * 37.0, images.mean(1)[:8].mean(1)
    _, alone = images_of_brightness(rows, bright - 0.02, bright + 0.02, smallest=0.0)
    assert not bool(alone.any()), "as LOKI reads them: up to a factor"


def test_two_images_of_even_levels_whose_mean_is_whole_are_told_apart_by_the_update() -> None:
    """Twins that leave the same gradient mix half and half to whole levels; their mean would have left another."""
    _, seen, _ = rounds.probed(Imprint(bins=4, mean=0.5, std=0.2), "lenet", 8)
    rng = torch.Generator().manual_seed(3)
    images = (2 * torch.randint(0, 128, (2, 1, 28, 28), generator=rng)).double() / 255
    mean = images.mean(0, keepdim=True)
    assert bool(is_one_image(mean.flatten(1)).all())
    model, state = seen.model, ModelState({n: v.double() for n, v in seen.sent.parameters.items()}, {})

    def own(batch: torch.Tensor, label: int) -> torch.Tensor:
        values = {name: value.clone().requires_grad_() for name, value in state.parameters.items()}
        outputs = torch.func.functional_call(model.double(), values, (batch,))
        loss = torch.nn.functional.cross_entropy(outputs, torch.full((len(batch),), label), reduction="sum") / 8
        (found,) = torch.autograd.grad(loss, [values["imprint.measure.bias"]])
        return found

    row = torch.tensor([0])
    told = partial(leaves_such_a_bias, seen, rows=row, bias="imprint.measure.bias", error=torch.tensor([1e-12]))
    for label in range(10):
        assert not bool(told(mean.flatten(1), measured=own(images, label)[row]).any())
        assert bool(told(images[:1].flatten(1), measured=own(images[:1], label)[row]).all())


@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_the_one_client_s_update_is_all_that_is_left_of_the_mean(decay: float) -> None:
    """Weight decay moves the dead models of all others as well, which the server knows as it sent them."""
    plan = LocalPlan(shares="delta", lr=0.05, batch_norm="eval", weight_decay=decay)
    attack, model = Inconsistent(client=1).informed(rounds.public()), rounds.network("lenet")
    clients = [rounds.client(model, plan, id=k, examples=number) for k, number in enumerate((40, 8, 60))]
    server = Server(state=ModelState.of(model), local_plan=plan, plan=ServerPlan(), clients=range(3), seed=0)
    audit = Audit(rounds=frozenset({1}), uploads="update", clients=frozenset({1}))
    seen = Interceptor(model=model, plan=plan, input_shape=(1, 28, 28), num_classes=10)
    _, take_means = hand_over(server, attack, audit, seen)
    sent = [server.sent_to(k, 1) for k in range(3)]
    replies = {
        k: c.update(s, ClientState(), round=1).upload for k, (c, s) in enumerate(zip(clients, sent, strict=True))
    }
    server.receive(replies, 1)
    (mean,) = take_means()
    found = attack.read(mean)
    assert isinstance(found, Observation) and len(found.upload.tensors) == len(replies[1].tensors) - 1
    for name, tensor in found.upload.tensors.items():
        own = replies[1].tensors[name]
        assert float((tensor - own).norm()) < 1e-2 * float(own.norm()), name
