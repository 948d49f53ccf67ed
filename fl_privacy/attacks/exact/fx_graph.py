"""Trace a network as a graph between the image and the logits."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fl_privacy.attacks.gradient_inversion.grouping import UNFORESEEN

_RELU = (F.relu, torch.relu, "relu", F.relu_, torch.relu_, "relu_")
_ADD = (operator.add, torch.add, "add", operator.iadd, "add_")
_CHOOSES = (operator.getitem, F.pad, torch.nn.functional.pad)
_KINDS: Mapping[str, type[nn.Module] | tuple[type[nn.Module], ...]] = {
    "conv": nn.Conv2d,
    "norm": nn.BatchNorm2d,
    "linear": nn.Linear,
    "relu": nn.ReLU,
    "same": (nn.Identity, nn.Dropout, nn.Dropout2d),
}


@dataclass(frozen=True, eq=False)
class FxGraph:
    """The graph of a model whose batch norm has fixed statistics."""

    module: fx.GraphModule
    nodes: Sequence[fx.Node]

    @property
    def image(self) -> fx.Node:
        return next(node for node in self.nodes if node.op == "placeholder")

    @property
    def logits(self) -> fx.Node | None:
        (returned,) = next(node for node in self.nodes if node.op == "output").args
        return returned if isinstance(returned, fx.Node) else None

    def layer(self, node: fx.Node) -> nn.Module | None:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def kind(self, node: fx.Node) -> str:
        """Return ``conv``, ``norm``, ``linear``, ``relu``, ``add``, ``same``, ``chooses`` or ``other``."""
        layer = self.layer(node)
        for name, kind in _KINDS.items():
            if isinstance(layer, kind):
                return name
        if node.op not in ("call_function", "call_method"):
            return "other"
        if node.target in _RELU:
            return "relu"
        if node.target in _ADD and len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args):
            return "add"
        return "chooses" if node.target in _CHOOSES else "other"

    def run(self, given: Mapping[fx.Node, Tensor], wanted: fx.Node) -> Tensor:
        needed = self.behind(wanted, given.keys())
        interpreter = fx.Interpreter(self.module)
        interpreter.env = dict(given)
        for node in self.nodes:
            if node in needed and node not in given:
                interpreter.env[node] = interpreter.run_node(node)
        return interpreter.env[wanted]  # type: ignore[no-any-return]

    def behind(self, wanted: fx.Node, given: Collection[fx.Node]) -> set[fx.Node]:
        found, left = set[fx.Node](), [wanted]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [] if node in given else node.all_input_nodes
        return found

    def is_passed_by_all(self, node: fx.Node) -> bool:
        return self.logits is not None and self.image not in self.behind(self.logits, {node})


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        own = any(isinstance(module, kind) for kind in _KINDS.values())
        return own or bool(super().is_leaf_module(module, name))


def traced(model: nn.Module) -> FxGraph | None:
    """Trace a model; ``None`` if its computation depends on values, or can't be followed."""
    try:
        module = fx.GraphModule(model, _Tracer().trace(model))
    except (*UNFORESEEN, TypeError, AttributeError):
        return None
    nodes = list(module.graph.nodes)
    return FxGraph(module, nodes) if sum(node.op == "placeholder" for node in nodes) == 1 else None
