import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from experiments.measures import input_conditions
from fl_privacy.defenses import selective_sharing
from fl_privacy.errors import UserError
from fl_privacy.measure.distortion import distortion_of

from ..defenses.harness import flat, large_update, local_step, run


def test_figures_of_a_known_perturbation():
    clean = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    found = distortion_of(clean, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([3.0])})
    assert found.signal_to_distortion == pytest.approx(1.0)
    assert found.cosine == pytest.approx(9 / (5 * math.sqrt(18)))
    assert found.zeros == pytest.approx(1 / 3)


def test_cosine_and_zeros_of_a_shared_update():
    clean = large_update()
    shared = run(selective_sharing(share=0.05), clean, local_step())
    found = distortion_of(clean, shared)
    assert found.cosine == pytest.approx(cosine_similarity(flat(clean), flat(shared), dim=0).item(), abs=1e-5)
    assert found.zeros == pytest.approx(0.95)
    assert found.cosine**2 + found.signal_to_distortion**-2 == pytest.approx(1)  # the dropped part is orthogonal


def test_unchanged_withheld_and_zero_updates():
    clean = {"a": torch.ones(3), "b": torch.ones(1)}
    assert distortion_of(clean, clean).signal_to_distortion == math.inf
    assert distortion_of(clean, {"a": torch.ones(3)}).zeros == 0.25
    assert math.isnan(distortion_of(clean, {}).cosine)


@pytest.mark.parametrize("other", [{"c": torch.ones(1)}, {"a": torch.ones(2)}])
def test_updates_of_different_models_are_refused(other):
    with pytest.raises(UserError, match="expected"):
        distortion_of({"a": torch.ones(3)}, other)


def smooth(widths, activation=nn.Tanh):
    torch.manual_seed(0)
    layers = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def test_a_first_layer_sees_the_input_itself():
    found = input_conditions(smooth([12, 8, 3]), torch.rand(3, 2, 2), 1)
    assert (found.layer, found.inputs, found.features, found.rank) == ("1", 12, 12, 12)
    assert found.condition == pytest.approx(1) and found.full_rank and found.invertible and found.nonsingular


def test_the_rank_of_what_is_below_is_that_of_its_jacobian():
    model, image = smooth([12, 20, 7, 3]), torch.rand(3, 2, 2)
    found = input_conditions(model, image, 1, layer="5")
    jacobian = torch.autograd.functional.jacobian(model[:5].double(), image.double()[None]).reshape(7, 12)
    values = torch.linalg.svdvals(jacobian)
    assert (found.rank, found.features) == (int(torch.linalg.matrix_rank(jacobian)), 7) == (7, 7)
    assert found.condition == pytest.approx(float(values[0] / values[-1]))
    assert found.full_rank and not found.invertible, "of full rank, and many images have these features"
    wider = input_conditions(model, image, 1, layer="3")
    assert (wider.rank, wider.features) == (12, 20) and wider.invertible
    with torch.no_grad():
        model[1].weight[:, 5] = model[1].weight[:, 4]
    assert input_conditions(model, image, 1, layer="3").rank == 11


def test_what_is_cut_off_has_no_gradient_of_its_bias():
    model = smooth([12, 9, 3], nn.ReLU)
    with torch.no_grad():
        model[1].bias[:4] = -100.0
    found = input_conditions(model, torch.rand(3, 2, 2), 1)
    assert found.rows == 9 and found.bias_zeros >= 4 and not found.nonsingular


def test_a_layer_that_is_none_is_told():
    with pytest.raises(UserError, match="one of 1, 3, but got fc; choose another layer"):
        input_conditions(smooth([12, 8, 3]), torch.rand(3, 2, 2), 1, layer="fc")
    with pytest.raises(UserError, match="none in this model, but got a model without one"):
        input_conditions(nn.Sequential(nn.Conv2d(3, 3, 2), nn.Flatten()), torch.rand(3, 2, 2), 1)
