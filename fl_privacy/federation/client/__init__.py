"""A client: what it trains on, how it trains, what it keeps for itself."""

from fl_privacy.federation.client.client import Client, Personalized
from fl_privacy.federation.client.private_part import private_names, public_state
from fl_privacy.federation.client.training import LocalResult, local_update

__all__ = ["Client", "LocalResult", "Personalized", "local_update", "private_names", "public_state"]
