import pytest
import torch
from scipy import stats

from fl_privacy.defenses import selective_sharing
from fl_privacy.errors import UserError

from ..harness import flat, large_update, local_step, run


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_shares_the_largest_elements_of_the_whole_update(share):
    clean = flat(large_update())
    shared = flat(run(selective_sharing(share=share), large_update(), local_step()))
    expected = clean.abs().topk(round(share * len(clean))).indices.sort().values
    assert torch.equal(shared.nonzero().squeeze(1), expected)
    assert torch.equal(shared[expected], clean[expected])


def test_noise_falls_on_the_shared_elements_only():
    clean = flat(large_update())
    defense = selective_sharing(share=0.3, noise="laplace", noise_scale=0.2)
    shared = flat(run(defense, large_update(), local_step()))
    on = shared != 0
    assert on.sum() == 6000
    assert clean[~on].abs().max() <= clean[on].abs().min()
    assert stats.kstest((shared - clean)[on].numpy(), stats.laplace(scale=0.2).cdf).pvalue > 0.01


def test_random_elements_are_spread_evenly():
    update = large_update()
    shared = run(selective_sharing(share=0.3, by="random"), update, local_step())
    assert flat(shared).count_nonzero() == 6000
    kept = shared["b.weight"].count_nonzero().item()
    assert stats.binomtest(kept, 2000, 0.3).pvalue > 0.001
    sizes = (large_update()["a.weight"].abs()[shared["a.weight"] != 0]).numpy()
    assert stats.ks_2samp(sizes, large_update()["a.weight"].abs().flatten().numpy()).pvalue > 0.01


@pytest.mark.parametrize("options", [{"share": 0}, {"share": 1.1}, {"by": "x"}, {"noise_scale": -1}, {"noise": "x"}])
def test_bad_options_are_one_line(options):
    with pytest.raises(UserError, match="expected") as error:
        selective_sharing(**options)
    assert "\n" not in str(error.value)
