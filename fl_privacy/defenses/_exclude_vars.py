"""NVFlare's filter ExcludeVars, which withholds some parameters."""

import re
from collections.abc import Sequence

import torch

from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.effects import Part, Withheld
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors


def exclude_vars(*, exclude: str | Sequence[str] = "bias") -> Defense:
    """Withhold some parameters from the upload (NVFlare 2.9's ExcludeVars).

    ``UserError`` if ``exclude`` is no regular expression, or excludes all parameters.

    Args:
        exclude: regular expression, matched anywhere in a parameter's name, or a list of whole names.
    """
    named = () if isinstance(exclude, str) else tuple(exclude)
    if not exclude or not all(isinstance(name, str) for name in named):
        raise UserError(
            f"defense.exclude is expected to be a regular expression or a list of names, but got {exclude!r};"
            " try defense.exclude=fc."
        )
    try:
        pattern = re.compile(exclude if isinstance(exclude, str) else "|".join(f"^{re.escape(n)}$" for n in named))
    except re.error as error:
        raise UserError(
            f"defense.exclude is expected to be a regular expression, but got {exclude!r} ({error}); try fc."
        ) from error

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        kept = {name: t for name, t in tensors.items() if not pattern.search(name)}
        if not kept:
            raise UserError(f"defense.exclude is expected to leave a parameter, but {exclude!r} fits all; narrow it.")
        return kept

    part = Part("exclude_vars", {"exclude": exclude if isinstance(exclude, str) else list(named)}, Withheld())
    return Defense(parts=(part,), upload=(on_upload,))
