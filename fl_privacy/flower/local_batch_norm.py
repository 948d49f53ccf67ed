"""A client that keeps its own batch norm, as in FedBN, and uses it instead of the received one for probes."""

from typing import Any

from flwr.app import Array, ArrayRecord, Context, RecordDict
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.federation.interception.local_batch_norm import moved_apart, norm_names
from fl_privacy.flower.records import array_values, to_array, to_tensor

KEPT = "fl-privacy.own-norms"
"""Record of a client's state: batch norm of its last reply, if that was its own."""


def keep_own_norms(sent: RecordDict, reply: RecordDict, model: nn.Module, context: Context) -> None:
    """Remember the batch norm in a client's ``reply`` if it differs from that of the message ``sent``.

    Only values that the client uploads anyway are kept, and none if the arrays' names are not those of ``model``.
    """
    norms = norm_names(model)
    before, after = _by_name(sent), _by_name(reply)
    if not norms or not norms <= after.keys() or before.keys() != after.keys():
        return
    change = {
        n: after[n] - before[n]
        for n, _ in model.named_parameters()
        if n in after and before[n].shape == after[n].shape and after[n].is_floating_point()
    }
    if moved_apart(change, norms) is None:
        context.state.pop(KEPT, None)
        return
    layers = {name.rpartition(".")[0] for name in norms}
    own = {name: value for name, value in after.items() if name.rpartition(".")[0] in layers}
    context.state[KEPT] = ArrayRecord({n: Array.from_numpy_ndarray(to_array(t)) for n, t in own.items()})


def own_norms(context: Context) -> dict[str, Tensor]:
    """Return the client's batch norm by name, as ``keep_own_norms`` stored it."""
    record = context.state.array_records.get(KEPT)
    return {} if record is None else {name: to_tensor(array_values(array)) for name, array in record.items()}


def _by_name(content: RecordDict) -> dict[str, Tensor]:
    found: dict[str, Any] = {}
    for record in content.array_records.values():
        found |= record
    try:
        return {name: to_tensor(array_values(array)) for name, array in found.items()}
    except (UserError, ValueError, TypeError):
        return {}
