"""What of a model stays with the clients: told apart from what is sent, joined with it, kept between rounds."""

from torch import Tensor, nn

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.errors import UserError
from fl_privacy.types import ModelState, Tensors

PRIVATE = "private/"
"""Prefix of a private parameter's name in ``ClientState.tensors``."""


def private_names(model: nn.Module, defense: Defense) -> frozenset[str]:
    """Names of the parameters and buffers of ``model`` that ``defense`` keeps with the clients."""
    return frozenset(name for hook in defense.private for name in hook(model))


def public_state(model: nn.Module, defense: Defense) -> ModelState:
    """The values of ``model`` without those that ``defense`` keeps with the clients."""
    kept, values = private_names(model, defense), ModelState.of(model)
    return ModelState(
        {name: p for name, p in values.parameters.items() if name not in kept},
        {name: b for name, b in values.buffers.items() if name not in kept},
    )


def join_private(model: nn.Module, sent: ModelState, state: ClientState) -> ModelState:
    """The values sent plus this client's private ones: kept from an earlier round, else as ``model`` has them."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if missing := sent.parameters.keys() - parameters.keys():
        raise UserError(
            f"The client's model is expected to keep the parameter names it was sent, but lacks {sorted(missing)};"
            " a defense may add private parameters, not rename public ones."
        )

    def value(name: str, initial: Tensor, public: Tensors) -> Tensor:
        if name in public:
            return public[name]
        kept = state.tensors.get(PRIVATE + name)
        return initial.detach().clone() if kept is None else kept

    return ModelState(
        {name: value(name, p, sent.parameters) for name, p in parameters.items()},
        {name: value(name, b, sent.buffers) for name, b in buffers.items()},
    )


def store_private(values: ModelState, sent: ModelState, state: ClientState) -> None:
    """Keep in ``state`` what of ``values`` was not sent."""
    for own, public in ((values.parameters, sent.parameters), (values.buffers, sent.buffers)):
        state.tensors.update({PRIVATE + name: value for name, value in own.items() if name not in public})


def private_values(model: nn.Module, sent: ModelState, state: ClientState) -> ModelState:
    """The private part alone of ``join_private``."""
    joined = join_private(model, sent, state)
    return ModelState(
        {name: p for name, p in joined.parameters.items() if name not in sent.parameters},
        {name: b for name, b in joined.buffers.items() if name not in sent.buffers},
    )
