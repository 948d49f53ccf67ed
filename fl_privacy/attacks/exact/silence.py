"""Images that a layer in front of a ReLU has mixed, told apart by the outputs that are silent, also behind noise.

In the terms of :mod:`fl_privacy.attacks.exact.unmixing` D^T = C A^-1 with C = G R^T, so that column i of A^-1 is the
direction in which C is zero at the outputs that image i leaves silent. Which these are a guess at the images tells
well enough, that of independent components say: nearly all outputs that lie clearly below zero for the guess do so for
the image. The direction in which their rows of C are least, as a share of all rows, is that of a symmetric B x B
matrix; sign and scale follow from the gradient of the bias, C A^-1 1 = g. The images found tell silent outputs better,
and so on. Neither labels nor what comes behind the ReLU are needed, and noise is averaged over half of the outputs.
"""

import torch
from torch import Tensor

from fl_privacy.attacks.deadline import timely

_ROUNDS = 10

_SURE = (0.8, 0.95)
"""Share of the outputs below zero that are taken for silent, those furthest below, in the first and the last round."""


def unmixed_by_silence(columns: Tensor, bias: Tensor, start: Tensor, projected: Tensor, shift: Tensor) -> Tensor | None:
    """A (B, B) near ``start``, or ``None`` where that leads nowhere.

    Args:
        columns: C (M, B).
        bias: g (M,).
        start: (B, B).
        projected: P = R W^T (B, M).
        shift: b (M,) of the layer.
    """
    rows, triangle = torch.linalg.qr(columns)
    mixing = start
    for number in timely(range(_ROUNDS)):
        share = _SURE[0] + (_SURE[1] - _SURE[0]) * number / (_ROUNDS - 1)
        silent = _lowest(mixing @ projected + shift, share)
        grams = torch.stack([rows[own].T @ rows[own] for own in silent])
        directions = torch.linalg.eigh(grams)[1][..., 0].T
        scales = torch.linalg.lstsq(rows @ directions, bias[:, None]).solution[:, 0]
        inverse = torch.linalg.solve_triangular(triangle, directions * scales, upper=True)
        mixing, failed = torch.linalg.inv_ex(inverse)
        if failed or not mixing.isfinite().all():
            return None
    return mixing


def _lowest(outputs: Tensor, share: float) -> Tensor:
    """(B, M) which of the outputs (B, M) below zero are the lowest, so large a share of them for each image."""
    order = outputs.argsort(1).argsort(1)
    return order < share * (outputs < 0).sum(1, keepdim=True)
