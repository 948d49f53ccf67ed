import math

import lpips as lpips_package
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import entropy
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torchvision.models import alexnet

from fl_privacy.errors import UserError
from fl_privacy.measure import bayesian_privacy_loss
from fl_privacy.measure.images import bpki, mse, pixel_histogram, psnr, rmse, ssim
from fl_privacy.measure.lpips import _network, lpips

SHAPES = [(1, 28, 28), (3, 32, 32), (3, 17, 23)]


def pair(shape, n=4, noise=0.2, seed=0):
    rng = torch.Generator().manual_seed(seed)
    truths = torch.rand(n, *shape, generator=rng)
    return (truths + noise * torch.randn(truths.shape, generator=rng)).clamp(0, 1), truths


@pytest.fixture
def backbone(tmp_path, monkeypatch):
    """Weights of the right shapes, so that LPIPS works without any download."""
    torch.manual_seed(0)
    (tmp_path / "weights").mkdir()
    features = {f"features.{k}": v for k, v in alexnet(weights=None).features.state_dict().items()}
    save_file(features, tmp_path / "weights" / "alexnet_features.safetensors")
    monkeypatch.setenv("FL_PRIVACY_DATA", str(tmp_path))
    _network.cache_clear()
    yield features
    _network.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
def test_psnr_agrees_with_skimage(shape):
    guesses, truths = pair(shape)
    expected = [
        peak_signal_noise_ratio(t.numpy(), g.numpy(), data_range=1.0) for g, t in zip(guesses, truths, strict=True)
    ]
    torch.testing.assert_close(psnr(guesses, truths), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_ssim_agrees_with_skimage(shape):
    guesses, truths = pair(shape)
    expected = [
        structural_similarity(
            g.numpy(),
            t.numpy(),
            channel_axis=0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1.0,
        )
        for g, t in zip(guesses.double(), truths.double(), strict=True)
    ]
    torch.testing.assert_close(ssim(guesses, truths), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)


def test_ssim_of_images_smaller_than_its_window_is_missing():
    assert ssim(*pair((1, 8, 8))).isnan().all()


def test_exact_guesses():
    truths = pair((3, 12, 12))[1]
    assert mse(truths, truths).eq(0).all() and rmse(truths, truths).eq(0).all()
    assert psnr(truths, truths).eq(math.inf).all()
    assert ssim(truths, truths) == pytest.approx(1)


def test_rmse_is_relative_to_the_image():
    truths = torch.full((1, 1, 2, 2), 0.5)
    assert rmse(truths * 1.5, truths).item() == pytest.approx(0.5)
    assert rmse(truths, torch.zeros_like(truths)).item() == math.inf
    assert rmse(torch.zeros_like(truths), torch.zeros_like(truths)).item() == 0


@pytest.mark.filterwarnings("ignore:The parameter 'pretrained'", "ignore:Arguments other than a weight enum")
def test_lpips_agrees_with_its_package_in_any_batch(backbone):
    guesses, truths = pair((3, 64, 64))
    network = lpips_package.LPIPS(net="alex", pretrained=True, pnet_rand=True, verbose=False)
    pieces = [layer for n in range(1, 6) for layer in getattr(network.net, f"slice{n}") if hasattr(layer, "weight")]
    for layer, index in zip(pieces, (0, 3, 6, 8, 10), strict=True):
        layer.weight.data, layer.bias.data = backbone[f"features.{index}.weight"], backbone[f"features.{index}.bias"]
    expected = torch.cat(
        [network(g[None], t[None]) for g, t in zip(2 * guesses - 1, 2 * truths - 1, strict=True)]
    ).flatten()
    torch.testing.assert_close(lpips(guesses, truths), expected.detach().double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (1, 64, 48)])
def test_lpips_of_small_and_grey_images(backbone, shape):
    guesses, truths = pair(shape, noise=0.3)
    assert lpips(truths, truths).eq(0).all()
    assert lpips(guesses, truths).gt(0).all()


def test_lpips_leaves_the_global_random_stream_alone(backbone):
    before = torch.get_rng_state()
    lpips(*pair((3, 32, 32)))
    assert torch.equal(before, torch.get_rng_state())


def test_lpips_without_weights_is_missing_with_one_line(tmp_path, monkeypatch, caplog):
    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setenv("FL_PRIVACY_DATA", str(tmp_path))
    monkeypatch.setattr("fl_privacy.measure.lpips.PACKAGE", "nowhere_to_be_found")
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    _network.cache_clear()
    assert lpips(*pair((3, 32, 32))).isnan().all()
    assert lpips(*pair((3, 32, 32))).isnan().all()
    assert len(caplog.records) == 1 and "no route to host" in caplog.text
    _network.cache_clear()


@pytest.mark.parametrize(("bins", "smoothing"), [(10, 1.0), (4, 0.5), (64, 2.0)])
def test_bpki_is_scipy_s_divergence_of_numpy_s_histogram(bins, smoothing):
    guesses, truths = pair((3, 17, 23))
    guesses[0] = 1.0
    expected = []
    for guess in guesses:
        counts, _ = np.histogram(guess.numpy(), bins=bins, range=(0, 1))
        expected.append(entropy(np.full(bins, 1 / bins), (counts + smoothing) / (counts + smoothing).sum()))
    found = bayesian_privacy_loss(bins=bins, smoothing=smoothing)(guesses, truths)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bins", [4, 10])
def test_bpki_of_a_prior_is_scipy_s_divergence_of_the_histogram_of_public_images(bins):
    guesses, truths = pair((3, 17, 23))
    public = pair((3, 17, 23), n=6, seed=1)[1] * 0.5
    counts, _ = np.histogram(public.numpy(), bins=bins, range=(0, 1))
    prior = counts / counts.sum()
    np.testing.assert_allclose(pixel_histogram(public, bins=bins).numpy(), prior)
    expected = []
    for guess in guesses:
        found, _ = np.histogram(guess.numpy(), bins=bins, range=(0, 1))
        expected.append(entropy(prior, (found + 1) / (found + 1).sum()))
    metric = bayesian_privacy_loss(bins=bins, public=public)
    torch.testing.assert_close(metric(guesses, truths), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_what_the_prior_knows_already_is_no_gain_of_knowledge():
    guesses, truths = pair((1, 50, 50), n=1)
    own, uniform = bayesian_privacy_loss(public=guesses), bayesian_privacy_loss()
    assert own(guesses, truths).item() == pytest.approx(0, abs=1e-4) and uniform(guesses, truths).item() > 0.01
    ramp = ((torch.arange(1000) + 0.5) / 1000).view(1, 1, 10, 100)
    torch.testing.assert_close(bayesian_privacy_loss(public=ramp)(guesses, truths), uniform(guesses, truths))
    with pytest.raises(UserError, match=r"expected with public images, but got none; leave bpki\.prior out"):
        bayesian_privacy_loss(public=guesses[:0])


def test_bpki_tells_nothing_of_a_uniform_image_and_most_of_a_black_one():
    ramp = ((torch.arange(1000) + 0.5) / 1000).view(1, 1, 10, 100)
    assert bpki(ramp, ramp).item() == pytest.approx(0, abs=1e-12)
    assert bpki(torch.zeros_like(ramp), ramp).item() > 3
    with pytest.raises(UserError, match=r"bpki\.bins is expected"):
        bayesian_privacy_loss(bins=1)
    with pytest.raises(UserError, match=r"bpki\.smoothing is expected"):
        bayesian_privacy_loss(smoothing=0)
