"""Recording and change of modules' inputs and outputs, by forward hooks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """Recorded call of a module: its first argument, and its output (for :func:`entering`, the argument again)."""

    name: str
    module: nn.Module
    inputs: Tensor
    output: Tensor


def owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the modules of ``model`` that have parameters of their own."""
    return {name: m for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}


@contextmanager
def entering(modules: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Record the inputs of ``modules`` within the context, in the order of calls."""
    calls: list[ModuleCall] = []

    def hook(name: str, called: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        inputs = _first(given, named)
        calls.append(ModuleCall(name, called, inputs, inputs))

    with _hooks([m.register_forward_pre_hook(partial(hook, n), with_kwargs=True) for n, m in modules.items()]):
        yield calls


@contextmanager
def leaving(
    modules: Mapping[str, nn.Module], change: Callable[[nn.Module, tuple[Any, ...], Any], Tensor] | None = None
) -> Iterator[list[ModuleCall]]:
    """Yield a growing list of calls of ``modules``; ``change`` (module, arguments, output) returns another output."""
    calls: list[ModuleCall] = []

    def hook(
        name: str, called: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], output: Any
    ) -> Tensor | None:
        changed = change(called, given, output) if change else output
        calls.append(ModuleCall(name, called, _first(given, named), changed))
        return changed if change else None

    with _hooks([m.register_forward_hook(partial(hook, n), with_kwargs=True) for n, m in modules.items()]):
        yield calls


@contextmanager
def replaced_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply ``change`` to the first argument of each call of ``module`` within the context."""
    with _hooks([module.register_forward_pre_hook(lambda _, given: (change(given[0]),))]):
        yield


def _first(given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    return given[0] if given else next(iter(named.values()), None)


@contextmanager
def _hooks(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
