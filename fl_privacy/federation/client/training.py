"""One client's work in a round: defended local training from model to upload, then of its private part."""

import copy
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.defenses.privacy.accounting import promises_privacy
from fl_privacy.federation.client.plain_pass import PlainPass
from fl_privacy.federation.client.private_part import join_private, private_values, store_private
from fl_privacy.progress import counted
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors, Upload

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalResult:
    """An upload and what the client may say of it.

    Attributes:
        upload: all that leaves the client.
        train_loss: mean over the local steps; NaN behind a defense that promises differential privacy: an exact loss
            tells what the noise hides, so that it stays with the client.
        seconds: of the whole update.
        defense_seconds: of the defense's hooks within it; changes of the loss are a part of the pass, not of these.
        bytes_up: of the upload, where they were counted as it came; ``None`` has them counted anew.
    """

    upload: Upload
    train_loss: float
    seconds: float
    defense_seconds: float
    bytes_up: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """What local steps come to.

    Attributes:
        values: parameters and buffers after the last step.
        gradients: of the last step, defended.
        losses: of each step.
    """

    values: ModelState
    gradients: Tensors
    losses: Sequence[Tensor]


class Stopwatch:
    """Adds up the seconds of the calls made through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        """What ``function`` returns."""
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
    """Train on ``batches``, one step each, defended, and make the upload.

    Args:
        model: architecture of the model sent.
        sent: its values; left as they are.
        batches: one for each local step.
        num_examples: how many different examples ``batches`` hold.
        plan: how to train and what to share.
        defense: whose hooks run on the model, each batch, each gradient and the upload.
        state: of this client; private parameters and what the defense keeps are written back into it.
        rng: drawn from by the defense only.
        private_rng: likewise, for the first values of private parts; the same stream in every round.
    """
    started, timed = time.perf_counter(), Stopwatch()
    for model_hook in defense.model:
        model = timed(model_hook, model, state.of_images(tuple(batches[0].inputs.shape[1:])), private_rng)
    values = join_private(model, sent, state)
    shares_gradient, held = plan.shares == "gradient", plan.held(sent.parameters)
    still = sent.parameters if shares_gradient else held
    steps = take_steps(
        model,
        values,
        batches,
        public=sent.parameters,
        still=still,
        plan=plan,
        defense=defense,
        state=state,
        rng=rng,
        timed=timed,
    )
    buffers = steps.values.buffers
    update = _update(steps, sent, shares_gradient, held)
    for upload_hook in defense.upload:
        update = timed(upload_hook, update, state, rng)
    if plan.shares == "weights":
        update = {name: sent.parameters[name] + delta for name, delta in update.items()}
    store_private(steps.values, sent, state)
    shared_buffers = {n: buffers[n] for n in sent.buffers} if plan.buffers == "shared" else {}
    return LocalResult(
        upload=Upload(tensors=update, buffers=shared_buffers, num_examples=num_examples),
        train_loss=math.nan if promises_privacy(defense) else float(torch.stack(list(steps.losses)).mean()),
        seconds=time.perf_counter() - started,
        defense_seconds=timed.seconds,
    )


def _update(steps: Steps, sent: ModelState, shares_gradient: bool, held: Collection[str]) -> Tensors:
    """The gradient of the last step, or the change of the parameters sent; without those ``held`` or whose gradient the
    defense withheld."""
    after = steps.values.parameters
    if shares_gradient:
        return {
            name: g for name in sent.parameters if name not in held and (g := steps.gradients.get(name)) is not None
        }
    return {
        name: after[name] - p for name, p in sent.parameters.items() if name not in held and name in steps.gradients
    }


def take_steps(
    model: nn.Module,
    values: ModelState,
    batches: Sequence[Batch],
    *,
    public: Collection[str],
    still: Collection[str],
    plan: LocalPlan,
    defense: Defense,
    state: ClientState,
    rng: torch.Generator,
    timed: Stopwatch,
) -> Steps:
    """One defended step on each of ``batches`` from ``values``, which are left as they are.

    Args:
        public: names of the parameters that were sent, on whose gradients the defense acts.
        still: names of the parameters that are not moved.
        timed: adds up the seconds of the defense.
    """
    parameters = {name: p.clone().requires_grad_() for name, p in values.parameters.items()}
    buffers: Tensors = values.buffers
    trained = [p for name, p in parameters.items() if name not in still]
    optimizer = _optimizer(trained, plan) if trained else None
    held = plan.held(public)
    losses, gradients = [], dict[str, Tensor]()
    for batch in counted("training step", batches):
        for data_hook in defense.data:
            batch = timed(data_hook, batch, state, rng)  # noqa: PLW2901
        current = ModelState(parameters, buffers)
        step = LocalStep(
            model=model, sent=current, batch=batch, plan=plan, state=state, rng=rng, changes=defense.loss, held=held
        )
        plain = PlainPass(step, defense)
        shared = plain.only(frozenset(public) - held)
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
    moved = {name: p.detach() for name, p in parameters.items()}
    return Steps(values=ModelState(moved, buffers), gradients=gradients, losses=losses)


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
    """Train on ``batches`` what of ``model`` was not sent, and keep it in ``state``.

    Args:
        model: architecture of the client, with its private part.
        sent: the new public values; left as they are.
        batches: one for each local step.
        plan: how to train.
        defense: whose hooks run on each batch, the loss and each gradient.
        state: of this client.
        rng: drawn from by the defense only.
    """
    moved = private_values(model, sent, state)
    if not moved.parameters:
        return
    values = join_private(model, sent, state)
    if not defense.gradient and not defense.loss:  # nobody looks at the other gradients, which need not be computed
        model, values = _holding(model, values), ModelState(moved.parameters, values.buffers)
    steps = take_steps(
        model,
        values,
        batches,
        public=sent.parameters,
        still=sent.parameters,
        plan=plan,
        defense=defense,
        state=state,
        rng=rng,
        timed=Stopwatch(),
    )
    store_private(steps.values, sent, state)


def _holding(model: nn.Module, values: ModelState) -> nn.Module:
    """A copy of ``model`` with ``values`` that does not train."""
    copied = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(values.parameters[name])
    return copied


class _Descent:
    """``torch.optim.SGD``, whose constructor takes seconds of a process, as it imports PyTorch's compiler."""

    def __init__(self, parameters: Sequence[Tensor], plan: LocalPlan) -> None:
        self._parameters, self._plan = parameters, plan
        self._momenta: list[Tensor | None] = [None] * len(parameters)

    def step(self) -> None:
        """Move the parameters that have a gradient."""
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


def _optimizer(parameters: Sequence[Tensor], plan: LocalPlan) -> torch.optim.Optimizer | _Descent:
    if plan.optimizer != "sgd":
        kind = torch.optim.Adam if plan.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr=plan.lr, weight_decay=plan.weight_decay)
    return _Descent(parameters, plan)
