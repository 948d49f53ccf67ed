"""Membership traps (Pichler et al. 2022): neurons that fire only for one candidate image each."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.first_layer import FirstLayer
from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.attacks.malicious import server_attack
from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.choose_method import decayed, number_of_steps
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.rng import derive_generator
from fl_privacy.types import ModelState, Observation, Reconstruction

_ULPS = 4.0  # roundings of a weight in each local step by which weight decay may differ from its computation
_ABOVE_NOISE = 2.0  # multiple of the largest change of an idle weight above which a neuron fired


@dataclass(frozen=True, kw_only=True)
class MembershipTrap(server_attack.ServerAttack):
    """Crafts second-layer neurons that fire for one candidate image and no other (Pichler et al. 2022).

    Pairs of first-layer ReLUs, relu(a x - a x0) + relu(a x0 - a x), measure the distance from the candidate x0 along
    random directions a. A second-layer neuron fires if that distance is below a threshold; its bias gradient is zero
    unless the image was in the batch.

    Attributes:
        directions: number of measured directions for each candidate.
        closeness: distance below which an image counts as the candidate, in standard deviations over public images.
        first: index of the first candidate among the server's images; the layers' widths limit their number.
    """

    directions: int = 4
    closeness: float = 1e-3
    first: int = 0
    seed: int = 0

    level = server_attack.ThreatLevel.PARAMETERS
    description = (
        "The server sent two layers that fire for images that it holds, one neuron each, and infers which of them the"
        " client trains on (membership traps). Half of these are the clients' data."
    )
    asks_of_members = True

    def __post_init__(self) -> None:
        whole("server.directions", self.directions, at_least=1, example=4)
        number("server.closeness", self.closeness, above=0, example=1e-3)
        whole("server.first", self.first, at_least=0, example=0)
        whole("server.seed", self.seed, at_least=0, example=0)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        server_attack.expect_whole(model, state, "Membership traps")
        traps = _TrapLayers.of(model, state, tuple(self.public.shape[1:]))
        first, asked, each = traps.first, self.asked(traps), 2 * self.directions
        count = len(asked)
        weight = torch.zeros_like(state.parameters[first.weight], dtype=torch.float64)
        bias = torch.zeros(len(weight), dtype=torch.float64)
        rows = torch.randn(count, self.directions, weight.shape[1], generator=derive_generator(self.seed, "trap"))
        rows = rows.double() / weight.shape[1] ** 0.5
        at = torch.einsum("nkp,np->nk", rows, asked.double().flatten(1))
        weight[: count * each] = torch.stack([rows, -rows], 2).flatten(0, 2)
        bias[: count * each] = torch.stack([-at, at], 2).flatten()
        spread = torch.einsum("nkp,mp->nkm", rows, self.public.double().flatten(1)).std(2).sum(1)
        behind = torch.zeros_like(state.parameters[traps.weight], dtype=torch.float64)
        behind[:count, : count * each] = -torch.eye(count, dtype=torch.float64).repeat_interleave(each, 1)
        margin = torch.full((len(behind),), -1.0, dtype=torch.float64)
        margin[:count] = self.closeness * spread
        seen, like = weight / first.scale.double(), state.parameters[first.weight]
        crafted = {
            first.weight: seen.to(like),
            first.bias: (bias - seen @ first.shift.double()).to(like),
            traps.weight: behind.to(like),
            traps.bias: margin.to(like),
        }
        return ModelState({**state.parameters, **crafted}, state.buffers)

    def read(self, observation: Observation) -> Reconstruction:
        traps = _TrapLayers.of(observation.model, observation.sent, observation.input_shape)
        if traps.bias not in observation.upload.tensors:
            return failed(observation, f"The gradient of {traps.bias} is expected, but was withheld; use defense=none.")
        fired, noise = self.fired(observation, traps)
        found, upload, plan = self.asked(traps)[fired], observation.upload, observation.plan
        alone = plan.shares == "gradient" or number_of_steps(upload.num_examples, plan) == 1
        sure = alone and not noise and len(found) <= upload.num_examples
        return server_attack.reconstruction_of(observation, found, torch.full((len(found),), sure))

    def members(self, observation: Observation) -> Tensor:
        return self.fired(observation, _TrapLayers.of(observation.model, observation.sent, observation.input_shape))[0]

    def asked(self, traps: "_TrapLayers") -> Tensor:
        return self.public[self.first : self.first + min(traps.widths[0] // (2 * self.directions), traps.widths[1])]

    def fired(self, observation: Observation, traps: "_TrapLayers") -> tuple[Tensor, float]:
        """Return ``True`` for candidates whose neuron fired, and noise: the largest change of an unused weight."""
        count = len(self.asked(traps))
        used = dict.fromkeys(traps.first.names, 2 * self.directions * count)
        used |= {traps.weight: count, traps.bias: count}
        there = observation.upload.tensors
        idle = [_net_changes(observation, name)[rows:].flatten() for name, rows in used.items() if name in there]
        noise = float(torch.cat(idle).max()) if sum(map(len, idle)) else 0.0
        return _net_changes(observation, traps.bias)[:count] > _ABOVE_NOISE * noise, noise


def _net_changes(observation: Observation, name: str) -> Tensor:
    plan, update = observation.plan, observation.update()[name].double()
    if plan.shares == "gradient" or not plan.weight_decay:
        return update.abs()
    sent = observation.sent.parameters[name]
    steps = number_of_steps(observation.upload.num_examples, plan)
    idle = (decayed(sent, plan, steps) - sent).double()
    rounding = _ULPS * steps * torch.finfo(sent.dtype).eps * (sent.abs() + idle.abs())
    apart = (update - idle).abs()
    return torch.where(apart > rounding, apart, 0.0)


@dataclass(frozen=True, eq=False)
class _TrapLayers:
    first: FirstLayer
    weight: str  # of the second layer
    bias: str
    widths: tuple[int, int]

    @classmethod
    def of(cls, model: nn.Module, state: ModelState, input_shape: tuple[int, ...]) -> "_TrapLayers":
        first = server_attack.first_layer(model, state, input_shape, "Membership traps")
        linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.ReLU)}
        with torch.no_grad(), leaving(linear) as calls:
            model.eval()(torch.zeros(1, *input_shape).to(next(model.parameters())))
        if [type(call.module) for call in calls[:4]] != [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]:
            raise UserError(
                "Membership traps: two fully connected layers with a ReLU each are expected, but there are others; use"
                " model=mlp."
            )
        weight = f"{calls[2].name}.weight"
        widths = len(state.parameters[first.weight]), len(state.parameters[weight])
        return cls(first, weight, f"{calls[2].name}.bias", widths)
