"""A federated round without any framework: clients, server, interception, and the plain loop over them."""

from fl_privacy.federation.audit import Audit, Probe, audited_rounds, spread_probes
from fl_privacy.federation.capture import CaptureWriter, save_observation
from fl_privacy.federation.captured import load_observations
from fl_privacy.federation.evaluation import Evaluation, evaluate_model, mean_evaluation
from fl_privacy.federation.guard import Failure, sort_out
from fl_privacy.federation.insider import Informant, Insider, States
from fl_privacy.federation.interception import Interceptor, observation_id, parse_observation_id
from fl_privacy.federation.local_update import LocalResult, local_update
from fl_privacy.federation.loop import RoundReport, finish_round, run_rounds, settled
from fl_privacy.federation.participant import Participant, Settled
from fl_privacy.federation.private_part import private_names, public_state
from fl_privacy.federation.server import Server, ServerPlan, upload_bytes

__all__ = [
    "Audit",
    "CaptureWriter",
    "Evaluation",
    "Failure",
    "Informant",
    "Insider",
    "Interceptor",
    "LocalResult",
    "Participant",
    "Probe",
    "RoundReport",
    "Server",
    "ServerPlan",
    "Settled",
    "States",
    "audited_rounds",
    "evaluate_model",
    "finish_round",
    "load_observations",
    "local_update",
    "mean_evaluation",
    "observation_id",
    "parse_observation_id",
    "private_names",
    "public_state",
    "run_rounds",
    "save_observation",
    "settled",
    "sort_out",
    "spread_probes",
    "upload_bytes",
]
