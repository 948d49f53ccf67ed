"""A client: what it trains on, how it trains, what it keeps for itself."""

from fl_privacy.federation.client.client import Participant, Settled
from fl_privacy.federation.client.private_part import private_names, public_state
from fl_privacy.federation.client.training import LocalResult, local_update

__all__ = ["LocalResult", "Participant", "Settled", "local_update", "private_names", "public_state"]
