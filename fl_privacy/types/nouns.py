"""What is trained, what is uploaded, what an attacker knows and what it finds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.checks import expects_its_arguments
from fl_privacy.effects import Description, settings_in_words
from fl_privacy.errors import UserError
from fl_privacy.models.losses import CROSS_ENTROPY, Loss, LossLike
from fl_privacy.types.film import Snapshot
from fl_privacy.types.modality import IMAGES, Modality
from fl_privacy.types.plan import LocalPlan
from fl_privacy.types.schema import Schema, with_schema
from fl_privacy.types.user_gradients import as_tensor, expect_range, read_gradients
from fl_privacy.types.user_updates import Weights, read_update
from fl_privacy.types.victim_ids import Certainty, VictimId

_SHAPES = "give input_shape=tuple(images.shape[1:]), or the number of columns of a row"

Tensors = Mapping[str, Tensor]
"""Parameter name -> tensor. Nothing in this package indexes a layer by number."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples with their labels.

    Attributes:
        inputs: images (B, C, H, W) float in [0, 1], or texts (B, L) int64: numbers of tokens, -1 where there is none,
            or rows (B, F) float as a :class:`fl_privacy.types.schema.Schema` encodes them. Arrays become tensors.
        labels: (B,) class indices, or (B, K) class probabilities; of a language model (B, L) next tokens, -100: none.
            Lists and arrays become tensors.
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name in ("inputs", "labels"):
            value: object = getattr(self, name)
            if not isinstance(value, Tensor):
                object.__setattr__(self, name, _tensor_of(name, value))

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, number: int) -> "Batch":
        """Return the first ``number`` examples."""
        return Batch(self.inputs[:number], self.labels[:number])


def _tensor_of(name: str, value: object) -> Tensor:
    """Return an array or a list as a tensor, whole numbers as int64."""
    try:
        tensor = torch.as_tensor(as_tensor(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{name} of a Batch are expected to be a tensor or an array, but got {type(value).__name__}; stack them."
        ) from error
    return tensor if tensor.is_floating_point() else tensor.long()


@dataclass(frozen=True, eq=False)
class ModelState:
    """The values of a model: ``parameters`` are trained, ``buffers`` (batch-norm statistics) are not."""

    parameters: Tensors
    buffers: Tensors = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """Return the detached values of ``model``, copied."""
        return cls(
            {name: p.detach().clone() for name, p in model.named_parameters()},
            {name: b.detach().clone() for name, b in model.named_buffers()},
        )

    def to(self, device: torch.device | str) -> "ModelState":
        """Return the same values on ``device``."""
        return ModelState(_moved(self.parameters, device), _moved(self.buffers, device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Upload:
    """All that leaves a client in a round.

    Attributes:
        tensors: gradient, delta or weights by parameter name; a name that is missing was withheld.
        buffers: the client's running statistics, empty where the plan withholds them.
        num_examples: how many examples the update was computed from; the server's weight.
        rounding: standard deviation of what secure aggregation's whole numbers did to each value; 0 without.
    """

    tensors: Tensors
    buffers: Tensors = field(default_factory=dict)
    num_examples: int
    rounding: float = 0.0

    def to(self, device: torch.device | str) -> "Upload":
        """Return the same upload on ``device``."""
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
            makes other images of the examples each time, but mixtures with others.
        public_images: (N, C, H, W) in [0, 1], images of the same domain, or texts (N, L), -1 where there is no token.
        public_labels: (N,) their classes.
        previous: (B, C, H, W) in [0, 1], what the attacker made of the same examples in an earlier round.
        private: values that stand in for those of the victim that are not sent: of a colluding client, or of the
            attacker's own draw.
        colluder: the client that ``private`` was taken from, if any.
        features: (B, ...) what the victim's private layers make of its examples, where the attacker sees it.
        features_at: the module that ``features`` enter, where it is not the first public layer.
        front: of the colluding client's model after its local training, where ``features`` are of the victim's so.
        lengths: (B,) tokens of each text.
        bounds: by name, least and largest value of each element of the gradient, where the client's optimizer left no
            more of it; ``None`` where it is the one uploaded.
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
    front: ModelState | None = None
    lengths: Tensor | None = None
    bounds: Mapping[str, tuple[Tensor, Tensor]] | None = None

    def describe(self, modality: Modality = IMAGES) -> list[str]:
        """Describe each thing known of examples of a kind in a sentence."""
        lines = []
        if self.labels is not None:
            lines.append("The attacker is given the true labels.")
        if self.lengths is not None:
            lines.append("The attacker is told how many tokens each text has.")
        if self.public_images is not None:
            kind = f"{len(self.public_images)} public {modality.one}s"
            lines.append(f"The attacker holds {kind} of the same domain, none attacked.")
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
            where = (self.features_at or "the first public layer") + " after local training" * (self.front is not None)
            lines.append(f"The attacker sees what enters {where} of a victim's model.")
        if self.defense is not None:
            lines.append(f"The attacker knows the defense and its settings ({settings_in_words(self.defense)}).")
        if self.same_data is not None:
            lines.append("The attacker knows which updates of different rounds come from the same examples.")
        return lines or ["The attacker knows nothing beyond the protocol."]


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """All that an attacker of one update knows.

    Attributes:
        id: names the victim and its random streams.
        model: the architecture; its own values are not used.
        sent: the values that this client was sent.
        upload: what the client replied.
        plan: how the client trains.
        input_shape: (C, H, W) of one image, (L,) of the longest text, or (F,) of a row.
        num_classes: K.
        knowledge: what is known beyond the protocol.
        filmed: whether to keep snapshots of the guess, which change no number.
        loss: of the client; ``None`` where it is not known, and the attack looks for it.
        input_range: least and largest value of an input.
        notes: how what nobody said was found, a sentence each.
    """

    id: VictimId
    model: nn.Module
    sent: ModelState
    upload: Upload
    plan: LocalPlan
    input_shape: tuple[int, ...]
    num_classes: int
    knowledge: Knowledge = field(default_factory=Knowledge)
    filmed: bool = False
    loss: Loss | None = CROSS_ENTROPY
    input_range: tuple[float, float] = (0.0, 1.0)
    notes: tuple[str, ...] = ()

    @classmethod
    @expects_its_arguments(
        num_examples="batch_size= is how many examples the gradient is of", plan="of_update is of a training by a plan"
    )
    def of_gradients(
        cls,
        model: nn.Module,
        gradients: Mapping[str, Any] | Sequence[Any],
        *,
        input_shape: Sequence[int] | int,
        batch_size: int | None = None,
        batch_norm: Literal["train", "eval"] | None = None,
        loss: LossLike | None = None,
        input_range: tuple[float, float] = (0.0, 1.0),
        schema: Schema | None = None,
        number: int = 0,
    ) -> "Observation":
        """Build an observation of the gradient of one batch's loss, at the values and in the mode of ``model``.

        Args:
            model: of images; ``fl_privacy.models.normalized`` puts a normalization before it. Its mode, training or
                evaluation, is taken for that in which the gradient was computed.
            gradients: by parameter name, or in the order of ``model.parameters()``; tensors or arrays of NumPy.
            input_shape: (C, H, W), or (F,) or F of rows.
            batch_size: examples behind the gradient; ``None`` counts them by the rank of the layers' gradients.
            batch_norm: mode of batch norm, if another than the model's.
            loss: name of ``models.losses.NAMED_LOSSES``, a loss of PyTorch, or a function (outputs, labels) ->
                scalar; ``None``: the attack takes the known one that gives the output layer's gradient.
            input_range: least and largest value of an input.
            schema: of the rows (F,) of a table; ``Schema.inferred(inputs)`` finds one.
            number: names the victim and its random streams.

        Raises:
            UserError: gradients, images or the loss do not fit the model, or nothing tells the batch size.
        """
        shape = checks.shape("input_shape", input_shape, example=_SHAPES)
        read = read_gradients(model, gradients, input_shape=shape, batch_size=batch_size, loss=loss)
        mode: Literal["train", "eval"] = "train" if model.training else "eval"
        of_norms = mode if batch_norm is None else batch_norm
        return cls(
            id=VictimId(0, 0, number),
            model=read.model if schema is None else with_schema(read.model, schema),
            sent=ModelState(read.parameters, read.buffers),
            upload=Upload(tensors=read.gradients, num_examples=read.batch_size),
            plan=LocalPlan(shares="gradient", batch_norm=of_norms, probe_batch_norm=of_norms, mode=mode),
            input_shape=shape,
            num_classes=read.num_classes,
            loss=read.loss,
            input_range=expect_range(input_range),
            notes=read.notes,
        )

    @classmethod
    @expects_its_arguments(
        **{field.name: f"it is the plan's: plan=LocalPlan({field.name}=...)" for field in fields(LocalPlan)}
    )
    def of_update(
        cls,
        before: Weights,
        after: Weights,
        plan: LocalPlan,
        *,
        input_shape: Sequence[int] | int,
        num_examples: int,
        model: nn.Module | None = None,
        loss: LossLike | None = None,
        input_range: tuple[float, float] = (0.0, 1.0),
        schema: Schema | None = None,
        number: int = 0,
    ) -> "Observation":
        """Build an observation of the weights that a client replies after its local training, as in FedAvg.

        Args:
            before: the model as it was sent, or with ``model`` its ``state_dict()`` or the arrays of that in order.
            after: the model after the training, its ``state_dict()`` or its arrays.
            plan: how the client trains: ``LocalPlan(lr=0.1, steps=5, batch_size=8)``; it is known to the server.
            input_shape: (C, H, W), or (F,) or F of rows.
            num_examples: the client trained on; an update does not show it.
            model: the architecture, where ``before`` is none.
            loss: as in :meth:`of_gradients`.
            input_range: least and largest value of an input.
            schema: of the rows (F,) of a table.
            number: names the victim and its random streams.

        Raises:
            UserError: weights do not fit the model, are the same before and after, or a number makes no sense.
        """
        shape = checks.shape("input_shape", input_shape, example=_SHAPES)
        read = read_update(before, after, plan, model=model, input_shape=shape, num_examples=num_examples, loss=loss)
        return cls(
            id=VictimId(0, 0, number),
            model=read.model if schema is None else with_schema(read.model, schema),
            sent=ModelState(read.parameters, read.buffers),
            upload=Upload(tensors=read.weights, buffers=read.statistics, num_examples=num_examples),
            plan=read.plan,
            input_shape=shape,
            num_classes=read.num_classes,
            loss=read.loss,
            input_range=expect_range(input_range),
        )

    def to(self, device: torch.device | str) -> "Observation":
        """Return the same observation with values sent, upload and what is known on ``device``."""
        known: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(Knowledge)
            if isinstance(value := getattr(self.knowledge, f.name), Tensor | ModelState)
        }
        return replace(
            self,
            sent=self.sent.to(device),
            upload=self.upload.to(device),
            knowledge=replace(self.knowledge, **known),
        )

    @property
    def precision(self) -> torch.dtype:
        """Return float64 where the values sent and the update are all in double precision, else float32."""
        values = (*self.sent.parameters.values(), *self.upload.tensors.values())
        return torch.float64 if all(value.dtype == torch.float64 for value in values) else torch.float32

    def update(self) -> Tensors:
        """Return the gradient or delta that was uploaded; weights are turned into a delta."""
        if self.plan.shares != "weights":
            return self.upload.tensors
        return {name: w - self.sent.parameters[name] for name, w in self.upload.tensors.items()}

    def assumed(self) -> ModelState:
        """Return the attacker's values: those sent, and stand-ins for what was not sent."""
        private = self.knowledge.private
        if private is None:
            return self.sent
        return ModelState({**private.parameters, **self.sent.parameters}, {**private.buffers, **self.sent.buffers})

    def told(self, **knowledge: Any) -> "Observation":
        """Return the same observation by an attacker that knows more."""
        return replace(self, knowledge=replace(self.knowledge, **knowledge))


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
        film: how its first image or text came about, where that was asked for and the attack goes step by step.
        cells_certain: (B, C) in [0, 1], of a table: how sure each cell is by the attempts alone, 1 where all agree;
            ``None`` where nobody says.
        words: (n,) tokens that were read of all its texts together, in no order, each as often as it was found;
            ``None`` where nobody looked for them.
        words_exact: whether no token of another text can have left such traces.
        notes: what of the client was found out or assumed on the way, a sentence each.
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
    film: tuple[Snapshot, ...] = ()
    cells_certain: Tensor | None = None
    words: Tensor | None = None
    words_exact: bool = False
    notes: tuple[str, ...] = ()
