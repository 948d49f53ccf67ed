"""Error feedback: what a compression dropped is added to the next round's update (Seide et al. 2014)."""

from collections.abc import Callable

from fl_privacy.defenses.base import ClientState
from fl_privacy.types import Tensors


def compress_with_feedback(
    compress: Callable[[Tensors], Tensors], tensors: Tensors, state: ClientState, *, owner: str
) -> Tensors:
    """``compress(tensors + residual)``; the new residual is kept in ``state`` under ``owner``.

    Over T rounds the compressed updates then sum to the clean ones up to the last residual. What is added for
    privacy does not belong into ``compress``: the residual would take it back in the next round.
    """

    def key(name: str) -> str:
        return f"{owner}/residual/{name}"

    corrected = {
        name: t + state.tensors[key(name)].to(t.device) if key(name) in state.tensors else t
        for name, t in tensors.items()
    }
    compressed = compress(corrected)
    state.tensors.update({key(name): t - compressed[name] for name, t in corrected.items()})
    return compressed
