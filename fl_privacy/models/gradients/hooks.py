"""Watching a model's modules while it runs: the only place that registers forward hooks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call of a module.

    Attributes:
        name: under which it is watched.
        module: itself.
        inputs: its first argument, by place or by name.
        output: what it returned; the input where only what enters is watched.
    """

    name: str
    module: nn.Module
    inputs: Tensor
    output: Tensor


def owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own parameters themselves, by name."""
    return {name: m for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}


@contextmanager
def entering(modules: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of ``modules`` within the context, in the order in which they are entered."""
    calls: list[Call] = []

    def watch(name: str, module: nn.Module) -> RemovableHandle:
        def hook(called: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            inputs = _first(given, named)
            calls.append(Call(name, called, inputs, inputs))

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    with _hooks([watch(name, module) for name, module in modules.items()]):
        yield calls


@contextmanager
def leaving(
    modules: Mapping[str, nn.Module], change: Callable[[nn.Module, tuple[Any, ...], Any], Tensor] | None = None
) -> Iterator[list[Call]]:
    """Record the calls of ``modules`` within the context, in the order in which they return.

    Args:
        modules: by name.
        change: (module, its arguments by place, its output) -> the output that the model goes on with; as it is by
            default.
    """
    calls: list[Call] = []

    def watch(name: str, module: nn.Module) -> RemovableHandle:
        def hook(called: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> Tensor | None:
            changed = change(called, given, output) if change else output
            calls.append(Call(name, called, _first(given, named), changed))
            return changed if change else None

        return module.register_forward_hook(hook, with_kwargs=True)

    with _hooks([watch(name, module) for name, module in modules.items()]):
        yield calls


@contextmanager
def replaced_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make ``module`` get ``change`` of its first argument, and nothing else, within the context."""
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
