"""Names of attacked updates, the two kinds of attackers, and certainty of reconstructions."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

_VICTIM_ID = re.compile(r"round-([0-9]{1,9})/client-([0-9]{1,9})(?:/victim-([0-9]{1,9}))?")


@total_ordering
@dataclass(frozen=True)
class VictimId:
    """Identifier of an attacked update, from which file names and random seeds are derived.

    As text: ``round-3/client-2/victim-0`` for a probe (an extra upload made for the attack), ``round-3/client-2`` for a
    training update. ``ValueError`` for a negative number, or a ``part`` that is not one word.
    """

    round: int  # round from 1; 0 if no round was trained
    client: int  # partition number, from 0
    probe: int | None = None  # number of the client's probed batch, from 0; ``None`` for a training update
    part: str = ""  # word that distinguishes several attacks on one update

    def __post_init__(self) -> None:
        if min(self.round, self.client, self.probe or 0) < 0 or not re.fullmatch(r"[\w+-]*", self.part, re.ASCII):
            what = "A victim's numbers are expected to be at least 0 and its part a word"
            raise ValueError(f"{what}, but got {self!r}; try VictimId(1, 0).")

    @classmethod
    def parse(cls, text: str) -> "VictimId":
        if not (match := _VICTIM_ID.fullmatch(text)):
            known = "round-R/client-C or round-R/client-C/victim-K"
            raise ValueError(f"A victim is expected to be {known}, but got {text!r}; try round-1/client-0.")
        round, client, probe = match.groups()
        return cls(int(round), int(client), None if probe is None else int(probe))

    @property
    def source(self) -> str:
        """Return the name without the round, so that it is equal in all rounds."""
        words = [f"client-{self.client}", *([] if self.probe is None else [f"victim-{self.probe}"]), self.part]
        return "/".join(filter(None, words))

    def __str__(self) -> str:
        return f"round-{self.round}/{self.source}"

    def __lt__(self, other: "VictimId") -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[int, int, int, str]:
        return self.round, self.client, -1 if self.probe is None else self.probe, self.part


class Certainty(StrEnum):
    """Certainty of a reconstruction, as an attacker can judge it: proven, consistent with the update, or neither."""

    PROVEN = "proven"
    """Equal to the inputs of the model's first layer, up to rounding: the unique solution of a system of equations,
    confirmed by the update. Inputs are images after crops, mixup and dropout."""

    CONSISTENT = "consistent"  # the reconstruction reproduces the observed update, up to rounding

    APPROXIMATE = "approximate"  # neither holds


class Attacker(StrEnum):
    """Attacker of an update: ``plain`` does not know the defense, ``adaptive`` does."""

    PLAIN = "plain"
    ADAPTIVE = "adaptive"
