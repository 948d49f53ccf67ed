"""Rounds of a federation and the interception of their uploads."""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.federation.client import Client, Personalized
from fl_privacy.federation.interception.interceptor import Interceptor
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.federation.server import Evaluation, Server, mean_evaluation, upload_bytes
from fl_privacy.federation.training import LocalResult
from fl_privacy.models.gradients.memory import freed_memory_kept
from fl_privacy.progress import counted
from fl_privacy.types import ModelState, Observation, Upload, VictimId

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Probe:
    """Request to ``client`` for an upload of one batch alone, so that this upload can be attacked."""

    client: int
    number: int  # number of the batch among the client's disjoint batches, from 0

    def in_round(self, round: int) -> VictimId:
        return VictimId(round, self.client, self.number)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Choice of the uploads that the attacker obtains.

    Attributes:
        rounds: intercepted rounds, from 1.
        uploads: ``probe``: extra defended uploads, each from ``batch_size`` examples as if the client had no others
            (the papers' setting). ``update``: updates that train the model. ``both``: updates and all probes.
        clients: clients whose updates are intercepted under ``update``; ``both`` takes all.
        listens: ``True`` also intercepts the updates that train the model under ``probe``.
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
    """Distribute ``victims`` attacked batches over clients in turn; ``UserError`` if there are too few examples."""
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
    """Return the rounds that ``chosen`` stands for, from 1 to ``total``.

    ``chosen``: ``first``, ``last``, ``ends`` (both), ``all``, a number or a list of numbers; ``UserError`` for anything
    else. ``name``, ``most``: settings that the error names.

    >>> sorted(audited_rounds("ends", 20))
    [1, 20]
    """
    names = {"first": [1], "last": [total], "ends": [1, total], "all": list(range(1, total + 1))}
    if isinstance(chosen, str):
        if chosen not in names:
            known = ", ".join(names)
            raise UserError(f"{name} is expected to be {known} or round numbers, but got {chosen!r}; try ends.")
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


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """Summary of a round."""

    round: int
    clients: tuple[int, ...]
    excluded: Mapping[int, str] = field(default_factory=dict)
    train_loss: float  # mean over the clients whose replies are used; NaN if all refused the model
    seconds: float  # duration without evaluation and attack
    defense_seconds: float  # time of the defense's hooks, summed over clients
    upload_bytes: int
    evaluation: Evaluation | None = None  # mean over the clients, each with its private part, if requested


Kept = TypeVar("Kept")

Steps = Generator[Observation, None, RoundReport]  # round in progress: yields observations and returns the report


class Round:
    """A round of training: iterate over it for its observations, then take its ``report``.

        for round in plain_rounds(server, clients, rounds=3, audit=audit, interceptor=interceptor):
            for observation in round:
                captures.write(observation)
            folder.add_round(round.report, None)

    ``report`` runs the rest of the round and drops observations that were not iterated over.
    """

    def __init__(self, number: int, steps: Steps) -> None:
        self.number = number
        self._steps = steps
        self._report: RoundReport | None = None

    def __iter__(self) -> "Round":
        return self

    def __next__(self) -> Observation:
        try:
            return next(self._steps)
        except StopIteration as end:
            self._report = self._report or end.value
            raise

    @property
    def report(self) -> RoundReport:
        for _ in self:
            pass
        assert self._report is not None, "the round was broken off by an error"
        return self._report


def unobserved(work: Callable[[], RoundReport]) -> Steps:
    """Wrap ``work``, which runs a whole round and returns its report, as a generator that yields no uploads."""
    return work()
    yield


def one_by_one(rounds: int, steps: Callable[[int], Steps], first: int = 1) -> Iterator[Round]:
    """Yield the rounds ``first`` to ``rounds``, run by the generators ``steps(number)``, one after the other."""
    for number in range(first, rounds + 1):
        round = Round(number, steps(number))
        yield round
        round.report  # noqa: B018


def run_all(rounds: Generator[Round, None, Kept]) -> tuple[list[RoundReport], Kept]:
    """Run all rounds without keeping observations; return the reports, and the generator's return value."""
    reports: list[RoundReport] = []
    while True:
        try:
            reports.append(next(rounds).report)
        except StopIteration as end:
            kept: Kept = end.value
            return reports, kept


def plain_rounds(
    server: Server,
    clients: Mapping[int, Client],
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    first: int = 1,
    states: Mapping[int, ClientState] | None = None,
) -> Generator[Round, None, dict[int, ClientState]]:
    """Train ``server.state`` in rounds ``first`` to ``rounds``, yielding each; return each client's private state.

    ``audit``, ``interceptor``: choice and recorder of the attacked uploads. ``states``: client states of a stopped
    training to continue; the server then has forgotten earlier norms, by which it excludes outliers.
    """
    states = {client: ClientState() if states is None else states[client] for client in clients}
    with freed_memory_kept():
        steps = partial(_steps, server, clients, states, audit, interceptor)
        yield from one_by_one(rounds, lambda number: steps(round=number), first)
    return states


def _steps(
    server: Server,
    clients: Mapping[int, Client],
    states: dict[int, ClientState],
    audit: Audit,
    interceptor: Interceptor,
    *,
    round: int,
) -> Steps:
    for probe in counted("victim", audit.probes_of(round)):
        victim, sent = probe.in_round(round), server.sent_to(probe.client, round)
        probed = partial(clients[probe.client].probe, sent, states[probe.client], round=round, probe=probe.number)
        result = attempt(partial(probed, batch_size=audit.batch_size))
        if isinstance(result, Failure):
            logger.warning("The probe %s failed: %s", victim, result.reason)
        else:
            yield from _observed(interceptor, victim, sent, result.upload, states)
    started, before = time.perf_counter(), dict(states)
    results: dict[int, LocalResult | Failure] = {}
    intercepted: list[tuple[VictimId, ModelState, Upload]] = []
    for client in counted("client", server.select(round)):
        sent, state = server.sent_to(client, round), ClientState(dict(states[client].tensors))
        results[client] = result = attempt(partial(clients[client].update, sent, state, round=round))
        if isinstance(result, Failure):
            continue
        states[client] = state
        if audit.intercepts(round, client):
            intercepted.append((VictimId(round, client), sent, result.upload))
    for victim, sent, upload in intercepted:
        yield from _observed(interceptor, victim, sent, upload, before)
    report = finish_round(server, results, round=round, started=started)
    return with_personalized(report, personalize(server, clients, states, round)) if server.personal else report


def finish_round(
    server: Server, results: Mapping[int, LocalResult | Failure], *, round: int, started: float
) -> RoundReport:
    """Pass the replies to the server and report the round, with seconds since ``started`` (``time.perf_counter``)."""
    excluded = server.receive({c: r if isinstance(r, Failure) else r.upload for c, r in results.items()}, round)
    for client, reason in excluded.items():
        logger.warning("Client %d is excluded from round %d: %s", client, round, reason)
    counted = {c: r for c, r in sorted(results.items()) if isinstance(r, LocalResult) and c not in excluded}
    return RoundReport(
        round=round,
        clients=tuple(counted),
        excluded=excluded,
        train_loss=sum(r.train_loss for r in counted.values()) / len(counted) if counted else float("nan"),
        seconds=time.perf_counter() - started,
        defense_seconds=sum(r.defense_seconds for r in counted.values()),
        upload_bytes=sum(upload_bytes(r.upload) if r.bytes_up is None else r.bytes_up for r in counted.values()),
    )


def with_personalized(report: RoundReport, ends: Mapping[int, Personalized | Failure]) -> RoundReport:
    """Add the mean evaluation and seconds of personalization to ``report``. ``ends``: results, or failures to log."""
    for client, end in ends.items():
        if isinstance(end, Failure):
            logger.warning("Client %d did not end round %d: %s", client, report.round, end.reason)
    sound = [end for end in ends.values() if isinstance(end, Personalized)]
    evaluations = [end.evaluation for end in sound if end.evaluation]
    mean = mean_evaluation(evaluations) if evaluations else None
    return replace(report, seconds=report.seconds + sum(end.seconds for end in sound), evaluation=mean)


def personalize(
    server: Server, clients: Mapping[int, Client], states: dict[int, ClientState], round: int
) -> dict[int, Personalized | Failure]:
    """Let the clients of ``round`` personalize the new model, and update ``states``; return results by client."""
    ends: dict[int, Personalized | Failure] = {}
    for client in counted("private part of client", server.select(round)):
        sent, state = server.sent_to(client, round), ClientState(dict(states[client].tensors))
        work = partial(clients[client].personalize, sent, state, round=round, test=round in server.tested)
        ends[client] = attempt(work)
        if isinstance(ends[client], Personalized):
            states[client] = state
    return ends


def _observed(
    interceptor: Interceptor, victim: VictimId, sent: ModelState, upload: Upload, held: Mapping[int, ClientState]
) -> Iterator[Observation]:
    result = attempt(partial(interceptor.observe, victim, sent=sent, upload=upload, states=held.__getitem__))
    if isinstance(result, Failure):
        logger.warning("The update %s could not be intercepted: %s", victim, result.reason)
    elif result is not None:
        yield result
