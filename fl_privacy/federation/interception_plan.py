"""Choice of intercepted updates: the clients' own, or those of extra victim batches that do not train the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fl_privacy.errors import UserError
from fl_privacy.types import VictimId


@dataclass(frozen=True, order=True)
class Probe:
    """The ``number``-th of the disjoint batches of ``client``, from 0."""

    client: int
    number: int

    def in_round(self, round: int) -> VictimId:
        return VictimId(round, self.client, self.number)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Which uploads the attacker obtains.

    Attributes:
        rounds: intercepted rounds, from 1.
        uploads: ``probe``: uploads of ``batch_size`` examples, computed with the client's defense and the round's model
            as if they were all its data (the papers' setting). ``update``: updates that train the model. ``both``:
            those and all probes.
        clients: clients whose updates are intercepted under ``update``; ``both`` takes all.
        listens: ``True`` if training updates are also observed next to probes.
    """

    rounds: frozenset[int] = frozenset()
    uploads: Literal["probe", "update", "both"] = "probe"
    probes: tuple[Probe, ...] = ()
    clients: frozenset[int] = frozenset()
    batch_size: int = 1
    listens: bool = False

    def probes_of(self, round: int) -> tuple[Probe, ...]:
        return self.probes if self.uploads == "probe" and round in self.rounds else ()

    def intercepts(self, round: int, client: int) -> bool:
        if self.uploads == "both":
            return round in self.rounds
        return (self.listens or self.uploads == "update") and round in self.rounds and client in self.clients

    def expects(self, probe: Probe) -> bool:
        return self.uploads == "both" or probe in self.probes


def spread_probes(victims: int, batch_size: int, client_sizes: Mapping[int, int]) -> tuple[Probe, ...]:
    """Assign ``victims`` probes to the clients in turn; ``UserError`` if they have fewer batches."""
    room = {client: size // batch_size for client, size in sorted(client_sizes.items())}
    if sum(room.values()) < victims:
        raise UserError(
            f"{victims} victims of {batch_size} examples are expected to fit into the clients' data, but it holds only"
            f" {sum(room.values())} such batches; lower victims or batch_size."
        )
    deepest = max(room.values(), default=0)
    dealt = [Probe(client, k) for k in range(deepest) for client in room if k < room[client]]
    return tuple(sorted(dealt[:victims]))


def audited_rounds(
    chosen: str | int | Sequence[int], total: int, *, name: str = "intercept.rounds", most: str = "federation.rounds"
) -> frozenset[int]:
    """Return rounds from ``first``, ``last``, ``ends`` (both), ``all``, a number or a list of numbers in 1..total.

    >>> sorted(audited_rounds("ends", 20))
    [1, 20]
    """
    names = {"first": [1], "last": [total], "ends": [1, total], "all": list(range(1, total + 1))}
    if isinstance(chosen, str):
        if chosen not in names:
            raise UserError(f"{name} is expected to be one of {', '.join(names)} or round numbers, but got {chosen!r}.")
        return frozenset(names[chosen])
    if not isinstance(chosen, int) and not chosen:
        raise UserError(
            f"{name} is expected to name rounds, but got an empty list; take {name}=ends, or attack none by"
            " attack=none."
        )
    rounds = frozenset([chosen] if isinstance(chosen, int) else chosen)
    if wrong := [r for r in rounds if not 1 <= r <= total]:
        raise UserError(
            f"{name} is expected within 1..{total}, but got {sorted(wrong)}; raise {most} or choose earlier rounds."
        )
    return rounds
