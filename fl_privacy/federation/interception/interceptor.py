"""Turn clients' replies into observations, with an attacker's knowledge and inside information."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.func import functional_call

from fl_privacy.checks import one_of
from fl_privacy.defenses import ClientState
from fl_privacy.defenses._split_fed import draw_own
from fl_privacy.errors import UserError
from fl_privacy.federation.client import Client
from fl_privacy.federation.replay import Replay
from fl_privacy.federation.server import mean_change
from fl_privacy.federation.training import join_private, private_values
from fl_privacy.models import Front, behind_activation, cut_layer
from fl_privacy.models.gradients import set_mode
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

States = Callable[[int], ClientState]  # client id -> its private state; available in simulations only
ACTIVATION = "activation"  # value of ``features_at`` for the module behind the private layers' activation
MOST_TRAINED = 4  # most locally trained models held at once


def no_states(client: int) -> ClientState:
    """Raise ``UserError``: the states of clients on other machines are not available."""
    raise UserError(
        f"A colluding client is expected where the clients are simulated, but client {client} runs elsewhere;"
        " use backend=loop, flower or ray, or set threat_model.colluder=null and threat_model.knows_features=false."
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedSideInformation:
    """Inside knowledge of an attacker about simulated clients with private layers.

    In place of the victim's private layers, the attacker uses those of a colluding client or, if none colludes, the
    architecture's initial values, shuffled. ``UserError`` if ``features_at`` names no module of the clients' model, or
    if ``features_of`` is ``trained`` and no client colludes.

    Attributes:
        colluder: client that works with the server, if any.
        knows_features: ``True`` if the attacker sees the output of the victim's private layers.
        features_at: module whose inputs are the features; ``None``: the first public layer; ``activation``: the module
            after the activation of the private layers.
        features_of: model that computes the features: as ``sent``, or as ``trained`` by the victim, both with the
            victim's private layers. With ``trained``, the attacker uses the layers that the colluder trained (FDL-PP,
            Algorithm 3).
        batch_size: number of examples in an attacked batch that does not train the model.
        trainers: clients with the examples of the training, if ``clients`` have other examples to attack.
    """

    clients: Mapping[int, Client]
    colluder: int | None = None
    knows_features: bool = False
    features_at: str | None = None
    features_of: Literal["sent", "trained"] = "sent"
    batch_size: int = 1
    seed: int = 0
    trainers: Mapping[int, Client] | None = None
    _models: dict[int, nn.Module] = field(default_factory=dict, init=False, repr=False)
    _trained: dict[tuple[int, int], tuple[ModelState, ModelState]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.knows_features:
            return
        if self.features_of == "trained" and self.colluder is None:
            raise UserError(
                "threat_model.features_of=trained expects a client whose own model stands in for the victim's, but"
                " there is none; set threat_model.colluder."
            )
        if self.features_at in (None, ACTIVATION):
            return
        model = next(iter(self.clients.values())).private_part(ModelState({}, {}), ClientState())[0]
        names = [name for name, _ in model.named_modules() if name]
        one_of("threat_model.features_at", self.features_at, [ACTIVATION, *names])

    def __call__(self, observation: Observation, *, states: States) -> Observation:
        model, values = self._stand_in(observation.model, observation.sent, states)
        informed = replace(observation, model=model).given(private=values, colluder=self.colluder)
        if not self.knows_features:
            return informed
        id, sent = observation.id, observation.sent
        victim, state = self.clients[id.client], states(id.client)
        scratch = ClientState(dict(state.tensors))
        replay = Replay(client=victim, victim=id, sent=sent, state=scratch, batch_size=self.batch_size)
        architecture, private = victim.private_part(sent, state)
        if self.features_at == ACTIVATION:
            at = behind_activation(architecture, victim.examples.input_shape, sent.parameters)
        else:
            at = self.features_at or cut_layer(architecture, victim.examples.input_shape, sent.parameters)
        held, front = _joined(join_private(architecture, sent, ClientState()), private), None
        if self.features_of == "trained" and self.colluder is not None:
            held = self._after_training(id.client, observation, states)
            front = self._after_training(self.colluder, observation, states)
        features = self._features(victim, Front(architecture, at), held, replay.transformed, observation.plan)
        return informed.given(features=features, features_at=at if self.features_at else None, front=front)

    def _after_training(self, client: int, observation: Observation, states: States) -> ModelState:
        key, sent = (client, observation.id.round), observation.sent
        if key in self._trained and self._trained[key][0] is sent:
            return self._trained[key][1]
        trainer = (self.trainers or self.clients)[client]
        state = ClientState(dict(states(client).tensors))
        upload = trainer.update(sent, state, round=observation.id.round).upload
        rate = trainer.plan.lr if trainer.plan.shares == "gradient" else 1.0
        changes = mean_change(upload, sent.parameters, trainer.plan)
        moved = {name: sent.parameters[name] + rate * change for name, change in changes.items()}
        public = ModelState({**sent.parameters, **moved}, {**sent.buffers, **upload.buffers})
        trained = _joined(public, trainer.private_part(public, state)[1])
        while len(self._trained) >= MOST_TRAINED:
            self._trained.pop(next(iter(self._trained)))
        self._trained[key] = sent, trained
        return trained

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
        self, victim: Client, front: Front, held: ModelState, examples: Batch, plan: LocalPlan
    ) -> torch.Tensor:
        set_mode(front, plan.batch_norm)
        for module in front.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        values = {**held.parameters, **held.buffers}
        inputs = examples.inputs.to(victim.device)
        copied = {f"model.{n}": t.to(victim.device, copy=True) for n, t in values.items()}
        features: torch.Tensor = functional_call(front, copied, (inputs,))
        return features.cpu()


def _joined(one: ModelState, other: ModelState) -> ModelState:
    return ModelState({**one.parameters, **other.parameters}, {**one.buffers, **other.buffers})


Sink = Callable[[Observation], None]
"""Receiver of each observation if Flower runs the rounds: keeps, writes or attacks it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Interceptor:
    """Converts clients' replies to observations, each with what the attacker knows of it.

    ``input_shape``: (C, H, W) of an image, (L,) of the longest text, or (F,) of a row. ``side_information``: attacker's
    inside knowledge, such as a colluding client's private layers, if any.
    """

    model: nn.Module
    plan: LocalPlan
    input_shape: tuple[int, ...]
    num_classes: int
    sink: Sink = lambda observation: None
    knowledge: Knowledge = field(default_factory=Knowledge)
    side_information: SimulatedSideInformation | None = None

    def capture(self, victim: VictimId, *, sent: ModelState, upload: Upload, states: States = no_states) -> None:
        observation = self.observe(victim, sent=sent, upload=upload, states=states)
        if observation is not None:
            self.sink(observation)

    def observe(
        self, victim: VictimId, *, sent: ModelState, upload: Upload, states: States = no_states
    ) -> Observation | None:
        values = sent.parameters
        if any(name in values and t.shape != values[name].shape for name, t in upload.tensors.items()):
            return None
        observation = Observation(
            id=victim,
            model=self.model,
            sent=sent,
            upload=upload,
            plan=self.plan.in_round(victim.round, probe=victim.probe is not None),
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            knowledge=self.knowledge,
        )
        if self.side_information:
            observation = self.side_information(observation, states=states)
        return observation
