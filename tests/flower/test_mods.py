"""Flower's own mod as a defense: the distribution of ours, its settings, its randomness."""

import numpy as np
import pytest
import torch
from scipy import stats

from fl_privacy.defenses import local_dp
from fl_privacy.defenses.privacy import guarantee
from fl_privacy.errors import UserError
from fl_privacy.flower import local_dp_mod
from tests.defenses.harness import flat, large_update, local_step, run

SETTINGS = {"round_epsilon": 2.0, "delta": 1e-5, "sensitivity": 0.5}


@pytest.mark.parametrize("clip_norm", [50.0, 1e6])
def test_the_update_is_distributed_as_ours(clip_norm):
    update = large_update()
    theirs = flat(run(local_dp_mod(clip_norm=clip_norm, **SETTINGS), update, local_step())).numpy()
    ours = flat(run(local_dp(clip_norm=clip_norm, **SETTINGS), update, local_step())).numpy()
    clean = flat(update).numpy() * min(1, clip_norm / flat(update).norm().item())
    assert stats.ks_2samp(ours - clean, theirs - clean).pvalue > 0.01
    assert stats.ks_2samp(1.1 * (ours - clean), theirs - clean).pvalue < 0.01
    assert abs(np.corrcoef(ours - clean, theirs - clean)[0, 1]) < 0.02


def test_the_guarantee_is_that_of_ours():
    ours, theirs = (guarantee(make(**SETTINGS), sample_rate=0.1, delta=1e-5) for make in (local_dp, local_dp_mod))
    assert theirs == ours
    assert local_dp_mod().parts[0].settings["implementation"] == "flower"


def test_noise_follows_the_clients_stream_and_leaves_numpys_alone():
    update, before = large_update(), np.random.get_state()[1].copy()
    hook = local_dp_mod().upload[0]
    once, again, other = (hook(update, None, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(flat(once), flat(again)) and not torch.equal(flat(once), flat(other))
    assert (np.random.get_state()[1] == before).all()


def test_bad_options_are_one_line():
    with pytest.raises(UserError, match="expected"):
        local_dp_mod(clip_norm=0)
