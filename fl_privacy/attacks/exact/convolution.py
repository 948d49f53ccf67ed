"""Solve for a convolution's inputs from its weight's gradient and its outputs, or the loss's gradient there."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
        """Place outputs' ``deltas`` (V, O, P, Q) at the input pixels of T kernel elements; return (V, O T, H W)."""
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
    """Set estimated ReLU outputs (V, ...) to zero up to the noise, whose size the most negative output shows."""
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
    """Solve a semidefinite ``normal(x) = right`` (V, ...) for the x of least norm; ``diagonal``: preconditioner > 0."""
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


_RANK = 1e-7  # singular values below this share of the largest are rounding of single precision
_RIDGE = 1e-12
_STEPS = 6  # steps of inverse iteration for the least eigenvalues, a million times apart if there is a solution
MOST_NUMBERS = 1 << 26  # numbers of matrices that are solved together: half a gigabyte
_DRAWS = 4000  # places from which sums of images without zeros in common are separated
_ZERO = 3e-3  # share of a sum's length that is taken for zero
_BRIGHT = 0.2  # places are compared if brighter than this share of the median
_ROUNDED = 10.0  # zeros are below this multiple of the median of their absolute values
_ZEROS = 0.02  # least share of zeros of an image's inputs
_ALIKE = 0.99  # cosine of directions that are the same


@dataclass(frozen=True, eq=False)
class BlindInputs:
    """Best solution found by :func:`inputs_up_to_a_factor`, for B images.

    ``values``: (B, C, H, W) convolution's inputs, with mean absolute value 1; a single image's sign is unknown.
    ``slopes``: (B, O, P, Q) loss's gradient at its outputs. ``left``: squared residual, divided by a random guess's.
    ``next``: the same ratio for the second-best solution.
    """

    values: Tensor
    slopes: Tensor
    left: float
    next: float

    @property
    def unique(self) -> bool:
        return self.left < 1e-6 and self.left < 1e-3 * self.next


def can_be_blind(layer: Convolution, count: int = 1) -> bool:
    """Return whether the gradient of the weight of ``layer`` can determine the layer's inputs for ``count`` images."""
    module, taps = layer.module, layer.module.kernel_size
    if module.stride != (1, 1) or module.dilation != (1, 1) or taps[0] != taps[1] or not 2 <= taps[0] <= 5:
        return False
    height, width = _grid(layer)
    rank = count * height * width
    least = 4 * min(module.out_channels, layer.shape[0] * (taps[0] - 1) ** 2 // 4)
    return rank <= least and height * (width * rank) ** 2 <= 2 * MOST_NUMBERS


def _grid(layer: Convolution) -> tuple[int, int]:
    """Return one more than the height and width of the outputs."""
    (down, across), size = layer.padding, layer.module.kernel_size[0]
    return layer.shape[1] + 2 * down - size + 2, layer.shape[2] + 2 * across - size + 2


_PAIR = tuple(itertools.product((0, 1), repeat=2))


@torch.no_grad()
def inputs_up_to_a_factor(layer: Convolution, gradient: Tensor, count: int = 1) -> BlindInputs | None:
    """Return the inputs of ``count`` images to a convolution from its weight's ``gradient`` alone, each up to a factor.

    The gradient (float64) is the convolution of the inputs with unknown slopes, the loss's gradient at the outputs.
    ``None`` if too few slopes can be determined.
    """
    height, width = _grid(layer)
    length, taps, most = gradient.norm(), len(gradient[0, 0]) - 1, count * height * width
    if not length > 0 or not length.isfinite():
        return None
    # of neighboring kernel elements, as in ESPRIT (Roy and Kailath 1989); inputs' zeros separate images
    blocks = [gradient[:, :, y : y + taps, x : x + taps].flatten(1) for y, x in _PAIR]
    left, values, _ = torch.linalg.svd(torch.cat(blocks) / length, full_matrices=False)
    values = F.pad(values, (0, max(0, most + 1 - len(values)))).clamp_min(_RIDGE * values[0])
    ends = most - 1 + int(values[most - 2] * values[most] < values[most - 1] ** 2) if most > 1 else 1
    if not values[ends - 1] > _RANK * values[0]:
        return None
    basis = left[:, :ends].reshape(4, len(gradient), ends)
    least, slopes = _shifted(basis, (height, width), count)
    right = gradient.flatten(2).transpose(1, 2).flatten(0, 1)
    moved = layer.moved(slopes).transpose(0, 1).flatten(1)
    found = torch.linalg.lstsq(moved, right).solution
    missed = float((moved @ found - right).square().sum() / right.square().sum())
    inputs = found.reshape(count, -1, layer.shape[0]).mT.flatten(1)
    mix = torch.ones_like(inputs[:, :1]) if count == 1 else _unmixed(inputs)
    if mix is None:
        return None
    mix = mix / (mix @ inputs).abs().mean(1, keepdim=True)
    values, own = mix @ inputs, torch.linalg.inv(mix).T @ slopes.flatten(1)
    after = max(float(least[count - 1]), missed)
    return BlindInputs(values.view(count, *layer.shape), own.view_as(slopes), after, float(least[count]))


def _shifted(basis: Tensor, size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    # finds ``count`` tensors (count, O, P, Q) whose copies, shifted by 0 or 1 pixel each way, come nearest to the span
    # of ``basis`` (4, O, R), orthonormal columns split by shift; returns ``count`` + 1 least squared distances and them
    (height, width), rank = size, basis.shape[2]
    products, n = torch.einsum("aor,bos->abrs", basis, basis), width * rank

    def block(row: int, below: int) -> Tensor:
        found = basis.new_zeros(width, rank, width, rank)
        for x, (a, (down, across)) in itertools.product(range(width), enumerate(_PAIR)):
            if row == below:
                found[x, :, x] += products[a, a]
            if 0 <= row - down < height - 1 and 0 <= x - across < width - 1:
                for b, (lower, further) in enumerate(_PAIR):
                    if row - down + lower == below:
                        found[x, :, x - across + further] -= products[a, b] / 4
        return found.reshape(n, n)

    factors, between = list[Tensor](), list[Tensor]()
    for row in range(height):
        own = block(row, row)
        own.diagonal().add_(_RIDGE)
        if row:
            between.append(torch.linalg.solve_triangular(factors[-1], block(row - 1, row), upper=False))
            own -= between[-1].T @ between[-1]
        factors.append(torch.linalg.cholesky(own))

    def inverse(right: Tensor) -> Tensor:
        parts = list(torch.split(right, n))
        for row, factor in enumerate(factors):
            rest = parts[row] - between[row - 1].T @ parts[row - 1] if row else parts[row]
            parts[row] = torch.linalg.solve_triangular(factor, rest, upper=False)
        for row, factor in reversed(list(enumerate(factors))):
            rest = parts[row] - between[row] @ parts[row + 1] if row + 1 < height else parts[row]
            parts[row] = torch.linalg.solve_triangular(factor.T, rest, upper=True)
        return torch.cat(parts)

    vectors = torch.randn(height * n, count + 1, dtype=basis.dtype, generator=torch.Generator().manual_seed(0))
    vectors = vectors.to(basis.device)
    for _ in range(_STEPS):
        vectors = inverse(torch.linalg.qr(vectors)[0])
    vectors, _ = torch.linalg.qr(vectors)
    largest, turned = torch.linalg.eigh(vectors.T @ inverse(vectors))
    kept = (vectors @ turned.flip(1))[:, :count].reshape(height, width, rank, count)
    parts = [
        torch.einsum("or,yxrk->koyx", own, kept[down : down + height - 1, across : across + width - 1])
        for own, (down, across) in zip(basis, _PAIR, strict=True)
    ]
    return 1 / largest.flip(0), torch.stack(parts).mean(0)


def _unmixed(sums: Tensor) -> Tensor | None:
    """Find the matrix (B, B) that turns ``sums`` (B, N) of images into non-negative rows with many zeros, if any."""
    white, mix = torch.linalg.qr(sums.T)
    size = white.norm(dim=1)
    bright = white[size > _BRIGHT * size.median()]
    bright = bright / bright.norm(dim=1, keepdim=True)
    drawn = torch.randint(len(bright), (_DRAWS, len(sums) - 1), generator=torch.Generator().manual_seed(0))
    directions = torch.linalg.svd(bright[drawn.to(bright.device)])[2][:, -1]
    shares = torch.cat([((part @ bright.T).abs() < _ZERO).double().mean(1) for part in torch.split(directions, 256)])
    found = list[Tensor]()
    for number in shares.argsort(descending=True).tolist():
        own = directions[number]
        if all((own @ other).abs() < _ALIKE for other in found):
            if shares[number] < _ZEROS:
                return None
            zeros, exact = (bright @ own).abs() < _ZERO, own
            for _ in range(_STEPS):  # each leaves out places that are nearly, but not as dark
                exact = torch.linalg.svd(bright[zeros], full_matrices=False)[2][-1]
                apart = (bright @ exact).abs()
                zeros = apart < _ROUNDED * apart[zeros].median() + _RIDGE
            found.append(exact * (white @ exact).sum().sign())
        if len(found) == len(sums):
            separated: Tensor = torch.stack(found) @ torch.linalg.inv(mix).T
            return separated
    return None


_SHORTCUT = 3.0  # weight of an input that a shortcut shows, in units of the mean weight of the gradients' equations
_FLIPS = 24  # largest number of outputs that are newly taken for silent or not
_BETTER = 0.95  # share of the residual to which a flip has to reduce it


@dataclass(frozen=True, eq=False)
class Slopes:
    """Gradient of the loss (V, C, H, W) with respect to a layer's outputs: ``full`` times ``open``, minus ``rest``.

    ``open``: mask of the active elements of the ReLU that follows. ``full``: gradient without that mask. ``rest``: part
    that flows through a batch norm's statistics.
    """

    full: Tensor
    open: Tensor | None = None
    rest: Tensor | None = None

    @property
    def values(self) -> Tensor:
        values = self.full if self.open is None else self.full * self.open
        return values if self.rest is None else values - self.rest


@dataclass(frozen=True, eq=False)
class Equations:
    """Linear equations ``slopes * inputs = gradient`` for the inputs of a convolution, for V victims, in float64.

    ``slopes``: loss's gradient at the layer's outputs. ``gradient`` (V, O, C, kernel): that of its weight.
    """

    layer: Convolution
    slopes: Slopes
    gradient: Tensor

    @property
    def right(self) -> Tensor:
        return self.gradient.flatten(3).transpose(2, 3).flatten(1, 2)

    @property
    def left(self) -> Tensor:
        return self.joined(self.layer.moved(self.slopes.values))

    def joined(self, values: Tensor) -> Tensor:
        """Flatten values (V, C, H, W) to (V, C, P), or (1, C, V P) if the V images are one batch; P = H W."""
        flat = values.flatten(2)
        return flat.transpose(0, 1).flatten(1)[None] if self.together else flat

    @property
    def together(self) -> bool:
        return len(self.gradient) < len(self.slopes.full)

    def of(self, rows: Tensor) -> "Equations":
        gates = None if self.slopes.open is None else self.slopes.open[rows]
        return Equations(self.layer, replace(self.slopes, full=self.slopes.full[rows], open=gates), self.gradient[rows])


Shown = tuple[Tensor, Tensor]
"""Number of times (V, C, H, W) that each input is known from elsewhere, and the sum (V, C, H, W) of its values."""


@torch.no_grad()
def gated_inputs(equations: Sequence[Equations], shown: Shown | None = None) -> tuple[Tensor, Tensor]:
    """Solve ``equations`` for V victims' inputs (V, C, H, W), and return them with their relative residual (V,).

    The ReLU masks in ``equations`` are first corrected (:func:`turn_gates`). ``shown``: inputs known from elsewhere.
    """
    for own in equations:
        turn_gates(own)
    return solve(equations, shown)


def turn_gates(own: Equations) -> None:
    """Flip, in place, elements of the ReLU masks (V, O, P, Q) of ``own`` while this lowers its residual."""
    gates = own.slopes.open
    if gates is None or own.layer.module.kernel_size == (1, 1):
        return
    found, left = solve([own], None)
    flat, going = gates.flatten(1), left > 0
    for _ in timely(range(_FLIPS)):
        gain, place = _gains(own, gates, found).flatten(1).max(1)
        going = going & (gain > 0)
        if not going.any():
            return
        rows = going.nonzero().flatten()
        flat[rows, place[rows]] ^= True
        gates.copy_(flat.view_as(gates))
        trial, after = solve([own], None)
        better = going & (after < _BETTER * left)
        undone = (going & ~better).nonzero().flatten()
        flat[undone, place[undone]] ^= True
        gates.copy_(flat.view_as(gates))
        found = torch.where(better[:, None, None, None], trial, found)
        left, going = torch.where(better, after, left), better


def solve(equations: Sequence[Equations], shown: Shown | None) -> tuple[Tensor, Tensor]:
    """Solve ``equations`` like :func:`gated_inputs`, with fixed ReLU masks; ignore ``shown`` if memory is short."""
    left = torch.cat([each.left for each in equations], 1)
    right = torch.cat([each.right for each in equations], 1)
    normal, sums = left.mT @ left, left.mT @ right  # (V, P, P), (V, P, C)
    scale = normal.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(left.dtype).tiny)[:, None, None]
    normal, sums = normal / scale, sums / scale
    normal.diagonal(dim1=1, dim2=2).add_(_RIDGE)
    if shown is None or normal.numel() * sums.shape[2] > MOST_NUMBERS:
        found = torch.linalg.solve_ex(normal, sums)[0].mT
    else:
        often, own = (_SHORTCUT * equations[0].joined(values) for values in shown)
        each, known = normal[:, None] + torch.diag_embed(often), sums.mT + own
        found = torch.linalg.solve_ex(each, known[..., None])[0][..., 0]
    apart = (left @ found.mT - right).flatten(1).norm(dim=1)
    share = apart / right.flatten(1).norm(dim=1).clamp_min(torch.finfo(left.dtype).tiny)
    count, share = len(equations[0].slopes.full), torch.where(share.isfinite(), share, torch.inf)
    if equations[0].together:
        found, share = found[0].unflatten(1, (count, -1)).transpose(0, 1), share.expand(count)
    return found.reshape(count, *equations[0].layer.shape), share


def _gains(own: Equations, gates: Tensor, found: Tensor) -> Tensor:
    # returns by how much flipping each element of the ReLU masks ``gates`` lowers the squared residual of ``own``
    left = own.left
    outputs = own.slopes.full.shape[1]
    step = torch.where(gates, -own.slopes.full, own.slopes.full).flatten(2)  # (V, O, P)
    rest = own.right - left @ own.joined(found).mT
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
