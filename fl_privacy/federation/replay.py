"""Replay of a simulated client's upload from the same random streams, which recovers its examples locally."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.errors import UserError
from fl_privacy.federation.client import Client, LocalWork
from fl_privacy.rng import Secret
from fl_privacy.types import Batch, ModelState, Upload, VictimId


def examples_behind(client: Client, victim: VictimId, state: ClientState, *, batch_size: int) -> Batch:
    """Return the examples behind the upload ``victim``, each once: in a probe's order, or in the order of first use.

    Raises:
        UserError: the client draws from its own secret.
    """
    if victim.probe is not None:
        return client.victim_batch(victim.probe, batch_size, state)
    rows = _rows(victim, _work(client, victim, state, batch_size), batch_size)
    return client.examples_of(torch.tensor(rows), state)


class _EnoughError(Exception):
    """Signal to end a training early."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """Lazy replay of one upload.

    Attributes:
        state: client's earlier state, to which the defense's examples are added.
    """

    client: Client
    victim: VictimId
    sent: ModelState
    state: ClientState
    batch_size: int

    @cached_property
    def examples(self) -> Batch:
        return examples_behind(self.client, self.victim, self.state, batch_size=self.batch_size)

    @cached_property
    def transformed(self) -> Batch:
        if not self.client.defense.data and not self._augments:
            return self.examples
        work = self._work()
        batches = self._defended(work) if self.client.defense.data else work.batches
        inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches])
        visited = _flat(work.order)
        first = [visited.index(row) for row in _rows(self.victim, work, self.batch_size)]
        return Batch(inputs[first], labels[first])

    def undefended(self) -> Upload:
        """Return the upload without the defense, from the same examples in the same order; trained at each call."""
        plain = replace(self.client, defense=Defense(examples=self.client.defense.examples))
        return plain.do(self._work(), self.sent, ClientState(dict(self.state.tensors))).upload

    def _work(self) -> LocalWork:
        return _work(self.client, self.victim, self.state, self.batch_size)

    @property
    def _augments(self) -> bool:
        return self.client.plan.augments if self.victim.probe is None else self.client.plan.augment_probes

    def _defended(self, work: LocalWork) -> list[Batch]:
        seen: list[Batch] = []
        needed = _steps_until(work.order, set(_rows(self.victim, work, self.batch_size)))

        def watch(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
            seen.append(batch)
            if len(seen) == needed:
                raise _EnoughError
            return batch

        defense = self.client.defense
        watched = replace(self.client, defense=replace(defense, data=(*defense.data, watch)))
        with suppress(_EnoughError):
            watched.do(work, self.sent, ClientState(dict(self.state.tensors)))
        return seen


def _work(client: Client, victim: VictimId, state: ClientState, batch_size: int) -> LocalWork:
    if isinstance(client.seed, Secret):
        raise UserError(
            f"Client {client.id} is expected to be simulated for its draws to be repeated, but has a secret of its own;"
            " give it a number as seed."
        )
    if victim.probe is None:
        return client.training_work(state, round=victim.round)
    return client.probe_work(state, round=victim.round, probe=victim.probe, batch_size=batch_size)


def _rows(victim: VictimId, work: LocalWork, batch_size: int) -> list[int]:
    return list(range(batch_size)) if victim.probe is not None else list(dict.fromkeys(_flat(work.order)))


def _flat(order: Sequence[Tensor]) -> list[int]:
    return [int(row) for step in order for row in step]


def _steps_until(order: Sequence[Tensor], rows: set[int]) -> int:
    missing = set(rows)
    for number, step in enumerate(order, 1):
        missing.difference_update(step.tolist())
        if not missing:
            return number
    return len(order)
