"""The nouns of the package: what is trained, what is uploaded, what an attacker knows and what it finds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import total_ordering
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.effects import Description, settings_in_words
from fl_privacy.plan import LocalPlan

__all__ = [
    "Batch",
    "Knowledge",
    "LocalPlan",
    "ModelState",
    "Observation",
    "Reconstruction",
    "Tensors",
    "Upload",
    "VictimId",
]

Tensors = Mapping[str, Tensor]
"""Parameter name -> tensor. Nothing in this package indexes a layer by number."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples with their labels.

    Attributes:
        inputs: (B, C, H, W) float in [0, 1].
        labels: (B,) class indices, or (B, K) class probabilities.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, eq=False)
class ModelState:
    """The values of a model: ``parameters`` are trained, ``buffers`` (batch-norm statistics) are not."""

    parameters: Tensors
    buffers: Tensors = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """The detached values of ``model``, copied."""
        return cls(
            {name: p.detach().clone() for name, p in model.named_parameters()},
            {name: b.detach().clone() for name, b in model.named_buffers()},
        )

    def to(self, device: torch.device | str) -> "ModelState":
        """The same values on ``device``."""
        return ModelState(_moved(self.parameters, device), _moved(self.buffers, device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Upload:
    """All that leaves a client in a round.

    Attributes:
        tensors: gradient, delta or weights by parameter name; a name that is missing was withheld.
        buffers: the client's running statistics, empty where the plan withholds them.
        num_examples: how many examples the update was computed from; the server's weight.
    """

    tensors: Tensors
    buffers: Tensors = field(default_factory=dict)
    num_examples: int

    def to(self, device: torch.device | str) -> "Upload":
        """The same upload on ``device``."""
        return replace(self, tensors=_moved(self.tensors, device), buffers=_moved(self.buffers, device))


def _moved(tensors: Tensors, device: torch.device | str) -> Tensors:
    return {name: t.to(device) for name, t in tensors.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Knowledge:
    """What the attacker is given beyond the protocol: the threat model as a value, printed in every report.

    Attributes:
        labels: (B,) class indices or (B, K) class probabilities, the labels that the client computed its loss with,
            where the attacker is assumed to have them.
        defense: public description of the client's defense, for an adaptive attacker: its ``Defense.parts``.
        same_data: names the examples behind the update: updates with the same name, of other rounds and other weights
            sent, come from the same examples. An adaptive attacker attacks them together; ``None`` where the defense
            makes other images of the examples each time.
        public_images: (N, C, H, W) in [0, 1], images of the same domain.
        public_labels: (N,) their classes.
        previous: (B, C, H, W) in [0, 1], what the attacker made of the same examples in an earlier round.
        private: values that stand in for those of the victim that are not sent: of a colluding client, or of the
            attacker's own draw.
        colluder: the client that ``private`` was taken from, if any.
        features: (B, ...) what the victim's private layers make of its examples, where the attacker is assumed to see
            it: the input of the first public layer.
        features_at: the module that ``features`` enter, where it is another one.
    """

    labels: Tensor | None = None
    defense: Description | None = None
    same_data: str | None = None
    public_images: Tensor | None = None
    public_labels: Tensor | None = None
    previous: Tensor | None = None
    private: ModelState | None = None
    colluder: int | None = None
    features: Tensor | None = None
    features_at: str | None = None

    def describe(self) -> list[str]:
        """One sentence for each thing known."""
        lines = []
        if self.labels is not None:
            lines.append("The attacker is given the true labels.")
        if self.public_images is not None:
            lines.append(
                f"The attacker holds {len(self.public_images)} public images of the same domain, none attacked."
            )
        if self.previous is not None:
            lines.append("The attacker starts from its own guess at the same examples in the round it attacked before.")
        if self.colluder is not None:
            lines.append(
                f"Client {self.colluder} colludes: its private layers stand in for those of the victims; it is not"
                " attacked itself."
            )
        elif self.private is not None:
            lines.append("For private layers, which it does not see, the attacker takes values of its own draw.")
        if self.features is not None:
            lines.append(
                f"The attacker sees what enters {self.features_at or 'the first public layer'} of a victim's model."
            )
        if self.defense is not None:
            lines.append(f"The attacker knows the defense and its settings ({settings_in_words(self.defense)}).")
        if self.same_data is not None:
            lines.append("The attacker knows which updates of different rounds come from the same examples.")
        return lines or ["The attacker knows nothing beyond the protocol."]


_VICTIM_ID = re.compile(r"round-([0-9]{1,9})/client-([0-9]{1,9})(?:/victim-([0-9]{1,9}))?")


@total_ordering
@dataclass(frozen=True)
class VictimId:
    """Names an attacked update, its random streams and its files.

    ``str()`` of it is ``round-3/client-2/victim-0``, of an update that trains the model ``round-3/client-2``.

    Attributes:
        round: from 1; 0 where no round was trained.
        client: partition number, from 0.
        probe: which of the client's extra batches is probed, from 0; ``None`` where the update trains the model.
        part: a word that tells apart several attacks on the same update, such as on its ``features``.

    Raises:
        ValueError: a number is negative, or ``part`` is no word.
    """

    round: int
    client: int
    probe: int | None = None
    part: str = ""

    def __post_init__(self) -> None:
        if min(self.round, self.client, self.probe or 0) < 0 or not re.fullmatch(r"[\w+-]*", self.part, re.ASCII):
            raise ValueError(f"A victim is expected to be named by numbers from 0 and a word, but got {self!r}.")

    @classmethod
    def parse(cls, text: str) -> "VictimId":
        """Inverse of ``str()``, for ids that come from files.

        Raises:
            ValueError: ``text`` is none.
        """
        if not (match := _VICTIM_ID.fullmatch(text)):
            raise ValueError(f"A name round-R/client-C or round-R/client-C/victim-K is expected, but got {text!r}.")
        round, client, probe = match.groups()
        return cls(int(round), int(client), None if probe is None else int(probe))

    @property
    def source(self) -> str:
        """The name without its round: what was attacked in several rounds has the same."""
        words = [f"client-{self.client}", *([] if self.probe is None else [f"victim-{self.probe}"]), self.part]
        return "/".join(filter(None, words))

    def __str__(self) -> str:
        return f"round-{self.round}/{self.source}"

    def __lt__(self, other: "VictimId") -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[int, int, int, str]:
        return self.round, self.client, -1 if self.probe is None else self.probe, self.part


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """All that an attacker of one update knows.

    Attributes:
        id: names the victim and its random streams.
        model: the architecture; its own values are not used.
        sent: the values that this client was sent.
        upload: what the client replied.
        plan: how the client trains.
        input_shape: (C, H, W) of one example.
        num_classes: K.
        knowledge: what is known beyond the protocol.
    """

    id: VictimId
    model: nn.Module
    sent: ModelState
    upload: Upload
    plan: LocalPlan
    input_shape: tuple[int, ...]
    num_classes: int
    knowledge: Knowledge = field(default_factory=Knowledge)

    def update(self) -> Tensors:
        """The gradient or delta that was uploaded; weights are turned into a delta."""
        if self.plan.shares != "weights":
            return self.upload.tensors
        return {name: w - self.sent.parameters[name] for name, w in self.upload.tensors.items()}

    def assumed(self) -> ModelState:
        """The values that the attacker works with: those sent, and for what was not sent those that stand in for it."""
        private = self.knowledge.private
        if private is None:
            return self.sent
        return ModelState({**private.parameters, **self.sent.parameters}, {**private.buffers, **self.sent.buffers})

    def told(self, **knowledge: Any) -> "Observation":
        """The same observation by an attacker that knows more."""
        return replace(self, knowledge=replace(self.knowledge, **knowledge))


class Certainty(StrEnum):
    """How sure an attacker is itself, which does not know the truth.

    Attributes:
        PROVEN: what entered the model, but for rounding: a system of equations with one solution was solved, and it
            shows in the update that the solution is the right one.
        CONSISTENT: the update that was observed is reproduced to rounding.
        APPROXIMATE: neither.
    """

    PROVEN = "proven"
    CONSISTENT = "consistent"
    APPROXIMATE = "approximate"


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """What an attack made of one observation.

    Attributes:
        id: of the observation.
        batch: the attacker's guess, in the attacker's own order; ``None`` where the attack failed.
        loss: the attacker's own loss of the guess, by which restarts are chosen.
        history: (T,) the attacker's loss over its iterations, thinned; empty if it has none.
        failure: one line on why there is no guess.
        label_source: how the labels were found: ``known``, ``inferred`` or ``optimized``.
        countermeasures: what the attack did against the defense it knows of, a sentence each.
        certainty: of the guess, without looking at the truth.
        certainties: (B,) of each of its images, where they differ; empty where all are alike.
        member: of the attacks that were tried, the one whose guess this is; empty where there was a single one.
    """

    id: VictimId
    batch: Batch | None
    loss: float = float("nan")
    history: tuple[float, ...] = ()
    failure: str | None = None
    label_source: str = "inferred"
    countermeasures: tuple[str, ...] = ()
    certainty: Certainty = Certainty.APPROXIMATE
    certainties: tuple[Certainty, ...] = ()
    member: str = ""
