import numpy as np
import pytest
import torch

from experiments.measures import effective_rank, mean_squared_distance, scale_norm


def test_distance_is_the_mean_over_pairs():
    weights = torch.randn(4, 3, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    pairs = [((a - b) ** 2).sum() for a in weights.double() for b in weights.double()]
    assert mean_squared_distance(weights) == pytest.approx(float(sum(pairs)) / 16)
    assert mean_squared_distance(weights[:1].expand(3, -1, -1, -1, -1)) == 0


@pytest.mark.parametrize(
    ("values", "share", "rank"), [([4, 3, 2, 1], 0.7, 2), ([4, 3, 2, 1], 0.99, 4), ([5, 0, 0], 0.99, 1)]
)
def test_rank_counts_the_values_that_reach_the_share(values, share, rank):
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(len(values), len(values))))
    right, _ = np.linalg.qr(rng.normal(size=(6, len(values))))
    matrix = torch.from_numpy(left @ np.diag(values) @ right.T).reshape(len(values), 2, 3)
    assert effective_rank(matrix, share=share) == rank


def test_a_scaling_is_as_large_as_its_largest_element():
    scale = torch.tensor([0.5, -3.0, 2.0])
    assert scale_norm(scale) == pytest.approx(float(torch.linalg.matrix_norm(torch.diag(scale), 2)))
