"""Clients that keep their own batch norm, like FedBN (Li et al. 2021), and do not train with the values sent."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fl_privacy.types import ModelState, Observation, Tensors

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

_FAR = 3.0
"""Ratio of a batch norm's median change to the largest change of all other parameters above which it counts as kept:
steps move both alike, and optimizers such as Adam move all parameters about equally."""

_NORM = nn.modules.batchnorm._BatchNorm


def norm_names(model: nn.Module) -> set[str]:
    """Return names of the parameters of batch norm."""
    layers: Mapping[str, _BatchNorm] = {n: m for n, m in model.named_modules() if isinstance(m, _NORM)}
    return {f"{layer}.{own}" if layer else own for layer, m in layers.items() for own, _ in m.named_parameters()}


def moved_apart(change: Tensors, norms: Collection[str]) -> float | None:
    """Return the largest change of batch norm if no step explains it, else ``None``."""
    own = [t.detach().double().abs() for name, t in change.items() if name in norms and t.numel()]
    rest = [float(t.detach().double().abs().max()) for n, t in change.items() if n not in norms and t.numel()]
    if not own or not rest or not 0 < max(rest) < float("inf"):
        return None
    half = max(float(moved.median()) for moved in own)
    return max(float(moved.max()) for moved in own) if half > _FAR * max(rest) else None


def without_kept_norms(observation: Observation) -> tuple[Observation, list[str]]:
    """Return ``observation`` with the batch norm its client trained with, and a sentence if it kept its own.

    Uploaded values of a kept batch norm are taken as sent, up to the client's steps. Values never sent are the initial
    ones. The change of a kept batch norm is not matched.
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
            " attack, and probes, take the values that model= is made with; the clients' own may give away more or"
            " less."
        ]
    if absent:
        return _taken(observation, norms, {}), [
            f"Batch norm is not uploaded: {absent[0]} and {len(absent) - 1} more are missing. The attack takes what was"
            " sent for it; a client that keeps its own, as in FedBN, is read less well by that."
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
