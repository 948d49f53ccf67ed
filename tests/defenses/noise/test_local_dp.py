from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from scipy import stats

from fl_privacy.defenses import local_dp
from fl_privacy.defenses.privacy import guarantee
from fl_privacy.errors import UserError

from ..harness import flat, large_update, local_step, run


def flower_update(update, **settings):
    """Apply the mod to a client that was sent zeros and replies ``update``."""

    def message(arrays):
        return SimpleNamespace(content=RecordDict({"arrays": ArrayRecord(arrays)}), has_error=lambda: False)

    sent = message([np.zeros_like(t.numpy()) for t in update.values()])
    np.random.seed(0)  # the stream that Flower draws from
    reply = LocalDpMod(**settings)(sent, None, lambda *_: message([t.numpy() for t in update.values()]))
    return np.concatenate([a.ravel() for a in reply.content["arrays"].to_numpy_ndarrays()])


@pytest.mark.parametrize("clip_norm", [50.0, 1e6])
def test_update_is_distributed_as_flowers(clip_norm):
    update = large_update()
    theirs = flower_update(update, clipping_norm=clip_norm, sensitivity=0.5, epsilon=2.0, delta=1e-5)
    defense = local_dp(round_epsilon=2.0, delta=1e-5, clip_norm=clip_norm, sensitivity=0.5)
    ours = flat(run(defense, update, local_step())).numpy()
    assert stats.ks_2samp(ours, theirs).pvalue > 0.01
    clean = flat(update).numpy() * min(1, clip_norm / flat(update).norm().item())
    assert stats.ks_2samp(ours - clean, theirs - clean).pvalue > 0.01
    assert stats.ks_2samp(1.1 * (ours - clean), theirs - clean).pvalue < 0.01


def test_a_round_costs_no_more_than_its_budget():
    found = guarantee(local_dp(round_epsilon=1.0, delta=1e-5), sample_rate=0.1, delta=1e-5)
    assert 0.5 < found.epsilon(1) <= 1.0
    assert found.epsilon(10) > 1.0


@pytest.mark.parametrize("options", [{"round_epsilon": 0}, {"delta": 1}, {"clip_norm": 0}, {"sensitivity": -1}])
def test_bad_options_are_one_line(options):
    with pytest.raises(UserError, match="expected") as error:
        local_dp(**options)
    assert "\n" not in str(error.value)
