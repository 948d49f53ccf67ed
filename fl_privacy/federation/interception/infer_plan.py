"""Infer a client's settings of local training from an intercepted update."""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.federation.interception.captures import changed
from fl_privacy.models import has_batch_norm
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.types import LocalPlan, ModelState, Observation, Tensors

_OFF = 3.0  # largest accepted ratio between given and estimated learning rate
MOST_COUNTED = 1_000_000  # most local steps accepted from a batch-norm counter, which a client can set freely

_COUNTER, _MEAN = "num_batches_tracked", "running_mean"


def recognize_training(observation: Observation, given: Collection[str] = ()) -> tuple[Observation, list[str]]:
    """Infer the settings of local training from an upload; return the observation with them, and a sentence on each.

    Inferred are the kind of upload, batch norm's mode, the number of steps and the learning rate. ``given``: names of
    settings that the user gave. If the upload contradicts one, a sentence says so, and the inferred value is used,
    except for the learning rate.
    """
    said: list[str] = []
    plan = _shares(observation, observation.plan, given, said)
    observation, kept = without_kept_norms(replace(observation, plan=plan))
    said += kept
    observation = replace(observation, plan=_batch_norm(observation, said))
    observation = replace(observation, plan=_steps(observation, given, said))
    return replace(observation, plan=_learning_rate(observation, given, said)), said


def describe_model(model: nn.Module) -> list[str]:
    """Return a sentence for an auditor on the dropout in ``model``; an empty list without dropout."""
    masks = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    if not masks:
        return []
    return [
        f"The model has {len(masks)} layer{'s' * (len(masks) > 1)} of dropout, whose masks only the client knows:"
        " the attack matches gradients without them, and reconstructs less than one that would guess them."
    ]


def share_of_sent(observation: Observation) -> float:
    """Return the share of the sent model in the upload: about 1 for uploaded weights, 0 for a gradient or delta."""
    sent, norms = observation.sent.parameters, norm_names(observation.model)
    both = [(n, t) for n, t in observation.upload.tensors.items() if n in sent]
    both = [pair for pair in both if pair[0] not in norms] or both
    pairs = [(t.double().flatten(), sent[n].double().flatten()) for n, t in both]
    length = sum(float(s @ s) for _, s in pairs)
    return sum(float(t @ s) for t, s in pairs) / length if length else 0.0


def _shares(observation: Observation, plan: LocalPlan, given: Collection[str], said: list[str]) -> LocalPlan:
    if not any(float(t.abs().max()) > 0 for t in observation.sent.parameters.values() if t.numel()):
        return plan
    weights = share_of_sent(observation) > 0.5
    if weights and plan.shares != "weights":
        said.append(
            f"Uploads were said to be a {plan.shares}, but are the values sent plus a step: they are taken as weights."
        )
        return replace(plan, shares="weights")
    if not weights and plan.shares == "weights":
        said.append(
            "Uploads are not the values sent plus a small step: they are taken as the change of the weights (if"
            " clients upload gradients, set plan=dict(shares='gradient'))."
        )
        return replace(plan, shares="delta")
    if weights and "shares" not in given:
        said.append("Uploads are the values sent plus a step: weights, whose change holds the gradient.")
    return plan


def _moved(observation: Observation, last: str) -> Mapping[str, torch.Tensor]:
    sent, held = observation.sent.buffers, observation.upload.buffers
    names = [name for name in held if name.rpartition(".")[2] == last and name in sent]
    return {name: held[name].double() - sent[name].double() for name in names}


def _batch_norm(observation: Observation, said: list[str]) -> LocalPlan:
    plan = observation.plan
    if not has_batch_norm(observation.model):
        return plan
    if not (moved := _moved(observation, _MEAN)):
        said.append("Batch norm: its running statistics were not uploaded.")
        return replace(plan, buffers="withheld")
    training = any(bool(change.any()) for change in moved.values())
    mode: Literal["train", "eval"] = "train" if training else "eval"
    said.append(
        "Batch norm ran in training mode, and its running statistics were uploaded: they reveal mean and variance of"
        " the client's images in every layer, which no clipping or noise on the weights hides."
        if training
        else "Batch norm ran in evaluation mode: its running statistics came back as they were sent."
    )
    return replace(plan, batch_norm=mode, probe_batch_norm=mode, buffers="shared")


def _steps(observation: Observation, given: Collection[str], said: list[str]) -> LocalPlan:
    plan, number = observation.plan, observation.upload.num_examples
    taken = min([int(change.max()) for change in _moved(observation, _COUNTER).values() if change.numel()], default=0)
    if plan.shares == "gradient" or taken < 1:
        return plan
    if taken > MOST_COUNTED or number < 1:
        said.append(f"Counters of batch norm say {taken} local steps on {number} examples, which is not believed.")
        return plan
    expected = number_of_steps(number, plan)
    if taken > 1:
        said.append(f"Clients took {taken} local steps on {number} examples, which an attack has to replay.")
    if taken == expected:
        return plan
    if {"epochs", "steps", "batch_size"} & set(given):
        said.append(f"The plan says {expected} local steps on {number} examples, but batch norm counted {taken}.")
    if "batch_size" in given:
        passes, rest = divmod(taken, math.ceil(number / min(plan.batch_size or number, number)))
        return replace(plan, epochs=None, steps=taken) if rest else replace(plan, epochs=passes, steps=None)
    passes = (plan.epochs or 1) if "epochs" in given else 1
    size = math.ceil(number * passes / taken)
    if math.ceil(number / size) * passes == taken:
        return replace(plan, epochs=passes, steps=None, batch_size=size)
    return replace(plan, epochs=None, steps=taken)


def _learning_rate(observation: Observation, given: Collection[str], said: list[str]) -> LocalPlan:
    plan, found = observation.plan, estimated_lr(observation)
    if plan.shares == "gradient" or found is None:
        return plan
    if "lr" not in given:
        said.append(f"The learning rate was not given; the output layer's bias implies about {found:.1g}.")
        return replace(plan, lr=found)
    if not found / _OFF <= plan.lr <= found * _OFF:
        said.append(
            f"The plan's learning rate is {plan.lr:g}, but the output layer's bias implies about {found:.1g}:"
            " is it the client's, or does a defense scale the update?"
        )
    return plan


def at_typical_rates(observations: Sequence[Observation]) -> Sequence[Observation]:
    """Set learning rates inferred from one step on one example to the round's median, if within a factor of three."""
    rates: dict[int, list[float]] = {}
    for observation in observations:
        if _is_one_step_on_one_example(observation):
            rates.setdefault(observation.id.round, []).append(observation.plan.lr)
    typical = {round: median(found) for round, found in rates.items()}

    def change(observation: Observation) -> Observation:
        plan, rate = observation.plan, typical.get(observation.id.round)
        if rate is None or not _is_one_step_on_one_example(observation) or not rate / _OFF <= plan.lr <= rate * _OFF:
            return observation
        return replace(observation, plan=replace(plan, lr=rate))

    return changed(observations, change)


def _is_one_step_on_one_example(observation: Observation) -> bool:
    return observation.upload.num_examples == 1 and number_of_steps(1, observation.plan) == 1


def estimated_lr(observation: Observation) -> float | None:
    """Estimate the learning rate of one SGD step on one example; ``None`` for other training or without output bias."""
    one_step, classes = _is_one_step_on_one_example(observation), observation.num_classes
    modules = observation.model.named_modules()
    layers = [name for name, m in modules if isinstance(m, nn.Linear) and m.out_features == classes]
    bias, known = f"{layers[-1]}.bias" if layers else "", dict(observation.model.named_parameters())
    if (
        not one_step
        or observation.plan.optimizer != "sgd"
        or bias not in known
        or bias not in observation.upload.tensors
    ):
        return None
    step = -observation.update()[bias].double()
    label = int(step.argmin())
    chance = 1 - float(_outputs(observation)[label])
    found = float(step.clamp_min(0).sum()) / max(chance, 1e-3)
    return found if math.isfinite(found) and found > 0 else None


@torch.no_grad()
def _outputs(observation: Observation) -> torch.Tensor:
    sent: ModelState = observation.sent
    images = torch.rand((16, *observation.input_shape), generator=torch.Generator().manual_seed(0))
    model = copy.deepcopy(observation.model).eval()
    return functional_call(model, {**sent.parameters, **sent.buffers}, (images,)).softmax(1).mean(0)


_FAR = 3.0  # a batch norm counts as kept if its median change is over this many times the largest of other parameters


def norm_names(model: nn.Module) -> set[str]:
    """Return names of the parameters of batch norm."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return {f"{layer}.{own}" if layer else own for layer, m in layers for own, _ in m.named_parameters()}


def moved_apart(change: Tensors, norms: Collection[str]) -> float | None:
    """Return batch norm's largest absolute change if the client seems to keep its batch norm (FedBN), else ``None``.

    It seems so if batch norm changed far more than all other parameters. ``change``: change of each parameter in a
    round. ``norms``: names of the parameters of batch norm.
    """
    own = [t.detach().double().abs() for name, t in change.items() if name in norms and t.numel()]
    rest = [float(t.detach().double().abs().max()) for n, t in change.items() if n not in norms and t.numel()]
    if not own or not rest or not 0 < max(rest) < float("inf"):
        return None
    half = max(float(moved.median()) for moved in own)
    return max(float(moved.max()) for moved in own) if half > _FAR * max(rest) else None


def without_kept_norms(observation: Observation) -> tuple[Observation, list[str]]:
    """Put the batch norm that a client really trained with into ``observation``; also return sentences on it.

    A client that keeps its batch norm (FedBN) trained with other values than the server's: those it uploads, else those
    sent, else the model's initial ones. Attacks then do not compare how batch norm changed.
    """
    norms = norm_names(observation.model)
    if not norms:
        return observation, []
    upload, sent = observation.upload, observation.sent
    absent = sorted(norms - upload.tensors.keys())
    if absent and norms - sent.parameters.keys():
        values = dict(observation.model.named_parameters(remove_duplicate=False))
        assumed = {name: values[name].detach() for name in norms if name not in sent.parameters}
        return _taken(observation, norms, assumed), [
            f"Batch norm stays with the clients: {absent[0]} and {len(absent) - 1} more are not in the messages. The"
            " attack, and probes, take the values that model= is made with; the clients' own may leak more or less."
        ]
    if absent:
        return _taken(observation, norms, {}), [
            f"Batch norm is not uploaded: {absent[0]} and {len(absent) - 1} more are missing. The attack uses the"
            " values sent; it reconstructs less from a client that keeps its own, as in FedBN."
        ]
    moved = moved_apart({n: t for n, t in observation.update().items() if n in sent.parameters}, norms)
    if moved is None:
        return observation, []
    delta = observation.plan.shares != "weights"
    own: dict[str, Tensor] = {n: sent.parameters[n] + upload.tensors[n] if delta else upload.tensors[n] for n in norms}
    return _taken(observation, norms, own), [
        f"Clients keep their own batch norm, as in FedBN: it moved by up to {moved:.2g}, which the steps on all other"
        " values do not explain. The attack takes the uploaded values of batch norm for those that trained."
    ]


def _taken(observation: Observation, norms: Collection[str], values: Mapping[str, Tensor]) -> Observation:
    sent, upload = observation.sent, observation.upload
    parameters = {**sent.parameters, **values}
    order = [name for name, _ in observation.model.named_parameters(remove_duplicate=False) if name in parameters]
    known = {name: parameters[name] for name in order} | parameters
    kept = {name: tensor for name, tensor in upload.tensors.items() if name not in norms}
    return replace(observation, sent=ModelState(known, sent.buffers), upload=replace(upload, tensors=kept))
