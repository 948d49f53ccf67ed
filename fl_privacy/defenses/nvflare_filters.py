"""NVFlare's filters: ExcludeVars withholds parameters; PercentilePrivacy bounds elements and zeros the smallest."""

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.effects import Part, Sparse, Truncated, Withheld
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


def percentile(*, percentile: float = 10.0, gamma: float = 0.01, steps: int = 1) -> Defense:
    """Zero the elements below a percentile of all magnitudes, and clamp the others to ``gamma`` (NVFlare 2.9).

    It equals NVFlare's PercentilePrivacy, after Shokri and Shmatikov 2015, and is not differentially private.

    Args:
        percentile: percentage in [0, 100] of the elements, those of smallest magnitude, that become zero.
        gamma: largest magnitude of an element per local step, above 0.
        steps: number of local steps (``NUM_STEPS_CURRENT_ROUND``), over which the update is averaged for clamping.
    """
    checks.number("defense.percentile", percentile, at_least=0, at_most=100, example=10)
    checks.number("defense.gamma", gamma, above=0, example=0.01)
    checks.whole("defense.steps", steps, at_least=1, example=1)

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        each = {name: t / steps for name, t in tensors.items()}
        sizes = np.concatenate([t.detach().abs().flatten().cpu().numpy() for t in each.values()])
        cutoff = float(np.percentile(sizes, percentile))

        def filtered(name: str, t: Tensor) -> Tensor:
            kept: Tensor = torch.where((t > -cutoff) & (t < cutoff), 0.0, t).clamp(-gamma, gamma)
            return kept * steps if t.dim() else tensors[name]

        return {name: filtered(name, t) for name, t in each.items()}

    sparse = Sparse(largest=True, scope="global", dropped=percentile / 100)
    parts = (
        Part("percentile", {"percentile": percentile, "steps": steps}, sparse, strength="percentile"),
        Part("truncation", {"bound": gamma * steps}, Truncated(bound=gamma * steps)),
    )
    return Defense(parts=parts, upload=(on_upload,))
