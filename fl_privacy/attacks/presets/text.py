"""Attacks on text by descent on the embeddings of words."""

from typing import Unpack

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import WeightedL2L1
from fl_privacy.attacks.optimizers import Adam, CosineRate
from fl_privacy.attacks.presets.options import GradientOptions, takes, vary
from fl_privacy.checks import number


@takes(GradientOptions)
def tag(
    *,
    lr: float = 0.05,
    weight_decay: float = 0.01,
    alpha: float = 0.1,
    last: float = 0.1,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """TAG (Deng et al. 2021): L2 and L1 distance of gradients, more of the latter near the input, AdamW.

    The embeddings of words are optimized from normal noise and read as the nearest tokens; rate and number of
    iterations are those of public implementations (0.05, 1,000), the rate falls to zero. The gradient of the embeddings
    is not matched, since what is optimized are these; its rows tell ``attack=dager`` the tokens.

    Args:
        lr, weight_decay: of AdamW.
        alpha: weight of the L1 distance at the first tensor.
        last: factor on it at the last one.
        options: as for all attacks.
    """
    number("attack.alpha", alpha, at_least=0, example=0.1)
    number("attack.last", last, at_least=0, example=0.1)
    published = GradientInversion(
        objective=WeightedL2L1(alpha=alpha, last=last),
        optimizer=Adam(lr=lr, weight_decay=weight_decay, schedule=CosineRate(warmup=20)),
        iterations=1000,
    )
    return vary(published, options)
