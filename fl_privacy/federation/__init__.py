"""Federated rounds without a framework: clients, server, interception plan, and the plain loop."""

from fl_privacy.federation.client import Client, ClientSource, Personalized
from fl_privacy.federation.evaluation import Evaluation, evaluate_model, mean_evaluation
from fl_privacy.federation.interception_plan import Audit, Probe, audited_rounds, spread_probes
from fl_privacy.federation.replay import Replay, examples_behind
from fl_privacy.federation.replies import Failure, attempt, sort_out
from fl_privacy.federation.rounds import Round, RoundReport, finish_round, plain_rounds, run_all, with_personalized
from fl_privacy.federation.server import Server, ServerPlan, upload_bytes
from fl_privacy.federation.training import LocalResult, local_update, private_names, public_state

__all__ = [
    "Audit",
    "Client",
    "ClientSource",
    "Evaluation",
    "Failure",
    "LocalResult",
    "Personalized",
    "Probe",
    "Replay",
    "Round",
    "RoundReport",
    "Server",
    "ServerPlan",
    "attempt",
    "audited_rounds",
    "evaluate_model",
    "examples_behind",
    "finish_round",
    "local_update",
    "mean_evaluation",
    "plain_rounds",
    "private_names",
    "public_state",
    "run_all",
    "sort_out",
    "spread_probes",
    "upload_bytes",
    "with_personalized",
]
