"""A federated round without any framework: clients, server, and the plain loop over them."""

from fl_privacy.federation.client import LocalResult, Participant, Settled, local_update, private_names, public_state
from fl_privacy.federation.evaluation import Evaluation, evaluate_model, mean_evaluation
from fl_privacy.federation.guard import Failure, attempt, sort_out
from fl_privacy.federation.rounds import RoundReport, finish_round, run_rounds, settled
from fl_privacy.federation.server import Server, ServerPlan, upload_bytes

__all__ = [
    "Evaluation",
    "Failure",
    "LocalResult",
    "Participant",
    "RoundReport",
    "Server",
    "ServerPlan",
    "Settled",
    "attempt",
    "evaluate_model",
    "finish_round",
    "local_update",
    "mean_evaluation",
    "private_names",
    "public_state",
    "run_rounds",
    "settled",
    "sort_out",
    "upload_bytes",
]
