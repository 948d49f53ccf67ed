"""How often each of the words read is in the texts."""

import torch
from torch import Tensor

_MOST = 8
"""Times that a word is there at most."""


def repeated(energy: Tensor, *, common: float, total: int | None, untold: float = 2.0) -> Tensor:
    """(k,) how often each word is there, at least once, by the squared length of its row.

    A word that is there c times adds c rows of one distribution, which have the share ``common`` of their squared
    length in common: it has c + c (c - 1) common times the energy of one that is there once.

    Args:
        energy: (k,) without the noise's.
        common: in [0, 1].
        total: tokens of the texts; what exceeds the number of words is given to those for which it is likeliest.
            ``None``: those are repeated that are nearer to it by ``untold``, which errs on the side of once.
    """
    times = torch.arange(1, _MOST + 1, dtype=energy.dtype, device=energy.device)
    growth = times + times * (times - 1) * common
    between = (growth[1:] * growth[:-1]).sqrt()
    reached = energy[:, None] / between
    if total is None:
        once = energy.median() if len(energy) else energy.sum()
        return 1 + (reached > untold * once).long().cumprod(1).sum(1)
    spare = min(max(0, total - len(energy)), reached.numel())
    found = torch.ones_like(energy, dtype=torch.long)
    if spare:
        chosen = reached.flatten().topk(spare).indices // reached.shape[1]
        found += chosen.bincount(minlength=len(energy))
    return found
