"""ATS in a client's round."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.defenses import ClientState, ats, compose, dp_sgd, instahide
from fl_privacy.defenses.privacy import guarantee
from fl_privacy.errors import UserError
from fl_privacy.federation import local_update
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState

from ..harness import small_model


def batch(number=6):
    levels = torch.randint(0, 256, (number, 3, 16, 16), generator=derive_generator(0, "images"))
    return Batch(levels.float() / 255, torch.arange(number) % 5)


def upload(defense, given, seed=0):
    model = small_model()
    result = local_update(
        model,
        ModelState.of(model),
        [given],
        num_examples=len(given),
        plan=LocalPlan(),
        defense=defense,
        state=ClientState(),
        rng=derive_generator(seed),
        private_rng=derive_generator(seed, "private"),
    )
    return result.upload.tensors


def transformed(defense, given, seed=0):
    (hook,) = defense.data
    return hook(given, ClientState(), derive_generator(seed))


def test_labels_and_number_stay():
    found = transformed(ats(), batch())
    assert torch.equal(found.labels, batch().labels)
    assert found.inputs.shape == batch().inputs.shape


def test_the_upload_is_the_gradient_of_the_transformed_images_and_of_nothing_else():
    defense = ats(policies=["3-43-15", "9-1"])
    model = small_model()
    expected = loss_gradients(model, ModelState.of(model), transformed(defense, batch())).gradients
    for name, tensor in upload(defense, batch()).items():
        assert torch.equal(tensor, expected[name])


def test_originals_that_are_transformed_alike_give_the_same_upload():
    """Posterized, images differ in bits that no gradient may show."""
    given = batch()
    other = replace(given, inputs=((given.inputs * 255).round().byte() ^ 1).float() / 255)
    assert not torch.equal(given.inputs, other.inputs)
    one, two = (upload(ats(policies="11"), b) for b in (given, other))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("policies", ["3-43-15", ["13-43-18", "21-3-16"]])
def test_reproducible_by_the_seed(policies):
    first, again, other = (upload(ats(policies=policies), batch(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_description_names_the_policies():
    assert ats(policies=["3-43-15", 7]).parts[0].settings["policies"] == ["3-43-15", "7"]


def test_noise_on_the_gradients_of_transformed_examples_keeps_its_guarantee():
    composed, alone = compose(ats(), dp_sgd()), dp_sgd()
    settings = {"sample_rate": 0.1, "delta": 1e-5}
    assert guarantee(composed, **settings).epsilon(10) == guarantee(alone, **settings).epsilon(10)
    assert guarantee(compose(instahide(), dp_sgd()), **settings).missing is not None


def test_images_that_cannot_be_transformed_are_refused_before_training():
    (prepare,) = ats().prepare
    prepare((3, 16, 16))
    with pytest.raises(UserError, match="1 or 3"):
        prepare((2, 16, 16))
