"""From an upload to what an attacker observes: with what else it knows, and the files of both."""

from fl_privacy.interception.capture_reader import StoredObservations, load_observations, stored_observations
from fl_privacy.interception.capture_writer import CaptureWriter, save_observation
from fl_privacy.interception.interceptor import Interceptor
from fl_privacy.interception.lazy_observations import LazyObservations, by_id, changed, ids_of, only
from fl_privacy.interception.recognition import at_typical_rates, describe_model, recognize_training
from fl_privacy.interception.side_information import SideInformation, SimulatedSideInformation, States, no_states
from fl_privacy.interception.waiting import WaitingUpdates

__all__ = [
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
