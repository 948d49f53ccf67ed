"""Data types of examples, models, uploads, knowledge and reconstructions."""

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
from fl_privacy.types.user_gradients import UserUpload, Weights, as_tensor, expect_range, read_gradients, read_update
from fl_privacy.types.victim_ids import Certainty, VictimId

_SHAPES = "give input_shape=tuple(images.shape[1:]), or the number of columns of a row"

Tensors = Mapping[str, Tensor]
"""Parameter name -> tensor; layers are never indexed by number."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples with their labels. Lists and arrays become tensors.

    Attributes:
        inputs: images (B, C, H, W) float in [0, 1]; texts (B, L) int64 token numbers, padded with -1; or rows (B, F)
            float of a table, encoded by a :class:`fl_privacy.types.schema.Schema`.
        labels: classes (B,), class probabilities (B, K), or next tokens (B, L) of language models, -100 for none.
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name in ("inputs", "labels"):
            value: object = getattr(self, name)
            if isinstance(value, Tensor):
                continue
            try:
                tensor = torch.as_tensor(as_tensor(value))
            except (TypeError, ValueError, RuntimeError) as error:
                got = type(value).__name__
                raise UserError(
                    f"{name} of a Batch are expected to be a tensor or an array, but got {got}; stack them."
                ) from error
            object.__setattr__(self, name, tensor if tensor.is_floating_point() else tensor.long())

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, number: int) -> "Batch":
        return Batch(self.inputs[:number], self.labels[:number])


@dataclass(frozen=True, eq=False)
class ModelState:
    """Values of a model: trained ``parameters``, and ``buffers`` (batch-norm statistics)."""

    parameters: Tensors
    buffers: Tensors = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        return cls(
            {name: p.detach().clone() for name, p in model.named_parameters()},
            {name: b.detach().clone() for name, b in model.named_buffers()},
        )

    def to(self, device: torch.device | str) -> "ModelState":
        return ModelState(_moved(self.parameters, device), _moved(self.buffers, device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Upload:
    """What a client sends in a round: gradient or weights (``tensors``), ``buffers``, and number of examples."""

    tensors: Tensors  # gradient, delta or weights by parameter name; missing names were withheld
    buffers: Tensors = field(default_factory=dict)  # running batch-norm statistics, empty if the plan withholds them
    num_examples: int  # number of examples behind the update, its weight in the server's mean
    rounding: float = 0.0  # standard deviation of the rounding error of secure aggregation; 0 without it

    def to(self, device: torch.device | str) -> "Upload":
        return replace(self, tensors=_moved(self.tensors, device), buffers=_moved(self.buffers, device))


def _moved(tensors: Tensors, device: torch.device | str) -> Tensors:
    return {name: t.to(device) for name, t in tensors.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Knowledge:
    """Attacker's knowledge beyond what the protocol shows; ``None`` means unknown.

    Attributes:
        labels: client's labels, (B,) class indices or (B, K) class probabilities.
        defense: parts of the client's defense, for an adaptive attacker.
        same_data: name shared by updates from the same examples, which an adaptive attacker attacks together; ``None``
            if a defense makes new images for each update, unless they are mixtures.
        public_images: images (N, C, H, W) in [0, 1] of the same domain, or texts (N, L), padded with -1.
        public_labels: classes (N,) of the public images.
        previous: reconstruction (B, C, H, W) in [0, 1] of the same examples in an earlier round.
        private: values used for layers that the victim keeps private: a colluding client's, or random ones.
        colluder: number of the client that gave ``private``.
        features: outputs (B, ...) of the victim's private layers for its examples.
        features_at: name of the module whose inputs are ``features``, if not the first public layer.
        front: colluding client's model after its local training, if ``features`` are from the trained model.
        lengths: number of tokens (B,) of each text.
        bounds: least and largest possible gradient by parameter name, if the optimizer hides the exact one.
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
        entrance = (self.features_at or "the first public layer") + " after local training" * (self.front is not None)
        images, guess = self.public_images, self.previous
        number = 0 if images is None else len(images)
        alone = self.private is not None and self.colluder is None
        sentences = {
            "The attacker is given the true labels.": self.labels,
            "The attacker is given the number of tokens of each text.": self.lengths,
            f"The attacker holds {number} public {modality.one}s of the same domain, none attacked.": images,
            "The attacker starts from its own guess at the same examples in the round it attacked before.": guess,
            f"Client {self.colluder} colludes: its private layers stand in for those of the victims; it is not attacked"
            " itself.": self.colluder,
            "For private layers, which it does not see, the attacker takes values of its own draw.": alone or None,
            f"The attacker sees what enters {entrance} of a victim's model.": self.features,
            f"The attacker knows the defense and its settings ({settings_in_words(self.defense or ())}).": self.defense,
            "The attacker knows which updates of different rounds come from the same examples.": self.same_data,
        }
        lines = [sentence for sentence, known in sentences.items() if known is not None]
        return lines or ["The attacker has no further knowledge of clients or their data."]


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """What an attacker knows about one update: model, values sent, upload, the client's plan, and ``knowledge``."""

    id: VictimId  # name of the attacked update and of its random streams
    model: nn.Module  # architecture; its parameter values are not used
    sent: ModelState  # parameters and buffers that the server sent to the client
    upload: Upload
    plan: LocalPlan
    input_shape: tuple[int, ...]  # (C, H, W) of one image, (L,) of the longest text, or (F,) of a row
    num_classes: int
    knowledge: Knowledge = field(default_factory=Knowledge)
    filmed: bool = False  # ``True`` keeps snapshots of the reconstruction
    loss: Loss | None = CROSS_ENTROPY  # client's loss; ``None`` lets the attack infer it
    input_range: tuple[float, float] = (0.0, 1.0)  # least and largest value of an input
    notes: tuple[str, ...] = ()  # sentences on how unstated properties were inferred

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
        """Build an observation of the gradient of one batch's loss, computed with ``model``.

        Args:
            model: model with its values and mode; ``fl_privacy.models.normalized`` adds a normalization.
            gradients: tensors or NumPy arrays by parameter name, or in the order of ``model.parameters()``.
            input_shape: (C, H, W) of an image, or (F,) or F of a table row.
            batch_size: number of examples; ``None`` infers it from the rank of the layers' gradients.
            batch_norm: mode of batch norm; ``None`` takes the model's.
            loss: name in ``models.losses.NAMED_LOSSES``, a loss of PyTorch, or a function (outputs, labels) -> scalar;
                ``None`` infers a named loss from the output layer's gradient.
            input_range: least and largest value of an input.
            schema: schema of table rows; ``Schema.inferred(inputs)`` infers one.
            number: number of the observation, for its name and random streams.

        Raises:
            UserError: gradients, input shape or loss do not fit the model, or the batch size can't be inferred.
        """
        shape = checks.shape("input_shape", input_shape, example=_SHAPES)
        mode: Literal["train", "eval"] = "train" if model.training else "eval"
        of_norms = mode if batch_norm is None else batch_norm
        plan = LocalPlan(shares="gradient", batch_norm=of_norms, probe_batch_norm=of_norms, mode=mode)
        read = read_gradients(model, gradients, plan, shape=shape, batch_size=batch_size, loss=loss)
        return cls._of_user(read, shape, input_range, schema, number)

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
        """Build an observation of a client's weights before and after local training, as in FedAvg.

        Args:
            before: model as sent or, if ``model`` is given, its ``state_dict()``, or the arrays of that dict in order.
            after: model after the training, its ``state_dict()``, or the arrays of that dict in order.
            plan: client's plan, known to the server: ``LocalPlan(lr=0.1, steps=5, batch_size=8)``.
            num_examples: number of the client's examples.
            model: architecture, if ``before`` is no model.
            input_shape, loss, input_range, schema, number: see :meth:`of_gradients`.

        Raises:
            UserError: weights do not fit the model or did not change, or a number is invalid.
        """
        shape = checks.shape("input_shape", input_shape, example=_SHAPES)
        read = read_update(before, after, plan, model=model, shape=shape, num_examples=num_examples, loss=loss)
        return cls._of_user(read, shape, input_range, schema, number)

    @classmethod
    def _of_user(
        cls,
        read: UserUpload,
        shape: tuple[int, ...],
        input_range: tuple[float, float],
        schema: Schema | None,
        number: int,
    ) -> "Observation":
        return cls(
            id=VictimId(0, 0, number),
            model=read.model if schema is None else with_schema(read.model, schema),
            sent=ModelState(read.parameters, read.buffers),
            upload=Upload(tensors=read.tensors, buffers=read.statistics, num_examples=read.num_examples),
            plan=read.plan,
            input_shape=shape,
            num_classes=read.num_classes,
            loss=read.loss,
            input_range=expect_range(input_range),
            notes=read.notes,
        )

    def to(self, device: torch.device | str) -> "Observation":
        known = {each.name: getattr(self.knowledge, each.name) for each in fields(Knowledge)}
        moved = {name: value.to(device) for name, value in known.items() if isinstance(value, Tensor | ModelState)}
        return replace(self, sent=self.sent.to(device), upload=self.upload.to(device)).given(**moved)

    @property
    def precision(self) -> torch.dtype:
        values = (*self.sent.parameters.values(), *self.upload.tensors.values())
        return torch.float64 if all(value.dtype == torch.float64 for value in values) else torch.float32

    def update(self) -> Tensors:
        if self.plan.shares != "weights":
            return self.upload.tensors
        return {name: w - self.sent.parameters[name] for name, w in self.upload.tensors.items()}

    def assumed(self) -> ModelState:
        """Return the values that the server sent, and the attacker's substitutes for the client's private values."""
        private = self.knowledge.private
        if private is None:
            return self.sent
        return ModelState({**private.parameters, **self.sent.parameters}, {**private.buffers, **self.sent.buffers})

    def given(self, **knowledge: Any) -> "Observation":
        return replace(self, knowledge=replace(self.knowledge, **knowledge))

    told = given  # the earlier name


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """Result of an attack on one observation: guessed ``batch``, or ``words`` of texts, or reason of a ``failure``."""

    id: VictimId
    batch: Batch | None  # reconstruction, in the attacker's order; ``None`` if the attack failed
    loss: float = float("nan")
    history: tuple[float, ...] = ()  # attacker's loss (T,) at some of its iterations, in order
    failure: str | None = None
    label_source: str = "inferred"  # origin of the labels: ``known``, ``inferred`` or ``optimized``
    countermeasures: tuple[str, ...] = ()  # sentences on how the attack counters the known defense
    certainty: Certainty = Certainty.APPROXIMATE
    certainties: tuple[Certainty, ...] = ()  # certainty of each example, if they differ
    member: str = ""  # name of the sub-attack that gave this reconstruction; empty if there is only one
    film: tuple[Snapshot, ...] = ()  # snapshots of the first image or text, if requested
    cells_certain: Tensor | None = None  # agreement (B, C) in [0, 1] of attempts on each table cell, if computed
    words: Tensor | None = None  # tokens (n,) of all texts together, unordered, with repetitions, if computed
    words_exact: bool = False  # ``True`` if ``words`` are certainly the tokens of these texts
    notes: tuple[str, ...] = ()  # sentences on what the attack inferred or assumed about the client
