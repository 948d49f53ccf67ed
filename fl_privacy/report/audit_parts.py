"""Records of an audit apart from attacks: data in the clear, entries of messages, captured uploads."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from fl_privacy.effects import Description
from fl_privacy.measure.answer import Answer
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.types.plan import Normalization

UP = "client to server"  # direction of replies
Severity = Literal["data", "facts", "look"]
"""``data``: examples, or parts of them, in the clear; ``facts``: facts about the examples; ``look``: anything
that may hold data, or run code on arrival."""


@dataclass(frozen=True, kw_only=True)
class Leak:
    """One thing that a reply leaks in the clear, and why this matters to the people behind the data."""

    severity: Severity
    what: str
    where: str
    why: str


@dataclass(frozen=True, kw_only=True)
class CountedLeak(Leak):
    """A leak found in some replies: in ``times`` of ``of`` replies to messages of a ``kind``."""

    kind: str
    times: int
    of: int

    def __post_init__(self) -> None:
        if not self.what:
            raise ValueError("a finding is expected to say what was found")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Table line on one entry of a record, over all messages of one ``kind``: type (``what``), mean bytes, example."""

    direction: str
    kind: str
    record: str
    key: str
    what: str
    size: float
    messages: int
    rounds: Sequence[int]
    example: str = ""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Number and size of the messages of a kind in one direction."""

    direction: str
    kind: str
    messages: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Facts about a strategy's clients that an attack needs besides the captured uploads."""

    model: str = ""  # import path of the clients' model; never imported
    normalization: Normalization | None = None
    # normalizations, defenses: client -> stated normalization or defense
    normalizations: Mapping[int, Normalization | None] = field(default_factory=dict)
    defense: Description = ()
    defenses: Mapping[int, Description] = field(default_factory=dict)
    fingerprints: Mapping[str, Sequence[str]] = field(default_factory=dict)  # probe id -> fingerprints of its images
    rates_estimated: bool = False  # ``True`` if each update's learning rate was inferred from that update alone
    partitions: Mapping[int, int] = field(default_factory=dict)  # client -> stated partition; not written
    identified: Set[int] = frozenset()  # clients that ever stated a partition; not written
    site: tuple[Counts, int] | None = None  # what another site reconstructs, and how many sites there are; if attacked


def members_said(members: Sequence[Answer]) -> list[str]:
    """Describe results of membership inference."""
    seen = {"outsider": "the final model", "server": "the training's own uploads"}
    sentences = []
    for leaks, said in ((True, "Yes, by membership inference"), (False, "Not shown by membership inference")):
        parts = [
            f"from {seen[one.observer]} (AUC {one.estimate.value:.2f}; control {one.control.value:.2f})"
            for one in members
            if one.leaks is leaks and one.estimate and isinstance(one.control, Estimate)
        ]
        luck = "; chance may explain such differences" * (not leaks)
        sentences += [f"{said}: {' and '.join(parts)}{luck}"] if parts else []
    return sentences
