"""The rounds of a federation through Flower; for the same seed the same numbers as the plain loop."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from flwr.serverapp import Grid

from fl_privacy.defenses import ClientState
from fl_privacy.federation import Audit, ClientSource, RoundReport, Server
from fl_privacy.flower.client_app import simulated_client_app
from fl_privacy.flower.curious import HonestButCurious
from fl_privacy.flower.grids import FIRST_NODE, LocalGrid
from fl_privacy.flower.records import PARTITION, load_state
from fl_privacy.flower.strategy import Federated
from fl_privacy.interception import Interceptor
from fl_privacy.interception.interceptor import States, no_states

OnRound = Callable[[RoundReport], None]


@dataclass(frozen=True, kw_only=True)
class NodeRules:
    """What a run expects of nodes in other processes; see ``Nodes``."""

    bound: bool = False
    simulated: bool | None = None
    own_data: bool | None = None
    reconnect: float = 0.0


def run_on_grid(
    grid: Grid,
    server: Server,
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    on_round: OnRound,
    timeout: float = 600.0,
    rules: NodeRules = NodeRules(),
) -> None:
    """Train ``server.state`` for ``rounds`` rounds with the clients behind ``grid``.

    Args:
        grid: leads to the nodes.
        server: selects, sends, aggregates.
        rounds: how many.
        audit: what is intercepted.
        interceptor: makes observations of it.
        on_round: told of each round.
        timeout: seconds to wait for the replies of a round; who has not answered then is excluded from it.
        rules: for nodes that are processes of their own.

    Raises:
        UserError: the nodes do not fit the server's clients, or all clients of a round failed.
    """
    federated = Federated(server=server, audit=audit, on_round=on_round, timeout=timeout, **asdict(rules))
    curious = HonestButCurious(federated, interceptor, audit, states=_states(grid))
    with quiet_flower():
        curious.start(grid, federated.arrays(), num_rounds=rounds, timeout=timeout)


def run_in_process(
    server: Server,
    source: ClientSource,
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    on_round: OnRound,
) -> dict[int, ClientState]:
    """Run ``run_on_grid`` with every node in this process, one after the other; return what each client kept."""
    grid = LocalGrid(server.clients, simulated_client_app(source()))
    run_on_grid(grid, server, rounds=rounds, audit=audit, interceptor=interceptor, on_round=on_round)
    return _kept(grid)


def run_ray(
    server: Server,
    source: ClientSource,
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    on_round: OnRound,
    num_cpus: float = 1,
    num_gpus: float = 0.0,
    actors: int | None = None,
    timeout: float = 3600.0,
) -> dict[int, ClientState]:
    """Run ``run_on_grid`` with the clients in processes that Ray manages; return what each client kept.

    Ray starts on this machine's loopback interface and stops at the end; an address in RAY_ADDRESS, or a Ray that
    runs already, is used instead.

    Args:
        server: as for ``run_on_grid``, like all that is not named here.
        source: called once in each process.
        num_cpus: CPUs set aside for a process.
        num_gpus: share of a GPU set aside for a process.
        actors: at most so many processes; ``None`` takes what the resources allow.
        timeout: seconds that a process may work on one message; then it is ended, and its client excluded.

    Raises:
        UserError: no process fits into the machine; besides what ``run_on_grid`` raises.
    """
    from fl_privacy.flower.ray_nodes import ray_grid  # noqa: PLC0415

    with ray_grid(server.clients, source, num_cpus=num_cpus, num_gpus=num_gpus, actors=actors, timeout=timeout) as grid:
        run_on_grid(grid, server, rounds=rounds, audit=audit, interceptor=interceptor, on_round=on_round)
        return _kept(grid)


def _kept(grid: LocalGrid) -> dict[int, ClientState]:
    return {client: _states(grid)(client) for client in (int(c.node_config[PARTITION]) for c in grid.contexts.values())}


def _states(grid: Grid) -> States:
    if not isinstance(grid, LocalGrid):
        return no_states
    return lambda client: load_state(grid.contexts[FIRST_NODE + client].state)


@contextmanager
def quiet_flower() -> Iterator[None]:
    """Silence Flower's account of each round, which the caller gives itself, but for warnings."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
