"""Row norms of a Jacobian, without one backward pass for each row."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp, vmap

from fl_privacy.progress import counted

Features = Callable[[Tensor], Tensor]
"""(B, ...) -> (B, D), each example by itself."""

_CHUNK_ELEMENTS = 1 << 20
"""Input elements of the products computed together: what bounds the memory."""


def exact_row_norms(features: Features, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Norms ||d r_i / d x|| of every feature of every example, by vectorized backward products.

    Args:
        features: r, differentiable.
        inputs: x, (B, ...).

    Returns:
        (B, D) the norms and (B, D) the features.
    """
    x = inputs.detach().requires_grad_()
    with torch.enable_grad():
        r = features(x)
    rows = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
    norms = []
    for chunk in counted("sensitivity of features", torch.split(rows, _chunk(inputs))):
        cotangents = chunk.unsqueeze(1).expand(-1, len(r), -1)
        (products,) = torch.autograd.grad(r, x, cotangents, retain_graph=True, is_grads_batched=True)
        norms.append(products.flatten(2).norm(dim=2))
    return torch.cat(norms).T, r.detach()


def estimated_row_norms(
    features: Features, inputs: Tensor, *, directions: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The same norms from random forward products: E[(J v)_i^2] = ||J_i||^2 for v of independent signs.

    The cost does not depend on D. The relative error of one norm is about 1 / sqrt(2 directions).

    Args:
        features: r, differentiable in forward mode.
        inputs: x, (B, ...).
        directions: how many v, at least 1.
        rng: of the signs.

    Returns:
        (B, D) the norms and (B, D) the features.
    """
    x = inputs.detach()
    with torch.no_grad():
        r = features(x)
        squares = torch.zeros_like(r)
        for start in counted("sensitivity of features", range(0, directions, _chunk(inputs))):
            size = (min(_chunk(inputs), directions - start), *x.shape)
            signs = torch.randint(0, 2, size, generator=rng, device=rng.device).to(x) * 2 - 1
            squares += vmap(lambda v: jvp(features, (x,), (v,))[1])(signs).square().sum(0)
    return (squares / directions).sqrt(), r


def _chunk(inputs: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // inputs.numel())
