"""What holds for every metric of images. A new one in ``METRICS`` is asked without a line here."""

import pytest
import torch

from fl_privacy.measure import METRICS
from fl_privacy.measure.registry import Metric

OF_IMAGES = {name: metric for name, metric in METRICS.items() if metric.of == "images" and metric.function}

LOOK_AT_THE_GUESS_ALONE = {METRICS["bpki"].title}

every_metric = pytest.mark.parametrize("metric", OF_IMAGES.values(), ids=OF_IMAGES.keys())


def measured(metric: Metric, guesses: torch.Tensor, truths: torch.Tensor) -> torch.Tensor:
    if not metric.available:
        pytest.skip(f"needs {metric.package}")
    assert metric.function is not None
    return metric.function(guesses, truths)


@every_metric
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 17, 23)], ids=str)
def test_a_value_an_image_within_its_range_and_best_for_the_original(metric: Metric, shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    truths, others = (torch.rand(3, *shape, generator=rng) for _ in range(2))
    near = (0.95 * truths + 0.05 * others).clamp(0, 1)
    exact, close, far = (measured(metric, guesses, truths) for guesses in (truths, near, others))
    for found in (exact, close, far):
        assert found.shape == (3,) and not found.isnan().any()
        assert (metric.range[0] <= found).all() and (found <= metric.range[1]).all()
    if metric.title in LOOK_AT_THE_GUESS_ALONE:
        return
    best = torch.maximum if metric.leaks == "high" else torch.minimum
    torch.testing.assert_close(best(exact, close), exact)
    torch.testing.assert_close(best(close, far), close)
    alone = torch.cat([measured(metric, others[i : i + 1], truths[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(alone, far, rtol=1e-5, atol=1e-6)


@every_metric
@pytest.mark.parametrize("size", [1, 2])
def test_images_too_small_for_it_have_no_value(metric: Metric, size: int) -> None:
    truths = torch.rand(2, 1, size, size, generator=torch.Generator().manual_seed(0))
    found = measured(metric, truths.flip(0), truths)
    assert found.shape == (2,)
