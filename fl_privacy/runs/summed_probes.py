"""Simulate secure aggregation without training: an honest server sees means over clients of one example each."""

from dataclasses import dataclass

import torch

from fl_privacy.defenses.defense import ClientState
from fl_privacy.effects import Part, Summed
from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.rng import derive_generator
from fl_privacy.runs.config.settings import RunSettings
from fl_privacy.types import ModelState, Upload


@dataclass(frozen=True, kw_only=True)
class SummedProbes:
    """Clients of one example each, whose updates are seen only as their mean.

    Attributes:
        clip: largest absolute value of an update.
        levels: number of levels of a quantized value.
    """

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
                "The command attack reads the sum of batch_size clients of one example each behind"
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
        first = probe * self.clients
        uploads = [
            client.probe(sent, state, round=round, probe=first + number, batch_size=1).upload
            for number in range(self.clients)
        ]
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
