"""SecAgg+ with clients on nodes of their own, which may leave and come back."""

import itertools
import logging
from collections.abc import Callable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_privacy.errors import UserError
from fl_privacy.federation import Failure, RoundReport, Server
from fl_privacy.federation.replies import MOST_EXAMPLES, attempt
from fl_privacy.flower.nodes import Nodes
from fl_privacy.flower.records import CLIENT, NUM_EXAMPLES
from fl_privacy.flower.secure_aggregation import Masking, expect_all_shared, train_secure_round
from fl_privacy.flower.traffic import Traffic
from fl_privacy.flower.transport import PromptGrid, pair

logger = logging.getLogger(__name__)

EXAMPLES = "query.examples"
"""Type of the message that asks for the number of examples, which is told in the clear under SecAgg+."""

TRIES = 4
"""How often a round is tried."""


def run_secure_on_grid(
    grid: Grid,
    server: Server,
    *,
    rounds: int,
    on_round: Callable[[RoundReport], None],
    nodes: Nodes,
    masking: Masking,
    timeout: float = 600.0,
) -> Traffic:
    """``run_secure_aggregation`` with clients on nodes of their own, whose apps are ``masking_client_app``.

    A node that joins or comes back takes part from the next round on. A round that too few nodes finish, as when one
    dies between two stages, is tried again, without those whose replies broke the protocol.

    Args:
        grid: leads to the nodes.
        server: as for ``run_secure_aggregation``, like ``rounds`` and ``on_round``.
        rounds: how many.
        on_round: told of each round.
        nodes: which node holds which partition.
        masking: clip, levels and threshold; nodes take theirs from the run's configuration.
        timeout: seconds to wait for the replies of each of the protocol's four stages.

    Raises:
        UserError: besides what ``run_secure_aggregation`` raises, the nodes do not fit the server's clients.
    """
    expect_all_shared(server)
    prompt, workflow = PromptGrid(grid), None
    traffic = Traffic(prompt, {})
    attempts = itertools.count(1)
    for round in range(1, rounds + 1):
        traffic.breaking.clear()
        for left in reversed(range(TRIES)):
            nodes.refresh(prompt)
            traffic.nodes = {client: nodes[client] for client in server.clients if client in nodes}
            if workflow is None:
                workflow = masking.workflow(_most_examples(traffic, timeout, server.plan.norm_factor), timeout)
            try:
                report = train_secure_round(
                    server, traffic, workflow, round=round, threshold=masking.threshold, attempt=next(attempts)
                )
            except UserError as error:
                if not left:
                    raise
                logger.warning("Round %d is tried again: %s", round, error)
            else:
                on_round(report)
                break
    return traffic


def _most_examples(traffic: Traffic, timeout: float, factor: float) -> int:
    """The largest number of examples that a node says it has, which scales the weights of all.

    At most ``factor`` times the lower median: one node's claim of 2^62 would leave nothing of the others' updates.
    """
    questions = [Message(RecordDict(), node, EXAMPLES) for node in traffic.nodes.values()]
    replies = [r for _, r in pair(questions, traffic.send_and_receive(questions, timeout=timeout))]
    told = [attempt(lambda: r.content.config_records[CLIENT][NUM_EXAMPLES]) for r in replies if isinstance(r, Message)]  # noqa: B023
    numbers = sorted(n for n in told if isinstance(n, int) and not isinstance(n, bool) and 0 < n <= MOST_EXAMPLES)
    if not numbers:
        reason = next((r.reason for r in replies if isinstance(r, Failure)), "none is positive")
        raise UserError(f"Nodes are expected to say how many examples they have, but failed: {reason}")
    return int(min(numbers[-1], factor * numbers[(len(numbers) - 1) // 2]))
