"""Names of attacked updates, kinds of attackers, and certainty of reconstructions."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

_VICTIM_ID = re.compile(r"round-([0-9]{1,9})/client-([0-9]{1,9})(?:/victim-([0-9]{1,9}))?")


@total_ordering
@dataclass(frozen=True)
class VictimId:
    """Name of an attacked update, its random streams and its files.

    As text: ``round-3/client-2/victim-0``, or ``round-3/client-2`` for a training update.

    Attributes:
        round: number from 1; 0 if no round was trained.
        client: partition number, from 0.
        probe: number of the client's probed batch, from 0; ``None`` for a training update.
        part: word that distinguishes attacks on the same update, such as on its ``features``.

    Raises:
        ValueError: a number is negative, or ``part`` is no word.
    """

    round: int
    client: int
    probe: int | None = None
    part: str = ""

    def __post_init__(self) -> None:
        if min(self.round, self.client, self.probe or 0) < 0 or not re.fullmatch(r"[\w+-]*", self.part, re.ASCII):
            raise ValueError(f"A victim is expected to be named by numbers from 0 and a word, but got {self!r}.")

    @classmethod
    def parse(cls, text: str) -> "VictimId":
        if not (match := _VICTIM_ID.fullmatch(text)):
            raise ValueError(f"A name round-R/client-C or round-R/client-C/victim-K is expected, but got {text!r}.")
        round, client, probe = match.groups()
        return cls(int(round), int(client), None if probe is None else int(probe))

    @property
    def source(self) -> str:
        """Return the name without its round, which victims of several rounds share."""
        words = [f"client-{self.client}", *([] if self.probe is None else [f"victim-{self.probe}"]), self.part]
        return "/".join(filter(None, words))

    def __str__(self) -> str:
        return f"round-{self.round}/{self.source}"

    def __lt__(self, other: "VictimId") -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[int, int, int, str]:
        return self.round, self.client, -1 if self.probe is None else self.probe, self.part


class Certainty(StrEnum):
    """How certain an attacker is, without the truth.

    Attributes:
        PROVEN: inputs of the model's first layer, up to rounding: the unique solution of a system of equations, which
            the update confirms. Changes before that layer (mixup, dropout, crops) are included; a note says so if the
            update shows them.
        CONSISTENT: reproduction of the observed update, up to rounding.
        APPROXIMATE: neither.
    """

    PROVEN = "proven"
    CONSISTENT = "consistent"
    APPROXIMATE = "approximate"


class Attacker(StrEnum):
    """The two attackers of each victim: without and with knowledge of the defense."""

    PLAIN = "plain"
    ADAPTIVE = "adaptive"
