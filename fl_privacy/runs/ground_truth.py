"""Look up the originals behind an update, for scoring only."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.effects import Part, Summed
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, Replay, Server, ServerPlan, examples_behind
from fl_privacy.federation.another_site import seen_by_sites
from fl_privacy.federation.replies import norm
from fl_privacy.federation.server import mean_change, weighted_mean
from fl_privacy.measure.matching import hard_labels
from fl_privacy.rng import derive_generator
from fl_privacy.runs.config.settings import RunSettings
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Upload, VictimId

ClientStates = defaultdict[int, ClientState]
"""States of simulated clients by id; a state holds the examples that a defense made."""

logger = logging.getLogger(__name__)

WITHIN, MOST_POISONED = 0.9, 50  # share of the excluded norm that a poisoned update has, and number of poisoned rounds
_AT_ONCE = 256  # images converted to floats at a time


@dataclass(frozen=True, eq=False)
class SummedReplay:
    """Recomputed uploads of several clients, of which the attacker observes only the mean."""

    each: Sequence[Replay]

    @property
    def transformed(self) -> Batch:
        return together([replay.transformed for replay in self.each])

    def undefended(self) -> Upload:
        uploads = [replay.undefended() for replay in self.each]
        numbers = [upload.num_examples for upload in uploads]
        tensors = weighted_mean([upload.tensors for upload in uploads], numbers)
        buffers = weighted_mean([upload.buffers for upload in uploads], numbers)
        return Upload(tensors=tensors, buffers=buffers, num_examples=sum(numbers))


def together(batches: Sequence[Batch]) -> Batch:
    """Join batches into one; texts are padded to the longest."""
    alike = as_wide(batches)
    return Batch(torch.cat([batch.inputs for batch in alike]), torch.cat([batch.labels for batch in alike]))


def as_wide(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with texts padded to the longest: tokens with -1, next-token labels with -100."""
    width = max(batch.inputs.shape[-1] for batch in batches)

    def padded(values: torch.Tensor, none: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, width - values.shape[-1]), value=none)

    labels = [padded(b.labels, -100) if b.labels.shape[1:] == b.inputs.shape[1:] else b.labels for b in batches]
    return [Batch(padded(batch.inputs, -1), own) for batch, own in zip(batches, labels, strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth:
    """Looks up the examples behind simulated clients' uploads, and recomputes these uploads; attackers see neither.

    ``batch_size``: number of examples behind a probe (extra upload for the attack). ``behind``: function from an
    upload's id to the ids of the clients that it averages. ``states``: states of the clients at the time of the upload.
    """

    clients: Mapping[int, Client]
    batch_size: int
    behind: Callable[[VictimId], Sequence[int]] = lambda victim: [victim.client]
    states: ClientStates = field(default_factory=lambda: defaultdict(ClientState))
    _replays: dict[VictimId, Replay | SummedReplay] = field(default_factory=dict, init=False, repr=False)

    def batch(self, victim: VictimId) -> Batch:
        """Return the examples behind ``victim``; if a defense trains on substitutes, the originals nearest to these."""
        batches = []
        for number in self.behind(victim):
            client, own = self.clients[number], replace(victim, client=number)
            batch = examples_behind(client, own, self.states[number], batch_size=self.batch_size)
            batches.append(_nearest(client, batch) if client.defense.examples else batch)
        return together(batches)

    def replay(self, observation: Observation) -> Replay | SummedReplay:
        id = observation.id
        if any(known.round != id.round for known in self._replays):
            self._replays.clear()
        if id not in self._replays:
            each = [
                Replay(
                    client=self.clients[number],
                    victim=replace(id, client=number),
                    sent=observation.sent,
                    state=self.states[number],
                    batch_size=self.batch_size,
                )
                for number in self.behind(id)
            ]
            self._replays[id] = each[0] if len(each) == 1 else SummedReplay(each)
        return self._replays[id]


def sees_other_images(defense: Defense, plan: LocalPlan, uploads: str) -> bool:
    """Return whether a defense or augmentation changes images before uploads (``probe`` or ``update``) are computed."""
    augmented = plan.augments if uploads == "update" else plan.augment_probes
    return bool(defense.examples or defense.data) or augmented


def _nearest(client: Client, batch: Batch) -> Batch:
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
    """Probes (extra uploads for the attack) of which a SecAgg+ server, or attacking clients, only learn the mean.

    ``clip``: bound of an update's values under SecAgg+, which rounds them to ``levels`` levels; else ``None``.
    """

    clients: int  # number of clients in the mean, with ``examples`` examples each
    examples: int = 1
    clip: float | None = None
    levels: int = 0
    seed: int = 0
    own: tuple[Client, ...] = ()  # attacking sites, each of which adds an update; empty if the server attacks
    server: ServerPlan = field(default_factory=ServerPlan)  # how the server makes the global model that sites see
    knows_numbers: bool = True

    @classmethod
    def of(cls, config: RunSettings, own: tuple[Client, ...], server: ServerPlan) -> "SummedProbes | None":
        """Return the averages of probes that a SecAgg+ server or clients ``own`` see; ``None`` for other attackers."""
        section, size = config.secure_aggregation, config.batch_size
        clip, levels = (float(section["clip"]), int(section["levels"])) if section["name"] == "secagg" else (None, 0)
        if own and config.threat_model.differences:
            raise UserError(
                "threat_model.differences=true is expected with rounds, but `fl-privacy attack` trains none; use"
                " `fl-privacy run intercept.uploads=update`."
            )
        if own:
            k, seed = config.federation.clients - len(own), config.seed
            made = cls(clients=k, examples=size, clip=clip, levels=levels, seed=seed, own=own, server=server)
            return replace(made, knows_numbers=config.threat_model.knows_numbers)
        if clip is None:
            return None
        if size < 2:
            raise UserError(
                "The command attack uses the sum of batch_size clients of one example each behind"
                f" secure_aggregation=secagg, which is expected to be of at least 2, but got {size};"
                " set batch_size=8, or secure_aggregation=none."
            )
        return cls(clients=size, clip=clip, levels=levels, seed=config.seed)

    @property
    def total(self) -> int:
        return self.clients * self.examples

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.clients == 1 and self.clip is None:
            return ()
        name = "another_site" if self.own else "secagg"
        return (Part(name, {"clients": self.clients}, Summed(clients=self.clients, rounding=self.rounding)),)

    @property
    def rounding(self) -> float:
        """Largest standard deviation of SecAgg+'s rounding error in the mean; 0 without SecAgg+."""
        return 0.0 if self.clip is None else float(self.clip / self.levels / self.clients**0.5)

    def mean_of_clients(
        self, client: Client, state: ClientState, sent: ModelState, *, round: int, probe: int
    ) -> Upload:
        """Return the mean of all clients' uploads; ``client`` stands in for each, with other examples each time."""
        uploads = self._uploads(client, state, sent, round, probe)
        if self.own:
            known, sites = dict(enumerate(uploads)), range(self.clients, len(uploads))
            plan, seed, counted = client.plan, self.seed, self.knows_numbers
            seen = seen_by_sites(sent, known, sites, self.server, plan, round=round, seed=seed, knows_numbers=counted)
            return replace(seen, rounding=math.hypot(seen.rounding, self.rounding))
        tensors = {name: torch.stack([u.tensors[name] for u in uploads]).mean(0) for name in uploads[0].tensors}
        buffers = {name: torch.stack([u.buffers[name].float() for u in uploads]).mean(0) for name in uploads[0].buffers}
        return Upload(tensors=tensors, buffers=buffers, num_examples=self.clients, rounding=self.rounding)

    def poisoned(
        self, client: Client, state: ClientState, sent: ModelState, aim: ModelState, *, round: int, probe: int
    ) -> ModelState:
        """Return the global model after malicious clients moved it from ``sent`` towards ``aim``, within a few rounds.

        They scale their updates (model replacement, Bagdasaryan et al. 2020), to a norm at which the server keeps them.
        ``client`` computes the honest uploads.
        """
        plan, clients = client.plan, range(self.clients + len(self.own))
        server = Server(state=sent, local_plan=plan, plan=self.server, clients=clients, seed=self.seed)
        for _ in range(MOST_POISONED):
            now, uploads = server.state.parameters, self._uploads(client, state, server.state, round, probe)
            honest, start = mean_change(uploads[-1], now, plan), now if plan.shares == "weights" else {}
            rate = len(clients) / len(self.own) / self.server.lr
            steps = {n: rate * (aim.parameters[n] - now[n]) for n in uploads[-1].tensors}
            share = min(1.0, WITHIN * self.server.norm_factor * norm(honest) / max(norm(steps), 1e-30))
            share *= -1 if plan.shares == "gradient" else 1
            tensors = {n: start.get(n, 0) + share * t for n, t in steps.items()}
            uploads[self.clients :] = [replace(upload, tensors=tensors) for upload in uploads[self.clients :]]
            for number, reason in server.receive(dict(enumerate(uploads)), round).items():
                logger.warning("The server excludes client %d from a poisoned round: %s", number, reason)
            if abs(share) == 1:
                break
        return server.state

    def _uploads(self, client: Client, state: ClientState, sent: ModelState, round: int, probe: int) -> list[Upload]:
        rng = derive_generator(self.seed, "secagg", round, probe)
        probes, size = range(probe * self.clients, (probe + 1) * self.clients), self.examples
        uploads = [client.probe(sent, state, round=round, probe=one, batch_size=size).upload for one in probes]
        for site in self.own:
            number = probe % max(1, site.number_of_examples // size)
            uploads.append(site.probe(sent, ClientState(), round=round, probe=number, batch_size=size).upload)
        clip = self.clip or 0.0
        for name in uploads[0].tensors if clip else ():
            step = 2 * clip / self.levels
            for k, upload in enumerate(uploads):  # to the protocol's levels at random, without bias
                value = upload.tensors[name]
                places = (value.double().clamp(-clip, clip) + clip) / step
                drawn = torch.rand(value.shape, generator=rng)
                rounded = ((places + drawn).floor() * step - clip).to(value)
                uploads[k] = replace(upload, tensors={**upload.tensors, name: rounded})
        return uploads
