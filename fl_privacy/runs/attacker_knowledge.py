"""Add to observations what the threat model lets attackers know beyond the intercepted data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_privacy.data import LabelledExamples
from fl_privacy.effects import Description, mixing
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, private_names
from fl_privacy.federation.client import local_batches
from fl_privacy.federation.interception import ACTIVATION, SimulatedSideInformation
from fl_privacy.rng import derive_generator
from fl_privacy.runs.config.settings import ThreatModelSettings
from fl_privacy.runs.folder import Attacker
from fl_privacy.types import Batch, Observation, Reconstruction, VictimId

ROUNDS_TOGETHER = 128  # most updates of the same examples that the adaptive attacker keeps

MOST_PUBLIC = 5000  # most public images by default


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackerKnowledge:
    """What attackers know besides uploads; the plain attacker ignores the defense, the adaptive one may know it.

    Attributes:
        same_data: function from an upload's id to a name of its examples; see :func:`data_names`.
        labels: function from an observation to the labels (N,) in the client's loss; ``None`` if not known.
        public: labelled examples like the clients'.
        defense: public description of the defense; ``None`` if no attacker knows it.
        defenses: client -> description of its defense, if it differs from ``defense``.
        lengths: function from an observation to its texts' lengths; ``None`` if not known.
        remembers: ``True`` starts an attack from the last result on the same examples.
    """

    same_data: Callable[[VictimId], str | None]
    labels: Callable[[Observation], Tensor] | None = None
    public: Batch | None = None
    defense: Description | None = None
    defenses: Mapping[int, Description] = field(default_factory=dict)
    remembers: bool = False
    lengths: Callable[[Observation], Tensor] | None = None
    _earlier: dict[str, list[Observation]] = field(default_factory=dict, init=False)
    _previous: dict[tuple[Attacker, str | None], Tensor] = field(default_factory=dict, init=False)

    def of_plain(self, observation: Observation) -> Observation:
        plain = observation.given(defense=None, same_data=None)
        if self.public is not None:
            plain = plain.given(public_images=self.public.inputs, public_labels=self.public.labels)
        if self.lengths is not None:
            plain = plain.given(lengths=self.lengths(plain))
        return plain.given(labels=self.labels(plain)) if self.labels else plain

    def of_adaptive(self, plain: Observation) -> Observation:
        own = self.defenses.get(plain.id.client, self.defense)
        return plain.given(defense=own or None, same_data=self.same_data(plain.id))

    def attacks_adaptively(self, id: VictimId) -> bool:
        return self.defense is not None and bool(self.defenses.get(id.client, True))

    def earlier(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return stored updates of the same examples as ``observations``, then store ``observations`` too."""
        earlier = []
        for observation in observations:
            if (name := observation.knowledge.same_data) is not None:
                known = self._earlier.setdefault(name, [])
                earlier += known
                self._earlier[name] = [*known, observation][-ROUNDS_TOGETHER + 1 :]
        return earlier

    def with_previous(self, observation: Observation, attacker: Attacker) -> Observation:
        if not self.remembers:
            return observation
        return observation.given(previous=self._previous.get((attacker, self.same_data(observation.id))))

    def remember(self, found: Sequence[Reconstruction], attacker: Attacker) -> None:
        for result in found if self.remembers else ():
            name = self.same_data(result.id)
            if result.batch is not None and name is not None:
                self._previous[attacker, name] = result.batch.inputs


def data_names(clients: Mapping[int, Client]) -> Callable[[VictimId], str | None]:
    """Return a function from an upload's id to a name of its examples; uploads of the same examples have the same name.

    The name is ``None`` if examples change between rounds: a client trains on a part of its data, or augmentation or a
    defense redraws images. Images mixed with others count as unchanged.
    """

    def same_data(victim: VictimId) -> str | None:
        client = clients[victim.client]
        changes = client.plan.augment_probes
        if victim.probe is None:
            number = client.number_of_examples
            batches = local_batches(number, client.plan, derive_generator(0))
            changes = client.plan.augments or len({int(i) for batch in batches for i in batch}) != number
        redrawn = client.defense.changes_images and mixing(client.defense.parts) is None
        return None if changes or redrawn else victim.source

    return same_data


def side_information_of(
    threats: ThreatModelSettings, clients: Mapping[int, Client], *, batch_size: int, seed: int
) -> SimulatedSideInformation | None:
    """Build the source of side information: features (a module's outputs), or stand-ins for layers kept private.

    ``threats``: settings that say which of these attackers know; ``None`` is returned if neither. ``UserError`` if
    ``threats.features_at`` names no module, or is set without known features.
    """
    if (at := threats.features_at) is not None:
        if not threats.knows_features:
            raise UserError(
                f"threat_model.features_at={at} is expected with threat_model.knows_features=true; set it, or leave"
                " features_at out."
            )
        names = [name for name, _ in next(iter(clients.values())).model.named_modules() if name]
        if at not in (ACTIVATION, *names):
            raise UserError(
                f"threat_model.features_at is expected to be a module of the model, such as {', '.join(names[:4])}, or"
                f" {ACTIVATION}, but got {at!r}; name one."
            )
    if not threats.knows_features and not any(private_names(c.model, c.defense) for c in clients.values()):
        return None
    return SimulatedSideInformation(
        clients=clients,
        colluder=threats.colluder,
        knows_features=threats.knows_features,
        features_at=threats.features_at,
        features_of=threats.features_of,
        batch_size=batch_size,
        seed=seed,
    )


def public_examples(count: int | None, unattacked: LabelledExamples) -> Batch | None:
    """Return the attacker's public examples: the first ``count``, or by default ``MOST_PUBLIC`` evenly spaced ones."""
    if count is None:
        number = min(MOST_PUBLIC, len(unattacked))
        return unattacked.batch(torch.linspace(0, len(unattacked) - 1, number).long()) if number else None
    if not 0 <= count <= len(unattacked):
        raise UserError(
            f"threat_model.public_images is expected in 0..{len(unattacked)}, the size of the split that is not"
            f" attacked, but got {count}; lower it."
        )
    return unattacked.batch(torch.arange(count)) if count else None
