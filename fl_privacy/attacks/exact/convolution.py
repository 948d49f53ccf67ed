"""Solve for a convolution's inputs from its weight's gradient and its outputs or their slopes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from fl_privacy.attacks.attack import timely

_ITERATIONS = 3000  # maximal number of steps of conjugate gradients
_CONVERGED = 1e-9  # residual share at which they stop
_LEAST = 0.03  # weight of an output that is known at all, in units of the largest
_SMOOTH = 1e-3  # weight of differences of neighbors if outputs are not all known, in units of an input's own weight


_NOISE = 2.0  # silent outputs of a ReLU are below this multiple of the depth of its least output


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution without groups, with zero padding, from ``shape`` (C, H, W) to O channels of P by Q outputs."""

    module: nn.Conv2d
    shape: tuple[int, ...]

    @property
    def padding(self) -> tuple[int, ...]:
        padding, size = self.module.padding, zip(self.module.dilation, self.module.kernel_size, strict=True)
        if isinstance(padding, str):
            return tuple(step * (taps - 1) // 2 if padding == "same" else 0 for step, taps in size)
        return padding

    @property
    def gradients(self) -> int:
        return self.module.out_channels * self.module.kernel_size[0] * self.module.kernel_size[1]

    @property
    def numbers(self) -> int:
        pixels, parts = self.shape[1] * self.shape[2], _common_step(self) ** 2
        return pixels * self.gradients + (pixels * pixels // parts if _multiplies(self) else 0)

    def outputs(self, inputs: Tensor) -> Tensor:
        module = self.module
        return F.conv2d(inputs, module.weight, None, module.stride, self.padding, module.dilation)

    def back(self, deltas: Tensor, *, squared: bool = False) -> Tensor:
        weight = self.module.weight.square() if squared else self.module.weight
        return self._transposed((len(deltas), *self.shape), weight, deltas)

    def moved(self, deltas: Tensor) -> Tensor:
        """Map V victims' ``deltas`` (V, O, P, Q) to the inputs that T kernel elements multiply: (V, O T, H W)."""
        module, (height, width) = self.module, self.shape[1:]
        taps = module.kernel_size[0] * module.kernel_size[1]
        alone = torch.eye(taps).to(deltas).view(1, taps, *module.kernel_size)
        size = (deltas.shape[0] * deltas.shape[1], taps, height, width)
        found = self._transposed(size, alone, deltas.reshape(size[0], 1, *deltas.shape[2:]))
        return found.reshape(len(deltas), -1, height * width)

    def _transposed(self, size: tuple[int, ...], weight: Tensor, deltas: Tensor) -> Tensor:
        module = self.module
        options = module.stride, self.padding, module.dilation
        return conv2d_input(size, weight, deltas, *options)  # type: ignore[no-untyped-call, no-any-return]


def above_noise(outputs: Tensor) -> Tensor:
    """Set estimated ReLU outputs to zero if noise explains them; each victim's most negative one shows its size."""
    least = outputs.flatten(1).amin(1).clamp(max=0).view(-1, *(1 for _ in outputs.shape[1:]))
    return torch.where(outputs > -_NOISE * least, outputs, 0)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Least-squares solution for the inputs of a convolution, with its quality, for V victims."""

    values: Tensor  # (V, C, H, W)
    left: Tensor  # (V,) residual share of the right-hand sides
    seen: Tensor  # (V, C, H, W) ``True`` if any equation contains the input; the others are 0, or smooth if asked for
    enough: Tensor  # (V,) ``True`` if there are at least as many equations as seen inputs


def solve_inputs(
    layer: Convolution, outputs: Tensor, slopes: Tensor, deltas: Tensor, gradient: Tensor, *, smooth: bool = False
) -> Inputs:
    """Solve ``W * x = outputs`` and ``deltas * x = gradient`` for x of V victims by least squares, in float64.

    Equations of outputs are weighted by the activation's slope; both kinds have the same total weight.

    Args:
        outputs: (V, O, P, Q) without the bias, P by Q in each of O channels.
        slopes: (V, O, P, Q) of the activation, at least 0.
        deltas: (V, O, P, Q) gradient of the loss with respect to the outputs.
        gradient: (V, O, C, kernel) gradient of the loss with respect to the weight W.
        smooth: ``True`` for the smoothest of several solutions instead of that of least norm.
    """
    tiny = torch.finfo(outputs.dtype).tiny
    largest = slopes.flatten(1).amax(1).clamp_min(tiny)[:, None, None, None]
    weights = torch.where(slopes > 0, (slopes / largest).clamp_min(_LEAST), 0)
    moved = layer.moved(deltas)
    of_outputs, squared = layer.back(weights.square(), squared=True), weights.square()
    of_gradients = moved.square().sum(1).reshape(len(moved), 1, *layer.shape[1:])
    sizes = [each.flatten(1).mean(1) for each in (of_outputs, of_gradients)]
    factor = (sizes[0] / sizes[1].clamp_min(tiny)).sqrt()
    seen = (of_outputs > 0) | (of_gradients > 0)
    enough = _number(slopes > 0) + gradient[0].numel() >= _number(seen)
    missing = ((slopes == 0).flatten(1).any(1) | ~enough | ~seen.flatten(1).all(1)) & smooth
    roughness = torch.where(missing, _SMOOTH * sizes[0], 0)[:, None, None, None]  # weight of differences of neighbors
    diagonal = of_outputs + factor.square()[:, None, None, None] * of_gradients + roughness
    moved = factor[:, None, None] * moved  # (V, n, H W), from each channel's pixels to its gradients
    outputs, gradients = weights * outputs, factor[:, None, None] * gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)
    step, rough = _common_step(layer), bool(missing.any())
    # products of columns that a tap sees together, (V, S, m, m), unless they are larger than the columns
    columns = _apart(moved.reshape(*moved.shape[:2], *layer.shape[1:]), step) if _multiplies(layer) else None
    products = None if columns is None else columns.mT @ columns

    def normal(inputs: Tensor) -> Tensor:
        found = layer.back(squared * layer.outputs(inputs))
        if products is None:
            found += ((inputs.flatten(2) @ moved.mT) @ moved).reshape(inputs.shape)
        else:
            parts = (_apart(inputs, step) @ products).transpose(1, 2)
            height, width = (size // step for size in inputs.shape[2:])
            found += F.pixel_shuffle(parts.reshape(len(inputs), -1, height, width), step)
        if rough:  # half the slope of the squared differences of neighbors
            across, down = inputs.diff(dim=-1), inputs.diff(dim=-2)
            slope = (
                F.pad(across, (1, 0)) - F.pad(across, (0, 1)) + F.pad(down, (0, 0, 1, 0)) - F.pad(down, (0, 0, 0, 1))
            )
            found.addcmul_(roughness, slope)
        return found

    right = layer.back(weights * outputs) + (gradients.mT @ moved).reshape(len(outputs), *layer.shape)
    found = conjugate_gradients(normal, right, diagonal.clamp_min(tiny))
    both = (weights * layer.outputs(found), outputs), (moved @ found.flatten(2).mT, gradients)
    apart = torch.stack([(a - b).flatten(1).square().sum(1) for a, b in both]).sum(0)
    length = torch.stack([b.flatten(1).square().sum(1) for _, b in both]).sum(0)
    return Inputs(found, (apart / length.clamp_min(tiny)).sqrt(), seen, enough)


def _number(rows: Tensor) -> Tensor:
    return rows.flatten(1).sum(1)


def _apart(values: Tensor, step: int) -> Tensor:
    """Return pixels (V, C, H, W) grouped by position modulo ``step``: (V, S, C, H W / S), S = step^2."""
    return F.pixel_unshuffle(values, step).reshape(*values.shape[:2], step * step, -1).transpose(1, 2)


def _common_step(layer: Convolution) -> int:
    down, across = (int(step) for step in layer.module.stride)
    return down if down == across and all(size % down == 0 for size in layer.shape[1:]) else 1


def _multiplies(layer: Convolution) -> bool:
    return layer.shape[1] * layer.shape[2] // _common_step(layer) ** 2 <= 2 * layer.gradients


def conjugate_gradients(normal: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor) -> Tensor:
    """Solve V victims' semidefinite ``normal(x) = right`` (V, ...) for least norm; ``diagonal``: preconditioner."""
    found, rest = torch.zeros_like(right), right.clone()
    enough = _CONVERGED * _lengths(right)
    scaled = rest / diagonal
    direction, inner = scaled, _products(rest, scaled)
    for _ in timely(range(_ITERATIONS)):
        going = _lengths(rest) > enough
        if not going.any():
            break
        ahead = normal(direction)
        curvature = _products(direction, ahead)
        going &= (curvature > 0).view(going.shape)
        step = torch.where(going.view(curvature.shape), inner / torch.where(curvature > 0, curvature, 1), 0)
        found, rest = found + step * direction, rest - step * ahead
        scaled = rest / diagonal
        last, inner = inner, _products(rest, scaled)
        direction = scaled + inner / torch.where(last > 0, last, 1) * direction
        if not going.any():
            break
    return found


def _products(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).flatten(1).sum(1).view(-1, *(1 for _ in one.shape[1:]))


def _lengths(values: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1)
    return lengths


MOST_UNKNOWNS = 4608
"""Largest number of unknowns of a system, such as 64 channels by 64 places: 130 MB."""

_RANK = 1e-7  # singular values below this share of the largest are rounding of single precision
_RIDGE = 1e-12
_STEPS = 4
"""Steps of inverse iteration for the two least eigenvalues, whose ratio is about a million if there is a solution."""


@dataclass(frozen=True, eq=False)
class BlindInputs:
    """The best solution of :func:`inputs_up_to_a_factor` for a layer's inputs.

    ``values`` (C, H, W) have a mean absolute value of 1; their sign is unknown. ``left``: squared residual, relative to
    that of a random guess. ``next``: the same for the best inputs orthogonal to ``values``.
    """

    values: Tensor
    left: float
    next: float

    @property
    def unique(self) -> bool:
        return self.left < 1e-6 and self.left < 1e-3 * self.next


def can_be_blind(layer: Convolution) -> bool:
    """Return whether the weight's gradient alone can determine the inputs of a layer with the shapes of ``layer``."""
    places = layer.shape[1] * layer.shape[2]
    taps = layer.module.kernel_size[0] * layer.module.kernel_size[1]
    return layer.shape[0] >= places and places * places <= MOST_UNKNOWNS and 4 <= taps <= 25


@torch.no_grad()
def inputs_up_to_a_factor(layer: Convolution, gradient: Tensor) -> BlindInputs | None:
    """Solve the convolution ``gradient = slopes * inputs`` with unknown slopes for one image's inputs.

    ``gradient``: the weight's, in float64. ``None`` if the rank of that is too low.
    """
    channels, places = layer.shape[0], layer.shape[1] * layer.shape[2]
    taps = gradient.flatten(2).permute(2, 0, 1)  # (K, O, C)
    length = taps.norm()
    if not length > 0 or not length.isfinite():
        return None
    _, values, right = torch.linalg.svd((taps / length).reshape(-1, channels), full_matrices=False)
    if int((values > _RANK * values[0]).sum()) < places:
        return None
    if places == 1:  # the taps that see the one place are slopes times its channels
        left = 1 - float(values[0].square() / values.square().sum())
        return BlindInputs((right[0] / right[0].abs().mean()).reshape(layer.shape), left, next=1.0)
    basis = right[:places].T / values[:places] * values[0]
    # each tap's input place of each output, (K, P, N) of zeros and ones
    size = layer.outputs(gradient.new_zeros(1, *layer.shape)).shape[2:]
    number = size[0] * size[1]
    alone = torch.eye(number, dtype=gradient.dtype, device=gradient.device).reshape(1, number, *size)
    matrix = _normal_matrix(
        layer.moved(alone).reshape(number, -1, layer.shape[1] * layer.shape[2]).transpose(0, 1), taps / length @ basis
    )
    least, vector = _least_eigenpairs(matrix)
    found = torch.linalg.pinv(basis @ vector.reshape(places, places), rtol=1e-9).T
    return BlindInputs((found / found.abs().mean()).reshape(layer.shape), float(least[0]), float(least[1]))


def _normal_matrix(shifts: Tensor, taps: Tensor) -> Tensor:
    """Build the matrix whose quadratic form in X (R, N) is the least ||``taps`` X - Y ``shifts``||^2 over Y.

    ``taps``: (K, O, R) and ``shifts``: (K, P, N), for K kernel elements, O outputs and P pixels. The mean of the
    diagonal is 1.
    """
    count, places, rank = len(shifts), shifts.shape[2], taps.shape[2]
    often = shifts.square().sum((0, 2)).clamp_min(1)
    products = torch.einsum("kor,los->klrs", taps, taps).reshape(count * count, -1)
    kept = -torch.einsum("kpa,lpb->klab", shifts, shifts / often[:, None])
    for tap in range(count):
        kept[tap, tap] += torch.eye(places, dtype=taps.dtype, device=taps.device)
    matrix = products.T @ kept.reshape(count * count, -1)
    matrix = matrix.reshape(rank, rank, places, places).transpose(1, 2).reshape(rank * places, rank * places)
    return matrix / matrix.diagonal().mean()


def _least_eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    size = len(matrix)
    matrix.diagonal().add_(_RIDGE)
    lower = torch.linalg.cholesky(matrix)
    block = torch.randn(size, 2, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in itertools.repeat(None, _STEPS):
        block, _ = torch.linalg.qr(torch.cholesky_solve(block, lower))
    values, vectors = torch.linalg.eigh(block.T @ matrix @ block)
    return values, (block @ vectors)[:, 0]


_SHORTCUT = 3.0  # weight of an input that a shortcut shows, in units of the mean weight of the gradients' equations
_FLIPS = 24  # largest number of outputs that are newly taken for silent or not
_BETTER = 0.95  # share of the residual to which a flip has to reduce it


@dataclass(frozen=True, eq=False)
class Slopes:
    """Gradient (V, C, H, W) of V victims' loss by a layer's outputs: ``full`` times ``open``, if that is given.

    ``open``: mask of the active elements of the ReLU behind the layer.
    """

    full: Tensor
    open: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.full if self.open is None else self.full * self.open


@dataclass(frozen=True, eq=False)
class Equations:
    """Equations ``slopes * inputs = gradient`` (V, O, C, kernel) for a convolution's inputs, by victim, float64."""

    layer: Convolution
    slopes: Slopes
    gradient: Tensor

    @property
    def right(self) -> Tensor:
        return self.gradient.flatten(3).transpose(2, 3).flatten(1, 2)

    @property
    def left(self) -> Tensor:
        return self.layer.moved(self.slopes.values)

    def of(self, rows: Tensor) -> "Equations":
        gates = None if self.slopes.open is None else self.slopes.open[rows]
        return Equations(self.layer, Slopes(self.slopes.full[rows], gates), self.gradient[rows])


Shown = tuple[Tensor, Tensor]
"""Number of other sources (V, C, H, W) that show each input, and the sum (V, C, H, W) of the shown values."""


@torch.no_grad()
def gated_inputs(equations: Sequence[Equations], shown: Shown | None = None) -> tuple[Tensor, Tensor]:
    """Solve ``equations`` for V victims' inputs (V, C, H, W), and return them with their relative residual (V,).

    The ReLU masks of ``equations`` are changed in place: elements that rounding may have flipped are flipped while the
    residual falls. ``shown``: values of the inputs known from elsewhere.
    """
    for own in equations:
        if own.slopes.open is not None and own.layer.module.kernel_size != (1, 1):
            _turn_gates(own, own.slopes.open)
    return _solved(equations, shown)


def _turn_gates(own: Equations, gates: Tensor) -> None:
    """Flip, in place, the elements of victims' ReLU masks ``gates`` whose change lowers the residual most."""
    found, left = _solved([own], None)
    flat, going = gates.flatten(1), left > 0
    for _ in range(_FLIPS):
        gain, place = _gains(own, gates, found).flatten(1).max(1)
        going = going & (gain > 0)
        if not going.any():
            return
        rows = going.nonzero().flatten()
        flat[rows, place[rows]] ^= True
        gates.copy_(flat.view_as(gates))
        trial, after = _solved([own], None)
        better = going & (after < _BETTER * left)
        undone = (going & ~better).nonzero().flatten()
        flat[undone, place[undone]] ^= True
        gates.copy_(flat.view_as(gates))
        found = torch.where(better[:, None, None, None], trial, found)
        left, going = torch.where(better, after, left), better


def _solved(equations: Sequence[Equations], shown: Shown | None) -> tuple[Tensor, Tensor]:
    left = torch.cat([each.left for each in equations], 1)
    right = torch.cat([each.right for each in equations], 1)
    normal, sums = left.mT @ left, left.mT @ right  # (V, P, P), (V, P, C)
    scale = normal.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(left.dtype).tiny)[:, None, None]
    normal, sums = normal / scale, sums / scale
    normal.diagonal(dim1=1, dim2=2).add_(_RIDGE)
    if shown is None:
        found = torch.linalg.solve_ex(normal, sums)[0].mT
    else:
        often, own = (_SHORTCUT * values.flatten(2) for values in shown)
        each, known = normal[:, None] + torch.diag_embed(often), sums.mT + own
        found = torch.linalg.solve_ex(each, known[..., None])[0][..., 0]
    apart = (left @ found.mT - right).flatten(1).norm(dim=1)
    share = apart / right.flatten(1).norm(dim=1).clamp_min(torch.finfo(left.dtype).tiny)
    return found.reshape(-1, *equations[0].layer.shape), torch.where(share.isfinite(), share, torch.inf)


def _gains(own: Equations, gates: Tensor, found: Tensor) -> Tensor:
    """Return the fall of the squared residual if one element of victims' ReLU masks ``gates`` is flipped, for each."""
    left = own.left
    outputs = own.slopes.full.shape[1]
    step = torch.where(gates, -own.slopes.full, own.slopes.full).flatten(2)  # (V, O, P)
    rest = own.right - left @ found.flatten(2).mT
    rest = rest.reshape(len(rest), outputs, -1, rest.shape[2])  # (V, O, K, C)
    module, (down, across) = own.layer.module, own.layer.padding
    seen = F.unfold(found, module.kernel_size, module.dilation, (down, across), module.stride)
    seen = seen.reshape(*found.shape[:2], -1, seen.shape[2])  # (V, C, K, P) inputs that each tap sees
    inner = torch.einsum("vokc,vckp->vop", rest, seen)
    normal = left.mT @ left
    normal.diagonal(dim1=1, dim2=2).add_(_RIDGE * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
    lower, _ = torch.linalg.cholesky_ex(normal)
    thin = torch.linalg.solve_triangular(lower, left.mT, upper=False)
    thin = thin.reshape(*thin.shape[:2], outputs, -1)  # (V, N, O, K)
    taken = torch.einsum("vnok,vnol->vokl", thin, thin)
    free = torch.eye(taken.shape[-1], dtype=taken.dtype, device=taken.device) - taken
    squared = torch.einsum("vokl,vklp->vop", free, torch.einsum("vckp,vclp->vklp", seen, seen))
    gain = 2 * inner * step - step.square() * squared
    return torch.where(gain.isfinite(), gain, 0).reshape(gates.shape)
