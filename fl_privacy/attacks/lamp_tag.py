"""Attacks on text by descent on the embeddings of words."""

from typing import Literal, Unpack

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import Cosine, WeightedL2L1
from fl_privacy.attacks.gradient_inversion.settings import Rearranging
from fl_privacy.attacks.optimizers import Adam, CosineRate, StairDecay
from fl_privacy.attacks.preset_options import GradientOptions, takes, vary
from fl_privacy.checks import number, one_of

_UNFELT = 1e-12
"""Adam's epsilon where slopes are clipped to next to nothing."""


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

    The embeddings of words are optimized from normal noise and read as the nearest tokens; rate and number of
    iterations are those of public implementations (0.05, 1,000), the rate falls to zero. Their clipping of the slope
    matters where a model has learned: guesses on the way have gradients dozens of times as long as that of a text which
    the model is sure of, and their steep slopes outweigh all others. The gradient of the embeddings is not matched,
    since what is optimized are these; its rows tell ``attack=dager`` the tokens.

    Args:
        lr, weight_decay: of AdamW. Behind models from scratch more is read where the embeddings decay twenty times as
            fast, ``lr=0.2, weight_decay=0.05``.
        clip: largest length of the objective's slope by the embeddings of a victim's words, in units of their root mean
            square; a longer one is cut to it. Public implementations have 1 by BERT's embeddings, whose unit is 0.05.
        alpha: weight of the L1 distance at the first tensor.
        last: factor on it at the last one.
        options: as for all attacks.
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
    """Build LAMP (Balunovic et al. 2022): descent on embeddings, and moves of words that a language model likes.

    Settings are those of the authors' code for BERT: cosine of each tensor, the mean length of the embeddings held at
    that of tokens (a weight of 1 at BERT's length of 1.4), 2,000 iterations of Adam whose rate of 0.01, 0.2 in units of
    BERT's embeddings, falls by 0.89 every 50, and the best of 200 orders of the words, of those of two exchanged, one
    moved, a sequence moved, the beginning put to the end. The language model, there GPT-2, is made of the attacker's
    public texts (:class:`fl_privacy.attacks.gradient_inversion.word_order.LanguageModel`).

    Four things differ. Slopes are clipped, as published for the largest model alone: within some dozens of iterations
    the slope of the angle falls to a thousandth, and Adam, whose second moment remembers a thousand iterations, would
    hardly move any more. Orders are those of the tokens that the embeddings are read as, since embeddings that were
    optimized at one position make up for its embedding, so that at another they fit worse wherever they belong. They
    are compared when the descent is over, and then as long as that leads on: every 75 iterations, as published
    (``burn_in=0.1``), is a setback to the descent on our small models, as is the best of 500 random ``starts``.
    And what the language model says counts as much as orders usually differ in their mismatch, since the size of that
    differs from model to model.

    Args:
        lr: of Adam, in units of the root mean square of embeddings.
        clip: as for :func:`tag`; so small a one that all iterations count alike. Without clipping: infinite.
        distance: of gradients; ``l2_l1`` is TAG's, with an L1 weight of 0.01, in shares of that of a zero gradient.
        prior: weight of the mean negative log likelihood of a text, in units of the usual difference of orders.
        every, burn_in, tries, starts: see :class:`fl_privacy.attacks.gradient_inversion.settings.Rearranging`.
        options: as for all attacks.
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
