"""What a defense does to an update, and what private layers come to."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.gradients.hooks import entering
from fl_privacy.types import Tensors


@dataclass(frozen=True, kw_only=True)
class UpdateDistortion:
    """The distance of a defended update from the undefended one.

    Attributes:
        signal_to_distortion: ||B|| / ||E||, clean norm over the norm of the difference; infinite if nothing changed.
        cosine: of the angle between both, in [-1, 1]; NaN if one of them is zero.
        zeros: share of the clean update's elements that are zero or withheld in the defended one.
    """

    signal_to_distortion: float
    cosine: float
    zeros: float


def distortion_of(clean: Tensors, defended: Tensors) -> UpdateDistortion:
    """Compare ``defended`` with the update ``clean`` of the same client, batch and model.

    Args:
        clean: gradient or delta by name.
        defended: the same names and shapes; a name that is missing was withheld and counts as zeros.

    Raises:
        UserError: ``defended`` has a name or shape that ``clean`` has not.
    """
    for name, t in defended.items():
        if name not in clean or clean[name].shape != t.shape:
            expected = f"shape {tuple(clean[name].shape)}" if name in clean else f"a name among {sorted(clean)}"
            raise UserError(f"Both updates are expected to match, but {name} has {tuple(t.shape)}, not {expected}.")
    b = _flat(clean)
    d = _flat({name: defended.get(name, torch.zeros_like(t)) for name, t in clean.items()})
    signal, error, size = (float(torch.linalg.vector_norm(v)) for v in (b, d - b, d))
    return UpdateDistortion(
        signal_to_distortion=signal / error if error > 0 else math.inf,
        cosine=float(b @ d) / (signal * size) if signal > 0 and size > 0 else math.nan,
        zeros=float((d == 0).double().mean()),
    )


def _flat(tensors: Tensors) -> Tensor:
    """Flatten the tensors to one vector (n,) of float64."""
    return torch.cat([t.detach().flatten().double() for t in tensors.values()])


@dataclass(frozen=True, kw_only=True)
class LinearSystem:
    """Equations B x = W of a layer, with a defense's noise: B + E_B and W + E_W (SPN, Theorem 2.2).

    B is diagonal: each entry b_i of the bias gradient, once for each input. Norms are spectral, of W Euclidean.

    Attributes:
        condition: kappa(B), largest over smallest |b_i|.
        contraction: ||B^-1 E_B||, the largest |e_i / b_i|.
        error_bound: on ||x* - x|| / ||x||; infinite where the condition of the theorem does not hold.
    """

    condition: float
    contraction: float
    error_bound: float

    @property
    def solvable(self) -> bool:
        """Say whether ||B^-1 E_B|| < 1, the theorem's condition for determining x."""
        return self.contraction < 1


def linear_system(
    clean: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], *, rows: int | None = None
) -> LinearSystem:
    """Build the system of a layer before and after the defense.

    Args:
        clean: gradient of weight (M, N) and bias (M,) without defense.
        seen: as uploaded.
        rows: number of rows, those with the largest bias gradient that was seen, as an attacker would; ``None`` takes
            all whose bias gradient is not zero.

    Returns:
        The diagnostic; a condition and contraction of infinity where a row that is taken has no gradient.
    """
    (weight, bias), (seen_weight, seen_bias) = (_double(*clean), _double(*seen))
    chosen = bias.nonzero().flatten() if rows is None else seen_bias.abs().topk(min(rows, len(bias))).indices
    w, b = weight[chosen], bias[chosen].abs()
    if not len(chosen) or not b.all():
        return LinearSystem(condition=math.inf, contraction=math.inf, error_bound=math.inf)
    e_w, e_b = (seen_weight - weight)[chosen], (seen_bias - bias)[chosen].abs()
    condition, contraction = float(b.max() / b.min()), float((e_b / b).max())
    relative = float(e_b.max() / b.max()) + float(e_w.norm() / w.norm())
    bound = condition / (1 - contraction) * relative if contraction < 1 else math.inf
    return LinearSystem(condition=condition, contraction=contraction, error_bound=bound)


@dataclass(frozen=True, kw_only=True)
class InputConditions:
    """Conditions at a fully connected layer under which an update determines one input (SPN, Theorem 2.1).

    Attributes:
        layer: whose input the update gives.
        inputs: numbers of the input x, N.
        features: numbers that enter the layer, F.
        rank: of the Jacobian (F, N) of all that is below the layer, at x.
        condition: largest over smallest of its singular values, of which there are min(F, N).
        bias_zeros: elements of the layer's bias gradient that are zero.
        rows: elements of that gradient.
    """

    layer: str
    inputs: int
    features: int
    rank: int
    condition: float
    bias_zeros: int
    rows: int

    @property
    def full_rank(self) -> bool:
        """Say whether the Jacobian has full rank, condition 1 as printed."""
        return self.rank == min(self.inputs, self.features)

    @property
    def invertible(self) -> bool:
        """Say whether what is below can be inverted near x, which the proof needs: a rank of ``inputs``.

        A Jacobian with fewer rows than columns has full rank and no inverse.
        """
        return self.rank == self.inputs

    @property
    def nonsingular(self) -> bool:
        """Say whether no element of the bias gradient is zero, condition 2."""
        return self.bias_zeros == 0


def input_conditions(model: nn.Module, image: Tensor, label: int, *, layer: str | None = None) -> InputConditions:
    """Compute both conditions of Theorem 2.1 for one input, in double precision and evaluation mode.

    Args:
        model: network with a fully connected layer that has a bias.
        image: (C, H, W) in [0, 1].
        label: its class, whose cross entropy is the loss.
        layer: name of the fully connected layer; ``None`` takes the first that is entered.

    Raises:
        UserError: there is no such layer, or nothing enters it.
    """
    exact = copy.deepcopy(model).double().eval()
    linear = {name: m for name, m in exact.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}
    if (layer is not None and layer not in linear) or not linear:
        raise UserError(
            f"A fully connected layer with a bias is expected, one of {', '.join(linear) or 'none in this model'}, but"
            f" got {layer or 'a model without one'}; choose another layer or model."
        )
    watched = linear if layer is None else {layer: linear[layer]}
    x = image.double()

    def features(pixels: Tensor) -> Tensor:
        with entering(watched) as calls:
            exact(pixels[None])
        return calls[0].inputs.flatten()

    with entering(watched) as calls:
        loss = nn.functional.cross_entropy(exact(x[None]), torch.tensor([label], device=x.device))
    if not calls:
        raise UserError(f"A layer that the model uses is expected, but {', '.join(watched)} is entered by no input.")
    name = calls[0].name
    bias = torch.autograd.grad(loss, linear[name].bias)[0]
    jacobian = torch.func.jacrev(features, chunk_size=_ROWS_AT_ONCE)(x).flatten(1).detach()
    values = torch.linalg.svdvals(jacobian)
    return InputConditions(
        layer=name,
        inputs=x.numel(),
        features=len(jacobian),
        rank=int((values > values[0] * max(jacobian.shape) * torch.finfo(values.dtype).eps).sum()),
        condition=float(values[0] / values[-1]),
        bias_zeros=int((bias == 0).sum()),
        rows=bias.numel(),
    )


_ROWS_AT_ONCE = 64
"""Of a Jacobian."""


def _double(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return weight.detach().to(torch.float64), bias.detach().to(torch.float64)


def mean_squared_distance(weights: Tensor) -> float:
    """Return the mean over all pairs of clients, a client with itself included, of ``||W_i - W_j||^2`` (Figure 4).

    Args:
        weights: (N, ...) of N clients.
    """
    flat = weights.flatten(1).double()
    return float(torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square().mean())


def scale_norm(scale: Tensor) -> float:
    """Compute the operator norm of the scaling that multiplies each channel by its element of ``scale`` (Figure 5).

    The matrix of such a scaling is diagonal, so that its norm is the largest of the elements' magnitudes.

    Args:
        scale: (O,).
    """
    return float(scale.detach().abs().max())


def effective_rank(weight: Tensor, *, share: float = 0.99) -> int:
    """Count how many of the largest singular values add up to ``share`` of the sum of all (Figure 5, left).

    The paper takes "99 % of the sum of the singular values as threshold" and counts the values above; a single value is
    never above that, so it is read as the sum that the values counted have to reach.

    Args:
        weight: (O, ...), seen as a matrix of O rows.
        share: above 0 up to 1.
    """
    values = torch.linalg.svdvals(weight.flatten(1).double())
    reached = values.cumsum(0) >= share * values.sum() * (1 - 1e-12)
    return int(reached.long().argmax()) + 1
