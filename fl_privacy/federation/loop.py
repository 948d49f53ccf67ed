"""A federated run as a plain loop in this process: the reference for every other backend."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fl_privacy.defenses import ClientState
from fl_privacy.federation.attempt import attempt
from fl_privacy.federation.audit import Audit
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.local_update import LocalResult
from fl_privacy.federation.participant import Participant
from fl_privacy.federation.server import Failure, Server, upload_bytes


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What happened in a round.

    Attributes:
        round: from 1.
        clients: ids of those whose replies count.
        excluded: reason by id of those whose replies do not.
        train_loss: mean over the clients that count.
        seconds: of the whole round, without evaluation and attack.
        defense_seconds: of the defense's hooks, summed over clients.
        upload_bytes: of the replies that count, together.
    """

    round: int
    clients: tuple[int, ...]
    excluded: Mapping[int, str] = field(default_factory=dict)
    train_loss: float
    seconds: float
    defense_seconds: float
    upload_bytes: int


def run_rounds(
    server: Server,
    participants: Mapping[int, Participant],
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    on_round: Callable[[RoundReport], None],
) -> dict[int, ClientState]:
    """Train ``server.state`` for ``rounds`` rounds; returns what each client kept for itself."""
    kept = {client: ClientState() for client in participants}
    for round in range(1, rounds + 1):
        for probe in audit.probes_of(round):
            sent = server.sent_to(probe.client)
            participant, state = participants[probe.client], kept[probe.client]
            result = attempt(
                f"Probe {probe.victim} of client {probe.client} in round {round}",
                lambda: participant.probe(sent, state, round=round, victim=probe.victim, batch_size=audit.batch_size),  # noqa: B023
            )
            if isinstance(result, LocalResult):
                interceptor.capture(round=round, client=probe.client, sent=sent, upload=result.upload, probe=probe)
        started = time.perf_counter()
        results: dict[int, LocalResult | Failure] = {}
        for client in server.select(round):
            sent, participant, state = server.sent_to(client), participants[client], kept[client]
            results[client] = result = attempt(
                f"Client {client} in round {round}",
                lambda: participant.update(sent, state, round=round),  # noqa: B023
            )
            if isinstance(result, LocalResult) and audit.intercepts(round, client):
                interceptor.capture(round=round, client=client, sent=sent, upload=result.upload)
        on_round(finish_round(server, results, round=round, started=started))
    return kept


def finish_round(
    server: Server, results: Mapping[int, LocalResult | Failure], *, round: int, started: float
) -> RoundReport:
    """Hand the replies to the server and sum the round up; ``started`` is on the clock of ``time.perf_counter``."""
    excluded = server.receive({c: r if isinstance(r, Failure) else r.upload for c, r in results.items()})
    counted = {c: r for c, r in sorted(results.items()) if isinstance(r, LocalResult) and c not in excluded}
    return RoundReport(
        round=round,
        clients=tuple(counted),
        excluded=excluded,
        train_loss=sum(r.train_loss for r in counted.values()) / len(counted),
        seconds=time.perf_counter() - started,
        defense_seconds=sum(r.defense_seconds for r in counted.values()),
        upload_bytes=sum(upload_bytes(r.upload) for r in counted.values()),
    )
