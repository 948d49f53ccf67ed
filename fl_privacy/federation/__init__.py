"""A federated round without any framework: clients, server, interception, and the plain loop over them."""

from fl_privacy.federation.audit import Audit, Probe, audited_rounds, spread_probes
from fl_privacy.federation.capture import CaptureWriter, save_observation
from fl_privacy.federation.captured import load_observations
from fl_privacy.federation.evaluation import Evaluation, evaluate_model
from fl_privacy.federation.interception import Interceptor, observation_id, parse_observation_id
from fl_privacy.federation.local_update import LocalResult, local_update
from fl_privacy.federation.loop import RoundReport, finish_round, run_rounds
from fl_privacy.federation.participant import Participant
from fl_privacy.federation.server import Failure, Server, ServerPlan, upload_bytes

__all__ = [
    "Audit",
    "CaptureWriter",
    "Evaluation",
    "Failure",
    "Interceptor",
    "LocalResult",
    "Participant",
    "Probe",
    "RoundReport",
    "Server",
    "ServerPlan",
    "audited_rounds",
    "evaluate_model",
    "finish_round",
    "load_observations",
    "local_update",
    "observation_id",
    "parse_observation_id",
    "run_rounds",
    "save_observation",
    "spread_probes",
    "upload_bytes",
]
