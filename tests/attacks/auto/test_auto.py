"""The attack without a setting reads at least what one that was chosen reads, and never looks at the truth."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_privacy.attacks import AutoAttack, inverting_gradients
from fl_privacy.attacks.auto.race import Attempt, Judgment, Race, ranked
from fl_privacy.attacks.auto.sub_attacks import entries, most_attempts, rungs
from fl_privacy.attacks.gradient_inversion.evident_defense import evident_defense, undo_evident_defenses, usual_of
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.data import load_data
from fl_privacy.defenses._pruning import pruning, selective_sharing
from fl_privacy.defenses._quantization import quantization
from fl_privacy.effects import MutedFeatures, Quantized, Sparse
from fl_privacy.errors import UserError
from fl_privacy.models import LeNet
from fl_privacy.types import Batch, Certainty, LocalPlan, ModelState, Observation, Upload, VictimId
from tests.attacks.exact.test_exact import mlp, victims as images_behind
from tests.attacks.victims import CLASSES, error, examples, observations, observe, smooth_net

SHORT = AutoAttack(evaluations=200)


@pytest.mark.long
def test_reads_more_than_a_preset_of_the_same_length():
    seen = observations(smooth_net(), 3)
    found, plain = SHORT(seen, seed=0), inverting_gradients(iterations=200)(seen, seed=0)
    truth = examples(3)
    for k, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
        own = type(truth)(truth.inputs[k : k + 1], truth.labels[k : k + 1])
        assert error(ours.batch, own) < error(theirs.batch, own)
        assert ours.member and torch.equal(ours.batch.labels, own.labels)


@pytest.mark.long
def test_gradients_that_shrink_towards_the_input_are_read():
    """Behind sigmoids with PyTorch's initialization, the first layer has a thousandth of the output layer's.

    Without the output's bias nothing is solved for.
    """
    digits = load_data("mnist_mini").train
    torch.manual_seed(0)
    model = LeNet(in_channels=1, image_size=digits.input_shape[-1], num_classes=10).eval()
    truth = digits.batch(torch.arange(1))
    seen = replace(observe(model, truth, told=True), num_classes=10)
    seen = upload(seen, {n: t for n, t in seen.upload.tensors.items() if n != "classifier.bias"})
    (found,) = AutoAttack(evaluations=200)([seen], seed=0)
    assert error(found.batch, truth) < 0.003
    assert found.member == "cosine of each layer by L-BFGS"


@pytest.mark.long
def test_contrast_is_read_behind_batch_norm_of_the_own_batch():
    """Which is nearly nothing to the update, so that the smoothest image that fits would be gray."""
    photos = smooth_picture(16)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ELU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32), nn.ELU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64), nn.ELU(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    seen = observe(model, photos, plan=LocalPlan(batch_norm="train"))
    (found,) = AutoAttack(evaluations=300)([seen], seed=0)
    assert found.batch is not None
    assert 0.7 < float(found.batch.inputs.std() / photos.inputs.std()) < 1.4
    assert error(found.batch, photos) < 0.01


def smooth_picture(size: int = 28) -> Batch:
    """Draw a smooth picture (1, 3, size, size) in [0, 1] of photographic contrast."""
    rough = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    smooth = nn.functional.interpolate(rough, size=size, mode="bicubic", align_corners=True)
    return Batch(smooth.clamp(0, 1), torch.tensor([2]))


def test_what_is_proven_needs_no_descent():
    seen, _ = images_behind(mlp(), 3, 2)
    found = AutoAttack(evaluations=10**9)(seen, seed=0)
    assert {(one.member, one.certainty) for one in found} == {("exact", Certainty.PROVEN)}


@pytest.mark.long
def test_the_same_alone_and_in_company():
    attack = AutoAttack(evaluations=80, most_victims=1)
    seen = observations(smooth_net(), 3)
    together = attack(seen, seed=1)
    for alone, one in zip([attack([each], seed=1)[0] for each in seen], together, strict=True):
        assert torch.equal(alone.batch.inputs, one.batch.inputs)
        assert (alone.member, alone.loss) == (one.member, one.loss)


def test_labels_that_nothing_tells_are_optimized():
    (seen,) = observations(smooth_net(), 1)
    hidden = {name: t for name, t in seen.upload.tensors.items() if not name.startswith("5.")}
    (found,) = SHORT([replace(seen, upload=replace(seen.upload, tensors=hidden))], seed=0)
    assert found.label_source == "optimized"


def test_what_can_not_be_attacked_says_why():
    (seen,) = observations(smooth_net(), 1)
    zero = {name: torch.zeros_like(t) for name, t in seen.upload.tensors.items()}
    (found,) = SHORT([replace(seen, upload=replace(seen.upload, tensors=zero))], seed=0)
    assert found.batch is None and "zero everywhere" in found.failure


@pytest.mark.parametrize("wrong", [{"budget": "slow"}, {"budget": 0}, {"evaluations": 0}, {"most_victims": 0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=r"^attack\."):
        AutoAttack(**wrong)


@pytest.mark.parametrize("evaluations", [600, 4800, 24_000])
def test_rungs_keep_to_the_budget_and_end_with_one_attempt(evaluations):
    steps = rungs(evaluations, most_attempts(evaluations))
    assert sum(rung.attempts * rung.evaluations for rung in steps) <= 1.05 * evaluations
    assert steps[-1].attempts == 1
    assert [rung.attempts for rung in steps] == sorted((rung.attempts for rung in steps), reverse=True)


def test_of_two_guesses_the_one_that_fits_has_the_better_score():
    """The rule by which members are compared, which knows no truth."""
    (victim,) = observations(smooth_net(), 1)
    race = Race(Group({0: victim}), entries(victim, 1, lambda attack: attack), 0)
    truth = examples(1)
    noise = torch.randn(truth.inputs.shape, generator=torch.Generator().manual_seed(0))
    for images in (truth.inputs, (truth.inputs + 0.1 * noise).clamp(0, 1)):
        race.add(0, Batch(images, truth.labels))
    exact, wrong = race.attempts[0][1:]
    assert exact.mismatch < 1e-9 < wrong.mismatch
    assert exact.order < wrong.order


def test_images_that_equations_gave_are_left_only_for_what_suits_the_widest_tensor_better():
    """Behind noise a smooth guess has the better score though the layer that gave the images tells against it."""
    images, smooth, better = torch.zeros(3), torch.ones(3), 2 * torch.ones(3)
    solved = Attempt(0, 0, 0.3, given="cocktail party", variables=images, mismatch=0.3, widest=0.3, score=-1.0)
    free = replace(solved, given="", start=1)
    judgment = Judgment(*torch.tensor([[0.2, 0.2], [0.31, 0.29], [0.1, 0.1], [-2.0, -1.5]]))
    drifted, gained = (
        solved.after(variables, judgment, row, torch.zeros(1), ()) for row, variables in enumerate((smooth, better))
    )
    assert (drifted.variables, drifted.score) == (images, -1.0)
    assert (gained.variables, gained.widest) == (better, judgment.widest[1])
    other = free.after(smooth, judgment, 0, torch.zeros(1), ())
    assert other.variables is smooth and other.order < solved.order
    assert ranked([other, solved]) == [solved, other]
    assert ranked([other, free]) == [other, free]


def test_images_that_equations_gave_are_not_left_for_what_free_pixels_suit_of_noise():
    solved = Attempt(0, 0, 0.3, given="exact", variables=torch.zeros(3), widest=0.3, score=-1.0, margin=0.5)
    judgment = Judgment(*torch.tensor([[0.2, 0.2], [0.2, 0.1], [0.1, 0.1], [-2.0, -2.0]]))
    fitted, better = (solved.after(torch.ones(3), judgment, row, torch.zeros(1), ()) for row in (0, 1))
    assert fitted.variables is solved.variables and fitted.margin == 0.5
    assert better.variables is not solved.variables and better.margin == 0
    others = [replace(solved.judged(judgment, row), given="", margin=0.0) for row in (0, 1)]
    assert ranked([others[0], solved]) == [solved, others[0]]
    assert ranked([others[1], solved]) == [others[1], solved]


def lenet(activation: str = "tanh") -> Observation:
    torch.manual_seed(0)
    model = LeNet(in_channels=2, image_size=8, num_classes=CLASSES, activation=activation)
    return observations(model.double(), 1)[0]


def upload(seen: Observation, tensors) -> Observation:
    return replace(seen, upload=replace(seen.upload, tensors=tensors))


def defended(seen: Observation, defense) -> Observation:
    return upload(seen, defense.upload[0](dict(seen.upload.tensors), {}, torch.Generator().manual_seed(0)))


EVIDENT = {
    "pruned": (pruning(rate=0.9), Sparse(largest=True, scope="layer")),
    "shared by magnitude": (selective_sharing(share=0.2), Sparse(largest=True, scope="layer")),
    "shared at random": (selective_sharing(share=0.3, by="random"), Sparse(largest=False, scope="layer")),
    "8 bits": (quantization(bits=8), Quantized(bits=8)),
    "2 bits": (quantization(bits=2), Quantized(bits=2)),
    "1 bit": (quantization(bits=1), Quantized(bits=1)),
}


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("kind", EVIDENT)
def test_a_defense_shows_in_the_update(kind, activation):
    seen = lenet(activation)
    defense, effect = EVIDENT[kind]
    (part,) = evident_defense(defended(seen, defense), usual_of(seen))
    assert part.effect == effect


def test_empty_columns_show_and_an_undefended_update_shows_nothing():
    seen = lenet()
    assert evident_defense(seen, usual_of(seen)) == ()
    relu = lenet("relu")
    assert evident_defense(relu, usual_of(relu)) == ()
    weight = seen.upload.tensors["classifier.weight"].clone()
    weight[:, ::2] = 0
    (part,) = evident_defense(upload(seen, {**seen.upload.tensors, "classifier.weight": weight}), usual_of(seen))
    assert part.effect == MutedFeatures()


@pytest.mark.long
def test_zeros_that_are_evident_are_answered():
    seen = observations(smooth_net(), 1)
    pruned = [defended(each, pruning(rate=0.5)) for each in seen]
    (found,) = SHORT(pruned, seed=0)
    assert any("not zero" in sentence for sentence in found.countermeasures)


@pytest.mark.parametrize(("rate", "thin"), [(0.97, True), (0.5, False)])
def test_fewer_values_than_pixels_are_answered_by_smoothness(rate, thin):
    """What fits them is then no proof, and rough images fit better."""
    (seen,) = undo_evident_defenses([defended(observations(smooth_net(), 1)[0], pruning(rate=rate))])
    weights = [weight for _, _, weight in entries(seen, 3, lambda attack: attack)]
    assert (min(weights) >= 0.1) is thin
    race = Race(Group({0: seen}), entries(seen, 1, lambda attack: attack), 0)
    race.add(0, examples(1))
    (_, exact) = race.attempts[0]
    assert exact.mismatch <= 1e-12 or not thin
    least = math.log(1e-6 if thin else 1e-12)
    assert least < exact.score < least + 3.0


@pytest.mark.fuzz
def test_a_smooth_picture_is_read_from_a_thinned_update():
    picture = smooth_picture()
    torch.manual_seed(0)
    model = LeNet(in_channels=3, image_size=28, num_classes=CLASSES, activation="tanh").eval()
    seen = defended(observe(model, picture), pruning(rate=0.9))
    (found,) = AutoAttack(evaluations=200)([seen], seed=0)
    (plain,) = inverting_gradients(iterations=200, total_variation=0.1)(undo_evident_defenses([seen]), seed=0)
    assert error(found.batch, picture) < error(plain.batch, picture)


@pytest.mark.fuzz
def test_a_client_that_tells_of_adam_is_read_no_less() -> None:
    """One step of Adam keeps little but signs; told of it, the attack replays the step instead of matching signs."""
    model = smooth_net()
    sent, errors = ModelState.of(model), {"sgd": 0.0, "adam": 0.0}
    batch = examples(2)
    truths = [Batch(batch.inputs[k : k + 1], batch.labels[k : k + 1]) for k in range(2)]
    for optimizer in errors:
        seen = []
        for number, truth in enumerate(truths):
            client = copy.deepcopy(model)
            step = torch.optim.Adam(client.parameters(), lr=0.01)
            cross_entropy(client(truth.inputs), truth.labels).backward()
            step.step()
            uploaded = {name: value.detach() for name, value in client.named_parameters()}
            plan = LocalPlan(shares="weights", lr=0.01, optimizer=optimizer)
            one = observe(model, truth, id=VictimId(0, 0, number))
            seen.append(replace(one, sent=sent, plan=plan, upload=Upload(tensors=uploaded, num_examples=1)))
        found = AutoAttack(evaluations=50, dtype="float64")(seen, seed=0)
        errors[optimizer] = sum(error(one.batch, truth) for one, truth in zip(found, truths, strict=True))
    assert errors["adam"] < errors["sgd"], errors
