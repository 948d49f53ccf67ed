"""Look up the originals behind an update, for scoring only."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.effects import Part, Summed
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, Replay, examples_behind
from fl_privacy.measure.matching import hard_labels
from fl_privacy.rng import derive_generator
from fl_privacy.runs.config.settings import RunSettings
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Upload, VictimId

ClientStates = defaultdict[int, ClientState]
"""States of simulated clients by id; users of a state share the examples that a defense made."""

_AT_ONCE = 256
"""Images converted to floats at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth:
    """Looks up victims in the simulated clients' data, and replays their uploads; none of it is ever sent.

    A probed batch has ``batch_size`` examples; ``states`` are the clients' at the upload.
    """

    clients: Mapping[int, Client]
    batch_size: int
    states: ClientStates = field(default_factory=lambda: defaultdict(ClientState))
    _replays: dict[VictimId, Replay] = field(default_factory=dict, init=False, repr=False)

    def batch(self, victim: VictimId) -> Batch:
        """Return the examples behind ``victim``, or the client's nearest own images if a defense replaces them."""
        client, state = self.clients[victim.client], self.states[victim.client]
        batch = examples_behind(client, victim, state, batch_size=self.batch_size)
        return _nearest(client, batch) if client.defense.examples else batch

    def replay(self, observation: Observation) -> Replay:
        """Replay an upload with the same random streams: the model's inputs, and the undefended update.

        The replays of the last round are cached, since labels and all attackers' scores need them.
        """
        id = observation.id
        if any(known.round != id.round for known in self._replays):
            self._replays.clear()
        if id not in self._replays:
            self._replays[id] = Replay(
                client=self.clients[id.client],
                victim=id,
                sent=observation.sent,
                state=self.states[id.client],
                batch_size=self.batch_size,
            )
        return self._replays[id]


def sees_other_images(defense: Defense, plan: LocalPlan, uploads: str) -> bool:
    """Return ``True`` if the model sees other images than the originals in a ``probe`` or an ``update``."""
    augmented = plan.augments if uploads == "update" else plan.augment_probes
    return bool(defense.examples or defense.data) or augmented


def _nearest(client: Client, batch: Batch) -> Batch:
    """Return the client's images nearest to those of ``batch``, of the same classes if it has some."""
    labels = hard_labels(batch.labels)
    own = client.examples.labels[client.indices].to(labels.device)
    nearest = torch.empty_like(batch.inputs)
    for label in labels.unique():
        asked, rivals = labels == label, client.indices[(own == label).to(client.indices.device)]
        rivals, images = rivals if len(rivals) else client.indices, batch.inputs[asked].flatten(1)
        inputs = (client.examples.batch(some, client.device).inputs for some in torch.split(rivals, _AT_ONCE))
        distances = torch.cat([torch.cdist(images, some.flatten(1)) for some in inputs], dim=1)
        nearest[asked] = client.examples.batch(rivals[distances.argmin(1).to(rivals.device)], client.device).inputs
    return Batch(nearest, labels)


@dataclass(frozen=True, kw_only=True)
class SummedProbes:
    """Clients of one example each, seen only as the mean of updates within ±``clip``, rounded to ``levels`` levels."""

    clients: int
    clip: float
    levels: int
    seed: int

    @classmethod
    def of(cls, config: RunSettings) -> "SummedProbes | None":
        """Build the probes of a run under SecAgg+, if used; ``UserError`` for sums of a single client."""
        section = config.secure_aggregation
        if section["name"] != "secagg":
            return None
        if config.batch_size < 2:
            raise UserError(
                "The command attack uses the sum of batch_size clients of one example each behind"
                f" secure_aggregation=secagg, which is expected to be of at least 2, but got {config.batch_size};"
                " set batch_size=8, or secure_aggregation=none."
            )
        return cls(
            clients=config.batch_size, clip=float(section["clip"]), levels=int(section["levels"]), seed=config.seed
        )

    @property
    def part(self) -> Part:
        return Part("secagg", {"clients": self.clients}, Summed(clients=self.clients, rounding=self.rounding))

    @property
    def rounding(self) -> float:
        """Return the largest standard deviation of a mean by random rounding to whole levels."""
        return float(self.clip / self.levels / self.clients**0.5)

    def mean_of_clients(
        self, client: Client, state: ClientState, sent: ModelState, *, round: int, probe: int
    ) -> Upload:
        """Return the mean update of ``clients`` clients with one example of the ``probe`` each."""
        rng = derive_generator(self.seed, "secagg", round, probe)
        probes = range(probe * self.clients, (probe + 1) * self.clients)
        uploads = [client.probe(sent, state, round=round, probe=one, batch_size=1).upload for one in probes]
        tensors, step = {}, 2 * self.clip / self.levels
        for name in uploads[0].tensors:
            rounded = []  # to the protocol's levels at random, without bias
            for value in (upload.tensors[name] for upload in uploads):
                places = (value.double().clamp(-self.clip, self.clip) + self.clip) / step
                drawn = torch.rand(value.shape, generator=rng)
                rounded.append(((places + drawn).floor() * step - self.clip).to(value))
            tensors[name] = torch.stack(rounded).mean(0)
        buffers = {name: torch.stack([u.buffers[name].float() for u in uploads]).mean(0) for name in uploads[0].buffers}
        return Upload(tensors=tensors, buffers=buffers, num_examples=self.clients, rounding=self.rounding)
