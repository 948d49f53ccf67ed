import math

import pytest
import torch
from scipy import stats

from fl_privacy.defenses import compose, dp_noise
from fl_privacy.defenses._dp_noise import clip_by_norm
from fl_privacy.defenses.privacy import guarantee, promises_privacy
from fl_privacy.errors import UserError

from ..harness import flat, large_update, local_step, run, small_model


@pytest.mark.parametrize("noise, reference", [("gaussian", stats.norm), ("laplace", stats.laplace)])
def test_noise_has_the_distribution_asked_for(noise, reference):
    clean = large_update()
    difference = (flat(run(dp_noise(noise=noise, scale=0.3), clean, local_step())) - flat(clean)).numpy()
    assert stats.kstest(difference, reference(scale=0.3).cdf).pvalue > 0.01
    assert stats.kstest(difference, reference(scale=0.3 * 1.1).cdf).pvalue < 0.01
    assert abs(stats.pearsonr(difference[1:], difference[:-1]).statistic) < 0.03


def test_public_std_is_that_of_the_noise():
    for noise in ("gaussian", "laplace"):
        defense = dp_noise(noise=noise, scale=0.3)
        noised = flat(run(defense, {"a": torch.zeros(200_000)}, local_step()))
        assert noised.std().item() == pytest.approx(defense.parts[0].settings["std"], rel=0.01)


def test_clipping_matches_torch_and_leaves_what_is_within_the_norm():
    update = large_update()
    leaves = [torch.nn.Parameter(torch.zeros_like(t)) for t in update.values()]
    for leaf, t in zip(leaves, update.values(), strict=True):
        leaf.grad = t.clone()
    torch.nn.utils.clip_grad_norm_(leaves, 2.0)
    for ours, leaf in zip(clip_by_norm(update, 2.0).values(), leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad)
    layered = clip_by_norm(update, 5.0, scope="layer")
    assert [t.norm().item() for t in layered.values()] == pytest.approx([5.0, update["b.weight"].norm().item()])
    torch.testing.assert_close(clip_by_norm(update, 1e6), dict(update), rtol=0, atol=0)
    assert flat(clip_by_norm({"a": torch.zeros(3)}, 1.0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_an_update_without_a_finite_norm_is_none(value, scope):
    update = {"a": torch.tensor([1.0, value]), "b": torch.ones(2)}
    clipped = clip_by_norm(update, 1.0, scope=scope)
    assert clipped["a"].tolist() == [0, 0]
    assert clipped["b"].norm().item() == pytest.approx(1.0 if scope == "layer" else 0.0)
    assert clip_by_norm({"a": torch.full((4,), 3e38)}, 1.0)["a"].isfinite().all()


def test_clipped_before_the_noise():
    update = {"a": torch.full((100_000,), 10.0)}
    defended = flat(run(dp_noise(scale=0.5, clip_norm=1.0), update, local_step()))
    assert defended.mean().abs() < 0.02
    assert defended.std().item() == pytest.approx(0.5, rel=0.02)


def test_two_noises_composed_add_their_variances():
    both = compose(dp_noise(scale=0.3), dp_noise(scale=0.4))
    assert flat(run(both, {"a": torch.zeros(100_000)}, local_step())).std().item() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("at", ["upload", "gradient"])
@pytest.mark.parametrize("layers", [["b"], [2]])
def test_noise_on_some_layers_leaves_the_others_as_they_are(at, layers):
    clean = large_update() | {"b.bias": torch.zeros(30), "c": torch.zeros(4)}
    found = run(dp_noise(scale=0.3, layers=layers, at=at), clean, local_step())
    assert torch.equal(found["a.weight"], clean["a.weight"])
    assert torch.equal(found["c"], clean["c"])
    assert (found["b.weight"] != clean["b.weight"]).all()
    assert (found["b.bias"] != 0).all()


def test_noise_on_all_layers_by_name_is_that_on_all():
    clean = large_update()
    torch.testing.assert_close(
        run(dp_noise(layers=["a", "b"]), clean, local_step()), run(dp_noise(), clean, local_step()), rtol=0, atol=0
    )


@pytest.mark.parametrize("layer", ["features.9", 4])
def test_a_layer_that_is_not_there_is_one_line_that_names_those_that_are(layer):
    defense = dp_noise(layers=[layer])
    with pytest.raises(UserError, match=r"defense\.layers .* one of 0, 2, 5, 1, 2, 3, but got") as error:
        defense.prepare_for(small_model(), (3, 16, 16))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="one of a, b, 1, 2"):
        run(defense, large_update(), local_step())


def test_noise_on_some_layers_guarantees_nothing():
    defense = dp_noise(scale=1.0, clip_norm=1.0, layers=[1])
    found = guarantee(defense, sample_rate=1.0, delta=1e-5)
    assert found.missing == "some layers are uploaded without noise"
    assert found.epsilon(1) == math.inf
    assert not promises_privacy(defense)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": -1},
        {"scale": float("nan")},
        {"clip_norm": 0},
        {"noise": "uniform"},
        {"clip_scope": "all"},
        {"at": "x"},
        {"layers": []},
        {"layers": "a"},
        {"layers": [0]},
        {"layers": [True]},
        {"layers": [""]},
    ],
)
def test_bad_options_are_one_line(options):
    with pytest.raises(UserError, match="expected") as error:
        dp_noise(**options)
    assert "\n" not in str(error.value)
