"""What a malicious server is: a model for each client, and what is read in the replies to it."""

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

Ask = Callable[[ModelState], Upload]
"""What a client replies to the values that it is sent."""


class ThreatLevel(StrEnum):
    """How far a malicious server goes.

    Attributes:
        HONEST: it follows the protocol and reads what it receives.
        PARAMETERS: it sends other values of the agreed architecture.
        ARCHITECTURE: it had the clients agree on an architecture with a layer of its own.
        INCONSISTENT: it sends different values to different clients.
    """

    HONEST = "honest but curious"
    PARAMETERS = "malicious parameters"
    ARCHITECTURE = "malicious architecture"
    INCONSISTENT = "inconsistent models"


@dataclass(frozen=True, kw_only=True)
class ServerAttack(ABC):
    """Crafts what clients are sent and reads what they reply.

    Attributes:
        level: how far it goes.
        told: one sentence on what it does.
        reads_sum: it needs no single update, the mean of all replies is enough: also behind secure aggregation.
        reads_images: what it reads are images; otherwise an update of fewer examples, for an attack of its own.
        trains: the global model goes on learning from the replies; otherwise it stays as it is in attacked rounds.
        asks_of_members: half of the images that the server holds are to be of the clients' own.
        public: (N, C, H, W) in [0, 1], images that the server holds; none of them is attacked.
    """

    level: ClassVar[ThreatLevel]
    told: ClassVar[str]
    reads_sum: ClassVar[bool] = False
    reads_images: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    asks_of_members: ClassVar[bool] = False
    public: Tensor = field(init=False, repr=False, compare=False, default_factory=lambda: torch.empty(0, 1, 1, 1))

    def informed(self, public: Tensor) -> Self:
        """Return the same attack by a server that holds ``public`` images (N, C, H, W), none attacked."""
        knowing = copy.copy(self)
        object.__setattr__(knowing, "public", public)
        return knowing

    @property
    def only(self) -> int | None:
        """Return the one client that can be attacked; ``None`` where all can."""
        return None

    def architecture(self, model: nn.Module, input_shape: tuple[int, ...], clients: int) -> nn.Module:
        """Return the architecture that ``clients`` clients are made to agree on; its values are not used."""
        return model

    @abstractmethod
    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        """Return what ``client`` is sent in place of ``state``, the values of ``model``; no tensor is changed in place.

        Raises:
            UserError: the model has no layer that this attack can use.
        """

    def question(self, model: nn.Module, state: ModelState, client: int, ask: Ask) -> tuple[ModelState, Upload]:
        """Return what ``client`` was sent and what it replied, where it can be asked about the same batch at will."""
        sent = self.craft(model, state, client)
        return sent, ask(sent)

    @abstractmethod
    def read(self, observation: Observation) -> Reconstruction | Observation:
        """Return what is in the reply of one client to what it was sent, or in the mean of all replies.

        Returns:
            Images, each with its certainty, or where ``reads_images`` is false what an attack may go on with.
        """


def expect_whole(model: nn.Module, state: ModelState, who: str) -> None:
    """Raise ``UserError``, which ``who`` begins, where clients keep layers of ``model`` that can't be crafted then."""
    if missing := [name for name, _ in model.named_parameters() if name not in state.parameters]:
        raise UserError(
            f"{who}: the whole model is expected to be sent, but clients keep {missing[0]}; use defense=none."
        )
