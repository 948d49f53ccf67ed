"""Measures that only experiments take: of layers, of published distances, of a row between two fits, of trees."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fl_privacy.attacks.fitted import LogisticOptimum
from fl_privacy.attacks.trees import Tree, Trees
from fl_privacy.errors import UserError
from fl_privacy.measure.matching import hard_labels
from fl_privacy.models.gradients.hooks import entering


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


def published_rmse(guesses: Tensor, truths: Tensor) -> Tensor:
    """(N,) ||guess - x|| / ||x|| of guesses as they come: not brought to [0, 1], not matched (SPN, section 4.1).

    The metric ``rmse`` clamps guesses first, and no clamped guess of a digit can have the errors that Figure 12 prints.

    Args:
        guesses: (N, C, H, W), of any range.
        truths: (N, C, H, W) in [0, 1], in the order in which they were attacked.
    """
    x, apart = truths.flatten(1).double(), (guesses - truths).flatten(1).double()
    ratios: Tensor = apart.square().sum(1).sqrt() / x.square().sum(1).sqrt()
    return ratios


def published_label_distance(guesses: Tensor, truths: Tensor) -> Tensor:
    """(N,) 1 where the label at this place of the batch is wrong, else 0 (SPN, section 4.1, as its figures have it).

    An attack on a batch finds labels in no order, so that perfectly read ones are at a wrong place as often as chance
    has it; the metric ``label_correct`` takes the order that finds most.

    Args:
        guesses, truths: (N,) classes or (N, K) probabilities, in their own order.
    """
    return (hard_labels(guesses) != hard_labels(truths)).double()


def chance_label_distance(batch_size: int, classes: int) -> float:
    """Return the distance of labels that were perfectly read and laid in a random order beside those of the batch.

    Labels are uniform over the ``classes``: a place has its own label with probability 1/B, and else one that is right
    by chance with probability 1/K.
    """
    own = 1 / batch_size
    return 1 - (own + (1 - own) / classes)


def row_between_optima(
    before: LogisticOptimum, after: LogisticOptimum, sample: np.ndarray, number: int
) -> tuple[np.ndarray, int]:
    """Estimate the row that came between two fits, to first order.

    The optimum moves by the inverse curvature times the row's gradient. The curvature of ``number`` rows is taken from
    a sample of the population. So the row is only as good as that sample; its direction is better than its length.

    Args:
        before, after: optima of ``number`` and of ``number`` + 1 rows, two classes.
        sample: (M, F) rows of the same population.
        number: of the client's rows.

    Returns:
        The estimated row (F,) and its label.

    Raises:
        UserError: there are more than two classes, or the optima are equal.
    """
    if len(before.weights) != 1 or before.weights.shape != after.weights.shape:
        raise UserError("Optima of two classes and equal features are expected.")
    wide = np.column_stack([sample, np.ones(len(sample))])
    step = np.append(after.weights[0] - before.weights[0], after.intercepts[0] - before.intercepts[0])
    middle = (wide @ np.append(before.weights[0], before.intercepts[0]) + wide @ np.append(
        after.weights[0], after.intercepts[0])) / 2  # fmt: skip
    p = 1 / (1 + np.exp(-middle))
    curvature = (wide * (p * (1 - p))[:, None]).T @ wide * (number / len(sample))
    curvature[:-1, :-1] += np.eye(sample.shape[1]) / before.inverse_penalty
    gradient = curvature @ step  # (y - p) times the row and 1
    if abs(gradient[-1]) < 1e-12:
        raise UserError("Two different optima are expected, but they are equal.")
    return np.asarray(gradient[:-1] / gradient[-1]), int(gradient[-1] > 0)


def leaves_of(tree: Tree, rows: np.ndarray) -> np.ndarray:
    """Return the leaf of each row (N, F), as a place in ``tree.leaves``; missing values are NaN."""
    node = np.zeros(len(rows), dtype=int)
    rows = rows.astype(np.float32)
    for _ in range(len(tree.left)):
        going = tree.left[node] >= 0
        if not going.any():
            break
        found = rows[np.arange(len(rows)), tree.feature[node]]
        goes_left = np.where(np.isnan(found), tree.default_left[node], found < tree.threshold[node])
        node = np.where(going, np.where(goes_left, tree.left[node], tree.right[node]), node)
    place = np.full(len(tree.left), -1)
    place[tree.leaves] = np.arange(len(tree.leaves))
    return place[node]


def margins_of(model: Trees, rows: np.ndarray) -> np.ndarray:
    """Return (N, K) margins of rows (N, F)."""
    found = np.tile(model.base_margin, (len(rows), 1))
    if found.shape[1] != model.classes:
        found = np.tile(found[:, :1], (1, model.classes))
    for tree in model.trees:
        found[:, tree.group] += tree.value[tree.leaves][leaves_of(tree, rows)]
    return found
