"""Deep leakage from gradients and its direct descendants."""

from dataclasses import replace
from typing import Literal, Unpack

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import L2, GaussianKernel
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.attacks.optimizers import LBFGS, Adam
from fl_privacy.attacks.optimizers.lbfgs import LineSearch
from fl_privacy.attacks.presets.options import GradientOptions, takes, vary
from fl_privacy.checks import one_of


@takes(GradientOptions)
def dlg(
    *,
    lr: float = 1.0,
    history: int = 100,
    line_search: LineSearch = "none",
    total_variation: float = 0.0,
    relative: bool = False,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Deep leakage from gradients (Zhu et al. 2019): L2, L-BFGS, image and soft label from N(0, 1) together.

    ``enough`` and ``accept`` are shares of the observed gradient's squared norm: below the first a victim has finished,
    below the second it is not attacked again. The default of ``enough`` is about the 1e-6 at which the published code
    of iDLG stops on its LeNet. All steps have the length ``lr``, as published, unless ``line_search`` asks for others.
    Later work adds ``total_variation`` (FDL-PP, Gu et al. 2021, Algorithm 2). ``relative`` divides the loss by the
    observed gradient's squared norm, without which L-BFGS stops at once where a trained model has small gradients.
    """
    published = GradientInversion(
        objective=L2(relative=relative),
        optimizer=LBFGS(lr=lr, history=history, line_search=line_search),
        priors=(TotalVariation(weight=total_variation),) if total_variation else (),
        enough=1e-9,
        accept=1e-7,
        labels="optimize",
    )
    return vary(published, options)


@takes(GradientOptions)
def idlg(
    *,
    lr: float = 1.0,
    history: int = 100,
    line_search: LineSearch = "none",
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Improved deep leakage (Zhao et al. 2020): DLG with the label read from the output layer's gradient."""
    published = replace(dlg(lr=lr, history=history, line_search=line_search), labels="auto")
    return vary(published, options)


@takes(GradientOptions)
def adam_dlg(*, lr: float = 1e-3, weight_decay: float = 0.01, **options: Unpack[GradientOptions]) -> GradientInversion:
    """DLG with AdamW, as SAPAG compares itself with (Wang et al. 2020)."""
    published = GradientInversion(
        objective=L2(), optimizer=Adam(lr=lr, weight_decay=weight_decay), iterations=20_000, labels="optimize"
    )
    return vary(published, options)


@takes(GradientOptions, depending=("projection",))
def sapag(
    *,
    optimizer: Literal["lbfgs", "adamw"] = "lbfgs",
    lr: float | None = None,
    form: Literal["literal", "normalized"] = "normalized",
    bandwidth: float | None = None,
    depth: Literal["constant", "linear", "geometric"] = "linear",
    last: float = 0.5,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Self-adaptive privacy attack from gradients (Wang et al. 2020): Gaussian kernel.

    The paper brings images to [0, 1] after each iteration, by ``projection``; it is so with AdamW alone: L-BFGS takes
    the jump for curvature and stops at once (measured on LeNet; see ``experiments/RESULTS.md``).

    A ``bandwidth`` of 1 leaves the kernel saturated at the start under normal weights, where a guess's gradient is
    several times as long as the observed one. AdamW's steps do not shrink with the slope, and it keeps 1. L-BFGS ends
    there, so it has 10, and smaller tolerances than suit squared gradients: losses are shares of a saturated kernel's.

    L-BFGS with rate 1 and 500 iterations on LeNet, AdamW with rate 1e-3 and 20,000 on ResNet-18, from N(0, 1) or a
    constant. ``form``, ``bandwidth``, ``depth`` and ``last`` are those of
    :class:`fl_privacy.attacks.gradient_inversion.objectives.GaussianKernel`; the printed formula is ``form="literal"``.
    """
    one_of("attack.optimizer", optimizer, ("lbfgs", "adamw"))
    width = bandwidth if bandwidth is not None else 10.0 if optimizer == "lbfgs" else 1.0
    published = GradientInversion(
        objective=GaussianKernel(form=form, bandwidth=width, depth=depth, last=last),
        optimizer=LBFGS(lr=1.0 if lr is None else lr, tolerance_grad=1e-10, tolerance_change=1e-13),
        iterations=500,
        labels="optimize",
        reading="pseudo_inverse",
    )
    if optimizer == "adamw":
        adam = Adam(lr=1e-3 if lr is None else lr, weight_decay=0.01)
        published = replace(published, optimizer=adam, projection="clamp", iterations=20_000)
    return vary(published, options)
