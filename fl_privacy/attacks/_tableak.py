"""TabLeak: rows of a table by descents on relaxed rows (Vero et al., ICML 2023)."""

from typing import Unpack

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.optimizers import Adam
from fl_privacy.attacks.optimizers.first_order import Sign
from fl_privacy.attacks.preset_options import GradientOptions, takes, vary


@takes(GradientOptions)
def tableak(
    *,
    lr: float = 0.06,
    sign: Sign = "hard",
    counted: bool = True,
    pooled: bool = True,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build TabLeak: softmax of logits for categories, cosine of gradients, signed Adam, median of the attempts.

    Numbers stay within the schema's bounds, as in the authors' program. ``attack=tableak_paper`` has 1500 iterations,
    30 restarts and no counts; its softmax has temperature 1, which the authors' program cools.

    Args:
        lr: learning rate.
        sign: sign of the gradient that enters Adam.
        counted: ``True``, beyond the paper, leaves out categories that no row has, and starts from the counts of the
            others (:mod:`fl_privacy.attacks.gradient_inversion.table_evidence`); a third of the paper's work then
            reconstructs more.
        pooled: ``True`` takes the median of the attempts' ordered rows instead of the best.
    """
    published = GradientInversion(
        objective=Cosine(),
        optimizer=Adam(lr=lr, sign=sign),
        counted=counted,
        pooled=pooled,
        iterations=500,
        restarts=10,
    )
    return vary(published, options)
