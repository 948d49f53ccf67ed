"""What clients agree on: the names, shapes and kinds of a model's parts."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Architecture:
    """Of a model.

    Attributes:
        tensors: shape of each parameter and buffer, by name.
        modules: kind of each module, by name.
    """

    tensors: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "Architecture":
        """What ``model`` is made of."""
        values = [*model.named_parameters(), *model.named_buffers()]
        modules = {name: type(module).__name__ for name, module in model.named_modules()}
        return cls({name: tuple(value.shape) for name, value in values}, modules)

    def difference(self, other: "Architecture") -> str | None:
        """The first thing in which ``other`` differs, in words; ``None`` where nothing does."""
        for mine, theirs in ((self.modules, other.modules), (self.tensors, other.tensors)):
            if more := [name for name in theirs if name not in mine]:
                return f"it has {more[0]}, which was not agreed on"
            if less := [name for name in mine if name not in theirs]:
                return f"it lacks {less[0]}"
            if changed := [name for name in mine if mine[name] != theirs[name]]:
                name = changed[0]
                return f"{name or 'the model'} is {theirs[name]}, agreed on was {mine[name]}"
        return None
