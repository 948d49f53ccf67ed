"""TabLeak: rows of a table by descents on relaxed rows, pooled over attempts (Vero et al., ICML 2023)."""

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

    Numbers stay within the bounds that the schema knows, as in the authors' program. Beyond the paper, ``counted``
    leaves categories out that no row has, since the gradient of the first layer shows which, and starts with as many
    rows of the others as it tells (:mod:`fl_privacy.attacks.gradient_inversion.table_evidence`): a third of the paper's
    attempts and iterations then reads more. ``attack=tableak_paper`` has 1500 iterations, 30 restarts and no counts;
    its softmax has temperature 1, where the authors' program cools it by default.

    Args:
        lr: learning rate.
        sign: of the gradient that enters Adam.
        counted: see above.
        pooled: take the median of the attempts' rows, put into one order, rather than the best attempt.
        options: of every gradient inversion.
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
