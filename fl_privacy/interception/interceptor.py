"""From a client's reply to what an attacker knows of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from fl_privacy.interception.side_information import SideInformation, States, no_states
from fl_privacy.types import Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

Sink = Callable[[Observation], None]
"""Takes each observation as it is made: keeps it, writes it down, or attacks it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Interceptor:
    """Turns replies into observations and hands them on.

    Attributes:
        model: architecture of what the clients are sent.
        plan: how the clients train.
        input_shape: (C, H, W).
        num_classes: K.
        sink: where observations go.
        knowledge: what the attacker knows beyond the protocol.
        side_information: adds what is known from inside the federation, such as layers that stand in for private
            ones; ``None`` where nothing is.
    """

    model: nn.Module
    plan: LocalPlan
    input_shape: tuple[int, ...]
    num_classes: int
    sink: Sink
    knowledge: Knowledge = field(default_factory=Knowledge)
    side_information: SideInformation | None = None

    def capture(self, victim: VictimId, *, sent: ModelState, upload: Upload, states: States = no_states) -> None:
        """Make the observation of one upload and hand it to the sink; ``states`` are what the clients held before.

        An upload whose arrays have other shapes than the model's is none of this model, and left out.
        """
        values = sent.parameters
        if any(name in values and t.shape != values[name].shape for name, t in upload.tensors.items()):
            return
        observation = Observation(
            id=victim,
            model=self.model,
            sent=sent,
            upload=upload,
            plan=self.plan.in_round(victim.round, probe=victim.probe is not None),
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            knowledge=self.knowledge,
        )
        if self.side_information:
            observation = self.side_information(observation, states=states)
        self.sink(observation)
