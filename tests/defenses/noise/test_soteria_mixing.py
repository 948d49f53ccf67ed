from collections import Counter

import pytest
import torch
from scipy import stats

from fl_privacy.defenses import soteria_mixing
from fl_privacy.defenses._soteria import gradient_sensitivity, slice_members
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch

from ..harness import clean_gradient, flat, local_step, run


def test_sensitivity_is_the_norm_of_the_jacobian_of_the_gradient():
    step = local_step(examples=1)
    names = ["2.bias", "5.bias"]

    def gradient(inputs):
        batch = Batch(inputs, step.batch.labels)
        found = loss_gradients(step.model, step.sent, batch, create_graph=True).gradients
        return tuple(found[name] for name in names)

    exact = [j.norm().item() for j in torch.autograd.functional.jacobian(gradient, step.batch.inputs)]
    estimated = gradient_sensitivity(step, directions=400, rng=derive_generator(0, "signs"))
    assert [estimated[name] for name in names] == pytest.approx(exact, rel=0.1)
    assert set(estimated) == set(step.sent.parameters)


def test_slices_share_the_sensitivity_equally_and_keep_the_order():
    tensors = {"a": torch.zeros(10, 10), "b": torch.zeros(1000)}
    members = slice_members(tensors, {"a": 8.0, "b": 2.0}, 10)
    assert Counter(members["a"].flatten().tolist()) == {i: 12 + i % 2 for i in range(8)}
    assert Counter(members["b"].tolist()) == {8: 500, 9: 500}
    order = flat(members)
    assert (order.diff() >= 0).all()
    assert flat(slice_members(tensors, {"a": 0.0, "b": 0.0}, 11)).bincount().tolist() == [100] * 11


def test_the_share_of_slices_is_noised_and_the_rest_left():
    step = local_step()
    clean = clean_gradient(step)
    defended = run(soteria_mixing(rate=0.3, noise_scale=0.2), clean, step)
    difference = flat(defended) - flat(clean)
    noised = difference[difference != 0]
    assert stats.kstest(noised.numpy(), stats.norm(scale=0.2).cdf).pvalue > 0.01
    members = flat(slice_members(clean, gradient_sensitivity(local_step(), directions=4, rng=local_step().rng), 10))
    touched = {m for m in members.unique().tolist() if (difference[members == m] != 0).any()}
    assert len(touched) == 3
    assert all((difference[members == m] != 0).all() for m in touched)


def test_slices_differ_from_step_to_step():
    step = local_step()
    clean = clean_gradient(step)
    noised = torch.stack([flat(run(soteria_mixing(rate=0.5), clean, step)) != flat(clean) for _ in range(20)])
    assert 0.2 < noised.double().mean(0).min() <= noised.double().mean(0).max() < 0.9


@pytest.mark.parametrize("options", [{"rate": 1.1}, {"slices": 0}, {"noise_scale": -1}, {"directions": 0}])
def test_bad_options_are_one_line(options):
    with pytest.raises(UserError, match="expected") as error:
        soteria_mixing(**options)
    assert "\n" not in str(error.value)
