"""Solve for images that entered a residual network, block by block (after R-GAP, Zhu and Blaschko 2021)."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fl_privacy.attacks.exact.certificate import model_as_sent
from fl_privacy.attacks.exact.convolution import (
    Convolution,
    Equations,
    Shown,
    Slopes,
    above_noise,
    can_be_blind,
    gated_inputs,
    inputs_up_to_a_factor,
)
from fl_privacy.attacks.gradient_inversion.grouping import UNFORESEEN
from fl_privacy.attacks.gradient_inversion.priors import uploaded_statistics
from fl_privacy.types import Observation, Tensors

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


class OwnStatistics(nn.BatchNorm2d):
    """Batch norm with fixed statistics (:meth:`Residual.use`) or, while ``moving``, with those of the batch."""

    def __init__(self, norm: nn.BatchNorm2d, *, fixed: bool) -> None:
        super().__init__(norm.num_features, norm.eps)
        self.weight, self.bias, self.fixed = norm.weight, norm.bias, fixed
        self.moving = False  # ``True`` for the statistics of the inputs

    def forward(self, inputs: Tensor) -> Tensor:
        if self.moving:
            return F.batch_norm(inputs, None, None, self.weight, self.bias, training=True, eps=self.eps)
        assert self.running_mean is not None and self.running_var is not None
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        return inputs * scale[..., None, None] + shift[..., None, None]


@dataclass(frozen=True, eq=False)
class FxGraph:
    """The traced graph of a model whose batch norm has fixed statistics."""

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

    def values(self, given: Mapping[fx.Node, Tensor], wanted: fx.Node) -> dict[fx.Node, Tensor]:
        needed, interpreter = self.behind(wanted, given.keys()), fx.Interpreter(self.module)
        interpreter.env = dict(given)
        for node in self.nodes:
            if node in needed and node not in given:
                interpreter.env[node] = interpreter.run_node(node)
        return interpreter.env

    def run(self, given: Mapping[fx.Node, Tensor], wanted: fx.Node) -> Tensor:
        return self.values(given, wanted)[wanted]

    def behind(self, wanted: fx.Node, given: Collection[fx.Node]) -> set[fx.Node]:
        found, left = set[fx.Node](), [wanted]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [] if node in given else node.all_input_nodes
        return found


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return any(isinstance(module, kind) for kind in _KINDS.values()) or bool(super().is_leaf_module(module, name))


def traced(model: nn.Module) -> FxGraph | None:
    """Trace a model with one input; ``None`` if its operations depend on values or can't be traced."""
    try:
        module = fx.GraphModule(model, _Tracer().trace(model))
    except (*UNFORESEEN, TypeError, AttributeError):
        return None
    nodes = list(module.graph.nodes)
    return FxGraph(module, nodes) if sum(node.op == "placeholder" for node in nodes) == 1 else None


_RIGHT = 1e-4  # largest relative residual inside of a block; rounding leaves 1e-7, a wrong mask of a ReLU 1e-3
FITS = 1e-2  # largest share of a block's outputs that the solved inputs may miss
_TRIES = 3  # convolutions, the last first, that are tried without knowing any slope
_FACTORS = 2001
MOST_PLACES = 1200  # pixels that enter a convolution whose equations are solved


@dataclass(frozen=True, eq=False)
class Known:
    """Activations solved for V images, and equations left for a node that these equations do not fully determine."""

    values: Mapping[fx.Node, Tensor]  # (V, C, H, W) of nodes behind a ReLU, those nearest to the image last
    equations: Sequence[tuple[fx.Node, Equations]]  # (node, equations for its values)
    started: Tensor  # (V,) ``True`` if the first activations were solved for
    found: Tensor  # (V,) ``True`` if solved as near to the image as for the other victims
    left: Tensor  # (V,) share of a block's outputs missed, in the worst block

    def of(self, rows: Tensor) -> "Known":
        values = {node: own[rows] for node, own in self.values.items()}
        equations = [(node, own.of(rows)) for node, own in self.equations]
        return Known(values, equations, self.started[rows], self.found[rows], self.left[rows])


@dataclass(frozen=True, eq=False)
class Residual:
    """A network of convolutions, batch norms, ReLUs and shortcuts, with a final fully connected layer.

    ``graph``: traced network, in float64. ``head``: last layer. ``shapes``: shape of each node's output, (C, H, W) or
    (N,), without the batch. ``count``: number of an update's images.
    """

    graph: FxGraph
    head: fx.Node
    shapes: Mapping[fx.Node, tuple[int, ...]]
    count: int = 1

    @property
    def device(self) -> torch.device:
        return next(self.graph.module.parameters()).device

    @property
    def names(self) -> tuple[str, ...]:
        own = [str(node.target) for node in self.convolutions]
        norms = [f"{name}.{kind}" for name in self.norms for kind in ("weight", "bias")]
        return (*(f"{name}.weight" for name in own), f"{self.head.target}.weight", f"{self.head.target}.bias", *norms)

    @property
    def norms(self) -> Mapping[str, OwnStatistics]:  # of single images in evaluation mode, none
        return {name: m for name, m in self.graph.module.named_modules() if isinstance(m, OwnStatistics)}

    def use(self, observation: Observation) -> None:
        """Set batch norm's means and variances to the running statistics in the upload or, without these, as sent."""
        own = (uploaded_statistics(observation) or observation.assumed().buffers) if self.norms else {}
        for name, norm in self.norms.items():
            norm.running_mean, norm.running_var = (
                own[f"{name}.running_{kind}"][None].to(norm.weight) for kind in ("mean", "var")
            )

    def slopes_at(self, node: fx.Node, values: Tensor, gradients: Tensors) -> Tensor:
        """Return the loss's gradient (V, C, H, W) with respect to the ``values`` that ``node`` outputs."""
        norms, inputs = self.norms.values(), values.detach().requires_grad_(True)
        weight, slopes = (gradients[f"{self.head.target}.{kind}"] for kind in ("weight", "bias"))
        for norm in norms:
            norm.moving = not norm.fixed
        with torch.enable_grad():
            behind = self.graph.values({node: inputs}, self.head)
            if self.count > 1:  # whose gradients are sums
                features = F.pad(behind[input_of(self.head)].detach(), (0, 1), value=1)
                slopes = torch.linalg.lstsq(features.T, torch.cat([weight[0], slopes[0, :, None]], 1).T).solution
            (found,) = torch.autograd.grad((behind[self.head] * slopes).sum(), inputs)
        for norm in norms:
            norm.moving = False
        return found

    @property
    def convolutions(self) -> Sequence[fx.Node]:
        return [node for node in self.graph.nodes if self.graph.kind(node) == "conv"]

    def convolution(self, node: fx.Node) -> Convolution:
        module = self.graph.layer(node)
        assert isinstance(module, nn.Conv2d)
        return Convolution(module, self.shapes[input_of(node)])

    @property
    def cuts(self) -> Sequence[fx.Node]:
        entering = dict.fromkeys(input_of(node) for node in self.convolutions)
        graph, logits = self.graph, self.graph.logits
        return [node for node in entering if logits is not None and graph.image not in graph.behind(logits, {node})]


def input_of(node: fx.Node) -> fx.Node:
    """Return a node's only input."""
    (given,) = node.all_input_nodes
    return given


@torch.no_grad()
def find_residual(observation: Observation) -> Residual | None:
    """Return the model as a :class:`Residual`; ``None`` if its structure, statistics or gradients do not fit."""
    modules, count = list(observation.model.modules()), observation.upload.num_examples
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules)
    trains = observation.plan.batch_norm == "train" and norms > 0
    joint, given = trains or count > 1, any(isinstance(module, nn.Conv2d) for module in modules)
    given = given and (not trains or bool(uploaded_statistics(observation)))
    graph = traced(model_as_sent(observation).eval()) if given else None
    if graph is None or graph.logits is None or graph.kind(graph.logits) != "linear":
        return None
    image = torch.zeros(1, *observation.input_shape, dtype=torch.float64, device=next(graph.module.parameters()).device)
    found = Residual(graph, graph.logits, _shapes(graph, image), count)
    for node in graph.nodes if joint else ():
        norm = graph.layer(node)
        if isinstance(norm, nn.BatchNorm2d) and norm.affine and (trains or norm.running_var is not None):
            graph.module.set_submodule(str(node.target), OwnStatistics(norm, fixed=not trains))
    layers = [found.convolution(node).module for node in found.convolutions]
    if not layers or not observation.upload.tensors.keys() >= set(found.names):
        return None
    plain = all(m.groups == 1 and m.padding_mode == "zeros" and not isinstance(m.padding, str) for m in layers)
    begins = len(found.norms) == norms and links(found) if joint else any(_blind(found))
    return found if plain and begins else None


def _shapes(graph: FxGraph, image: Tensor) -> dict[fx.Node, tuple[int, ...]]:
    interpreter, shapes = fx.Interpreter(graph.module), {graph.image: tuple(image.shape[1:])}
    interpreter.env = {graph.image: image}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            value = interpreter.env[node] = interpreter.run_node(node)
            if isinstance(value, Tensor):
                shapes[node] = tuple(value.shape[1:])
    return shapes


def _blind(network: Residual) -> list[fx.Node]:
    cuts = set(network.cuts)
    own = [node for node in network.convolutions if input_of(node) in cuts]
    return [node for node in reversed(own) if can_be_blind(network.convolution(node))][:_TRIES]


@torch.no_grad()
def known_between(network: Residual, gradients: Tensors) -> Known:
    """Solve for activations of V images from the parameters' ``gradients``, layer by layer toward the image."""
    own = {name: value.double() for name, value in gradients.items()}
    at, values, found = _started(network, own, own[f"{network.head.target}.bias"])
    if not found.any():
        return Known({}, (), found, found, (~found).to(values))
    return followed(network, own, Known({at: values}, (), found, found, torch.zeros_like(found.to(values))), Step)


def followed(network: Residual, own: Tensors, known: Known, kind: type["Step"]) -> Known:
    """Continue from the last activations in ``known`` toward the image, solving for one block at a time.

    Return ``known`` with the activations added. ``own``: gradients by name. ``kind``: class that solves one block.
    """
    cuts, values, equations = list(network.cuts), dict(known.values), list(known.equations)
    at, found, left = list(values)[-1], known.found, known.left
    for before in reversed(cuts[: cuts.index(at)]):
        step = kind(network, own, before, at, values[at], network.slopes_at(at, values[at], own))
        if not step.runs() or not (found & (step.left < _RIGHT)).any():
            break
        found, values = found & (step.left < _RIGHT), values | step.values
        equations = [(before, each) for each in step.equations]
        guess = step.solved()
        if guess is None:
            break
        missed = misses(network, before, guess, at, values[at])
        fits = missed <= FITS
        fits = fits.all().expand_as(fits) if network.count > 1 else fits
        if not (found & fits).any():
            break
        found = found & fits
        left, at = left.maximum(torch.where(found, missed, left)), before
        values[before], equations = guess, []
    return Known(values, equations, known.started, found, left)


def misses(network: Residual, before: fx.Node, inputs: Tensor, at: fx.Node, values: Tensor) -> Tensor:
    """Return the relative distance (V,) of ``values`` at ``at`` from those computed from ``inputs`` at ``before``."""
    apart = (network.graph.run({before: inputs}, at) - values).flatten(1).norm(dim=1)
    share = apart / values.flatten(1).norm(dim=1).clamp_min(torch.finfo(apart.dtype).tiny)
    return torch.where(share.isfinite(), share, torch.inf)


def _started(network: Residual, own: Tensors, slopes: Tensor) -> tuple[fx.Node, Tensor, Tensor]:
    features = torch.einsum("vk,vkn->vn", slopes, own[f"{network.head.target}.weight"])
    features = features / slopes.square().sum(1, keepdim=True).clamp_min(torch.finfo(slopes.dtype).tiny)
    candidates, best = _blind(network), None
    for node in candidates:
        layer, at = network.convolution(node), input_of(node)
        values = slopes.new_zeros(len(slopes), *layer.shape)
        found = torch.zeros(len(slopes), dtype=torch.bool, device=slopes.device)
        for victim, gradient in enumerate(own[f"{node.target}.weight"]):
            blind = inputs_up_to_a_factor(layer, gradient)
            if blind is not None and blind.unique:
                scaled, missed = _scaled(network, at, blind.values[0], features[victim])
                values[victim], found[victim] = heard(network, at, scaled[None])[0], missed < FITS
        if best is None or int(found.sum()) > int(best[2].sum()):
            best = at, values, found
        if found.all():
            break
    assert best is not None
    return best


def _scaled(network: Residual, at: fx.Node, values: Tensor, features: Tensor) -> tuple[Tensor, float]:
    """Scale ``values`` at node ``at`` to bring the last layer's inputs near ``features``; return the error, too."""
    pooled = input_of(network.head)

    def missed(factors: Tensor) -> Tensor:
        outputs = network.graph.run({at: factors[:, None, None, None] * values}, pooled).flatten(1)
        apart: Tensor = (outputs - features).norm(dim=1) / features.norm()
        return apart

    some = torch.logspace(-3, 3, _FACTORS // 2, dtype=values.dtype, device=values.device)
    factors = torch.cat([-some.flip(0), some])
    for _ in range(5):
        apart = torch.cat([missed(part) for part in torch.split(factors, 256)])
        place = int(apart.nan_to_num(torch.inf).argmin())
        low, high = factors[max(place - 1, 0)], factors[min(place + 1, len(factors) - 1)]
        best = factors[place], float(apart[place])
        factors = torch.linspace(float(low), float(high), 101, dtype=values.dtype, device=values.device)
    return best[0] * values, best[1]


def heard(network: Residual, node: fx.Node, values: Tensor) -> Tensor:
    """Set ``values`` (V, C, H, W) of a ReLU's ``node`` to zero where they are no larger than the noise."""
    return above_noise(values) if network.graph.kind(node) == "relu" else values


Link = tuple[fx.Node | None, fx.Node, fx.Node, fx.Node]
"""Nodes in a row: a convolution, if there is one, a norm, its ReLU and a convolution."""


def links(network: Residual) -> list[Link]:
    """List the chains (:data:`Link`) nearest to the image whose last convolution's gradient gives its inputs."""
    found, kind = list[Link](), network.graph.kind
    for later in network.convolutions:
        relu = input_of(later)
        norm = input_of(relu) if kind(relu) == "relu" else relu
        if relu is not norm and kind(norm) == "norm" and can_be_blind(network.convolution(later), network.count):
            before = input_of(norm)
            found.append((before if kind(before) == "conv" else None, norm, relu, later))
    return found[:_TRIES]


@dataclass(eq=False)
class Step:
    """Step toward the image: solves for the values at graph node ``before`` from those at the later node ``at``.

    ``outputs``, ``slopes``: V images' values (V, C, H, W) at ``at``, and the loss's gradient there.
    """

    network: Residual
    gradients: Tensors
    before: fx.Node
    at: fx.Node
    outputs: Tensor
    slopes: Tensor
    values: dict[fx.Node, Tensor] = field(default_factory=dict)  # solved values of nodes in between
    equations: list[Equations] = field(default_factory=list)  # equations for the values at ``before``
    left: Tensor = field(default_factory=lambda: torch.zeros(1))  # (V,) relative residual of the worst of ``values``
    gates: Tensor | None = None  # (V, C, H, W) bool, the ``outputs`` that a ReLU let through

    def runs(self) -> bool:
        """Build equations for values at ``before``, by backpropagation from ``at``; return whether there are any."""
        graph, slopes = self.network.graph, {self.at: Slopes(self.slopes)}
        between = graph.behind(self.at, {self.before}) - {self.before}
        for node in reversed([node for node in graph.nodes if node in between]):
            own = slopes.get(node)
            handle = self._handlers.get(graph.kind(node))
            if own is None or handle is None:
                if graph.kind(node) not in ("chooses", "other") or self.before not in graph.behind(node, {self.before}):
                    return False
                continue  # a shortcut, whose slopes nothing needs
            passed = handle(node, own)
            if passed is None:
                return False
            for given, value in passed.items():
                other = slopes.get(given)
                slopes[given] = value if other is None else Slopes(value.values + other.values)
        return bool(self.equations)

    @property
    def _handlers(self) -> Mapping[str, Callable[[fx.Node, Slopes], dict[fx.Node, Slopes] | None]]:
        return {
            "same": lambda node, own: {input_of(node): own},
            "add": lambda node, own: dict.fromkeys(node.all_input_nodes, own),
            "norm": self._behind_norm,
            "relu": self._behind_relu,
            "conv": self._behind_convolution,
        }

    def _behind_norm(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        layer = self.network.graph.layer(node)
        assert isinstance(layer, nn.BatchNorm2d)
        if layer.running_var is None:
            return None
        scale = torch.rsqrt(layer.running_var + layer.eps)
        scale = scale if layer.weight is None else scale * layer.weight
        return {input_of(node): Slopes(own.full * scale[:, None, None], own.open)}

    def _behind_relu(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        values = self.outputs if node is self.at else self.values.get(node)
        if values is None:
            return None
        passed = Slopes(own.values, values > 0)
        if node is self.at:
            self.gates = passed.open
        return {input_of(node): passed}

    def _behind_convolution(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        given, layer = input_of(node), self.network.convolution(node)
        equations = Equations(layer, own, self.gradients[f"{node.target}.weight"])
        if given is self.before:
            self.equations.append(equations)
            return {}
        if given in self.values or not enough([equations]):
            return None
        found, left = gated_inputs([equations])
        self.values[given], self.left = heard(self.network, given, found), left.maximum(self.left.to(left))
        return {given: Slopes(layer.back(own.values))}

    def solved(self) -> Tensor | None:
        if not enough(self.equations):
            return None
        found, _ = gated_inputs(self.equations, self.shown())
        return heard(self.network, self.before, found)

    def shown(self) -> Shown | None:
        """Return inputs of a residual block that are known from its shortcut; ``None`` if it has none.

        At active ReLUs, they are the block's outputs minus those of its other branch.
        """
        graph, ends = self.network.graph, {self.before, self.network.graph.image}
        if self.gates is None or graph.kind(input_of(self.at)) != "add":
            return None
        branches = input_of(self.at).all_input_nodes
        known = [one for one in branches if not ends & graph.behind(one, self.values.keys())]
        behind = {one: graph.behind(one, {self.before}) for one in branches if one not in known}
        others = [
            one
            for one, own in behind.items()
            if self.before in own and all(graph.kind(each) in ("chooses", "same") for each in own - {self.before})
        ]
        if len(known) != 1 or len(others) != 1:
            return None
        seen = torch.where(self.gates, self.outputs - graph.run(self.values, known[0]), 0)
        if others[0] is self.before:
            return self.gates.to(seen), seen
        zeros = torch.zeros(len(seen), *self.network.shapes[self.before], dtype=seen.dtype, device=seen.device)
        with torch.enable_grad():
            chosen = graph.run({self.before: zeros.requires_grad_(True)}, others[0])
            often, sums = (
                torch.autograd.grad(chosen, zeros, own, retain_graph=True)[0] for own in (self.gates.to(seen), seen)
            )
        return often, sums


def enough(equations: Sequence[Equations]) -> bool:
    """Return whether equations are at least as many as the unknown inputs of a channel, and few enough to solve."""
    layer = equations[0].layer
    places = layer.shape[1] * layer.shape[2] * (len(equations[0].slopes.full) if equations[0].together else 1)
    return places <= MOST_PLACES and sum(each.layer.gradients for each in equations) >= places
