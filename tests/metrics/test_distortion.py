import math

import pytest
import torch
from torch.nn.functional import cosine_similarity

from fl_privacy.defenses import selective_sharing
from fl_privacy.errors import UserError
from fl_privacy.metrics.distortion import distortion_of

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
