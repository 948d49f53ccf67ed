"""Interface of malicious servers: a model for each client, and a reconstruction from its reply."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.types import ModelState, Observation, Reconstruction, Upload

Ask = Callable[[ModelState], Upload]  # a client's reply to given values


class ThreatLevel(StrEnum):
    """Deviation of a server from the protocol."""

    HONEST = "honest but curious"  # no deviation
    PARAMETERS = "malicious parameters"  # crafted values of the agreed architecture
    ARCHITECTURE = "malicious architecture"  # an agreed architecture with a layer of its own
    INCONSISTENT = "inconsistent models"  # different values for different clients


@dataclass(frozen=True, kw_only=True)
class ServerAttack(ABC):
    """Crafts the models sent to clients and reconstructs from their replies.

    Attributes:
        reads_sum: ``True`` if the mean of all replies is enough, also behind secure aggregation.
        reads_images: ``False`` if it returns an update for a further attack.
        trains: ``True`` if the global model learns from the replies.
        asks_of_members: ``True`` if half of the server's images are to be the clients' own.
        public: (N, C, H, W) in [0, 1], the server's images; none of them is attacked.
    """

    level: ClassVar[ThreatLevel]
    told: ClassVar[str]
    reads_sum: ClassVar[bool] = False
    reads_images: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    asks_of_members: ClassVar[bool] = False
    public: Tensor = field(init=False, repr=False, compare=False, default_factory=lambda: torch.empty(0, 1, 1, 1))

    def informed(self, public: Tensor) -> Self:
        """Return a copy for a server with ``public`` images (N, C, H, W)."""
        knowing = copy.copy(self)
        object.__setattr__(knowing, "public", public)
        return knowing

    @property
    def only(self) -> int | None:
        """Return the only client that can be attacked; ``None`` for all."""
        return None

    def architecture(self, model: nn.Module, input_shape: tuple[int, ...], clients: int) -> nn.Module:
        """Return the architecture that ``clients`` clients have to agree on; its values are not used."""
        return model

    @abstractmethod
    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        """Return values for ``client``; ``state`` stays as it is. UserError: the model has no usable layer."""

    def question(self, model: nn.Module, state: ModelState, client: int, ask: Ask) -> tuple[ModelState, Upload]:
        """Return the sent values and the reply of ``client``, which answers repeatedly on the same batch."""
        sent = self.craft(model, state, client)
        return sent, ask(sent)

    @abstractmethod
    def read(self, observation: Observation) -> Reconstruction | Observation:
        """Return images, each with its certainty, from one client's reply, or from the mean of all.

        Unless ``reads_images``, an update for a further attack is returned.
        """


def expect_whole(model: nn.Module, state: ModelState, who: str) -> None:
    """Raise ``UserError``, which ``who`` begins, if clients keep layers of ``model``."""
    if missing := [name for name, _ in model.named_parameters() if name not in state.parameters]:
        raise UserError(
            f"{who}: the whole model is expected to be sent, but clients keep {missing[0]}; use defense=none."
        )
