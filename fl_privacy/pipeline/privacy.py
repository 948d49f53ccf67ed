"""What differential privacy a run gives its clients, in a sentence."""

import math

from fl_privacy.config import Federation
from fl_privacy.defenses.accounting import Accountant, Guarantee, guarantee
from fl_privacy.federation.batching import local_batches
from fl_privacy.rng import derive_generator


def privacy_statement(federation: Federation, *, delta: float, accountant: Accountant) -> str:
    """Epsilon after one round and at the end for the client that is worst off, or why there is none.

    Clients that a round draws at random are taken to be drawn in every round: the server sees who takes part.

    Args:
        federation: before it runs.
        delta: in (0, 1), below one over a client's number of examples.
        accountant: ``rdp`` or ``prv``.
    """
    server, plan = federation.server, federation.server.local_plan
    kinds = set()
    for participant in federation.participants.values():
        number = len(participant.indices)
        size = min(plan.batch_size or number, number)
        kinds.add((size / number, len(local_batches(number, plan, derive_generator(0)))))
    candidates = [
        guarantee(
            federation.defense,
            sample_rate=sample_rate,
            delta=delta,
            steps_per_round=steps,
            accountant=accountant,
            num_tensors=len(server.state.parameters),
            buffers_shared=bool(server.state.buffers) and plan.buffers == "shared" and plan.batch_norm == "train",
        )
        for sample_rate, steps in kinds
    ]
    turns = len(federation.participants) if server.plan.aggregation == "round_robin" else 1
    taken_part = math.ceil(federation.rounds / turns)

    def total(candidate: Guarantee) -> float:
        return candidate.epsilon(taken_part)

    worst = max(candidates, key=total)
    sentences = [worst.describe(taken_part)]
    if worst.missing is None and taken_part > 1:
        sentences.append(f"After one round epsilon is {worst.epsilon(1):.4g}.")
    if worst.missing is None and worst.sample_rate < 1:
        sentences.append("This run draws its batches without replacement instead, which the accountant does not cover.")
    return " ".join(sentences)
