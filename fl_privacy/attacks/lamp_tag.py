"""Attacks on text by descent on the embeddings of words."""

from typing import Literal, Unpack

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import Cosine, WeightedL2L1
from fl_privacy.attacks.gradient_inversion.settings import Rearranging
from fl_privacy.attacks.optimizers import Adam, CosineRate, StairDecay
from fl_privacy.attacks.preset_options import GradientOptions, takes, vary
from fl_privacy.checks import number, one_of

_UNFELT = 1e-12
"""Adam's epsilon for slopes clipped to almost nothing."""


@takes(GradientOptions)
def tag(
    *,
    lr: float = 0.05,
    weight_decay: float = 0.01,
    clip: float = 0.05,
    alpha: float = 0.1,
    last: float = 0.1,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build TAG (Deng et al. 2021): L2 and L1 distance of gradients, more L1 near the input, AdamW.

    Embeddings are optimized from normal noise and decoded to the nearest tokens, with rate and iterations of public
    implementations (0.05 falling to zero, 1,000). Their clipping matters once a model has learned, as gradients of
    guesses are then dozens of times as long as that of a text it is sure of. The gradient of the embeddings is not
    matched; its rows give ``attack=dager`` the tokens.

    Args:
        lr, weight_decay: settings of AdamW; models from scratch leak more with ``lr=0.2, weight_decay=0.05``.
        clip: largest length of the slope by a victim's embeddings, in units of their root mean square. Public
            implementations have 1 for BERT's, whose unit is 0.05.
        alpha: weight of the L1 distance at the first tensor.
        last: factor on it at the last one.
    """
    number("attack.alpha", alpha, at_least=0, example=0.1)
    number("attack.last", last, at_least=0, example=0.1)
    published = GradientInversion(
        objective=WeightedL2L1(alpha=alpha, last=last),
        optimizer=Adam(lr=lr, weight_decay=weight_decay, clip=clip, schedule=CosineRate(warmup=20)),
        iterations=1000,
    )
    return vary(published, options)


@takes(GradientOptions)
def lamp(
    *,
    lr: float = 0.2,
    clip: float = 1e-5,
    distance: Literal["cosine", "l2_l1"] = "cosine",
    prior: float = 0.5,
    every: int = 75,
    burn_in: float = 1.0,
    tries: int = 200,
    starts: int = 1,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build LAMP (Balunovic et al. 2022): descent on embeddings, and moves of words scored by a language model.

    Settings are those of the authors' code for BERT: cosine of each tensor, and the embeddings' mean length held at
    that of tokens (weight 1 at BERT's length of 1.4). 2,000 iterations of Adam start at 0.01, 0.2 in units of BERT's
    embeddings, times 0.89 every 50. The best of 200 orders is kept. The language model, there GPT-2, is made of public
    texts (:class:`fl_privacy.attacks.gradient_inversion.word_order.LanguageModel`).

    Four things differ. Slopes are clipped, as published for the largest model only: they fall to a thousandth within
    dozens of iterations, and Adam, which remembers a thousand, would hardly move. Decoded tokens are ordered, since
    embeddings make up for their position. Orders are compared after the descent: every 75 iterations, as published
    (``burn_in=0.1``), sets it back on our small models, as does the best of 500 random ``starts``. The language model
    counts as much as the usual mismatch of orders, which differs between models.

    Args:
        lr: learning rate of Adam, in units of the root mean square of embeddings.
        clip: clipping as for :func:`tag`, so small that all iterations count alike; infinite: none.
        distance: distance of gradients; ``l2_l1`` is TAG's, with an L1 weight of 0.01, in shares of a zero gradient's.
        prior: weight of a text's mean negative log likelihood, in units of the usual difference of orders.
        every, burn_in, tries, starts: see :class:`fl_privacy.attacks.gradient_inversion.settings.Rearranging`.
    """
    one_of("attack.distance", distance, ("cosine", "l2_l1"))
    cosine = distance == "cosine"
    published = GradientInversion(
        objective=Cosine(per_layer=True) if cosine else WeightedL2L1(alpha=0.01, last=1.0, relative=True),
        optimizer=Adam(lr=lr, eps=_UNFELT, clip=clip, schedule=StairDecay(factor=0.89, every=50)),
        embedding_norm=2.0,
        moves=Rearranging(every=every, burn_in=burn_in, tries=tries, prior=prior, starts=starts),
        iterations=2000,
    )
    return vary(published, options)
