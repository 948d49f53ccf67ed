"""The accuracy score: whether an untrained model tells the transformed images apart."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.gradients import set_mode
from fl_privacy.policy_search.privacy import transformed_by
from fl_privacy.rng import derive_seed
from fl_privacy.transformations import Policy
from fl_privacy.types import ModelState

Total = Literal["mean", "sum"]
"""Over the eigenvalues: ``mean`` as in Eq. 14, ``sum`` as in the authors' code."""

_CHUNK = 1000
"""Images differentiated at a time."""


def input_jacobian(model: nn.Module, state: ModelState, images: Tensor) -> Tensor:
    """(N, C H W) gradient of each image's summed logits by its pixels, batch norm in evaluation mode: one backward.

    Args:
        model: architecture.
        state: its values.
        images: (N, C, H, W).
    """
    set_mode(model, "eval")
    values = {**state.parameters, **state.buffers}
    rows = []
    for some in torch.split(images, _CHUNK):
        leaf = some.detach().requires_grad_()
        with torch.enable_grad():
            logits = functional_call(model, values, (leaf,))
            (slope,) = torch.autograd.grad(logits.sum(), leaf)
        rows.append(slope.flatten(1))
    return torch.cat(rows)


def correlation_score(jacobian: Tensor, *, total: Total = "mean", eta: float = 1e-5) -> Tensor:
    """How little the rows are correlated (Mellor et al. 2021; Gao et al. 2023, Eq. 14), higher is better.

    Eq. 14 itself is its negative, but Algorithm 1 keeps policies whose score is above a threshold.

    Args:
        jacobian: (..., N, D).
        total: over the eigenvalues.
        eta: keeps the logarithm finite.

    Returns:
        (...) at most -1 (``mean``) or -N (``sum``) up to ``eta``, where no two rows are correlated.
    """
    rows = jacobian.double()
    rows = rows - rows.mean(-1, keepdim=True)
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    values = torch.linalg.eigvalsh(rows @ rows.mT).clamp_min(0) + eta
    terms = values.log() + 1 / values
    score: Tensor = -(terms.mean(-1) if total == "mean" else terms.sum(-1))
    return score


def accuracy_scores(
    model: nn.Module,
    states: Sequence[ModelState],
    images: Sequence[Tensor],
    policies: Sequence[Policy],
    *,
    seed: int,
    total: Total = "mean",
    eta: float = 1e-5,
) -> list[float]:
    """S_acc of each of ``policies``: the mean over the draws.

    Args:
        model: architecture.
        states: fresh initial values, one for each draw.
        images: (N, C, H, W) of each draw, in [0, 1].
        policies: scored in one batch.
        seed: of the policies' signs.
        total: over the eigenvalues.
        eta: of the score.
    """
    draws = []
    for number, (state, batch) in enumerate(zip(states, images, strict=True)):
        own = derive_seed(seed, "draw", number)
        stacked = torch.cat([transformed_by(batch, policy, own) for policy in policies])
        jacobian = input_jacobian(model, state, stacked)
        apart = jacobian.reshape(len(policies), -1, jacobian.shape[1])
        draws.append(correlation_score(apart, total=total, eta=eta))
    scores: list[float] = torch.stack(draws).mean(0).tolist()
    return scores
