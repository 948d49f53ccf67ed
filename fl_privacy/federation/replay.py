"""Repeat a simulated client's upload to recover its examples."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.errors import UserError
from fl_privacy.federation.client import Client, LocalWork
from fl_privacy.rng import Secret
from fl_privacy.types import Batch, ModelState, Upload, VictimId


def examples_behind(client: Client, victim: VictimId, state: ClientState, *, batch_size: int) -> Batch:
    """Return the examples from which ``client`` made the upload ``victim``, in order of first use.

    ``batch_size``: number of examples of a probe (an upload from one batch, for attacks). ``UserError`` if the client's
    random numbers derive from a secret.
    """
    return Replay(client=client, victim=victim, sent=ModelState({}, {}), state=state, batch_size=batch_size).examples


class _EnoughError(Exception):
    """Signal to end a training early."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """Repetition of a simulated client's upload ``victim``, to get the attacks' ground truth.

    ``sent``: model that the client was sent. ``state``: its state before the upload, to which examples made by the
    defense are added. ``batch_size``: number of examples of a probe (an upload from one batch, for attacks).
    """

    client: Client
    victim: VictimId
    sent: ModelState
    state: ClientState
    batch_size: int

    @cached_property
    def examples(self) -> Batch:
        if self.victim.probe is not None:
            return self.client.victim_batch(self.victim.probe, self.batch_size, self.state)
        return self.client.examples_of(torch.tensor(self._rows(self._work())), self.state)

    @cached_property
    def transformed(self) -> Batch:
        plan = self.client.plan
        if not self.client.defense.data and not (plan.augments if self.victim.probe is None else plan.augment_probes):
            return self.examples
        work = self._work()
        batches = self._defended(work) if self.client.defense.data else work.batches
        inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches])
        visited = torch.cat(list(work.order)).tolist()
        first = [visited.index(row) for row in self._rows(work)]
        return Batch(inputs[first], labels[first])

    def undefended(self) -> Upload:
        plain = replace(self.client, defense=Defense(examples=self.client.defense.examples))
        return plain.do(self._work(), self.sent, ClientState(dict(self.state.tensors))).upload

    def _work(self) -> LocalWork:
        client, victim = self.client, self.victim
        if isinstance(client.seed, Secret):
            raise UserError(
                f"Client {client.id} is expected to be simulated for its draws to be repeated, but has a secret of its"
                " own; give it a number as seed."
            )
        if victim.probe is None:
            return client.training_work(self.state, round=victim.round)
        return client.probe_work(self.state, round=victim.round, probe=victim.probe, batch_size=self.batch_size)

    def _rows(self, work: LocalWork) -> list[int]:
        if self.victim.probe is not None:
            return list(range(self.batch_size))
        return list(dict.fromkeys(torch.cat(list(work.order)).tolist()))

    def _defended(self, work: LocalWork) -> list[Batch]:
        seen, missing = list[Batch](), set(self._rows(work))

        def watch(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
            missing.difference_update(work.order[len(seen)].tolist())
            seen.append(batch)
            if not missing:
                raise _EnoughError
            return batch

        defense = self.client.defense
        watched = replace(self.client, defense=replace(defense, data=(*defense.data, watch)))
        with suppress(_EnoughError):
            watched.do(work, self.sent, ClientState(dict(self.state.tensors)))
        return seen
