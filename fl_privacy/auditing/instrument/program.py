"""The recorded computation from a batch to its loss, which can be replayed with another batch."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map, tree_map_only

from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.rng import streams_put_back

MOST_DEEP, MOST_CALLS = 3, 5000
"""Largest depth of attributes in which tensors of a module's output are searched, and number of recorded calls."""

MOVES = {"to", "cpu", "cuda", "contiguous", "float", "double", "half", "long", "type", "type_as", "requires_grad_"}
"""Functions that return their argument unchanged if it has the requested form."""


@dataclass(frozen=True)
class Ref:
    """Placeholder, in recorded arguments, of the tensor with this number."""

    number: int


@dataclass(frozen=True)
class Own:
    """Placeholder, in recorded arguments, for the model's parameter with this name."""

    name: str


def graph_entries(value: Any) -> dict[str, Any] | None:
    """Return a PyTorch Geometric graph's tensors by key, or their recorded placeholders; ``None`` if no graph."""
    if isinstance(value, Tensor | Mapping | type) or not hasattr(value, "edge_index") or not hasattr(value, "to_dict"):
        return None
    return {key: each for key, each in value.to_dict().items() if isinstance(each, Tensor | Ref | Own)}


def enter_graphs(kind: type) -> None:
    """Let ``tree_map`` descend into the tensors of graphs of the class ``kind``."""

    def entries_of(graph: Any) -> tuple[list[Any], Any]:
        entries = graph_entries(graph) or {}
        return list(entries.values()), (graph, tuple(entries))

    def with_entries(entries: Iterable[Any], of_keys: Any) -> Any:
        graph = copy.copy(of_keys[0])
        for key, value in zip(of_keys[1], entries, strict=True):
            graph[key] = value
        return graph

    register_pytree_node(kind, entries_of, with_entries)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a function or module."""

    function: Callable[..., Any] | None
    part: int  # number of the called module; -1 for a function
    args: Any  # arguments with ``Ref`` and ``Own`` in place of tensors
    kwargs: Any
    outputs: tuple[int, ...]  # numbers of the returned tensors
    changes: bool = False  # ``True`` if it changes its first argument in place

    @cached_property
    def taken(self) -> list[int]:
        return [leaf.number for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]

    @property
    def is_plain_cross_entropy(self) -> bool:
        if self.function not in (F.cross_entropy, F.nll_loss):
            return False
        options = {**self.kwargs, **dict(zip(("input", "target", "weight", "size_average"), self.args, strict=False))}
        plain = options.get("weight") is None and options.get("reduction", "mean") == "mean"
        return plain and not options.get("label_smoothing", 0.0) and options.get("ignore_index", -100) == -100


@dataclass(frozen=True, eq=False)
class Program:
    """Recorded computation from a batch to its loss: calls, whose tensors are named by numbers."""

    calls: tuple[Call, ...]
    constants: Mapping[int, Tensor]  # tensors by number that were computed earlier, detached
    root: int  # number of the loss
    parts: tuple[nn.Module, ...]  # outermost modules that are called
    sizes: tuple[int, ...] = ()  # numbers of examples of the batches that were joined, if any

    def __deepcopy__(self, memo: dict[int, Any]) -> "Program":
        return self

    def run(
        self,
        given: Mapping[int, Tensor],
        parts: Sequence[nn.Module],
        parameters: Mapping[str, Tensor],
        *,
        until: int | None = None,
        after: int | None = None,
    ) -> Tensor:
        """Replay the program with the tensors ``given`` by number; return the tensor number ``until``, or the loss.

        ``parts``, ``parameters``: modules and parameters that replace the recorded ones. ``after``: module calls up to
        this index are left out; their outputs must then be ``given``.
        """
        wanted = self.root if until is None else until
        like = next((value.dtype for value in given.values() if value.is_floating_point()), None)
        known = {n: v.to(like) if like and v.is_floating_point() else v for n, v in self.constants.items()}
        known |= dict(given)

        def filled(value: Any) -> Any:
            if isinstance(value, Ref):
                return known[value.number]
            return parameters[value.name] if isinstance(value, Own) else value

        for place, call in enumerate(self.calls):
            early = after is not None and place <= after and call.part >= 0
            made_already = call.outputs and all(number in given for number in call.outputs)
            if early or made_already or any(number not in known for number in call.taken):
                continue
            args, kwargs = tree_map(filled, (call.args, call.kwargs))
            if call.changes:
                args = (args[0].clone(), *args[1:])
            made = parts[call.part](*args, **kwargs) if call.function is None else call.function(*args, **kwargs)
            known.update(zip(call.outputs, tensors_in(made), strict=False))
            if wanted in call.outputs and not any(wanted in later.outputs for later in self.calls[place + 1 :]):
                break
        return known[wanted]

    def renamed(self, names: Mapping[str, str]) -> "Program":

        def named(value: Any) -> Any:
            return Own(names.get(value.name, value.name)) if isinstance(value, Own) else value

        calls = (replace(c, args=tree_map(named, c.args), kwargs=tree_map(named, c.kwargs)) for c in self.calls)
        return replace(self, calls=tuple(calls))

    def steps(self) -> list[Any]:
        """Return the recorded calls without tensors' values; they are equal for batches on which the same code ran."""
        called = [(c.function, c.part, repr((c.args, c.kwargs)), c.outputs) for c in self.calls]
        return [self.root, [id(part) for part in self.parts], called]

    def depends_on(self, numbers: set[int]) -> set[int]:
        found = set(numbers)
        for call in self.calls:
            if found.intersection(call.taken):
                found.update(call.outputs)
        return found


def tensors_in(value: Any, deep: int = MOST_DEEP) -> list[Tensor]:
    """List tensors in containers, graphs and ``deep`` levels of attributes, not in modules, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping | list | tuple):
        held = value.values() if isinstance(value, Mapping) else value
        return [t for each in held for t in tensors_in(each, deep)]
    if (entries := graph_entries(value)) is not None:
        return list(entries.values())
    own = getattr(value, "__dict__", None)
    if not deep or not isinstance(own, dict) or isinstance(value, nn.Module | type):
        return []
    if not is_dataclass(value) and type(value).__module__.split(".")[0] == "builtins":
        return []
    return [t for each in own.values() for t in tensors_in(each, deep - 1)]


def size_of(batch: Any) -> int:
    """Return the number of a batch's examples."""
    if hasattr(batch, "to_data_list"):  # graphs of PyTorch Geometric
        return int(batch.num_graphs)
    return next((len(t) for t in tensors_in(batch) if t.dim()), 0)


def cut_out(batch: Any, start: int, stop: int, size: int) -> Any:
    """Return the examples ``start`` to ``stop`` of a batch of ``size``, in its own form."""
    if isinstance(batch, Tensor):
        plain = batch.as_subclass(Tensor)  # other subclasses may not allow slices
        return plain[start:stop] if plain.dim() and len(plain) == size else batch
    if isinstance(batch, Mapping):
        parts = {key: cut_out(value, start, stop, size) for key, value in batch.items()}
        made = parts if type(batch) is dict else attempt(lambda: type(batch)(parts))  # type: ignore[call-arg]
        return parts if isinstance(made, Failure) else made
    if isinstance(batch, tuple):
        each = [cut_out(value, start, stop, size) for value in batch]
        return type(batch)(*each) if hasattr(batch, "_fields") else tuple(each)
    if isinstance(batch, list):
        if len(batch) == size and size > 1 and not any(isinstance(each, Tensor | Mapping) for each in batch):
            return batch[start:stop]
        return [cut_out(value, start, stop, size) for value in batch]
    graphs = hasattr(batch, "to_data_list")
    return type(batch).from_data_list(batch.to_data_list()[start:stop]) if graphs else batch


class Recorder:
    """Records calls of functions and modules, and makes a ``Program`` of those on which a loss depends."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any] | None, nn.Module | None, Any, Any, list[Tensor], bool]] = []
        self._entered = False
        self._begun: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, args: Any) -> None:
        """Copy the first argument of a call, if it is a scalar tensor, before the call may overwrite it."""
        if args and isinstance(first := args[0], Tensor) and first.numel() == 1 and first.grad_fn is None:
            self._begun.setdefault(id(first), (first, first.detach().clone()))

    def note(self, function: Any, module: nn.Module | None, args: Any, kwargs: Any, made: Any) -> None:
        if function is not None and args and made is args[0] and getattr(function, "__name__", "") in MOVES:
            return
        if module is not None and not self._entered:
            self._calls.clear()  # the preparation of the batch
            self._entered = True
        if (outputs := tensors_in(made)) and len(self._calls) < MOST_CALLS:
            changes = function is not None and bool(args) and outputs[0] is args[0]
            self._calls.append((function, module, args, kwargs, outputs, changes))

    def program(self, roots: Sequence[Tensor], names: Mapping[int, str]) -> Program:
        """Return the recorded calls that the losses ``roots`` need, to replay; ``names``: parameter names by ``id``."""
        if len(roots) > 1:
            with streams_put_back():  # preparations of batches are computed again
                found = attempt(lambda: _as_one_batch([self.program([root], names) for root in roots]))
            if isinstance(found, Program):
                return found
        needed, kept = {id(root) for root in roots}, []
        for call in reversed(self._calls):
            if any(id(t) in needed for t in call[4]):
                kept.append(call)
                needed.update(id(t) for t in tensors_in((call[2], call[3])))
        kept.reverse()
        root = roots[0]
        if len(roots) > 1:
            root = torch.stack(list(roots)).sum()
            kept.append((sum, None, (tuple(roots),), {}, [root], False))
        made, parts = set[int](), {id(m): m for _, m, *_ in kept if m is not None}
        for _, _, args, kwargs, outputs, changes in kept:  # a module may also return what entered it
            entered = set() if changes else {id(t) for t in tensors_in((args, kwargs))}
            made.update(id(t) for t in outputs if id(t) not in entered)
        places = {own: place for place, own in enumerate(parts)}
        constants, numbers = dict[int, Tensor](), defaultdict[int, int](count().__next__)

        def number_of(tensor: Tensor) -> int:
            return numbers[id(tensor)]

        def abstract(value: Any) -> Any:
            if graph_entries(value) is not None:  # of a class that is met for the first time
                enter_graphs(type(value))
                return tree_map(abstract, value)
            if not isinstance(value, Tensor):
                return value
            if id(value) in names:
                return Own(names[id(value)])
            if id(value) not in made:
                constants.setdefault(number_of(value), value.detach().as_subclass(Tensor))
            return Ref(number_of(value))

        calls = []
        for function, module, args, kwargs, outputs, changes in kept:
            if changes and id(args[0]) not in numbers:
                _, begun = self._begun.get(id(args[0]), (None, args[0].detach()))
                constants.setdefault(number_of(args[0]), begun.as_subclass(Tensor))
            taken, part = tree_map(abstract, (args, kwargs)), places.get(id(module), -1)
            if changes:  # its value from here on has a number of its own
                del numbers[id(args[0])]
            calls.append(Call(function, part, taken[0], taken[1], tuple(number_of(t) for t in outputs), changes))
        return Program(tuple(calls), constants, number_of(root), tuple(parts.values()))


def _loaded(way: Program) -> Program:
    constants, calls = dict(way.constants), list[Call]()
    for call in way.calls:
        early = not any(c.part >= 0 for c in calls) or getattr(call.function, "__name__", "") == "__getitem__"
        known = all(number in constants for number in call.taken)
        if call.function and early and known and not call.changes:
            given = (call.args, call.kwargs)
            args, kwargs = tree_map(lambda v: constants[v.number] if isinstance(v, Ref) else v, given)
            constants.update(zip(call.outputs, tensors_in(call.function(*args, **kwargs)), strict=False))
        else:
            calls.append(call)
    met = [n for c in calls for n in (*c.taken, *c.outputs)]
    place = {number: k for k, number in enumerate(dict.fromkeys((*met, way.root)))}

    def again(call: Call) -> Call:
        args, kwargs = tree_map(lambda v: Ref(place[v.number]) if isinstance(v, Ref) else v, (call.args, call.kwargs))
        return replace(call, args=args, kwargs=kwargs, outputs=tuple(place[n] for n in call.outputs))

    kept = {place[number]: value for number, value in constants.items() if number in place}
    return Program(tuple(again(call) for call in calls), kept, place[way.root], way.parts)


def _as_one_batch(ways: Sequence[Program]) -> Program | None:
    """Merge programs (``ways``), each recorded on one batch, into one on all batches; ``None`` if calls differ."""
    ways = [_loaded(way) for way in ways]
    first, joined, sizes = ways[0], dict[int, Tensor](), tuple[int, ...]()
    if any(way.steps() != first.steps() or way.constants.keys() != first.constants.keys() for way in ways):
        return None
    for number, value in first.constants.items():
        every = [way.constants[number] for way in ways]
        if value.dim() == 0 or all(each.data_ptr() == value.data_ptr() for each in every):
            joined[number] = value
        elif all(each.shape[1:] == value.shape[1:] for each in every):
            joined[number] = torch.cat(every)
            sizes = tuple(map(len, every))
    return replace(first, constants=joined, sizes=sizes) if len(joined) == len(first.constants) else None


class _InDouble(TorchFunctionMode):  # of code that casts to single precision
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.dtype, lambda k: torch.float64 if k == torch.float32 else k, (args, kwargs))
        return (Tensor.double if func is Tensor.float else func)(*args, **(kwargs or {}))


class ReplayModel(nn.Module):
    """The client's recorded program as a network whose inputs are in [0, 1]: pixels, rows or vectors.

    Outputs are (B, K), the K values that enter the client's loss; or, if the loss is included, (B, 1) with the batch's
    loss in every row. Inputs that are not reconstructed, such as categories, keep their recorded values.

    Args:
        variables: numbers, in the program, of the input tensors to reconstruct; their first axis is the batch.
        shapes: shape of one example of each variable.
        ranges: ``low`` and ``scale`` of each variable, broadcast over an example for ``input = low + scale * value``.
        output: number of the tensor (B, K) before the loss; ``None`` includes the loss.
        draws: ``True`` if the program draws at random; it then draws the same at every call.
    """

    def __init__(
        self,
        program: Program,
        variables: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        ranges: Sequence[tuple[Tensor, Tensor]],
        *,
        output: int | None,
        draws: bool = False,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(program.parts)
        self.program, self.variables, self.shapes, self.output = program, tuple(variables), tuple(shapes), output
        self.draws = draws
        self.kinds: tuple[int, ...] = ()  # widths of the one-hot features of a graph's nodes
        self._examples = len(program.constants[self.variables[0]]) if self.variables else 0
        self.fixed_inputs = fixed_inputs(program, self.variables, self._examples, whole=output is None)
        for place, (least, width) in enumerate(ranges):
            self.register_buffer(f"low{place}", least, persistent=False)
            self.register_buffer(f"scale{place}", width, persistent=False)

    def looked_for(self, inputs: Tensor) -> Tensor:
        return (inputs.float() - self.get_buffer("low0")) / self.get_buffer("scale0")

    def entered(self, values: Tensor) -> list[Tensor]:
        """Convert ``values`` (B, ...) in [0, 1] to the inputs' own ranges; return a tensor for each attacked input."""
        parts = values.flatten(1).split([math.prod(shape) for shape in self.shapes], 1)
        shaped = (part.reshape(len(values), *shape) for part, shape in zip(parts, self.shapes, strict=True))
        return [getattr(self, f"low{k}") + getattr(self, f"scale{k}") * each for k, each in enumerate(shaped)]

    def forward(self, values: Tensor) -> Tensor:
        given = dict(zip(self.variables, self.entered(values), strict=True))
        if len(values) != self._examples:
            again = torch.arange(len(values)) % max(self._examples, 1)
            given |= {number: self.program.constants[number][again] for number in self.fixed_inputs}
        own = dict(self.named_parameters(remove_duplicate=False))
        try:
            made = self._run(given, own)
        except (KeyError, RuntimeError, ValueError, IndexError):
            if self.output is not None or len(values) == self._examples:
                raise
            again = torch.arange(self._examples) % len(values)  # for triplets, which need the recorded number
            made = self._run({number: given[number][again] for number in self.variables}, own)
        if self.output is None:
            return made.reshape(1, 1).expand(len(values), 1)
        return made.flatten(1) if made.dim() > 1 else made[:, None]

    def _run(self, given: Mapping[int, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        double = any(value.dtype == torch.float64 for value in given.values())
        # PyTorch's own has no second derivative
        twice = patch.object(F, "hardsigmoid", lambda input, inplace=False: F.relu6(input + 3) / 6)
        with torch.random.fork_rng(devices=[], enabled=self.draws), _InDouble() if double else nullcontext(), twice:
            if self.draws:
                torch.manual_seed(0)
            return self.program.run(given, list(self.parts), own, until=self.output)


def fixed_inputs(program: Program, variables: Sequence[int], examples: int, *, whole: bool = False) -> tuple[int, ...]:
    """Return the network's inputs that are not reconstructed: numbers of constants with ``examples`` rows.

    ``variables``: numbers of the reconstructed inputs. ``whole=True`` adds constants that are not passed to modules,
    but to other functions, such as the loss.
    """
    constants = program.constants
    taken = [number for call in program.calls if call.part >= 0 for number in call.taken]
    if whole:  # copies of parameters, as in penalties, may have as many rows as there are examples
        shapes = {p.shape for part in program.parts for p in part.parameters()}
        taken += [n for n, t in constants.items() if not t.is_floating_point() or t.shape not in shapes]
    given = (number for number in dict.fromkeys(taken) if number in constants and number not in variables)
    return tuple(number for number in given if constants[number].shape[:1] == (examples,))


def connections_of(model: ReplayModel) -> int:
    """Return the id of the tensor (2, E) that holds a graph's E edges; -1 if the network takes no graph."""
    constants, nodes = model.program.constants, model.program.constants[model.variables[0]]
    if len(model.variables) > 1 or nodes.dim() != 2 or len(nodes) <= 2:  # (2, E) may be integers of two examples
        return -1
    taken = (number for call in model.program.calls if call.part >= 0 for number in call.taken if number in constants)
    pairs = [n for n in taken if constants[n].shape[:1] == (2,) and constants[n].dim() == 2 and constants[n].numel()]
    ends = ((n, constants[n]) for n in pairs if not constants[n].is_floating_point())
    return next((n for n, each in ends if 0 <= int(each.min()) <= int(each.max()) < len(nodes)), -1)


def kinds_in(rows: Tensor) -> tuple[int, ...]:
    """Return the widths of the one-hot features in ``rows`` (N, F) of N nodes; empty if they are not all one-hot."""
    if not len(rows) or not bool(((rows == 0) | (rows == 1)).all()):
        return ()
    sums = rows.cumsum(1).int()  # equal for all nodes at the end of a feature
    ends = (sums[0] * (sums == sums[0]).all(0)).tolist()
    stops = [ends.index(feature) + 1 for feature in range(1, ends[-1] + 1) if feature in ends]
    whole = 0 < len(stops) == ends[-1]
    return tuple(stop - start for start, stop in pairwise([0, *stops[:-1], len(ends)])) if whole else ()
