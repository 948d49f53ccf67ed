"""Interception of uploads: observations with an attacker's knowledge, and their files."""

from fl_privacy.federation.interception.capture_writer import CaptureWriter, WaitingUpdates, save_observation
from fl_privacy.federation.interception.captures import (
    LazyObservations,
    StoredObservations,
    by_id,
    changed,
    ids_of,
    load_observations,
    only,
    stored_observations,
)
from fl_privacy.federation.interception.infer_plan import at_typical_rates, describe_model, recognize_training
from fl_privacy.federation.interception.interceptor import (
    ACTIVATION,
    Interceptor,
    SideInformation,
    SimulatedSideInformation,
    States,
    no_states,
)

__all__ = [
    "ACTIVATION",
    "CaptureWriter",
    "Interceptor",
    "LazyObservations",
    "SideInformation",
    "SimulatedSideInformation",
    "States",
    "StoredObservations",
    "WaitingUpdates",
    "at_typical_rates",
    "by_id",
    "changed",
    "describe_model",
    "ids_of",
    "load_observations",
    "no_states",
    "only",
    "recognize_training",
    "save_observation",
    "stored_observations",
]
