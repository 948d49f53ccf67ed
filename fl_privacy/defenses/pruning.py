"""Setting the less important elements of the update to zero."""

from collections.abc import Callable
from typing import Literal

import torch

from fl_privacy.defenses.base import ClientState, Defense, LocalStep
from fl_privacy.defenses.checks import expect_number, expect_one_of
from fl_privacy.defenses.clipping import Scope
from fl_privacy.defenses.feedback import compress_with_feedback
from fl_privacy.defenses.selection import keep_largest, random_scores
from fl_privacy.types import Tensors


def pruning(
    *,
    rate: float = 0.9,
    by: Literal["gradient", "weight", "product", "random"] = "gradient",
    scope: Scope = "layer",
    error_feedback: bool = False,
) -> Defense:
    """Zero the floor(rate * n) elements of the least importance (DLG section 5.2; Refiner Table 1).

    Args:
        rate: share of the elements set to zero, in [0, 1).
        by: importance of an element: ``gradient`` is its magnitude in what is uploaded, ``random`` a uniform draw;
            ``weight`` (the magnitude of its parameter) and ``product`` (|parameter x gradient|) prune the gradient
            of every local step, where the parameters are at hand.
        scope: ``layer`` prunes the share of each parameter tensor, ``global`` of the whole update.
        error_feedback: add what was pruned to the next update.
    """
    expect_number("defense.rate", rate, at_least=0, below=1, example=0.9)
    expect_one_of("defense.by", by, ("gradient", "weight", "product", "random"))
    expect_one_of("defense.scope", scope, ("layer", "global"))
    expect_one_of("defense.error_feedback", error_feedback, (True, False))

    def prune(tensors: Tensors, scores: Callable[[Tensors], Tensors], state: ClientState) -> Tensors:
        def compress(update: Tensors) -> Tensors:
            masks = keep_largest(scores(update), drop=rate, scope=scope)
            return {name: t.masked_fill(~masks[name], 0.0) for name, t in update.items()}

        if error_feedback:
            return compress_with_feedback(compress, tensors, state, owner="pruning")
        return compress(tensors)

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        if by == "random":
            return prune(tensors, lambda update: random_scores(update, rng), state)
        return prune(tensors, lambda update: {name: t.abs() for name, t in update.items()}, state)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        weights = {name: step.sent.parameters[name].detach() for name in tensors}
        if by == "weight":
            return prune(tensors, lambda update: {name: w.abs() for name, w in weights.items()}, step.state)
        return prune(tensors, lambda update: {n: (w * update[n]).abs() for n, w in weights.items()}, step.state)

    of_gradient = by in ("weight", "product")
    return Defense(
        name="pruning",
        gradient=(on_gradient,) if of_gradient else (),
        upload=() if of_gradient else (on_upload,),
        public={"rate": rate, "by": by, "scope": scope, "error_feedback": error_feedback},
    )
