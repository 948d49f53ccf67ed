"""Images of the same domain that the attacker holds."""

import torch
from omegaconf import DictConfig

from fl_privacy.data import Examples
from fl_privacy.errors import UserError
from fl_privacy.types import Batch


def public_examples(config: DictConfig, unattacked: Examples) -> Batch | None:
    """The first ``config.public_images`` of ``unattacked``, a split without victims; ``None`` for 0.

    Raises:
        UserError: there are not so many.
    """
    count = config.public_images
    if not 0 <= count <= len(unattacked):
        raise UserError(
            f"public_images is expected in 0..{len(unattacked)}, the size of the split that is not attacked,"
            f" but got {count}."
        )
    return unattacked.batch(torch.arange(count)) if count else None
