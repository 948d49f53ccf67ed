"""Build the observation that attacks need from a client's first step: network, inputs, loss."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fl_privacy.attacks.exact.certificate import CHANGED_BEFORE
from fl_privacy.auditing.instrument.fitted import FromSklearn, InLayers
from fl_privacy.auditing.instrument.keras_layers import FromKeras, adds_channel, is_keras, laid_out
from fl_privacy.auditing.instrument.matching import Matched
from fl_privacy.auditing.instrument.program import (
    Call,
    Own,
    Program,
    ReplayModel,
    connections_of,
    fixed_inputs,
    kinds_in,
    tensors_in,
)
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.data.app_data import find_normalization
from fl_privacy.errors import UserError
from fl_privacy.federation import ServerPlan
from fl_privacy.federation.another_site import seen_by_sites
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.measure.answer import Kind
from fl_privacy.models.losses import CROSS_ENTROPY, Loss, loss_of
from fl_privacy.models.unwrap_model import dequantize, detached_copy, unwrapped
from fl_privacy.rng import streams_put_back
from fl_privacy.types import Knowledge, LocalPlan, ModelState, Observation, Tensors, Upload, VictimId

LEAST_SIDE, FEW_ROWS = 4, 10
"""Smallest side of an image in pixels, and number of rows below which all features share one range."""

NEARLY_AS_ONE = 1e-2  # largest relative error of a gradient of all examples as one batch

MIXED = (
    "The app's loss is replayed as a whole, and batch norm mixes examples in training: no equations are known here for"
    " that, so that only descents were tried. Few or no reconstructed examples are no evidence of protection."
)

OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}  # PyTorch class -> name in a plan

_OWN_LOSS = Loss("the app's own loss", lambda outputs, labels: outputs.mean(), targets="values", takes="rows")
"""Loss of a network that computes the loss itself."""


class NotAttackedError(Exception):
    """Raised if an attack does not apply; the message gives the reason in one line."""


def reason_of(failed: Failure) -> str:
    """Return why an attack gave no result; if the attack itself crashed, the sentence says so."""
    for kind in ("NotAttackedError: ", "UserError: "):
        if failed.reason.startswith(kind):
            return failed.reason.removeprefix(kind).rstrip(".")
    return f"the attack ended with an error of its own, which says nothing about the app ({failed.reason.rstrip('.')})"


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedReply:
    """A client's ``reply`` (arrays by record/name), the training observed before, and what each array holds."""

    reply: dict[str, np.ndarray] = field(repr=False)
    watched: Watched
    matched: Matched

    def tensors(self) -> dict[str, Tensor]:
        held = {**self.reply, **self.matched.decoded}
        own = {name: held[key] for key, name in self.matched.parameters.items()}
        return {name: torch.from_numpy(np.array(a, dtype=np.float32)) for name, a in own.items() if a.dtype.kind == "f"}


def seen_by_site(again: WatchedReply, own: WatchedReply, others: int, plan: ServerPlan) -> WatchedReply:
    """Return the other sites' mean reply as an attacking site infers it from two global models and its ``own`` reply.

    ``again``: true mean reply; the result lacks digits that global models round off, and what the server's ``plan``
    hides. ``others``: number of other sites. ``NotAttackedError`` if the replies share no parameter.
    """
    mine, before = own.tensors(), again.watched.before
    theirs = {name: value for name, value in again.tensors().items() if name in mine and name in before}
    if not theirs:
        raise NotAttackedError("parameters are expected in both sites' uploads, but none is in both; upload the same")
    sent = ModelState({name: before[name].float().reshape(value.shape) for name, value in theirs.items()})
    uploads = {0: Upload(tensors=theirs, num_examples=others)}
    uploads[1] = Upload(tensors={name: mine[name] for name in theirs}, num_examples=1)
    shares: Any = again.matched.shares
    seen = seen_by_sites(sent, uploads, [1], plan, LocalPlan(shares=shares)).tensors
    parameters = {key: name for key, name in again.matched.parameters.items() if name in seen}
    decoded = {**again.matched.decoded, **{key: seen[name].numpy() for key, name in parameters.items()}}
    return replace(again, matched=replace(again.matched, parameters=parameters, decoded=decoded))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProblem:
    """Batch, loss and network of one training step of a client."""

    kind: Kind
    model: ReplayModel  # network whose inputs are scaled to [0, 1]
    loss: Loss  # loss of the network's outputs; their mean if the network computes the loss
    whole: bool  # ``True`` if the network computes the loss itself
    truth: Tensor  # (B, ...) examples in [0, 1]
    labels: Tensor | None  # (B,) classes or (B, K) targets, if the loss takes them separately
    input_shape: tuple[int, ...]
    num_classes: int
    names: dict[str, str]  # name of a parameter in ``Watched`` -> its name in ``model``
    sent: ModelState
    notes: tuple[str, ...] = ()

    def observed(self, number: int, tensors: Tensors, plan: LocalPlan) -> Observation:
        """Build what an attacker observes if upload ``number`` holds ``tensors`` (by observed name) after ``plan``."""
        found = ((self.names[name], value) for name, value in tensors.items() if name in self.names)
        own = {name: laid_out(self.model, name, value) for name, value in found}
        parameters = {name: v for name, v in own.items() if name in self.sent.parameters}
        buffers = {name: v for name, v in own.items() if name in self.sent.buffers}
        if plan.shares == "delta":
            buffers = {name: self.sent.buffers[name] + value for name, value in buffers.items()}
        if not parameters:
            raise NotAttackedError(
                "what is uploaded was not understood: by values, names and places none of its arrays is a parameter of"
                " the network that trains; upload the parameters unencoded"
            )
        given = torch.ones(len(self.truth), 1) if self.whole else None
        return Observation(
            id=VictimId(1, 0, number),
            model=self.model,
            sent=self.sent,
            upload=Upload(tensors=parameters, num_examples=len(self.truth), buffers=buffers),
            plan=plan,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            loss=self.loss,
            knowledge=Knowledge(labels=given),
            notes=tuple(note for note in self.notes if note == CHANGED_BEFORE),
        )

    def observed_reply(self, number: int, reply: WatchedReply, *, uploaded: bool) -> Observation:
        seen = reply.watched
        if uploaded:
            return self.observed(number, reply.tensors(), plan_of(seen, reply.matched, len(self.truth)))
        found = self.observed(number, seen.gradients, gradient_plan(seen))
        with suppress(NotAttackedError):  # running statistics of batch norm leave in any case
            leaving = self.observed_reply(number, reply, uploaded=True).upload
            found = replace(found, upload=replace(found.upload, buffers=leaving.buffers))
        return found


def read_problem(seen: Watched, range_of: Sequence[Tensor]) -> StepProblem:
    """Build the problem that attacks solve from the first observed step; ``NotAttackedError`` if no attack applies.

    ``range_of``: loaded inputs (N, ...), from which the attacker's ranges of values are taken.
    """
    program = seen.program
    if program is None:
        many = f"the gradients of {seen.added} losses are added up before a step, too many to follow; step after fewer"
        raise NotAttackedError(many if seen.added > 1 else "a loss is expected, but none was seen; call backward()")
    first = next((call for call in program.calls if call.part >= 0), None)
    if first is None:
        raise NotAttackedError("a loss of a PyTorch module's outputs is expected, but got another; compute it by one")
    program, variables, batch = _searched(program, _leaves(program, first))
    if is_keras(part := program.parts[first.part]):  # whose channels come last, or are left out
        moved = {n: t.movedim(-1, 1) for n in variables if (t := program.constants[n]).dim() == 4}
        moved |= {n: t[:, None] for n in variables if (t := program.constants[n]).dim() == 3 and adds_channel(part)}
        program = replace(program, constants=dict(program.constants) | moved)
    plain = replace(program, parts=tuple(cleaned(part) for part in program.parts))
    shapes = [tuple(program.constants[n].shape[1:]) for n in variables]
    is_image = len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][0] in (1, 2, 3, 4)
    kind: Kind = "image" if is_image and min(shapes[0][1:]) >= LEAST_SIDE else "row"
    truths = [program.constants[n].float() for n in variables]
    low, scale, notes = _ranges(kind, truths, range_of)
    ranges = list(zip(low, scale, strict=True))
    names = names_in(seen, program, ReplayModel(plain, variables, shapes, ranges, output=None))
    plain = plain.renamed(names)
    inside = replace(seen, before={names.get(name, name): value for name, value in seen.before.items()})
    output, loss, labels = _loss(plain, variables, batch, inside)
    draws = not torch.equal(_made(plain, output, 1), _made(plain, output, 2))
    values = torch.cat([((t - a) / s).flatten(1) for t, a, s in zip(truths, low, scale, strict=True)], 1)
    model = ReplayModel(plain, variables, shapes, ranges, output=output, draws=draws)
    if output is not None and kind == "row":
        still, others = detached_copy(model).eval(), (torch.cat([values, values[:1]]), values[:1])
        with torch.no_grad(), streams_put_back():
            tried = attempt(lambda: [still(one) for one in others])
        if isinstance(tried, Failure):  # nodes of a graph, which come in its number alone
            output, loss, labels = None, _OWN_LOSS, None
            model = ReplayModel(plain, variables, shapes, ranges, output=None, draws=draws)
    notes += _given(model, [*range_of, *truths])
    notes += (CHANGED_BEFORE,) * (seen.drawn or draws) + (MIXED,) * (output is None and _normalizes(seen))
    shape = shapes[0] if kind == "image" else (1, 1, values.shape[1])
    own = dict((*model.named_parameters(), *model.named_buffers()))
    held = ((names[n], laid_out(model, names[n], v)) for n, v in seen.before.items() if n in names)
    before = {name: value for name, value in held if value.shape == own[name].shape}
    parts = (model.named_parameters(), model.named_buffers())
    sent = ModelState(*({name: before.get(name, v.detach().clone()) for name, v in each} for each in parts))
    problem = StepProblem(
        kind=kind,
        model=model,
        loss=loss,
        whole=output is None,
        truth=values.reshape(batch, *shape),
        labels=labels,
        input_shape=shape,
        num_classes=1 if output is None else _width(plain, output),
        names=names,
        sent=sent,
        notes=notes,
    )
    return problem if seen.added < 2 else _added_up(problem, seen)


def _given(model: ReplayModel, rows: Sequence[Tensor]) -> tuple[str, ...]:
    """Return notes on inputs that the attacker knows; for a graph, set the widths of its one-hot features."""
    if model.output is None and connections_of(model) >= 0:
        model.kinds = kinds_in(torch.cat([each for each in rows if each.shape[1:] == model.shapes[0]]))
        return ("The attacker is given each graph's connections, labels and other inputs, but not what its nodes are.",)
    given = fixed_inputs(model.program, model.variables, len(model.program.constants[model.variables[0]]))
    return ("The attacker is given the network's other inputs, such as categories.",) * bool(given)


def _added_up(problem: StepProblem, seen: Watched) -> StepProblem:
    """Scale the loss for an app that adds up several losses' gradients; ``NotAttackedError`` if no factor fits."""
    still, sent = detached_copy(problem.model).train(seen.training), problem.sent
    still.load_state_dict({**sent.parameters, **sent.buffers}, strict=False)
    # values that modules take and the attack does not search for would be given
    program, known = problem.model.program, set(problem.model.variables)
    taken = {number for call in program.calls if call.part >= 0 for number in call.taken}
    values = [program.constants[number] for number in taken - known if number in program.constants]
    if any(value.is_floating_point() and value.dim() > 0 for value in values):
        raise NotAttackedError(f"gradients of {seen.added} losses of different batches are added up; step after each")
    named = ((problem.names[name], value) for name, value in seen.gradients.items() if name in problem.names)
    own = {name: laid_out(problem.model, name, value).flatten() for name, value in named}
    asked = [(p, own[name]) for name, p in still.named_parameters() if name in own and p.requires_grad]
    if not asked:
        raise NotAttackedError("the network's parameters are expected in its optimizer, but it has none; pass them")
    labels = torch.ones(len(problem.truth), 1) if problem.labels is None else problem.labels
    loss, sizes = problem.loss, problem.model.program.sizes
    if problem.labels is not None and len(set(sizes)) > 1:  # each batch has a mean of its own

        def of_each(outputs: Tensor, labels: Tensor) -> Tensor:
            if len(outputs) != sum(sizes):
                return problem.loss.function(outputs, labels)
            each = zip(outputs.split(sizes), labels.split(sizes), strict=True)
            return torch.stack([problem.loss.function(*one) for one in each]).mean()

        loss = replace(loss, function=of_each)
    with streams_put_back():
        value = loss(still(problem.truth), labels)
        parts = torch.autograd.grad(value, [p for p, _ in asked], allow_unused=True, materialize_grads=True)
    there, made = torch.cat([g for _, g in asked]).double(), torch.cat([g.flatten() for g in parts]).double()
    factor = float(there @ made / made.square().sum().clamp_min(1e-30))
    if float((there - factor * made).norm()) > NEARLY_AS_ONE * float(there.norm()) or factor <= 0:
        why = "of batches that batch norm normalizes one by one"
        why = why if _normalizes(seen) else "in a way that was not understood"
        raise NotAttackedError(f"gradients of {seen.added} losses are added up before a step, {why}; step after each")
    note = f"The gradients of {seen.added} losses are added up before the step; they are attacked as one."
    plain = loss.function
    if abs(factor - 1) > NEARLY_AS_ONE:
        loss = replace(loss, function=lambda outputs, labels: factor * plain(outputs, labels))
    return replace(problem, loss=loss, notes=(*problem.notes, note))


def _normalizes(seen: Watched) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return seen.training and any(isinstance(each, kind) for part in seen.modules for each in part.modules())


def _searched(program: Program, leaves: list[int]) -> tuple[Program, list[int], int]:
    """Choose the inputs that attacks reconstruct: those of ``leaves`` (tensor ids) that are continuous.

    Return the program, the chosen ids, and the batch size. Integer inputs become floats in the program, if it still
    runs. ``NotAttackedError`` if no input is continuous.
    """
    whole = {n: t.float() for n in leaves if (t := program.constants[n]).dim() > 1 and not t.is_floating_point()}
    if whole and not any("Embedding" in type(each).__name__ for part in program.parts for each in part.modules()):
        asked = replace(program, constants={**program.constants, **whole})
        runs = [not isinstance(attempt(lambda: _made(each, None)), Failure) for each in (asked, program)]  # noqa: B023
        program = program if runs == [False, True] else asked  # code that counts or indexes by them
    inputs = {n: program.constants[n] for n in leaves}
    batch = next((len(value) for value in inputs.values() if value.dim()), 0)
    variables = [n for n, value in inputs.items() if value.is_floating_point() and value.dim() and len(value) == batch]
    if not variables and any(value.dim() > 1 for value in inputs.values()):
        raise NotAttackedError(
            "words, or other categories, enter the network by their numbers; attacks infer them from rows of the"
            " embedding, which are not uploaded; upload the embedding"
        )
    if not variables or not batch:
        raise NotAttackedError("floating-point inputs are expected, but the network takes none; audit another app")
    return program, variables, batch


def plan_of(seen: Watched, found: Matched, batch: int) -> LocalPlan:
    """Infer the training settings of the observed client; ``NotAttackedError`` if no attack handles its optimizer."""
    if not seen.optimizers:
        raise NotAttackedError(
            "a step of a PyTorch optimizer is expected, but none is made on so few examples, as where the gradients of"
            " several batches are added up before one; step after each batch"
        )
    if max(len(seen.optimizers), len(seen.trained)) > 1:
        raise NotAttackedError(
            "steps of several optimizers, or with settings that change, are not undone; use one, with fixed settings"
        )
    (name, stated), steps = next(iter(seen.optimizers.items()))
    settings, kind = dict(stated), name.removeprefix("DP")
    if kind not in OPTIMIZERS or settings.get("groups", 1) > 1:
        raise NotAttackedError(f"steps of {name} are not undone; use {', '.join(OPTIMIZERS)}")
    return replace(
        gradient_plan(seen),
        steps=steps if found.shares != "gradient" else None,
        batch_size=batch,
        nesterov=bool(settings.get("nesterov", False)),
        **optimizer_in_plan(found.shares, kind, settings),
    )


def optimizer_in_plan(shares: str, kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``LocalPlan`` (training settings) for PyTorch's optimizer class ``kind``."""
    given = {name: float(settings.get(name) or 0.0) for name in ("momentum", "weight_decay")}
    return {"shares": shares, "lr": float(settings["lr"]), "optimizer": OPTIMIZERS[kind], **given}


def gradient_plan(seen: Watched) -> LocalPlan:
    """Return the training settings of a client that uploads the gradient of its first step."""
    mode: Literal["train", "eval"] = "train" if seen.training else "eval"
    return LocalPlan(shares="gradient", batch_norm=mode, probe_batch_norm=mode, mode=mode)


def _leaves(program: Program, call: Call) -> list[int]:
    makers = {number: each for each in program.calls for number in each.outputs}
    found = []
    for taken in call.taken:
        number = taken
        while number not in program.constants and number in makers:
            behind = makers[number].taken
            if len(behind) != 1 or makers[number].part >= 0 or behind == [number]:
                break
            (number,) = behind
        found.append(number)
    return [number for number in dict.fromkeys(found) if number in program.constants]


def _ranges(
    kind: Kind, truths: Sequence[Tensor], range_of: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], tuple[str, ...]]:
    """Return minimum and width of each input's range, from examples ``truths`` and ``range_of``, and notes."""
    if kind == "image":
        every = next((r for r in range_of if r.shape[1:] == truths[0].shape[1:]), truths[0]).float()
        found = find_normalization([(image, 0) for image in every[:256]])
        channels = truths[0].shape[1]
        if found is None:
            return [torch.zeros(1, 1, 1)], [torch.ones(1, 1, 1)], ("Pixels enter the network unnormalized, in [0, 1].",)
        mean, std = (torch.tensor(v).view(-1, 1, 1).expand(channels, 1, 1).clone() for v in (found.mean, found.std))
        said = (
            f"Pixels are normalized before the network: {found.in_words()}, inferred from the least and largest values."
        )
        return [-mean / std], [1 / std], (said,)
    low, scale = [], []
    for truth in truths:
        alike = [r.reshape(len(r), *truth.shape[1:]) for r in range_of if r[0].numel() == truth[0].numel()]
        every = torch.cat([*alike, truth]).float()
        if len(every) < FEW_ROWS:  # too few for a range of each feature
            every = every.reshape(-1, *[1] * (truth.dim() - 1)).expand(-1, *truth.shape[1:])
        width = every.amax(0) - every.amin(0)
        low.append(every.amin(0))
        scale.append(torch.where(width > 1e-6, width, torch.ones_like(width)))
    return low, scale, ("The attacker knows the range of each feature, as from a public schema.",)


def _loss(
    program: Program, variables: Sequence[int], batch: int, seen: Watched
) -> tuple[int | None, Loss, Tensor | None]:
    """Separate a recorded ``program`` into network and loss; return the id of the network's output, loss, targets.

    If impossible, id and targets are ``None``, and the network outputs the loss. ``variables``: ids of reconstructed
    inputs. ``batch``: number of examples.
    """
    modules = [place for place, call in enumerate(program.calls) if call.part >= 0]
    made = {number for place in modules for number in program.calls[place].outputs}
    later = program.calls[modules[-1] + 1 :]
    taken = [number for call in later for number in call.taken]
    outputs = [number for number in dict.fromkeys(taken) if number in made]
    targets = [n for n in dict.fromkeys(taken) if n in program.constants and program.constants[n].shape[:1] == (batch,)]
    if len(targets) > 1:  # class weights, or copies of parameters, may have the batch's length
        loaded = [tensor for each in seen.batches for tensor in tensors_in(each)]
        alike = {n: [t for t in loaded if t.dtype == program.constants[n].dtype] for n in targets}
        targets = [n for n in targets if any(torch.equal(program.constants[n], tensor) for tensor in alike[n])]
    reaches = program.depends_on(set(variables)) - made
    if len(outputs) != 1 or len(targets) != 1 or targets[0] in reaches or set(variables) & set(taken):
        return None, _OWN_LOSS, None
    output, target = outputs[0], targets[0]
    labels = program.constants[target]
    try:
        width = _width(program, output)
        from_output, asked = program.depends_on({output}), program.depends_on({target})
        used = [call for call in later if from_output.intersection(call.taken) and asked.intersection(call.taken)]
        if len(later) == 1 and used[0].is_plain_cross_entropy:
            return output, CROSS_ENTROPY, labels
        target, labels = _as_compared(program, used[0], asked - from_output, target)
        if labels.shape == (batch, width) and width > 1 and not labels.is_floating_point():
            labels = labels.float()  # whole numbers would be taken for classes
        bounded = any(call.function is F.binary_cross_entropy for call in later)  # raises for targets outside of [0, 1]

        def replayed(outputs: Tensor, labels: Tensor) -> Tensor:
            labels = labels.clamp(0, 1) if bounded and labels.is_floating_point() else labels
            shaped = outputs if program_dim[0] > 1 else outputs.squeeze(1)
            if labels.dim() > target_dim and labels.shape[-1] == 1:
                labels = labels.squeeze(-1)  # otherwise losses compare each output with each target
            labels = labels.reshape(*labels.shape, *[1] * (target_dim - labels.dim()))  # as in Keras's columns
            return program.run({output: shaped, target: labels}, (), own, after=modules[-1])

        target_dim, program_dim = labels.dim(), [_made(program, output).dim()]
        own = _without_pull(program, seen, modules[-1])
        name = getattr(used[0].function, "__name__", "the app's own loss").replace("_", " ") if used else "the app's"
        like = next(each for each in seen.before.values() if each.is_floating_point())
        return output, replace(loss_of(replayed, width, like), name=name), labels
    except (UserError, RuntimeError, ValueError, TypeError, IndexError, KeyError):
        return None, _OWN_LOSS, None


def _as_compared(program: Program, call: Call, asked: set[int], target: int) -> tuple[int, Tensor]:
    taken, labels = asked.intersection(call.taken), program.constants[target]
    if len(taken) == 1 and (number := taken.pop()) != target:
        made = _made(program, number)
        if made.is_floating_point() and made.shape[:1] == (len(labels),):
            return number, made
    return target, labels


def _without_pull(program: Program, seen: Watched, after: int) -> dict[str, Tensor]:
    """Return parameters that the loss uses after the module call ``after``; ``ValueError`` if it penalizes them."""
    later = program.calls[after + 1 :]
    outputs = {n: _made(program, n) for call in program.calls[: after + 1] for n in call.outputs if call.part >= 0}
    named = [leaf.name for call in later for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Own)]
    own = {name: seen.before[name].clone().requires_grad_() for name in dict.fromkeys(named)}
    if not own:
        return {}
    loss = program.run(outputs, (), own, after=after)
    pulls = torch.autograd.grad(loss, list(own.values()), allow_unused=True) if loss.requires_grad else ()
    if any(pull is not None and pull.any() for pull in pulls):
        raise ValueError("a penalty on parameters has a gradient of its own")
    return {name: value.detach() for name, value in own.items()}


def _made(program: Program, output: int | None, seed: int = 0) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [copy.deepcopy(part).eval() for part in program.parts]
        own = {f"parts.{k}.{name}": p for k, part in enumerate(parts) for name, p in part.named_parameters()}
        return program.run({}, parts, own, until=output)


def _width(program: Program, output: int) -> int:
    return torch.atleast_1d(_made(program, output))[:1].numel()


def cleaned(part: nn.Module) -> nn.Module:
    """Copy a module without wrappers and third-party hooks; Keras and scikit-learn networks are rebuilt in PyTorch."""
    if isinstance(part, FromSklearn):
        return InLayers(part)
    if is_keras(part):
        try:
            return FromKeras(part)
        except UserError as error:
            raise NotAttackedError(str(error)) from error
    inner = unwrapped(part)
    while (within := getattr(inner, "_module", None)) is not None and isinstance(within, nn.Module):
        inner = within
    copied = detached_copy(inner)
    dequantize(copied)
    for module in copied.modules():
        for hooks in (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks):
            hooks.clear()
        for key, hook in list(module._forward_pre_hooks.items()):
            if not isinstance(getattr(hook, "name", None), str):
                del module._forward_pre_hooks[key]
    return copied


def names_in(seen: Watched, program: Program, model: nn.Module) -> dict[str, str]:
    """Map each observed parameter name to the name in ``model``, the network rebuilt from the recorded ``program``."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    found = {}
    for place, part in enumerate(program.parts):
        inside = next((f"parts.{k}." for k, module in enumerate(seen.modules) if module is part), None)
        for name in () if inside is None else [name for name in seen.before if name.startswith(inside)]:
            rest = name.removeprefix(str(inside))
            rest = getattr(model.parts[place], "named", {}).get(rest, rest)  # type: ignore[index]
            for prefix in ("_module.", "module.", "_orig_mod."):
                if f"parts.{place}.{rest}" not in own:
                    rest = rest.removeprefix(prefix)
            if f"parts.{place}.{rest}" in own:
                found[name] = f"parts.{place}.{rest}"
    return found
