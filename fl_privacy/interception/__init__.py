"""From an upload to what an attacker observes: with what else it knows, and the files of both."""

from fl_privacy.interception.capture_reader import load_observations
from fl_privacy.interception.capture_writer import CaptureWriter, save_observation
from fl_privacy.interception.interceptor import Interceptor
from fl_privacy.interception.recognition import describe_model, recognize_training
from fl_privacy.interception.side_information import InsiderInformation, SideInformation, States, no_states

__all__ = [
    "CaptureWriter",
    "InsiderInformation",
    "Interceptor",
    "SideInformation",
    "States",
    "describe_model",
    "load_observations",
    "no_states",
    "recognize_training",
    "save_observation",
]
