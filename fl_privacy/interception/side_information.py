"""What an attacker with help from inside is told beside the upload."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn
from torch.func import functional_call

from fl_privacy.defenses import ClientState
from fl_privacy.defenses.private_layers.split import draw_own
from fl_privacy.errors import UserError
from fl_privacy.federation.client import Client, Replay
from fl_privacy.federation.client.private_part import join_private, private_values
from fl_privacy.gradients import set_mode
from fl_privacy.models import Front, cut_layer
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation

States = Callable[[int], ClientState]
"""Client id -> what it keeps for itself at the moment; only a simulation can look."""


class SideInformation(Protocol):
    """Adds to an observation what the attacker knows from inside the federation."""

    @property
    def clients(self) -> Mapping[int, Client]: ...

    def __call__(self, observation: Observation, *, states: States) -> Observation:
        """``observation`` with what is told; ``states`` are of before the update."""
        ...


def no_states(client: int) -> ClientState:
    """Where clients run elsewhere, nobody can look into them."""
    raise UserError(
        f"A colluding client is simulated where the clients are, but client {client} runs elsewhere;"
        " use backend=loop, flower or ray, or set threat_model.colluder=null and threat_model.knows_features=false."
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedSideInformation:
    """What the simulated clients can tell of: completes observations where these keep a part of the model.

    Private layers of a colluding client stand in for those of the victims; without one, values of the attacker's own
    draw do: those that the architecture was made with, in another order, as a client draws its own.

    Attributes:
        clients: the simulated clients.
        colluder: which of them works with the server, if any.
        knows_features: whether the attacker sees what the victim's private layers make of its examples.
        features_at: the module whose input these are; ``None`` is the first public layer.
        batch_size: of the victims that are probed.
        seed: of the attacker's own draw.
    """

    clients: Mapping[int, Client]
    colluder: int | None = None
    knows_features: bool = False
    features_at: str | None = None
    batch_size: int = 1
    seed: int = 0
    _models: dict[int, nn.Module] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, observation: Observation, *, states: States) -> Observation:
        """``observation`` with what is told, as it is at the moment."""
        model, values = self._stand_in(observation.model, observation.sent, states)
        told = replace(observation, model=model).told(private=values, colluder=self.colluder)
        if not self.knows_features:
            return told
        id, sent = observation.id, observation.sent
        victim, state = self.clients[id.client], states(id.client)
        scratch = ClientState(dict(state.tensors))
        replay = Replay(client=victim, victim=id, sent=sent, state=scratch, batch_size=self.batch_size)
        features = self._features(victim, sent, state, replay.transformed, observation.plan)
        return told.told(features=features, features_at=self.features_at)

    def _stand_in(self, model: nn.Module, sent: ModelState, states: States) -> tuple[nn.Module, ModelState | None]:
        if self.colluder is None:
            hook = draw_own(lambda own: [name for name, _ in own.named_parameters() if name not in sent.parameters])
            drawn = hook(model, ClientState(), derive_generator(self.seed, "stand-in"))
            values = private_values(drawn, sent, ClientState())
            return model, values if values.parameters or values.buffers else None
        inside, values = self.clients[self.colluder].private_part(sent, states(self.colluder))
        return self._models.setdefault(self.colluder, inside), values

    @torch.no_grad()
    def _features(
        self, victim: Client, sent: ModelState, state: ClientState, examples: Batch, plan: LocalPlan
    ) -> torch.Tensor:
        model, private = victim.private_part(sent, state)
        shape = victim.examples.input_shape
        front = Front(model, self.features_at or cut_layer(model, shape, sent.parameters))
        set_mode(front, plan.batch_norm)
        for module in front.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        values = join_private(model, sent, ClientState())
        held = {**values.parameters, **values.buffers, **private.parameters, **private.buffers}
        inputs = examples.inputs.to(victim.device)
        copied = {f"model.{n}": t.to(victim.device, copy=True) for n, t in held.items()}
        features: torch.Tensor = functional_call(front, copied, (inputs,))
        return features.cpu()
