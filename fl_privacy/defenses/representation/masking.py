"""Soteria: withhold the features that tell most about the input."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses.compression.selection import keep_largest
from fl_privacy.defenses.defense import Defense, LocalStep
from fl_privacy.defenses.representation.features import estimated_row_norms, exact_row_norms, find_head, representation
from fl_privacy.effects import MutedFeatures, Part
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors

Form = Literal["paper", "code"]
"""Which features are withheld: those of the paper's definition, or those of the authors' scripts."""

_EPSILONS: Mapping[Form, float] = {"paper": 1e-10, "code": 0.1}


def soteria(
    *,
    rate: float = 0.8,
    scores: Literal["exact", "estimated"] = "exact",
    directions: int | None = None,
    form: Form = "paper",
    epsilon: float | None = None,
) -> Defense:
    """Zero the columns of the last linear layer's weight gradient that belong to the lowest scores (Sun et al. 2021).

    The score of feature i is sum over the batch of ||d r_i / d x|| / (|r_i| + epsilon), where r is what enters the
    layer (Soteria, section 4). The bias gradient and all other layers stay.

    The paper divides by the feature alone, which a small epsilon comes closest to. The authors' scripts add 0.1 where
    they are attacked by the cosine: not little for features in (0, 1), as after a sigmoid, of which it then withholds
    others. ``form="code"`` withholds what these scripts do. Besides epsilon they differ in the sign: a negative feature
    has a negative score, and is kept where the score's magnitude is not below the threshold. That is the percentile
    ``rate`` of the scores, interpolated, below which up to one feature more lies than floor(rate * D); features equal
    to it are all kept.

    Args:
        rate: share of the features withheld, in [0, 1).
        scores: ``exact`` costs a backward product a feature, ``estimated`` a forward product a direction.
        directions: of the estimate; ``None`` takes 256 / B for a batch of B, at least 32, since the errors of the
            examples average out. That treats 96 % of the features or more as the exact scores do.
        form: ``paper`` or ``code``.
        epsilon: above 0; ``None`` is 1e-10 for the paper's form and 0.1 for that of the code.
    """
    checks.number("defense.rate", rate, at_least=0, below=1, example=0.8)
    checks.one_of("defense.scores", scores, ("exact", "estimated"))
    if directions is not None:
        checks.number("defense.directions", directions, at_least=1, example=256)
    checks.one_of("defense.form", form, ("paper", "code"))
    if epsilon is not None:
        checks.number("defense.epsilon", epsilon, above=0, example=1e-10)
    added = _EPSILONS[form] if epsilon is None else epsilon

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        head = find_head(step.model, step.sent, step.batch.inputs[:1])
        weight = f"{head}.weight"
        if weight not in tensors:
            raise UserError(f"Soteria expects the gradient of {weight}, but it was withheld; compose Soteria first.")
        estimate = (directions or max(32, 256 // len(step.batch))) if scores == "estimated" else None
        scored = feature_scores(step, head, directions=estimate, epsilon=added, form=form)
        keep = feature_mask(scored, rate) if form == "paper" else published_mask(scored, rate)
        return {**tensors, weight: tensors[weight].masked_fill(~keep, 0.0)}

    settings = {"rate": rate, "layer": "last linear", "scores": scores, "form": form, "epsilon": added}
    return Defense(
        parts=(Part("soteria", settings, MutedFeatures(dropped=rate), strength="rate"),),
        gradient=(on_gradient,),
    )


def feature_scores(
    step: LocalStep, head: str, *, directions: int | None = None, epsilon: float = 1e-10, form: Form = "paper"
) -> Tensor:
    """(D,) sum over the batch of ||d r_i / d x|| / (|r_i| + epsilon); with the form ``code``, of r_i with its sign.

    Args:
        step: model, values and batch.
        head: name of the layer that r enters, of ``find_head``.
        directions: of the estimate; ``None`` computes the norms exactly.
        epsilon: above 0.
        form: ``paper`` or ``code``.
    """

    def features(inputs: Tensor) -> Tensor:
        return representation(step.model, step.sent, inputs, head)

    if directions is None:
        norms, r = exact_row_norms(features, step.batch.inputs)
    else:
        norms, r = estimated_row_norms(features, step.batch.inputs, directions=directions, rng=step.rng)
    return (norms / ((r.abs() if form == "paper" else r) + epsilon)).sum(0)


def feature_mask(scores: Tensor, rate: float) -> Tensor:
    """(D,) booleans, false at the floor(rate * D) lowest ``scores``."""
    return keep_largest({"features": scores}, drop=rate, scope="layer")["features"]


def published_mask(scores: Tensor, rate: float) -> Tensor:
    """(D,) booleans, false where the magnitude of ``scores`` is below their percentile ``rate``, in [0, 1)."""
    mask: Tensor = scores.abs() >= scores.quantile(rate)
    return mask
