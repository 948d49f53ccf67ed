"""Observe third-party training by PyTorch's hooks and wrapped methods, which leave numbers and streams unchanged."""

from __future__ import annotations

import copy
import importlib
import inspect
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from fl_privacy.auditing.instrument.keras_layers import as_optimizer, keras_on_torch, owner_of, state_taken
from fl_privacy.auditing.instrument.program import Program, Recorder, cut_out, size_of, tensors_in

MOST_EXAMPLES, MOST_BYTES, MOST_LABELS = 4096, 1 << 26, 1 << 20
"""Largest numbers kept of a client: examples, bytes of tensors, and examples with labels."""

LATE_BATCH, MOST_EVALUATED = 8, 16
"""Largest numbers of examples in a batch, once a training is late, and of batches kept that load without gradients."""

MOST_ADDED = 16  # number of recorded losses without a step after which the first alone is taken

SETTINGS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "amsgrad", "maximize")
"""Settings of an optimizer that are kept."""


@dataclass(eq=False)
class Watched:
    """Observations of a client's training while it answered one message."""

    modules: list[nn.Module] = field(default_factory=list)  # outermost with parameters, called with gradients on
    before: dict[str, Tensor] = field(default_factory=dict)  # values before the first step, by observed name
    names: dict[int, str] = field(default_factory=dict)  # ``id`` of a value -> its name, ``parts.<number>.<name>``
    batches: list[Any] = field(default_factory=list)  # tensors of the first training batches from loaders
    evaluated: list[Any] = field(default_factory=list)  # tensors of the first batches loaded without gradients
    labels: list[Tensor] = field(default_factory=list)  # those of each batch with exactly one integer vector
    loaded: int = 0  # number of examples loaded with gradients on, counted once for each epoch
    passes: dict[int, int] = field(default_factory=dict)  # ``id`` of a data set -> most examples in one epoch
    entered: Counter[str] = field(default_factory=Counter)  # calls by combination of input shapes and types
    inputs: list[Any] = field(default_factory=list)
    # number of steps for each optimizer class and its settings
    optimizers: Counter[tuple[str, tuple[tuple[str, Any], ...]]] = field(default_factory=Counter)
    trained: set[frozenset[int]] = field(default_factory=set)  # ``id`` of each parameter, one set for each optimizer
    backwards: int = 0  # number of losses differentiated; they count as steps without an optimizer
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, or first loss, by observed name
    program: Program | None = None  # from the first batch, or all that the first step accumulates, to the loss
    added: int = 0  # number of losses whose gradients the first step accumulates
    training: bool = True  # ``True`` if the first module was in training mode
    cut: bool = False  # ``True`` if the training got fewer examples than its loader has
    drawn: bool = False  # ``True`` if random numbers were drawn for a training example before it entered the network
    anew: bool = True  # ``True`` if its optimizers had no state before their first step
    hurried: bool = False  # ``True`` if a pass over the data ended early, as the training was late

    @property
    def steps(self) -> int:
        return sum(self.optimizers.values()) or self.backwards

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self._named()}

    def keep_values(self) -> None:
        """Copy new parameters and buffers to ``before``; copy all again if one changed before the first step."""
        named, kept = dict(self._named()), self.before
        known = [
            (kept[name], value) for name, value in named.items() if isinstance(value, nn.Parameter) and name in kept
        ]
        if not self.steps and not all(torch.equal(old.to(value.device), value) for old, value in known):
            kept = {}
        self.before = {name: kept[name] if name in kept else value.detach().clone() for name, value in named.items()}
        for name, value in named.items():
            self.names.setdefault(id(value), name)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for number, module in enumerate(self.modules):
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                yield f"parts.{number}.{name}", value


@dataclass(frozen=True, kw_only=True)
class OnlyExamples:
    """Limits a training to one batch: ``number`` examples of its data loaders, from the example ``first`` on.

    ``at_call``: ``True`` if the training has no loaders; tensors are then cut when they are passed to modules.
    ``anew``: ``True`` to take the state, such as momentum, from optimizers for the training.
    """

    first: int = 0
    number: int | None = 1  # ``None`` for the loader's own first batch
    repeats: bool = False  # ``True`` to give the batch again in each epoch
    evaluation: bool = False  # ``True`` for evaluation mode: no batch norm over the batch, no dropout
    at_call: bool = False
    anew: bool = False


class _Mode(TorchFunctionMode):
    def __init__(self, watch: TrainingWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._watch.met(args, kwargs or {})
        made = func(*args, **kwargs)
        self._watch.called(func, args, kwargs, made)
        return made


class TrainingWatch:
    """Records what happens in a training within ``with watch.looking() as seen``.

    ``program``: ``True`` also records the computation of the first loss. ``only``: limit of the training's examples.
    ``late``: whether the training has lasted too long; each pass over the data then has one small batch.
    """

    def __init__(
        self, *, program: bool = False, only: OnlyExamples | None = None, late: Callable[[], bool] = bool
    ) -> None:
        self.seen, self._only, self._asked, self._late = Watched(), only, program, late
        self._recorder = Recorder() if program else None
        self._roots: list[Tensor] = []
        self._depth, self._bytes = 0, 0
        self._given = False
        self._begun: DataLoader[Any] | None = None
        self._first: dict[str, Tensor] = {}
        self._streams: tuple[Any, ...] | None = None
        self._span: tuple[int, int, int] | None = None
        self._cuts: dict[int, tuple[Tensor, Tensor]] = {}
        self._derived: dict[int, Tensor] = {}
        self._stepped_by: set[int] = set()
        self._put_back = ExitStack()
        self._of_keras: dict[int, Any] = {}

    def _begin(self, tensors: list[Tensor], only: OnlyExamples) -> None:
        size = next((len(t) for t in tensors if t.dim()), 0)
        if size and not self._given:
            self._given = self.seen.cut = True
            number = min(size, only.number or size)
            start = only.first % (size - number + 1)
            self._span, self.seen.loaded = (start, start + number, size), number

    def met(self, args: Any, kwargs: Any, *, enters: bool = False) -> tuple[Any, Any]:
        """Return the arguments of a call that is about to run, with batches cut to the chosen examples.

        ``enters``: ``True`` if a module is called. After the optimizer's first step, nothing is cut.
        """
        if self._recorder is not None and self._depth == 0:
            self._recorder.begin(args)
        if self._span is None or self._depth or self.seen.optimizers:
            return args, kwargs
        # other functions' arguments are cut, such as targets, if one was computed from a cut batch
        if not enters and not any(id(t) in self._derived for t in tensors_in((args, kwargs))):
            return args, kwargs
        start, stop, size = self._span

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.dim():
                return value
            if len(value) != size or stop - start == size or id(value) in self._derived:
                return value
            if id(value) not in self._cuts:
                self._cuts[id(value)] = (value, self._alike(cut_out(value, start, stop, size), enters))
            return self._cuts[id(value)][1]

        with self._within():
            return tree_map(cut, (args, kwargs))

    def _alike(self, part: Tensor, enters: bool) -> Tensor:
        for _, known in () if enters else self._cuts.values():
            if known.is_floating_point() and torch.equal(known.flatten(), part.flatten()):
                made = known.reshape(part.shape)
                if self._recorder is not None:
                    self._recorder.note(torch.Tensor.reshape, None, (known, part.shape), {}, made)
                return made
        return part

    def _derive(self, made: Any) -> None:
        if self._span is not None and not self.seen.optimizers:
            self._derived |= {id(t): t for t in tensors_in(made)}

    def called(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        if self._recorder is not None and self._depth == 0:
            self._recorder.note(func, None, args, kwargs, made)
        if self._derived and self._depth == 0 and any(id(t) in self._derived for t in tensors_in((args, kwargs))):
            self._derive(made)

    @contextmanager
    def looking(self) -> Iterator[Watched]:
        optimizer = importlib.import_module("torch.optim.optimizer")
        with ExitStack() as stack:
            stack.enter_context(self._put_back)
            stack.callback(optimizer.register_optimizer_step_pre_hook(self._stepping).remove)
            # a step's closure differentiates within the step
            stack.callback(optimizer.register_optimizer_step_post_hook(self._stepped).remove)
            stack.enter_context(replaced(nn.Module, "__call__", self.on_call))
            stack.enter_context(replaced(DataLoader, "__iter__", self.on_iteration))
            stack.enter_context(replaced(torch.autograd, "backward", self.on_backward))
            if (keras := keras_on_torch()) is not None:
                stack.enter_context(replaced(owner_of(keras.Layer, "__call__"), "__call__", self.on_layer))
                stack.enter_context(replaced(owner_of(keras.Optimizer, "apply"), "apply", self.on_step))
                if hasattr(keras.Model, "_symbolic_build"):
                    stack.enter_context(
                        replaced(owner_of(keras.Model, "_symbolic_build"), "_symbolic_build", self.on_build)
                    )
                apart = torch.no_grad()(lambda call, *args, **kwargs: call(*args, **kwargs))
                for name in ("evaluate", "predict"):  # whose examples are no further ones of the training
                    stack.enter_context(replaced(owner_of(keras.Model, name), name, apart))
            fetch = importlib.import_module("torch.utils.data._utils.fetch")
            for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
                stack.enter_context(replaced(fetcher, "fetch", self.on_fetch))
            if self._asked:
                stack.enter_context(_Mode(self))
            yield self.seen
            if not self.seen.optimizers:
                self.seen.gradients = self._first
                del self._roots[1:]
            self._end_recording()

    def on_call(self, call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self._depth or not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        if self._only is not None and self._only.at_call:
            self._begin(tensors_in((args, kwargs)), self._only)
            args, kwargs = self.met(args, kwargs, enters=True)
        self._entering(module, args, kwargs)
        with self._within(), _evaluating(module, self._only is not None and self._only.evaluation):
            made = call(module, *args, **kwargs)
        self._derive(made)
        if self._recorder is not None:
            self._recorder.note(None, module, args, kwargs, made)
        return made

    def on_layer(self, call: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        if not tensors or tensors[0].is_meta:  # Keras asks for shapes alone
            return self.on_build(call, layer, *args, **kwargs)
        kwargs |= {"training": False} if self._only is not None and self._only.evaluation else {}
        return self.on_call(call, layer, *args, **kwargs)

    def on_step(self, apply: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        known = self._of_keras.get(id(optimizer)) or as_optimizer(optimizer, variables)
        again = self._span is not None and id(known) in self._stepped_by
        if id(known) not in self._stepped_by and self._begins(bool(int(getattr(optimizer, "iterations", 0)))):
            with self._within():
                self._put_back.callback(state_taken(optimizer))
        if self._hurries():
            for module in self.seen.modules:
                vars(module)["stop_training"] = True  # ends Keras's own loop after this batch
        self._of_keras[id(optimizer)] = known
        self._stepping(known, (), {})
        if not again:
            apply(optimizer, grads, variables)

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _entering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen = self.seen
        if self._streams is not None:
            seen.drawn |= _streams() != self._streams
            self._streams = None
        if not any(module is known for known in seen.modules):
            if not seen.modules:
                seen.training = module.training and not (self._only is not None and self._only.evaluation)
            inner = set() if seen.steps else {id(each) for each in module.modules()}
            if any(id(known) in inner for known in seen.modules):  # called alone before, as to learn a size
                seen.modules = [known for known in seen.modules if id(known) not in inner]
                seen.before, seen.names = {}, {}
            seen.modules.append(module)
            seen.keep_values()
        elif not seen.steps:
            seen.keep_values()
        tensors = tensors_in((args, kwargs))
        if tensors:
            seen.entered[", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)] += 1
        if not seen.loaded and tensors and self._room(tensors):
            seen.inputs.append([_kept(t) for t in tensors])

    def _room(self, tensors: list[Tensor]) -> bool:
        size = sum(t.numel() * t.element_size() for t in tensors)
        if self._bytes + size > MOST_BYTES:
            return False
        self._bytes += size
        return True

    def on_fetch(self, fetch: Any, fetcher: Any, index: Any) -> Any:
        before = _streams()
        batch = fetch(fetcher, index)
        self.seen.drawn |= torch.is_grad_enabled() and _streams() != before
        return batch

    def on_build(self, build: Any, *args: Any, **kwargs: Any) -> Any:  # Keras takes a shape
        with self._within():
            return build(*args, **kwargs)

    def on_iteration(self, iterate: Any, loader: DataLoader[Any]) -> Any:
        if self._depth:
            return iterate(loader)
        if torch.is_grad_enabled() and not self.seen.modules:
            if loader is self._begun:  # a batch of it was looked at, as for its shape; the training begins now
                self.seen.batches.clear()
                self.seen.labels.clear()
                self.seen.loaded, self._given = 0, False
            self._begun = loader
        if self._only is not None:
            return self._some(loader, iterate, self._only)
        data, passed = id(loader.dataset), 0

        def note(batch: Any) -> None:
            nonlocal passed
            passed += self._note(batch)
            self.seen.passes[data] = max(passed, self.seen.passes.get(data, 0))

        return _Counting(iterate(loader), note, self._hurries)

    def _hurries(self) -> bool:
        self.seen.hurried |= (late := self._late())
        return late

    def _note(self, batch: Any) -> int:
        tensors = [t for t in tensors_in(batch) if t.dim()]
        if not torch.is_grad_enabled():
            small = sum(t.nbytes for t in tensors) <= MOST_BYTES // MOST_EVALUATED
            if tensors and small and len(self.seen.evaluated) < MOST_EVALUATED:
                self.seen.evaluated.append([_kept(t) for t in tensors])
            return 0
        number = size_of(batch)
        if number and self.seen.loaded < MOST_EXAMPLES and self._room(tensors):
            self.seen.batches.append([_kept(t) for t in tensors])
        whole = [t for t in tensors if t.dim() == 1 and len(t) == number and not t.is_floating_point()]
        if len(whole) == 1 and self.seen.loaded < MOST_LABELS:
            self.seen.labels.append(_kept(whole[0]))
        self.seen.loaded += number
        self._streams = _streams()
        return number

    def _some(self, loader: DataLoader[Any], iterate: Callable[..., Any], only: OnlyExamples) -> Iterator[Any]:
        if not only.repeats and self._given and torch.is_grad_enabled():
            return
        skipped = 0
        for batch in iterate(loader):
            size = size_of(batch)
            if only.number is not None and size and only.first >= skipped + size:
                skipped += size
                continue
            start = only.first - skipped
            part = batch if only.number is None else cut_out(batch, start, start + only.number, size)
            if torch.is_grad_enabled():
                self._given = self.seen.cut = True
            self._note(part)
            yield part
            return

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._end_recording()
        seen, group = self.seen, optimizer.param_groups[0]
        if self._span is not None and id(optimizer) in self._stepped_by:
            for parameter in (parameter for each in optimizer.param_groups for parameter in each["params"]):
                parameter.grad = None  # so that this step changes nothing
            return
        if id(optimizer) not in self._stepped_by and self._begins(bool(state := optimizer.state)):
            self._put_back.callback(setattr, optimizer, "state", state)
            optimizer.state = defaultdict(dict)
        self._stepped_by.add(id(optimizer))
        if not seen.optimizers and 0 < seen.added < seen.backwards:  # more than were recorded
            seen.program, seen.added = None, seen.backwards
        settings = tuple((key, _plain(group[key])) for key in SETTINGS if key in group)
        settings += (("groups", len(optimizer.param_groups)),) if len(optimizer.param_groups) > 1 else ()
        seen.optimizers[type(optimizer).__name__, settings] += 1
        seen.trained.add(frozenset(id(each) for own in optimizer.param_groups for each in own["params"]))
        self._stepped(optimizer, args, kwargs)

    def _begins(self, used: bool) -> bool:
        self.seen.anew &= not used
        return used and self._only is not None and self._only.anew

    def _end_recording(self) -> None:
        if self._recorder is not None and self._roots:
            self.seen.program, self.seen.added = self._recorder.program(self._roots, self.seen.names), len(self._roots)
            self._recorder, self._roots = None, []

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        seen = self.seen
        if not seen.gradients:
            own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            seen.gradients |= {seen.names[id(p)]: p.grad.detach().clone() for p in own if id(p) in seen.names}

    def on_backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() >= 0:  # a recomputed part of the network, within the loss's
            return backward(tensors, *args, **kwargs)
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if self._recorder is not None and isinstance(root, Tensor) and root.numel() == 1:
            if root.dim():  # as of a sum that begins with torch.zeros(1)
                root, given = root.reshape(()), (root, ())
                self._recorder.note(Tensor.reshape, None, given, {}, root)
            self._roots.append(root)
            if self.seen.optimizers or len(self._roots) == MOST_ADDED:  # in a step's closure, or without steps
                del self._roots[1:]
                self._end_recording()
        with self._within():  # checkpointing recomputes parts of the network
            made = backward(tensors, *args, **kwargs)
        self.seen.backwards += 1
        if self.seen.backwards == 1 and not self.seen.optimizers:
            own = ((k, *pair) for k, module in enumerate(self.seen.modules) for pair in module.named_parameters())
            self._first = {f"parts.{k}.{name}": _kept(p.grad) for k, name, p in own if p.grad is not None}
        return made


def _streams() -> tuple[Any, ...]:
    numpys = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), numpys["key"].tobytes(), numpys["pos"], random.getstate()


@contextmanager
def _evaluating(module: nn.Module, wanted: bool) -> Iterator[None]:
    before = [each for each in module.modules() if each.training] if wanted else []
    for each in before:
        each.training = False
    try:
        yield
    finally:
        for each in before:
            each.training = True


class _Counting:
    def __init__(self, given: Iterator[Any], note: Callable[[Any], None], late: Callable[[], bool]) -> None:
        self._given, self._note, self._late, self._begun = given, note, late, False

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> Any:
        if self._begun and self._late():
            raise StopIteration
        batch, self._begun = next(self._given), True
        batch = cut_out(batch, 0, LATE_BATCH, size_of(batch)) if self._late() else batch
        self._note(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor).clone()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return tuple(value) if isinstance(value, list) else value


@contextmanager
def replaced(owner: Any, name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Let ``answer(original, ...)`` replace the function ``name`` of a class or module until the block ends."""
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    called = original.__func__ if isinstance(original, classmethod) else original

    def answered(*args: Any, **kwargs: Any) -> Any:
        return answer(called, *args, **kwargs)

    answered.__wrapped__ = called  # type: ignore[attr-defined]  # some read signatures
    with suppress(ValueError, TypeError):  # Keras does not look at what is wrapped
        answered.__signature__ = inspect.signature(called)  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(answered) if isinstance(original, classmethod) else answered)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def state_kept(clients: Sequence[object]) -> Iterator[None]:
    """At the end of the block, restore the state that the networks and optimizers of ``clients`` had at its start."""
    holders = chain(clients, *(getattr(client, "__dict__", {}).values() for client in clients))
    inner = chain.from_iterable(getattr(h, "__dict__", {}).values() for h in holders if not isinstance(h, type))
    parts = (each for each in inner if isinstance(each, nn.Module | torch.optim.Optimizer))
    held = [(each, copy.deepcopy(each.state_dict())) for each in parts]
    try:
        yield
    finally:
        for each, state in held:
            each.load_state_dict(state)
