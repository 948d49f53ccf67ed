"""Local training of one client, with defended steps."""

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import GradientResult
from fl_privacy.progress import counted
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors, Upload


class StepGradients(Mapping[str, Tensor]):
    """One step's mean gradients by parameter; ``UserError`` on access if the defense computes them itself."""

    def __init__(self, step: LocalStep, defense: Defense) -> None:
        self._step, self._hidden, self._names = step, defense.computes_gradient, tuple(step.sent.parameters)
        if not defense.computes_gradient:
            _ = self._result

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if self._hidden:
            raise UserError(
                f"A defense that computes the gradient itself is expected to give that of {name}, too, but does not;"
                " remove the gradient hook behind it."
            )
        return self._result.gradients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def loss(self) -> Tensor:
        return self._step.losses[-1] if self._step.losses else self._result.loss

    @property
    def buffers(self) -> Tensors:
        return self._result.buffers if "_result" in vars(self) else self._step.sent.buffers

    def only(self, names: frozenset[str]) -> "Tensors":
        chosen = copy.copy(self)
        chosen._names = tuple(name for name in self._names if name in names)
        return chosen

    @cached_property
    def _result(self) -> GradientResult:
        return self._step.gradients()


PRIVATE = "private/"  # prefix of a private parameter's name in ``ClientState.tensors``


def private_names(model: nn.Module, defense: Defense) -> frozenset[str]:
    """Return names of the parameters and buffers of ``model`` that ``defense`` keeps with the clients."""
    return frozenset(name for hook in defense.private for name in hook(model))


def public_state(model: nn.Module, defense: Defense) -> ModelState:
    """Return the values of ``model`` without those that ``defense`` keeps with the clients."""
    kept, values = private_names(model, defense), ModelState.of(model)
    return ModelState(
        {name: p for name, p in values.parameters.items() if name not in kept},
        {name: b for name, b in values.buffers.items() if name not in kept},
    )


def join_private(model: nn.Module, sent: ModelState, state: ClientState) -> ModelState:
    """Join the values that the server ``sent`` with the client's private ones: from ``state``, else from ``model``."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if missing := sent.parameters.keys() - parameters.keys():
        raise UserError(
            f"The client's model is expected to keep the parameter names it was sent, but lacks {sorted(missing)};"
            " let the defense add private parameters, and not rename public ones."
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
    """Store in ``state`` the ``values`` that are not in ``sent``."""
    for own, public in ((values.parameters, sent.parameters), (values.buffers, sent.buffers)):
        state.tensors.update({PRIVATE + name: value for name, value in own.items() if name not in public})


def private_values(model: nn.Module, sent: ModelState, state: ClientState) -> ModelState:
    """Return the values that stay with a client: those stored in ``state`` by an earlier round, else ``model``'s."""
    joined = join_private(model, sent, state)
    return ModelState(
        {name: p for name, p in joined.parameters.items() if name not in sent.parameters},
        {name: b for name, b in joined.buffers.items() if name not in sent.buffers},
    )


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalResult:
    """A client's upload, with training loss, duration in seconds and size in bytes.

    ``train_loss``: mean over the local steps; NaN under a defense that promises differential privacy, since an exact
    loss would leak. ``defense_seconds``: duration of the defense's hooks, except for those that change the loss.
    """

    upload: Upload
    train_loss: float
    seconds: float
    defense_seconds: float
    bytes_up: int | None = None


class Stopwatch:
    """Sums the seconds taken by functions that are called through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        started = time.perf_counter()
        result = function(*args)
        self.seconds += time.perf_counter() - started
        return result


def local_update(
    model: nn.Module,
    sent: ModelState,
    batches: Sequence[Batch],
    *,
    num_examples: int,
    plan: LocalPlan,
    defense: Defense,
    state: ClientState,
    rng: torch.Generator,
    private_rng: torch.Generator,
) -> LocalResult:
    """Train on ``batches``, one defended step each, and return the upload.

    ``sent``: model's values; not changed. ``num_examples``: number of distinct examples in ``batches``. ``state``:
    client's state, to which private parameters and the defense's values are written. ``rng``: generator that only the
    defense draws from. ``private_rng``: generator for the initial values of parameters that stay with the client; the
    same in each round.
    """
    started, timed = time.perf_counter(), Stopwatch()
    for model_hook in defense.model:
        model = timed(model_hook, model, state.of_images(tuple(batches[0].inputs.shape[1:])), private_rng)
    values = join_private(model, sent, state)
    shares_gradient, held = plan.shares == "gradient", plan.held(sent.parameters)
    first = LocalStep(model, values, batches[0], plan, state, rng, defense.loss, held)
    still = sent.parameters if shares_gradient else held
    moved, gradients, losses = take_steps(first, batches, defense, public=sent.parameters, still=still, timed=timed)
    update: Tensors
    if shares_gradient:
        update = {n: g for n in sent.parameters if n not in held and (g := gradients.get(n)) is not None}
    else:
        free = {n: p for n, p in sent.parameters.items() if n not in held and n in gradients}
        update = {n: moved.parameters[n] - p for n, p in free.items()}
    if promises_privacy(defense) and not all(tensor.isfinite().all() for tensor in update.values()):
        update = {name: torch.zeros_like(tensor) for name, tensor in update.items()}  # no noise hides non-finite values
    for upload_hook in defense.upload:
        update = timed(upload_hook, update, state, rng)
    if plan.shares == "weights":
        update = {name: sent.parameters[name] + delta for name, delta in update.items()}
    store_private(moved, sent, state)
    shared_buffers = {n: moved.buffers[n] for n in sent.buffers} if plan.buffers == "shared" else {}
    return LocalResult(
        upload=Upload(tensors=update, buffers=shared_buffers, num_examples=num_examples),
        train_loss=math.nan if promises_privacy(defense) else float(torch.stack(losses).mean()),
        seconds=time.perf_counter() - started,
        defense_seconds=timed.seconds,
    )


def take_steps(
    first: LocalStep,
    batches: Sequence[Batch],
    defense: Defense,
    *,
    public: Collection[str],
    still: Collection[str],
    timed: Stopwatch,
) -> tuple[ModelState, Tensors, list[Tensor]]:
    """Take one defended training step on each of ``batches``, starting from the values ``first.sent``.

    Return the model values after the last step, the gradients of that step, and the loss of each step. ``public``:
    names of the parameters shared with the server, whose gradients the defense changes. ``still``: names of the
    parameters that stay fixed. ``timed``: calls the defense's hooks and measures their time.
    """
    plan, state, rng = first.plan, first.state, first.rng
    parameters = {name: p.clone().requires_grad_() for name, p in first.sent.parameters.items()}
    buffers: Tensors = first.sent.buffers
    trained = [p for name, p in parameters.items() if name not in still]
    optimizer: torch.optim.Optimizer | _Descent | None = None
    if trained and plan.optimizer == "sgd":
        optimizer = _Descent(trained, plan)
    elif trained:
        kind = torch.optim.Adam if plan.optimizer == "adam" else torch.optim.AdamW
        optimizer = kind(trained, lr=plan.lr, weight_decay=plan.weight_decay)
    losses, gradients = [], dict[str, Tensor]()
    for batch in counted("training step", batches):
        for data_hook in defense.data:
            batch = timed(data_hook, batch, state, rng)  # noqa: PLW2901
        step = replace(first, sent=ModelState(parameters, buffers), batch=batch, losses=[])
        plain = StepGradients(step, defense)
        shared = plain.only(frozenset(public) - first.held)
        for gradient_hook in defense.gradient:
            shared = timed(gradient_hook, shared, step)
        private = {name: plain[name] for name in plain if name not in public and name not in shared}
        gradients = {**private, **shared}
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        if optimizer is not None:
            optimizer.step()
        buffers = plain.buffers
        losses.append(plain.loss)
    return ModelState({name: p.detach() for name, p in parameters.items()}, buffers), gradients, losses


def train_private(
    model: nn.Module,
    sent: ModelState,
    batches: Sequence[Batch],
    *,
    plan: LocalPlan,
    defense: Defense,
    state: ClientState,
    rng: torch.Generator,
) -> None:
    """Train the private part of ``model`` on ``batches``, with the values ``sent`` fixed, and store it in ``state``."""
    moved = private_values(model, sent, state)
    if not moved.parameters:
        return
    values = join_private(model, sent, state)
    if not defense.gradient and not defense.loss:  # the other gradients are not needed
        copied = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for name, parameter in copied.named_parameters():
                parameter.copy_(values.parameters[name])
        model, values = copied, ModelState(moved.parameters, values.buffers)
    public = sent.parameters
    first = LocalStep(model, values, batches[0], plan, state, rng, defense.loss, plan.held(public))
    trained, _, _ = take_steps(first, batches, defense, public=public, still=public, timed=Stopwatch())
    store_private(trained, sent, state)


class _Descent:
    """Steps like ``torch.optim.SGD``, whose constructor takes seconds, since it imports PyTorch's compiler."""

    def __init__(self, parameters: Sequence[Tensor], plan: LocalPlan) -> None:
        self._parameters, self._plan = parameters, plan
        self._momenta: list[Tensor | None] = [None] * len(parameters)

    def step(self) -> None:
        gradients = {place: p.grad for place, p in enumerate(self._parameters) if p.grad is not None}
        places = list(gradients)
        momenta = [self._momenta[place] for place in places]
        with torch.no_grad():
            sgd(
                [self._parameters[place] for place in places],
                list(gradients.values()),
                momenta,
                lr=self._plan.lr,
                momentum=self._plan.momentum,
                nesterov=self._plan.nesterov,
                weight_decay=self._plan.weight_decay,
                dampening=0.0,
                maximize=False,
            )
        for place, momentum in zip(places, momenta, strict=True):
            self._momenta[place] = momentum
