"""Images that a fully connected layer's gradient has mixed, told apart by their independence (V victims at once).

The gradient G = D X^T of the weight and g = D 1 of the bias are those of :mod:`fl_privacy.attacks.exact.factorization`,
here without zeros in D. With R an orthonormal basis (B, N) of the rows of G, X^T = A R for an unknown A (B, B), and
G R^T = D A; so (G R^T) c = g is solved by c = A^-1 1: every image a R has a c = 1, which gives its sign and its scale.
The directions of A are those that make differences of neighboring pixels independent and heavy-tailed, as they are in
photographs: FastICA (Hyvarinen 1999), then the likelihood of independent components without the constraint that they
are uncorrelated, which those of few pixels are not, by relative quasi-Newton steps (Ablin et al. 2018, "Picard"). That
a batch is read by independent components is of Kariyappa et al. 2023, "Cocktail Party Attack".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_RANK = 1e-6
"""Singular values below this share of the largest are rounding."""

_LEAST_CURVATURE = 0.1
"""Of the likelihood, of two components: below, steps are as with this one."""

_LONGEST_STEP = 0.3
"""Relative change of a component in one step, at most."""


def row_basis(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """R (V, B, N), rows that span those of G (V, M, N) with M >= B, and whether each G has this rank (V,)."""
    gradients = weights.double()
    values, vectors = torch.linalg.eigh(gradients @ gradients.mT)
    top = vectors[..., -count:]
    enough = values[:, -count] > _RANK**2 * values[:, -1]
    return torch.linalg.qr((top.mT @ gradients).mT)[0].mT, enough


def unmixed(basis: Tensor, directions: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """(V, B, N) what entered the layer, from ``directions`` (V, B, B) on the basis R, in their sign and scale."""
    columns = weights.double() @ basis.mT
    gram = columns.mT @ columns
    balance = torch.linalg.solve_ex(gram, columns.mT @ biases.double()[..., None])[0]
    inputs: Tensor = directions / (directions @ balance) @ basis
    return inputs


def neighbors(images: Tensor) -> Tensor:
    """(V, B, n) differences of neighboring pixels of (V, B, C, H, W): of the mean of the channels and of each channel
    to it, every kind as strong as the others."""
    gray = images.mean(2, keepdim=True)
    kinds = [gray] if images.shape[2] == 1 else [gray, images[:, :, :-1] - gray]
    found = []
    for kind in kinds:
        for apart in (kind[..., 1:] - kind[..., :-1], kind[..., 1:, :] - kind[..., :-1, :]):
            flat = apart.flatten(2)
            found.append(flat / flat.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12))
    return torch.cat(found, 2)


def number_of_neighbors(shape: Sequence[int]) -> int:
    """n of :func:`neighbors` for images (C, H, W)."""
    channels, height, width = shape
    return (channels + (channels > 1)) * (height * (width - 1) + (height - 1) * width)


def unlikeliness(features: Tensor, directions: Tensor) -> Tensor:
    """Of ``features`` (B, n) as mixtures of what ``directions`` (B, B) make of them: minus the logarithm of their
    likelihood, up to a constant, for components with tails as those that are searched for."""
    found = directions @ features
    scale = found.square().mean(1, keepdim=True).sqrt()
    each = (1 + (found / scale).square()).log().mean(1) + scale[:, 0].log()
    unlikely: Tensor = features.shape[1] * (each.sum() - torch.linalg.slogdet(directions)[1])
    return unlikely


def independent_directions(features: Tensor, start: Tensor, *, iterations: int) -> Tensor:
    """(V, B, B) whose products with ``features`` (V, B, n) are independent and heavy-tailed.

    Args:
        features: mixtures.
        start: (V, B, B) orthogonal.
        iterations: of each of the two searches.
    """
    centered = features - features.mean(2, keepdim=True)
    values, vectors = torch.linalg.eigh(centered @ centered.mT / centered.shape[2])
    scale = values.clamp_min(_RANK**2 * values[:, -1:]).rsqrt()
    whitening = vectors * scale[:, None] @ vectors.mT
    white = whitening @ centered
    found: Tensor = _most_likely(white, _uncorrelated(white, start, iterations), iterations) @ whitening
    return found


def _uncorrelated(white: Tensor, directions: Tensor, iterations: int) -> Tensor:
    """FastICA with the hyperbolic tangent, all components at once."""
    for _ in range(iterations):
        bent = (directions @ white).tanh()
        slope = (1 - bent.square()).mean(2, keepdim=True)
        left, _, right = torch.linalg.svd(bent @ white.mT / white.shape[2] - slope * directions)
        directions = left @ right
    return directions


def _most_likely(white: Tensor, directions: Tensor, iterations: int) -> Tensor:
    """Of components with the tails of Student's t of one degree of freedom, each in its own scale."""
    found = directions @ white
    one = torch.eye(white.shape[1], dtype=white.dtype, device=white.device)
    for _ in range(iterations):
        scale = found.square().mean(2, keepdim=True).sqrt()
        directions, found = directions / scale, found / scale
        inverse = 1 / (1 + found.square())
        score, slope = 2 * found * inverse, 2 * (1 - found.square()) * inverse.square()
        factor = 1 / (score * found).mean(2, keepdim=True)
        gradient = factor * (score @ found.mT / found.shape[2])
        curvature = (factor[..., 0] * slope.mean(2)).clamp_min(0.01)[..., None]
        together = (curvature * curvature.mT - 1).clamp_min(_LEAST_CURVATURE)
        step = (curvature.mT * gradient - gradient.mT) / together * (1 - one)
        longest = step.norm(dim=2).amax(1).clamp_min(_LONGEST_STEP)
        step = step * (_LONGEST_STEP / longest)[:, None, None]
        directions, found = directions - step @ directions, found - step @ found
    return directions
