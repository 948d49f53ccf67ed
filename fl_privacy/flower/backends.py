"""Run federated rounds through Flower, with the same results as the plain loop."""

import logging
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fl_privacy.checks.packages import expect_package
from fl_privacy.defenses import ClientState
from fl_privacy.federation import Audit, ClientSource, Round, RoundReport, Server
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.interception.interceptor import States, no_states
from fl_privacy.federation.rounds import Steps, one_by_one
from fl_privacy.flower.client_app import simulated_client_app
from fl_privacy.flower.curious import HonestButCurious
from fl_privacy.flower.grids import FIRST_NODE, LocalGrid
from fl_privacy.flower.records import PARTITION, load_state
from fl_privacy.flower.strategy import Federated, NodeRules
from fl_privacy.types import Observation


def rounds_on_grid(
    grid: Grid,
    server: Server,
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    timeout: float = 600.0,
    rules: NodeRules | None = None,
) -> Generator[Round, None, None]:
    """Train ``server.state`` with the clients behind ``grid``, yielding each round.

    ``audit``, ``interceptor``: choice and recorder of the attacked uploads. ``timeout``: seconds to wait for a round's
    replies; later replies do not count. ``rules``: requirements on the nodes. ``UserError`` if a client has no node,
    nodes break the rules, or all clients of a round failed.
    """
    seen, ended = deque[Observation](), list[RoundReport]()
    settings = asdict(rules or NodeRules())
    federated = Federated(server=server, audit=audit, on_round=ended.append, timeout=timeout, **settings)
    curious = HonestButCurious(federated, replace(interceptor, sink=seen.append), audit, states=_states(grid))

    def steps(round: int) -> Steps:
        config = ConfigRecord()
        messages = curious.configure_train(round, federated.arrays(), config, grid)
        yield from _emptied(seen)
        curious.aggregate_train(round, grid.send_and_receive(messages, timeout=timeout))
        yield from _emptied(seen)
        tests = curious.configure_evaluate(round, federated.arrays(), config, grid)
        curious.aggregate_evaluate(round, grid.send_and_receive(tests, timeout=timeout))
        return ended.pop()

    with quiet_flower():
        yield from one_by_one(rounds, steps)


def _emptied(seen: deque[Observation]) -> Iterator[Observation]:
    while seen:
        yield seen.popleft()


def rounds_in_process(
    server: Server, source: ClientSource, *, rounds: int, audit: Audit, interceptor: Interceptor
) -> Generator[Round, None, dict[int, ClientState]]:
    """Train with all nodes in this process, yielding rounds, as ``rounds_on_grid``; return the clients' states."""
    grid = LocalGrid(server.clients, simulated_client_app(source()))
    yield from rounds_on_grid(grid, server, rounds=rounds, audit=audit, interceptor=interceptor)
    return _kept(grid)


def rounds_on_ray(
    server: Server,
    source: ClientSource,
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    num_cpus: float = 1,
    num_gpus: float = 0.0,
    actors: int | None = None,
    timeout: float = 3600.0,
) -> Generator[Round, None, dict[int, ClientState]]:
    """Train ``server.state`` with clients in Ray's processes, yielding each round; return each client's state.

    Ray starts on the loopback interface and stops at the end, unless RAY_ADDRESS or a running Ray is used.
    ``num_gpus``: share of a GPU reserved for a process. ``actors``: largest number of processes; ``None`` takes what
    the resources allow. ``timeout``: seconds for one message, after which a process is ended and its client excluded.
    ``UserError`` if no process fits into the machine, or as in ``rounds_on_grid``, which explains ``audit`` and
    ``interceptor``.
    """
    expect_package("ray", "backend=ray")
    from fl_privacy.flower.ray_nodes import ray_grid  # noqa: PLC0415

    with ray_grid(server.clients, source, num_cpus=num_cpus, num_gpus=num_gpus, actors=actors, timeout=timeout) as grid:
        yield from rounds_on_grid(grid, server, rounds=rounds, audit=audit, interceptor=interceptor)
        return _kept(grid)


def _kept(grid: LocalGrid) -> dict[int, ClientState]:
    return {client: _states(grid)(client) for client in (int(c.node_config[PARTITION]) for c in grid.contexts.values())}


def _states(grid: Grid) -> States:
    if not isinstance(grid, LocalGrid):
        return no_states
    return lambda client: load_state(grid.contexts[FIRST_NODE + client].state)


@contextmanager
def quiet_flower() -> Iterator[None]:
    """Silence Flower's log of each round, except for warnings."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
