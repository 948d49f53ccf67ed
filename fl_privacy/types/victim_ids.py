"""How an attacked update is called, who attacks it, and how sure an attacker is of what it made of it."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

_VICTIM_ID = re.compile(r"round-([0-9]{1,9})/client-([0-9]{1,9})(?:/victim-([0-9]{1,9}))?")


@total_ordering
@dataclass(frozen=True)
class VictimId:
    """Names an attacked update, its random streams and its files.

    ``str()`` of it is ``round-3/client-2/victim-0``, of an update that trains the model ``round-3/client-2``.

    Attributes:
        round: from 1; 0 where no round was trained.
        client: partition number, from 0.
        probe: which of the client's extra batches is probed, from 0; ``None`` where the update trains the model.
        part: a word that tells apart several attacks on the same update, such as on its ``features``.

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
        """Parse what ``str()`` gives, for ids that come from files.

        Raises:
            ValueError: ``text`` is none.
        """
        if not (match := _VICTIM_ID.fullmatch(text)):
            raise ValueError(f"A name round-R/client-C or round-R/client-C/victim-K is expected, but got {text!r}.")
        round, client, probe = match.groups()
        return cls(int(round), int(client), None if probe is None else int(probe))

    @property
    def source(self) -> str:
        """Return the name without its round: what was attacked in several rounds has the same."""
        words = [f"client-{self.client}", *([] if self.probe is None else [f"victim-{self.probe}"]), self.part]
        return "/".join(filter(None, words))

    def __str__(self) -> str:
        return f"round-{self.round}/{self.source}"

    def __lt__(self, other: "VictimId") -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[int, int, int, str]:
        return self.round, self.client, -1 if self.probe is None else self.probe, self.part


class Certainty(StrEnum):
    """How sure an attacker is itself, which does not know the truth.

    Attributes:
        PROVEN: what entered the model's first layer, but for rounding: a system of equations with one solution was
            solved, and it shows in the update that the solution is the right one. What was changed before (mixup,
            dropout in front, crops) is proven as it was changed; a note says so if the update shows it.
        CONSISTENT: the update that was observed is reproduced to rounding.
        APPROXIMATE: neither.
    """

    PROVEN = "proven"
    CONSISTENT = "consistent"
    APPROXIMATE = "approximate"


class Attacker(StrEnum):
    """Who attacks the same victims: one that knows nothing of the defense, and one that knows its description."""

    PLAIN = "plain"
    ADAPTIVE = "adaptive"
