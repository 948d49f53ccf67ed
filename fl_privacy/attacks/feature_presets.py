"""Presets of model inversion."""

from dataclasses import replace
from typing import Literal, Unpack

from fl_privacy.attacks.feature_inversion import ModelInversion, Recovery
from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.attacks.gradient_inversion.settings import Uniform
from fl_privacy.attacks.optimizers import LBFGS, Adam, StepDecay
from fl_privacy.attacks.optimizers.lbfgs import LineSearch
from fl_privacy.attacks.preset_options import FeatureOptions, takes, vary
from fl_privacy.checks import one_of


@takes(FeatureOptions)
def model_inversion(
    *,
    lr: float = 0.01,
    line_search: LineSearch = "none",
    total_variation: float | None = None,
    form: Literal["relative", "published"] = "relative",
    isotropic: bool = False,
    matching: Literal["l2", "cosine"] = "cosine",
    matching_iterations: int = 2000,
    matching_lr: float = 0.01,
    **options: Unpack[FeatureOptions],
) -> ModelInversion:
    """Build model inversion by server and colluding client (FDL-PP, Gu et al. 2021, Algorithm 3).

    ``form="published"`` minimizes the squared distance of features plus ``total_variation`` (0.1; the paper gives no
    value) times the sum of absolute differences of neighboring pixels. ``relative`` divides by the features' squared
    length and takes the mean (weight 1e-3).

    The paper runs L-BFGS for 1,500 or 2,000 iterations at step length 0.01 or 0.001; ``lr=1`` with
    ``line_search="strong_wolfe"`` reaches that minimum in a tenth.

    ``recover_at`` names a later module whose input Lemma 1 gives in closed form. Without one, ``matching`` searches the
    private layers' output: ``l2`` by L-BFGS, ``cosine`` by signed Adam.
    """
    found = GradientInversion(objective=L2(), optimizer=LBFGS(), start=Uniform(), iterations=matching_iterations)
    if matching != "l2":
        adam = Adam(lr=matching_lr, sign="hard", schedule=StepDecay())
        found = replace(found, objective=Cosine(), optimizer=adam, projection="clamp")
    one_of("attack.form", form, ("relative", "published"))
    weight = total_variation if total_variation is not None else 0.1 if form == "published" else 1e-3
    prior = TotalVariation(weight=weight, isotropic=isotropic, summed=form == "published")
    published = ModelInversion(
        recovery=Recovery(matching=found),
        optimizer=LBFGS(lr=lr, line_search=line_search),
        priors=(prior,) if weight else (),
        relative=form == "relative",
        iterations=1500,
        restarts=10,
    )
    return vary(published, options)
