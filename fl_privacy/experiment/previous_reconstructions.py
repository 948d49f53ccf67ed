"""What an attacker made of the same examples in earlier rounds, for attack.start=previous."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig
from torch import Tensor

from fl_privacy.experiment.attacker_knowledge import data_names
from fl_privacy.federation import Participant
from fl_privacy.results import Attacker
from fl_privacy.types import Observation, Reconstruction, VictimId


@dataclass(frozen=True, eq=False)
class PreviousReconstructions:
    """The last guess at each batch.

    Attributes:
        name_of: see ``data_names``.
    """

    name_of: Callable[[VictimId], str | None]
    _kept: dict[tuple[Attacker, str | None], Tensor] = field(default_factory=dict, init=False)

    def tell(self, observation: Observation, attacker: Attacker) -> Observation:
        """``observation`` with the guess of an earlier round, if there is one."""
        return observation.told(guess=self._kept.get((attacker, self.name_of(observation.id))))

    def keep(self, found: Sequence[Reconstruction], attacker: Attacker) -> None:
        """Remember ``found``, for the rounds to come."""
        for result in found:
            name = self.name_of(result.id)
            if result.batch is not None and name is not None:
                self._kept[attacker, name] = result.batch.inputs


def previous_reconstructions_of(
    config: DictConfig, participants: Mapping[int, Participant]
) -> PreviousReconstructions | None:
    """An empty memory, where the attack of ``config`` starts from earlier guesses."""
    return PreviousReconstructions(data_names(participants)) if config.attack.get("start") == "previous" else None
