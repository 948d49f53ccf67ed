"""The second phase of a round: a client trains its private part on the new public one, which stays as it is."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.federation.local_update import Stopwatch, take_steps
from fl_privacy.federation.private_part import join_private, keep_private, private_values
from fl_privacy.types import Batch, LocalPlan, ModelState


def train_private(
    model: nn.Module,
    sent: ModelState,
    batches: Sequence[Batch],
    *,
    plan: LocalPlan,
    defense: Defense,
    state: ClientState,
    rng: torch.Generator,
) -> None:
    """Train on ``batches`` what of ``model`` was not sent, and keep it in ``state``.

    Args:
        model: architecture of the client, with its private part.
        sent: the new public values; left as they are.
        batches: one for each local step.
        plan: how to train.
        defense: whose hooks run on each batch, the loss and each gradient.
        state: of this client.
        rng: drawn from by the defense only.
    """
    moved = private_values(model, sent, state)
    if not moved.parameters:
        return
    values = join_private(model, sent, state)
    if not defense.gradient and not defense.loss:  # nobody looks at the other gradients, which need not be computed
        model, values = _holding(model, values), ModelState(moved.parameters, values.buffers)
    steps = take_steps(
        model,
        values,
        batches,
        public=sent.parameters,
        still=sent.parameters,
        plan=plan,
        defense=defense,
        state=state,
        rng=rng,
        timed=Stopwatch(),
    )
    keep_private(steps.values, sent, state)


def _holding(model: nn.Module, values: ModelState) -> nn.Module:
    """A copy of ``model`` with ``values`` that does not train."""
    copied = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(values.parameters[name])
    return copied
