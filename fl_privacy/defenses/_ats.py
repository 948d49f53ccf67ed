"""ATS: training on randomly transformed images."""

from collections.abc import Sequence

import torch

from fl_privacy import checks
from fl_privacy.data.transformations import Table, check_shape, read_policies, transform
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.effects import Part, Transformed
from fl_privacy.types import Batch


def ats(
    *,
    policies: str | int | Sequence[str | int] = ("13-43-18", "21-3-16"),
    table: Table | None = None,
    by_probability: bool = False,
) -> Defense:
    """Transform every training image by a policy, a sequence of image operations (ATS, Gao et al. 2021, 2023).

    Labels stay. The defaults are the paper's for CIFAR-100 and ResNet20; ``fl-privacy search-policies`` finds others.

    Args:
        policies: policy ``i-j-k``, which applies operations number i, j and k in turn; a list of policies, of which
            each image draws one ("hybrid"); or a file of the search.
        table: list of operations, ``paper`` (Table 1) or ``code`` (the authors' program, which differs at 16 and 43);
            ``None`` takes the file's, or the paper's if there is no file.
        by_probability: ``True`` applies each operation with AutoAugment's probability instead of always.
    """
    checks.one_of("defense.by_probability", by_probability, (True, False))
    chosen = read_policies(policies, table)

    def on_batch(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
        return Batch(transform(batch.inputs, chosen, rng, by_probability=by_probability), batch.labels)

    names, of_table = tuple(str(policy) for policy in chosen), chosen[0].table
    settings = {"policies": list(names), "table": of_table, "by_probability": by_probability}
    effect = Transformed(policies=names, table=of_table, by_probability=by_probability)
    return Defense(parts=(Part("ats", settings, effect),), data=(on_batch,), prepare=(check_shape,))
