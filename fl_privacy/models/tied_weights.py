"""Parameters that a model holds under several names: all names of each, and each value once.

``named_parameters()`` gives a tied weight under its first name alone, while ``state_dict()``, and with it what a client
uploads, has it under all. Whoever asks the former which arrays are parameters takes a second name for a buffer.
"""

from collections.abc import Mapping

from torch import Tensor, nn


def all_parameter_names(model: nn.Module) -> frozenset[str]:
    """Return every name under which ``model.state_dict()`` holds a parameter, second names of tied weights included."""
    return frozenset(first_names(model))


def first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter to the one that ``model.named_parameters()`` has for the same tensor."""
    first: dict[int, str] = {}
    pairs = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in pairs}


def once_each(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``values`` by name with a tied weight once, under its first name.

    Where only a second name is there, its value goes under the first. Names that ``model`` does not have stay.
    """
    first = first_names(model)
    found = {name: value for name, value in values.items() if first.get(name, name) == name}
    for name, value in values.items():
        found.setdefault(first.get(name, name), value)
    return found
