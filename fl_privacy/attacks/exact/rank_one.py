"""The linear systems B x = W of a fully connected layer for V victims, in double precision.

Weight gradient W (V, M, N) and bias gradient b (V, M) of a layer with M outputs: W_i is the sum over the examples of
d_i x, b_i that of d_i.
"""

import torch
from torch import Tensor


def fit(weights: Tensor, biases: Tensor) -> Tensor:
    """(V, N) the least squares solution x of b x^T = W over all rows."""
    w, b = weights.double(), biases.double()
    return torch.einsum("vm,vmn->vn", b, w) / b.square().sum(1, keepdim=True)


def distinct_ratios(weights: Tensor, biases: Tensor, *, count: int, smallest: float, alike: float) -> Tensor:
    """(V, count, N) the ratios W_i / b_i that most rows have in common, none twice while there are others.

    Args:
        weights: (V, M, N).
        biases: (V, M), of each victim at least one not zero.
        count: how many.
        smallest: rows whose |b_i| is below this share of the largest are left out.
        alike: ratios whose distance is below this share of the longer one's length are the same; at least 1e-6.
    """
    w, b = weights.double(), biases.double()
    sound = b.abs() > smallest * b.abs().amax(1, keepdim=True)
    ratios = (w / b[..., None]).masked_fill(~sound[..., None], 0.0)
    lengths = ratios.norm(dim=2)
    apart = torch.cdist(ratios, ratios, compute_mode="use_mm_for_euclid_dist")
    same = apart <= alike * torch.maximum(lengths[:, :, None], lengths[:, None])
    same &= sound[:, :, None] & sound[:, None]
    # of ratios with the same number of rows, the one of the largest gradient
    score = same.sum(2) + b.abs() / (2 * b.abs().amax(1, keepdim=True))
    score = score.masked_fill(~sound, -torch.inf)
    victims, chosen = torch.arange(len(w), device=w.device), []
    for _ in range(count):
        best = score.argmax(1)
        chosen.append(ratios[victims, best])
        score = score - same[victims, best] * (score.shape[1] + 1.0)
    return torch.stack(chosen, 1)


def residual(weights: Tensor, biases: Tensor, inputs: Tensor) -> Tensor:
    """(V,) ||W - b x^T|| / ||W||, where each row takes the one of its victim's x (V, B, N) that suits it best."""
    w, b, x = weights.double(), biases.double(), inputs.double()
    squared = w.square().sum(2)[..., None] + b.square()[..., None] * x.square().sum(2)[:, None]
    left = squared - 2 * b[..., None] * torch.einsum("vmn,vbn->vmb", w, x)
    return (left.amin(2).clamp_min(0).sum(1) / w.square().sum((1, 2))).sqrt()
