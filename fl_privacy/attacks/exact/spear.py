"""G = D X^T taken apart, half of D being zero: a batch behind a ReLU from one gradient (SPEAR, Dimitrov et al. 2024).

Of a layer z = W x + b in front of a ReLU the gradient of the weight is G = D X^T, that of the bias g = D 1, with
D = dL/dz of shape (M, B) and the layer's inputs X of shape (N, B). Where example j leaves neuron i silent, D_ij is
zero. With L an orthonormal basis of the columns of G, D = L Q for an invertible Q (B, B), and each column of Q is a
direction q that makes L q as sparse as a ReLU. Such directions are found as those which minimize a norm of L q that
rewards zeros, by iteratively reweighted least squares from many starts at once; the authors' null vectors of B - 1
random rows are one kind of start. Their scales follow from g, X from Q, and the signs of W X + b say whether all of it
is right.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.attack import timely

AGREEMENT = 0.99
"""Of the signs in front of a ReLU with the zeros of what came back through it; wrong images agree in about half."""

_ZERO = 1e-4
"""Elements of L q below this share of the largest are zeros of the ReLU."""

_SAME = 1e-6
"""Directions are the same up to this distance of their cosine from 1."""

_INDEPENDENT = 1e-3
"""Share of a direction that has to be new to those chosen before."""

_RANK = 1e-6
"""Singular values below this share of the largest are rounding."""

_MOST_ROWS = 16
"""Examples up to which null vectors of random rows are a start: of more, next to none is near a sparse direction."""

_SHARP = [(0.03 * 0.5**step, 1.0) for step in range(20)]
"""Schedule of a search that stays near where it starts."""

_SOFT = [(0.3 * 0.8**step, 1.0) for step in range(36)]
"""Of one that goes further: components of 64 images are a few percent of others."""

_RIDGE = {torch.float32: 1e-6, torch.float64: 1e-12}

_SPARE = 8
"""Combinations of columns beyond the rank that is expected, to notice a higher one."""


@dataclass(frozen=True, eq=False)
class SparseFactors:
    """G = D X^T.

    Attributes:
        columns: D (M, B) float64.
        inputs: X^T (B, N) float64, in an order of its own.
        agreement: share of the elements in which the zeros of D are where W X + b is negative, of the worst example.
    """

    columns: Tensor
    inputs: Tensor
    agreement: float


def column_space(weight: Tensor, count: int) -> Tensor | None:
    """Return orthonormal columns (M, B) that span those of a weight's gradient (M, N), in float64.

    ``None`` unless the rank but for rounding is ``count``, that is B, the number of examples. The range is that of a
    few random combinations of the columns (Halko et al. 2011), which is all of it where the rank is as small as here.
    """
    gradient = weight.double()
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(gradient.shape[1], count + _SPARE, generator=rng, dtype=torch.float64).to(gradient.device)
    basis = torch.linalg.qr(gradient @ mixed)[0]
    directions, values, _ = torch.linalg.svd(basis.T @ gradient, full_matrices=False)
    if int((values > _RANK * values[0]).sum()) != count:
        return None
    columns: Tensor = basis @ directions[:, :count]
    return columns


def sparse_factors(
    weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], basis: Tensor, *, rng: torch.Generator, starts: int
) -> Iterator[SparseFactors | None]:
    """Yield better and better factors of one victim's gradient, one value for each round of ``starts`` starts.

    Args:
        weight: G (M, N).
        bias: g (M,).
        layer: W (M, N) and b (M,) as the client had them.
        basis: (M, B) of the columns of G, see :func:`column_space`.
        rng: of the starts, on the CPU.
        starts: of a round.

    Yields:
        The factors, or ``None`` while less than B independent directions are found. Whoever asks decides when to stop;
        where a few rounds find nothing sparse at all there is no ReLU, and nothing more is yielded.
    """
    rank, rows = basis.shape[1], basis * len(basis) ** 0.5
    pool, search = basis.new_zeros(rank, 0), _Search(rows, rng, starts)
    while True:
        pool = search.extended(pool)
        if search.hopeless:
            return
        chosen = _independent(pool)
        if chosen.shape[1] < rank:
            yield None
            continue
        yield _factors(weight, bias, layer, basis, chosen)


def factors_near(
    columns: Tensor, weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], basis: Tensor
) -> SparseFactors | None:
    """Polish a guess at D (M, B) to sparse factors; ``None`` where its columns become dependent.

    Args:
        columns: the guess.
        weight, bias, layer, basis: as of :func:`sparse_factors`.
    """
    directions, rows = basis.T @ columns, basis * len(basis) ** 0.5
    directions = directions / directions.norm(dim=0)
    near = [_sparsest(rows, directions, schedule) for schedule in (_SHARP, _SOFT)]
    chosen = _independent(_distinct(rows, torch.cat(near, 1)))
    return None if chosen.shape[1] < basis.shape[1] else _factors(weight, bias, layer, basis, chosen)


def zeros(columns: Tensor) -> Tensor:
    """Mark the elements of (..., M, B) that are zero but for rounding."""
    return columns.abs() < _ZERO * columns.abs().amax(-2, keepdim=True)


class _Search:
    """Rounds of local searches of one or two kinds in turn; of one that found nothing in two rounds, no more."""

    def __init__(self, rows: Tensor, rng: torch.Generator, starts: int) -> None:
        self._rows, self._rng, self._starts = rows, rng, starts
        few = (self._null_vectors,) if rows.shape[1] <= _MOST_ROWS else ()
        self._kinds = (*few, self._random_directions)
        self._rounds, self._found = 0, [0] * len(self._kinds)

    @property
    def hopeless(self) -> bool:
        """Say whether no kind found anything sparse in two rounds."""
        return self._tried and not any(self._found)

    @property
    def _tried(self) -> bool:
        return self._rounds >= 2 * len(self._kinds)

    def extended(self, pool: Tensor) -> Tensor:
        """Extend ``pool`` by what one more round finds."""
        kind = self._rounds % len(self._kinds)
        if self._tried and not self._found[kind]:
            kind = len(self._kinds) - 1 - kind
        more = _distinct(self._rows, torch.cat([pool, self._kinds[kind]()], 1))
        self._rounds += 1
        self._found[kind] += more.shape[1] - pool.shape[1]
        return more

    def _null_vectors(self) -> Tensor:
        """Search from the null vectors of B - 1 random rows, by the logarithm of the elements."""
        total, rank = self._rows.shape
        picked = torch.stack([torch.randperm(total, generator=self._rng)[: rank - 1] for _ in range(self._starts)])
        some = self._rows[picked.to(self._rows.device)]
        null = torch.linalg.eigh(some.mT @ some)[1][:, :, 0].T
        return _sparsest(self._rows, null, [(0.5 * 0.7**step, 1.0) for step in range(36)])

    def _random_directions(self) -> Tensor:
        """Search from random directions, by the sum of the elements in single precision and then by their logarithm."""
        directions = torch.randn(self._rows.shape[1], self._starts, generator=self._rng, dtype=torch.float64)
        directions = directions.to(self._rows)
        blunt = [(0.2 * 0.85 ** max(0, step - 15), 0.5) for step in range(35)]
        near = _sparsest(self._rows.float(), (directions / directions.norm(dim=0)).float(), blunt)
        return _sparsest(self._rows, near.to(self._rows), _SHARP)


def _sparsest(rows: Tensor, directions: Tensor, schedule: list[tuple[float, float]]) -> Tensor:
    """Move directions (B, K) to where rows @ directions is locally sparsest.

    One step of reweighted least squares on the sphere for each of the schedule's (smoothing, power): the weights are
    (y^2 + smoothing^2)^-power.
    """
    ridge = _RIDGE[rows.dtype] * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for smoothing, power in timely(schedule):
        weights = ((rows @ directions).square() + max(smoothing, 1e-7) ** 2) ** -power
        curvature = (rows.T[None] * weights.T[:, None]) @ rows
        curvature = curvature / curvature.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + ridge
        directions = torch.linalg.solve_ex(curvature, directions.T[..., None])[0][..., 0].T
        directions = directions / directions.norm(dim=0)
    return directions


def _distinct(rows: Tensor, pool: Tensor) -> Tensor:
    """Keep the directions of the pool with more zeros than any direction has, none twice, the sparsest first."""
    count = zeros(rows @ pool).sum(0)
    sparse = count >= rows.shape[1] + 2
    pool, count = pool[:, sparse], count[sparse]
    pool = pool[:, count.argsort(descending=True, stable=True)]
    twice = torch.triu((pool.T @ pool).abs() > 1 - _SAME, 1).any(0)
    return pool[:, ~twice]


def _independent(pool: Tensor) -> Tensor:
    """Pick the first directions of the pool none of which is a combination of those before."""
    rank = len(pool)
    basis, chosen = pool.new_zeros(rank, 0), []
    for position in range(pool.shape[1]):
        rest = pool[:, position] - basis @ (basis.T @ pool[:, position])
        if rest.norm() > _INDEPENDENT:
            basis = torch.cat([basis, (rest / rest.norm())[:, None]], 1)
            chosen.append(position)
        if len(chosen) == rank:
            break
    return pool[:, chosen]


def _factors(
    weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], basis: Tensor, chosen: Tensor
) -> SparseFactors:
    """Build the sparse factors from the directions ``chosen`` (B, B)."""
    directions = _polished(basis * len(basis) ** 0.5, chosen)
    scales = torch.linalg.solve_ex(directions, basis.T @ bias.double())[0]
    columns = basis @ directions * scales
    inputs = torch.linalg.solve_ex(directions * scales, basis.T @ weight.double())[0]
    return SparseFactors(columns, inputs, _agreement(columns, inputs, *layer))


def _polished(rows: Tensor, directions: Tensor) -> Tensor:
    """Polish directions to be orthogonal to all rows in which they are zero: exact but for rounding."""
    silent = zeros(rows @ directions).to(rows)
    gram = torch.einsum("mb,mj,mk->bjk", silent, rows, rows)
    polished: Tensor = torch.linalg.eigh(gram)[1][:, :, 0].T
    return polished


def _agreement(columns: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Return the share of neurons that are silent exactly where they receive no gradient, for the worst example.

    A neuron whose row of G is zero, dead on the whole batch or cut off behind the layer, says nothing, nor does an
    element that is neither zero nor clearly not, or whose neuron lies within rounding of its threshold.
    """
    size = columns.abs() / columns.abs().amax(0)
    before = (inputs @ weight.double().T + bias.double()).T
    clear = ((size < _ZERO / 30) | (size > 30 * _ZERO)) & (before.abs() > 30 * _ZERO * before.std(0))
    clear &= size.amax(1, keepdim=True) > 30 * _ZERO
    right = (before > 0) == (size > _ZERO)
    return float(((right & clear).sum(0) / clear.sum(0)).nan_to_num(0.0).min())
