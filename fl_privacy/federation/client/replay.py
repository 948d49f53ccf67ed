"""What was behind an upload: a simulated client repeats it by the same random streams; nothing of it ever travels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.errors import UserError
from fl_privacy.federation.client.client import Client, LocalWork
from fl_privacy.rng import Secret
from fl_privacy.types import Batch, ModelState, Upload, VictimId


class _EnoughError(Exception):
    """Ends a training that nobody needs any more of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """The making of one upload again, computed where it is asked for and once.

    Attributes:
        client: who made it; a simulation, whose draws can be repeated.
        victim: the upload.
        sent: what the client was sent.
        state: what it kept for itself before; what a defense makes of the client's examples once is added to it.
        batch_size: examples of a probed batch.

    Raises:
        UserError: the client draws from a secret of its own.
    """

    client: Client
    victim: VictimId
    sent: ModelState
    state: ClientState
    batch_size: int

    def __post_init__(self) -> None:
        if isinstance(self.client.seed, Secret):
            raise UserError(
                f"Client {self.client.id} is expected to be simulated for its draws to be repeated, but has a secret of"
                " its own; give it a number as seed."
            )

    @cached_property
    def examples(self) -> Batch:
        """Those behind the upload, each once: of a probe in its own order, of a training as first visited."""
        if self.victim.probe is not None:
            return self.client.victim_batch(self.victim.probe, self.batch_size, self.state)
        return self.client.examples_of(torch.tensor(self._rows), self.state)

    @cached_property
    def transformed(self) -> Batch:
        """What augmentation and the defense first made of each of ``examples``, in their order."""
        if self.client.defense.data:
            batches = self._through_the_defense()
        elif self._augments:
            batches = self._work.batches
        else:
            return self.examples
        inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches])
        visited = _flat(self._work.order)
        first = [visited.index(row) for row in self._rows]
        return Batch(inputs[first], labels[first])

    @cached_property
    def undefended(self) -> Upload:
        """What the client would have uploaded without its defense, of the same examples in the same order."""
        plain = replace(self.client, defense=Defense(examples=self.client.defense.examples))
        return plain.do(self._work, self.sent, ClientState(dict(self.state.tensors))).upload

    @cached_property
    def _work(self) -> LocalWork:
        round, probe = self.victim.round, self.victim.probe
        if probe is None:
            return self.client.training_work(self.state, round=round)
        return self.client.probe_work(self.state, round=round, victim=probe, batch_size=self.batch_size)

    @property
    def _rows(self) -> list[int]:
        """Which of the client's examples, or of the probed batch, ``examples`` are."""
        return list(dict.fromkeys(_flat(self._work.order)) if self.victim.probe is None else range(self.batch_size))

    @property
    def _augments(self) -> bool:
        return self.client.plan.augments if self.victim.probe is None else self.client.plan.augment_probes

    def _through_the_defense(self) -> list[Batch]:
        """The first batches as the gradient is taken of them; of one step alone, no gradient is taken."""
        seen: list[Batch] = []
        needed = _steps_until(self._work.order, set(self._rows))

        def watch(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
            seen.append(batch)
            if len(seen) == needed:
                raise _EnoughError
            return batch

        defense = self.client.defense
        watched = replace(self.client, defense=replace(defense, data=(*defense.data, watch)))
        try:
            watched.do(self._work, self.sent, ClientState(dict(self.state.tensors)))
        except _EnoughError:
            pass
        return seen


def _flat(order: Sequence[Tensor]) -> list[int]:
    return [int(row) for step in order for row in step]


def _steps_until(order: Sequence[Tensor], rows: set[int]) -> int:
    """How many steps it takes to visit each of ``rows``."""
    missing = set(rows)
    for number, step in enumerate(order, 1):
        missing.difference_update(step.tolist())
        if not missing:
            return number
    return len(order)
