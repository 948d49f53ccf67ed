"""DP-MERF and GS-WGAN: what they release is bounded and noised, and the accountant says so."""

import math

import pytest
import torch

from fl_privacy.defenses import compose, dp_merf, gs_wgan, pruning
from fl_privacy.defenses._dp_merf import Generator, feature_sum
from fl_privacy.defenses._gs_wgan import Critic, sanitized
from fl_privacy.defenses.dc_dsa_dm import fresh_network
from fl_privacy.defenses.privacy import epsilon, guarantee, mixture_epsilon, mixture_noise_multiplier
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch

from ..clients import local_data, own_batch

pytest.importorskip("opacus")

MERF = {"images_per_class": 2, "features": 100, "iterations": 2, "batch_size": 10, "width": 4}
WGAN = {"images_per_class": 2, "critics": 3, "iterations": 4, "critic_steps": 1, "batch_size": 4, "width": 4}
METHODS = {"dp_merf": dp_merf(**MERF), "gs_wgan": gs_wgan(**WGAN)}

every_method = pytest.mark.parametrize("defense", METHODS.values(), ids=METHODS.keys())


@every_method
def test_images_of_every_class_whichever_the_client_holds(defense):
    some = own_batch()
    rows = some.labels == 3
    (hook,) = defense.examples
    made = hook(Batch(some.inputs[rows], some.labels[rows]), local_data())
    assert made.labels.tolist() == [c for c in range(5) for _ in range(2)]
    assert made.inputs.shape[1:] == (3, 16, 16)
    assert made.inputs.min() >= 0 <= made.inputs.max() <= 1


@every_method
def test_the_same_from_the_same_seed(defense):
    (hook,) = defense.examples
    one, two, other = (hook(own_batch(), local_data(seed)).inputs for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@every_method
@pytest.mark.parametrize("size", [8, 17, 30])
def test_any_size_and_number_of_channels(defense, size):
    batch = Batch(torch.rand(6, 1, size, size), torch.arange(6) % 5)
    (hook,) = defense.examples
    assert hook(batch, local_data()).inputs.shape == (10, 1, size, size)


def test_an_example_adds_features_of_norm_one():
    frequencies = torch.randn(50, 3 * 16 * 16, generator=derive_generator(0))
    batch = own_batch()
    everything = feature_sum(batch.inputs, batch.labels, frequencies, 5)
    without = feature_sum(batch.inputs[1:], batch.labels[1:], frequencies, 5)
    assert (everything - without).norm() == pytest.approx(1.0, rel=1e-4)


def test_features_give_the_gaussian_kernel():
    frequencies = torch.randn(20_000, 12, generator=derive_generator(0)) / 1.5
    images, label = torch.rand(2, 3, 2, 2, generator=derive_generator(1)), torch.zeros(1, dtype=torch.long)
    one, two = (feature_sum(image[None], label, frequencies, 1)[:, 0] for image in images)
    expected = math.exp(-float((images[0] - images[1]).square().sum()) / (2 * 1.5**2))
    assert float(one @ two) == pytest.approx(expected, abs=0.02)


@pytest.mark.long
def test_without_much_noise_the_generator_learns_the_mean_of_each_class():
    settings = {"features": 400, "iterations": 150, "batch_size": 50, "width": 8, "images_per_class": 5}
    (hook,) = dp_merf(**settings, epsilon=1e5).examples
    (noisy_hook,) = dp_merf(**settings, epsilon=0.3).examples
    batch = own_batch()
    means = torch.stack([batch.inputs[batch.labels == c].mean(0) for c in range(5)])

    def error(made):
        return (torch.stack([made.inputs[made.labels == c].mean(0) for c in range(5)]) - means).square().mean()

    good, bad = error(hook(batch, local_data())), error(noisy_hook(batch, local_data()))
    assert good < 0.5 * bad


def test_slopes_are_clipped_one_by_one_and_noised_for_the_whole_batch():
    slopes = torch.randn(8, 1, 20, 20, generator=derive_generator(0))
    slopes[0] *= 1e-3
    clipped = sanitized(slopes, 0.0, derive_generator(1))
    assert torch.equal(clipped[0], slopes[0])
    assert torch.allclose(clipped[1:].flatten(1).norm(dim=1), torch.ones(7))
    noise = sanitized(slopes, 0.5, derive_generator(1)) - clipped
    assert float(noise.std()) == pytest.approx(0.5 * 2 * math.sqrt(8), rel=0.05)


def test_a_critic_learns_to_tell_its_own_examples():
    batch, rng = own_batch(), derive_generator(0)
    critic = Critic(batch, 5, rng, width=8, lr=2e-3)
    generator = fresh_network(Generator, batch.inputs, 5, rng, width=4)
    for _ in range(30):
        critic.train(generator, 16, rng)
    with torch.no_grad():
        real = critic._network(batch.inputs, batch.labels).mean()
        made = critic._network(generator.draw(batch.labels, rng), batch.labels).mean()
    assert real > made
    slope = critic.slope(batch.inputs[:2], batch.labels[:2])
    step = batch.inputs[:2] - 0.05 * slope
    with torch.no_grad():
        assert critic._network(step, batch.labels[:2]).sum() > critic._network(batch.inputs[:2], batch.labels[:2]).sum()


def test_mixture_epsilon_is_the_gaussian_mechanism_where_every_release_depends_on_the_record():
    for steps, multiplier in ((1, 4.0), (10, 8.0)):
        ours = mixture_epsilon(noise_multiplier=multiplier, share=1.0, steps=steps, delta=1e-5)
        assert ours == pytest.approx(epsilon(noise_multiplier=multiplier, sample_rate=1.0, steps=steps, delta=1e-5))


def test_mixture_epsilon_is_above_that_of_poisson_sampling_and_below_that_of_no_sampling():
    settings = {"noise_multiplier": 2.0, "steps": 100, "delta": 1e-5}
    ours = mixture_epsilon(share=0.02, **settings)
    assert epsilon(sample_rate=0.02, **settings) < ours < epsilon(sample_rate=1.0, **settings)


@pytest.mark.parametrize(("budget", "share", "steps"), [(10, 0.02, 300), (10, 0.001, 20_000), (1, 1.0, 1)])
def test_the_noise_spends_the_budget(budget, share, steps):
    multiplier = mixture_noise_multiplier(epsilon=budget, share=share, steps=steps, delta=1e-5)
    assert 0.99 * budget < mixture_epsilon(noise_multiplier=multiplier, share=share, steps=steps, delta=1e-5) <= budget


@every_method
def test_epsilon_is_spent_once_whatever_the_rounds(defense):
    for told in (defense, compose(defense, pruning(rate=0.5))):
        found = guarantee(told, sample_rate=0.5, delta=1e-3)
        assert found.missing is None
        assert found.unit == "example"
        assert found.delta == defense.parts[0].settings["delta"]
        assert found.epsilon(1) == found.epsilon(500) == defense.parts[0].settings["epsilon"]
        assert found.course([1, 2, 3]) == [defense.parts[0].settings["epsilon"]] * 3
        assert "one noised release" in found.describe(3)


def test_the_mechanism_is_the_one_that_spends_the_budget():
    multiplier = dp_merf(epsilon=2.0).parts[0].settings["noise_multiplier"]
    assert epsilon(noise_multiplier=multiplier, sample_rate=1.0, steps=1, delta=1e-5) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("settings", [{"epsilon": 0}, {"delta": 1}, {"iterations": -1}, {"images_per_class": 0}])
def test_wrong_settings_are_one_line(settings):
    for make in (dp_merf, gs_wgan):
        with pytest.raises(UserError):
            make(**settings)
