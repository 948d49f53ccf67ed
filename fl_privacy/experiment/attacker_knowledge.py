"""What the adaptive attacker is told that the plain one is not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from fl_privacy.defenses import Defense
from fl_privacy.federation import Participant
from fl_privacy.federation.client.examples import local_batches
from fl_privacy.interception import Insider
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, VictimId


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackerKnowledge:
    """Knowledge of the defense, and of which updates come from the same examples.

    Attributes:
        defense: public description.
        same_data: see ``data_names``.
    """

    defense: Mapping[str, Any]
    same_data: Callable[[VictimId], str | None]

    def __call__(self, observation: Observation) -> Observation:
        """``observation`` by the adaptive attacker."""
        return observation.told(defense=self.defense, same_data=self.same_data(observation.id))


def attacker_knowledge_of(defense: Defense, participants: Mapping[int, Participant]) -> AttackerKnowledge | None:
    """What can be told of ``defense`` and ``participants``; ``None`` where the defense has no public description."""
    if not defense.description:
        return None
    return AttackerKnowledge(defense=defense.description, same_data=data_names(participants))


def data_names(participants: Mapping[int, Participant]) -> Callable[[VictimId], str | None]:
    """Observation id -> name of the examples behind it, ``None`` where they change from round to round.

    A probe holds the same examples in every round; so does the update of a client that trains on all it has. They are
    not the same where the defense, or augmentation, makes other images of them each time.
    """

    def same_data(victim: VictimId) -> str | None:
        participant = participants[victim.client]
        probed = victim.probe is not None
        changes = participant.plan.augment_probes if probed else not _trains_on_everything(participant)
        if changes or participant.defense.changes_images:
            return None
        return victim.source

    return same_data


def insider_of(config: DictConfig, participants: Mapping[int, Participant]) -> Insider | None:
    """What help from inside ``config`` gives the attacker; ``None`` where no layer is private and nothing is shown."""
    if not config.knows_features and not any(p.keeps_private() for p in participants.values()):
        return None
    return Insider(
        participants=participants,
        colluder=config.colluder,
        knows_features=config.knows_features,
        features_at=config.features_at,
        batch_size=config.batch_size,
        seed=config.seed,
    )


def _trains_on_everything(participant: Participant) -> bool:
    if participant.plan.augments:
        return False
    number = participant.number_of_examples
    batches = local_batches(number, participant.plan, derive_generator(0))
    return len({int(i) for batch in batches for i in batch}) == number
