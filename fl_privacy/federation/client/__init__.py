"""A client: what it trains on, how it trains, what it keeps for itself, and how a simulation repeats it."""

from fl_privacy.federation.client.client import Client, ClientSource, Personalized
from fl_privacy.federation.client.examples import LocalWork
from fl_privacy.federation.client.private_part import private_names, public_state
from fl_privacy.federation.client.replay import Replay, examples_behind
from fl_privacy.federation.client.training import LocalResult, local_update

__all__ = [
    "Client",
    "ClientSource",
    "LocalResult",
    "LocalWork",
    "Personalized",
    "Replay",
    "examples_behind",
    "local_update",
    "private_names",
    "public_state",
]
