"""Reconstruct a batch that enters a layer with a ReLU by sparse factors of a gradient (SPEAR, Dimitrov et al. 2024)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.gradient_inversion.infer_client import precision_of

# For a layer z = W x + b, D = dL/dz (M, B) is zero at silent neurons, X (N, B) are the inputs, g = D 1 is the bias's
# gradient, and D = L Q with an orthonormal basis L of the columns of G.

AGREEMENT = 0.99
"""Share of the signs in front of a ReLU that have to match the zeros behind it; wrong images match in about half."""

TURNED = 1e-2  # largest distance of a rotation from orthogonality
NEARLY = 0.9  # the same share if all images are right but for rounding, or few are wrong
_ZERO = 1e-4  # elements of L q below this share of the largest are zeros of the ReLU
_ACTIVE = 0.01  # slopes above this share of the largest are not zero
_SAME = 1e-6  # directions are the same up to this distance of their cosine from 1
_INDEPENDENT = 1e-3  # share of a direction that has to be new compared with those chosen before
_RANK = 1e-6  # singular values below this share of the largest are rounding errors
_MOST_ROWS = 16  # largest number of examples for which null vectors of random rows are tried as starts
_SHARP = [(0.03 * 0.5**step, 1.0) for step in range(20)]  # schedule of a search that stays near where it starts
_SOFT = [(0.3 * 0.8**step, 1.0) for step in range(36)]  # schedule (smoothing, power) of a wider search
_FAR = [(0.5 * 0.7**step, 1.0) for step in range(36)]  # schedule (smoothing, power) of the widest search
_KEPT = 1024  # largest number of directions from which independent ones are chosen
_JUDGED = 2_000_000  # signs of alternatives that are computed at once
_BLIND = 6  # rounds without a finding after which a kind of search is given up
_ROUNDED, _CLEAR = 3.0, 0.1  # units of half precision up to which elements are zero, if above this share of _ZERO
_HALF = 0.25  # singular values below this many units of half precision, relative to the largest, are its rounding
_RIDGE = {torch.float32: 1e-6, torch.float64: 1e-12}
_SPARE = 8  # combinations of columns beyond the expected rank, to notice a higher one


@dataclass(frozen=True, eq=False)
class SparseFactors:
    """Factors of a weight's gradient G = D X^T: sparse gradients D at the layer's outputs W X + b, and its inputs X.

    ``inputs``: X^T (B, N), float64, in any order. ``agreement``: share of elements of D that are zero if and only if W
    X + b is negative, for the worst example.
    """

    inputs: Tensor
    agreement: float


def column_space(weight: Tensor, count: int) -> Tensor | None:
    """Return an orthonormal basis of the columns of ``weight``; ``None`` unless its rank is ``count``."""
    found = columns_of(weight, count)
    return found if found is not None and found.shape[1] == count else None


def columns_of(weight: Tensor, most: int) -> Tensor | None:
    """Return an orthonormal basis, in R columns, of the column space of a weight's gradient, in float64.

    ``None`` if the rank R, up to rounding in the gradient's own precision, is above ``most``.
    """
    gradient = weight.double()
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(gradient.shape[1], most + _SPARE, generator=rng, dtype=torch.float64).to(gradient.device)
    basis = torch.linalg.qr(gradient @ mixed)[0]  # after Halko et al. 2011
    directions, values, _ = torch.linalg.svd(basis.T @ gradient, full_matrices=False)
    rank = int((values > _RANK * values[0]).sum())
    if rank > most and (kind := precision_of(weight)) in (torch.float16, torch.bfloat16):
        rank = int((values > _HALF * torch.finfo(kind).eps * values[0]).sum())
    return None if rank > most else basis @ directions[:, :rank]


def sparse_factors(
    weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], basis: Tensor, *, rng: torch.Generator, starts: int
) -> Iterator[SparseFactors | None]:
    """Yield factors D X^T of one victim's gradient G, better ones after each round of ``starts`` random starts.

    D is the loss's gradient at the layer's outputs, X its inputs. ``None`` is yielded while fewer than B independent
    columns of D are found. The iterator ends if a few rounds find nothing sparse, as without a ReLU.

    Args:
        weight: weight's gradient G (M, N).
        bias: bias's gradient g (M,).
        layer: weight W (M, N) and bias b (M,) as sent.
        basis: basis L (M, B) of the columns of G, see :func:`columns_of`.
    """
    own = _Gradient(weight, bias, layer, basis)
    for search in _rounds(own, rng, starts):
        few = search.chosen.shape[1] < basis.shape[1]
        yield None if few else own.factors(own.improved(search.chosen, search.pool.directions))


def orthogonal_factors(
    weight: Tensor, values: Tensor, count: int, *, rng: torch.Generator, starts: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield ever better orthogonal factors Q of a gradient G = D Q, for a layer followed by a ReLU.

    D is the loss's gradient at the layer's outputs z. The rows q of Q (R, R) are found, in any order, as directions
    with a sparse G q. The last element of a row that occurs n times among ``count`` examples is sqrt(n / ``count``).
    Rows that rounding hides are completed by orthogonality. Also yield their number; up to two completed rows are
    unique.

    Args:
        weight: G (M, R).
        values: layer's weight (M, R), so that z = ``values`` q.
        starts: number of random starts in each round.
    """
    left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    total, none = len(sizes), weight.new_zeros(len(weight))
    ranks = range(total, max(total - 3, 1), -1)
    own = {rank: _Gradient(weight, none, (weight, none), left[:, :rank]) for rank in ranks}
    searches = {rank: _rounds(gradient, rng, starts) for rank, gradient in own.items()}
    for rank in itertools.cycle([total, *ranks]):
        search = next(searches[rank], None)
        if search is None and rank == total:
            return
        if search is not None:
            rows = (search.pool.directions / sizes[:rank, None]).T @ right[:rank]
            yield _orthogonal(rows / rows.norm(dim=1, keepdim=True) * rows[:, -1:].sign(), weight, values, count)


def _orthogonal(rows: Tensor, weight: Tensor, values: Tensor, count: int) -> tuple[Tensor, int]:
    # keeps rows q with a possible last element whose slopes are zero where z is negative, and adds the K missing rows
    # with equal last elements, of which one or two are unique; returns the rows and K
    times, slopes = count * rows[:, -1].square(), weight @ rows.T
    active = slopes.abs() > _ACTIVE * slopes.abs().amax(0)
    right = ((values @ rows.T > 0) & active).sum(0) >= NEARLY * active.sum(0)
    chosen = rows[:0]
    for row in rows[right & ((times - times.round()).abs() < TURNED * times)]:
        if not ((chosen @ row).abs() > TURNED).any():
            chosen = torch.cat([chosen, row[None]])
    rest = torch.linalg.svd(chosen, full_matrices=True)[2][len(chosen) :]
    apart = torch.nn.functional.normalize(rest[:, -1], dim=0) - max(len(rest), 1) ** -0.5
    mirrored = 2 * apart[:, None] * (apart @ rest) / apart.square().sum().clamp_min(torch.finfo(rest.dtype).tiny)
    return torch.cat([chosen, rest - mirrored]), len(rest)


def _rounds(gradient: "_Gradient", rng: torch.Generator, starts: int) -> Iterator["_Search"]:
    search = _Search(gradient, rng, starts)
    while True:
        search.extended()
        if search.hopeless:
            return
        yield search


def factors_near(
    columns: Tensor, weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], basis: Tensor
) -> SparseFactors | None:
    """Refine ``columns`` (M, B), a guess of the sparse factor, as in :func:`sparse_factors`; ``None`` if this fails."""
    own, directions = _Gradient(weight, bias, layer, basis), basis.T @ columns
    pool, directions = _Pool(own), directions / directions.norm(dim=0)
    pool.extend(torch.cat([_sparsest(own.rows, directions, schedule, own.noise) for schedule in (_SHARP, _SOFT)], 1))
    chosen = _independent(pool.directions)
    return None if chosen.shape[1] < basis.shape[1] else own.factors(chosen)


def zeros(columns: Tensor, zero: float = _ZERO) -> Tensor:
    """Mark elements of ``columns`` that are below ``zero`` times the largest of their column."""
    return columns.abs() < zero * columns.abs().amax(-2, keepdim=True)


class _Gradient:
    """A weight's gradient G, in an orthonormal basis L of its columns, and the bias's gradient, in float64.

    ``rows`` (M', B): nonzero rows of L, times sqrt(M). ``noise``: rounding error of ``rows``; 0 unless in half
    precision. ``zero``: size up to which an element counts as zero, relative to its column.
    """

    def __init__(self, weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], basis: Tensor) -> None:
        self._basis, norms, gradient = basis, basis.norm(dim=1), weight.double()
        self._live = norms > _RANK * norms.max()
        self.rows: Tensor = basis[self._live] * len(basis) ** 0.5
        self._weight, self._bias = basis.T @ gradient, basis.T @ bias.double()
        self._layer = layer[0].double(), layer[1].double()
        freedom = max(1, len(basis) - basis.shape[1]) * max(1, gradient.shape[1] - basis.shape[1])
        each = float((gradient - basis @ self._weight).norm()) / freedom**0.5
        noise = each * len(basis) ** 0.5 / float(torch.linalg.svdvals(self._weight)[-1])
        self.noise = noise if noise > _CLEAR * _ZERO else 0.0
        self.zero = max(_ZERO, _ROUNDED * self.noise)

    def improved(self, chosen: Tensor, pool: Tensor) -> Tensor:
        """Exchange directions in ``chosen`` (B, B) for some in ``pool`` while the factors then fit the ReLU better."""
        rows, (values, shift) = self._basis[self._live], (own[self._live] for own in self._layer)
        before = self._weight @ values.T

        def agreement(chosen: Tensor) -> Tensor:
            scales, failed = torch.linalg.solve_ex(chosen, self._bias.expand(len(chosen), -1))
            found, _ = torch.linalg.solve_ex(chosen * scales[:, None], before.expand(len(chosen), -1, -1))
            right = (found + shift > 0) == ~zeros(rows @ chosen, self.zero).mT
            return torch.where(failed == 0, right.double().mean((1, 2)), -1.0)

        rank = len(chosen)
        most = min(4 * rank, _JUDGED // (rank * rank * len(rows)), pool.shape[1])
        reached = float(agreement(chosen[None]))
        places = torch.arange(rank, device=chosen.device)
        for _ in range(rank if most else 0):
            sets = chosen.expand(rank, most, rank, rank).clone()
            sets[places, :, :, places] = pool[:, :most].T
            found = agreement(sets.flatten(0, 1))
            best = int(found.argmax())
            if float(found[best]) <= reached or reached == 1:
                break
            chosen, reached = sets.flatten(0, 1)[best], float(found[best])
        return chosen

    def factors(self, chosen: Tensor) -> SparseFactors:
        silent = zeros(self._basis * len(self._basis) ** 0.5 @ chosen, self.zero)
        found = self._factors_with_zeros(silent)
        if found.agreement < NEARLY:
            return found
        before = self._before(found.inputs)
        signed = self._factors_with_zeros(
            torch.where(before.abs() > 30 * self.zero * before.std(0), before <= 0, silent)
        )
        return signed if signed.agreement >= found.agreement else found

    def _factors_with_zeros(self, silent: Tensor) -> SparseFactors:
        """Return the factors D X^T of the gradient with D nearest to zero where ``silent`` (M, B) is ``True``."""
        rows, zero = self._basis * len(self._basis) ** 0.5, self.zero
        directions = torch.linalg.eigh(torch.einsum("mb,mj,mk->bjk", silent.to(rows), rows, rows))[1][:, :, 0].T
        scales = torch.linalg.solve_ex(directions, self._bias)[0]
        columns = self._basis @ directions * scales
        inputs = torch.linalg.solve_ex(directions * scales, self._weight)[0]
        size, before = columns.abs() / columns.abs().amax(0), self._before(inputs)
        small = size < (zero / 30 if zero == _ZERO else zero)
        clear = (small | (size > 30 * zero)) & (before.abs() > 30 * zero * before.std(0))
        clear &= size.amax(1, keepdim=True) > 30 * zero
        right = (before > 0) == (size > zero)
        return SparseFactors(inputs, float(((right & clear).sum(0) / clear.sum(0)).nan_to_num(0.0).min()))

    def _before(self, inputs: Tensor) -> Tensor:
        weight, bias = self._layer
        return (inputs @ weight.T + bias).T


class _Pool:
    """Directions q with the most zeros in L q, for the basis L of a :class:`_Gradient`; ``_KEPT`` at most."""

    def __init__(self, gradient: _Gradient) -> None:
        self._rows, self._zero, rows = gradient.rows, gradient.zero, gradient.rows
        self.directions = rows.new_zeros(rows.shape[1], 0)
        self._zeros = torch.zeros(0, dtype=torch.long, device=rows.device)

    def extend(self, found: Tensor) -> int:
        count = zeros(self._rows @ found, self._zero).sum(0)
        new = count >= self._rows.shape[1] + 2
        new &= ~_same(self.directions, found).any(0)
        new &= ~torch.triu(_same(found, found) & new[:, None], 1).any(0)
        directions, count = torch.cat([self.directions, found[:, new]], 1), torch.cat([self._zeros, count[new]])
        order = count.argsort(descending=True, stable=True)[:_KEPT]
        self.directions, self._zeros = directions[:, order], count[order]
        return int(new.sum())


def _same(some: Tensor, others: Tensor) -> Tensor:
    return (some.T @ others).abs() > 1 - _SAME


class _Search:
    """Search for directions q with many zeros in L q, for the basis L of a :class:`_Gradient`.

    Rounds alternate between random starts and starts outside of the directions chosen so far.
    """

    def __init__(self, gradient: _Gradient, rng: torch.Generator, starts: int) -> None:
        rows = gradient.rows
        self._rows, self._rng, self._starts, self._noise = rows, rng, starts, gradient.noise
        self.pool = _Pool(gradient)
        self._kinds = (*((self._null_vectors,) if rows.shape[1] <= _MOST_ROWS else ()), self._random_directions)
        self._rounds, self._found = [0] * len(self._kinds), [0] * len(self._kinds)
        self.chosen, self._blind = rows.new_zeros(rows.shape[1], 0), False

    @property
    def hopeless(self) -> bool:
        return min(self._rounds) >= _BLIND and not any(self._found)

    def extended(self) -> Tensor:
        self._blind = not self._blind or not self.chosen.shape[1]
        if self._blind:
            kind = min(range(len(self._kinds)), key=self._rounds.__getitem__)
            if self._rounds[kind] >= _BLIND and not self._found[kind]:
                kind = len(self._kinds) - 1 - kind
            self._rounds[kind] += 1
            self._found[kind] += self.pool.extend(self._kinds[kind]())
        else:
            self.pool.extend(self._outside_of_chosen())
        self.chosen = _independent(self.pool.directions)
        return self.chosen

    def _null_vectors(self) -> Tensor:
        total, rank = self._rows.shape
        picked = torch.stack([torch.randperm(total, generator=self._rng)[: rank - 1] for _ in range(self._starts)])
        some = self._rows[picked.to(self._rows.device)]
        return _sparsest(self._rows, torch.linalg.eigh(some.mT @ some)[1][:, :, 0].T, _FAR, self._noise)

    def _random_directions(self) -> Tensor:
        directions = self._drawn(self._rows.shape[1])
        blunt = [(0.2 * 0.85 ** max(0, step - 15), 0.5) for step in range(35)]
        near = _sparsest(self._rows.float(), (directions / directions.norm(dim=0)).float(), blunt, self._noise)
        return _sparsest(self._rows, near.to(self._rows), _SHARP, self._noise)

    def _outside_of_chosen(self) -> Tensor:
        rank, count = self.chosen.shape
        if count == rank:
            apart = torch.linalg.inv_ex(self.chosen)[0].T
            apart = apart[:, torch.arange(self._starts, device=apart.device) % count]
        else:
            apart = torch.linalg.svd(self.chosen, full_matrices=True)[0][:, count:] @ self._drawn(rank - count)
        directions = apart / apart.norm(dim=0) + (self.chosen @ self._drawn(count) / count**0.5)
        return _sparsest(self._rows, directions / directions.norm(dim=0), _FAR, self._noise)

    def _drawn(self, size: int) -> Tensor:
        return torch.randn(size, self._starts, generator=self._rng, dtype=torch.float64).to(self._rows)


def _sparsest(rows: Tensor, directions: Tensor, schedule: list[tuple[float, float]], noise: float) -> Tensor:
    """Refine K unit vectors ``directions`` (B, K) until rows @ directions is locally sparsest.

    Each (smoothing, power) of ``schedule`` is one step of weighted least squares, with weights (y^2 +
    smoothing^2)^-power for y = rows @ directions. ``noise``: least smoothing.
    """
    ridge = _RIDGE[rows.dtype] * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for smoothing, power in timely(schedule):
        weights = ((rows @ directions).square() + max(smoothing, noise, 1e-7) ** 2) ** -power
        curvature = (rows.T[None] * weights.T[:, None]) @ rows
        curvature = curvature / curvature.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + ridge
        directions = torch.linalg.solve_ex(curvature, directions.T[..., None])[0][..., 0].T
        directions = directions / directions.norm(dim=0)
    return directions


def _independent(pool: Tensor) -> Tensor:
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
