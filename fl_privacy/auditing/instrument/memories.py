"""State that a client overwrites without a gradient, such as a queue of its examples' features."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fl_privacy.auditing.clear_text.findings import Leak, raw_labels

ANEW = 0.5
"""Smallest relative change of an overwritten vector; a running mean moves less."""

MOST = 0.9
"""Smallest share of overwritten vectors among the changed ones."""

UNIT = 1e-3
"""Largest distance from one of a normalized vector's length."""


def memories_in(
    parameters: Mapping[str, str],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    moved: Collection[str],
    counts: Collection[int],
    labels: np.ndarray | None,
) -> list[Leak]:
    """List the uploaded state in which the client wrote an entry or vector for each of its examples.

    Args:
        parameters: name of each uploaded array -> name of its parameter or buffer.
        before, after: values at the start and end of the training.
        moved: names of values moved by a gradient or a mean over batches.
    """
    found = []
    for key, name in parameters.items():
        if name in moved or name not in before or before[name].shape != after[name].shape or not before[name].dim():
            continue
        old, new = (value.detach().cpu().to(torch.float64).numpy() for value in (before[name], after[name]))
        if (leak := _memory(old, new, key, sorted({n for n in counts if n > 1}), labels)) is not None:
            found.append(leak)
    return found


def averaged(modules: Sequence[nn.Module], names: Mapping[int, str]) -> set[str]:
    """Return the names of the running statistics of normalizations in ``modules``."""
    kinds = nn.modules.batchnorm._NormBase
    return {
        names[id(buffer)]
        for module in modules
        for layer in module.modules()
        if isinstance(layer, kinds)
        for buffer in layer.buffers()
        if id(buffer) in names
    }


def _memory(
    old: np.ndarray, new: np.ndarray, where: str, counts: Sequence[int], labels: np.ndarray | None
) -> Leak | None:
    told: list[tuple[bool, bool, int, int]] = []
    for axis in dict.fromkeys((0, old.ndim - 1)):
        rows, anew = (np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1) for each in (old, new))
        apart = np.linalg.norm(anew - rows, axis=1)
        changed = np.flatnonzero(apart > 0)
        written = apart[changed] > ANEW * np.linalg.norm(rows[changed], axis=1)
        if len(changed) < 2 or written.mean() < MOST:
            continue
        number, width = len(changed), rows.shape[1]
        if width == 1 and labels is not None and np.array_equal(np.sort(anew[changed, 0]), np.sort(labels)):
            return raw_labels(number, where)
        unit = width > 1 and bool((np.abs(np.linalg.norm(anew[changed], axis=1) - 1) < UNIT).all())
        if width > 1 or number in counts:
            told.append((unit, any(number % count == 0 for count in counts), number, width))
    if not told:
        return None
    *signs, number, width = max(told)
    sure = any(signs)
    what = f"{number} numbers" if width == 1 else f"{number} vectors of {width} numbers"
    return Leak(
        severity="facts" if sure else "look",
        what=f"{what} that the client wrote into its network's state without a gradient"
        + (", as features of single examples are" if sure else ""),
        where=where,
        why="What is kept of single examples may be enough to rebuild them, or tells who took part; not attacked.",
    )
