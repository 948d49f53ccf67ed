"""SplitFed as FDL-PP compares itself with it: a private front, a public rest."""

from collections.abc import Sequence
from functools import partial

from fl_privacy.defenses.base import Defense
from fl_privacy.defenses.checks import expect_one_of, expect_whole
from fl_privacy.defenses.split import Start, draw_own, keep_private, private_modules


def split_fed(*, private: Sequence[str] | None = None, start: Start = "own", private_passes: int = 1) -> Defense:
    """Keep some layers with the clients; only the others are sent, uploaded and averaged (Gu et al. 2021, Eq. 23).

    At the end of each round a client trains its private layers on the new public ones, which it leaves as they are
    (Algorithm 5 without the passport). With an empty ``private`` this is plain federated averaging.

    Args:
        private: names of the modules that are kept; ``None`` is the first convolution or linear layer.
        start: initial private values, ``own`` to each client or ``shared`` by all.
        private_passes: over a client's examples at the end of each round.
    """
    expect_one_of("defense.start", start, ("own", "shared"))
    expect_whole("defense.private_passes", private_passes, at_least=0, example=1)
    hook = keep_private(partial(private_modules, names=private))
    return Defense(
        name="split_fed",
        private=(hook,),
        private_passes=private_passes,
        model=(draw_own(hook),) if start == "own" else (),
        public={"private": "first layer" if private is None else list(private), "start": start},
    )
