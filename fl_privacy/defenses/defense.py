"""What a defense is: plain functions at a few places of a client's round."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.effects import Description, Part
from fl_privacy.errors import UserError
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import LossChange
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors
from fl_privacy.types.modality import modality_of
from fl_privacy.types.user_gradients import as_tensor, named_tensors


@dataclass(eq=False)
class ClientState:
    """What survives between the rounds on one client and never leaves it: private layers, passports, robust data.

    Attributes:
        tensors: by name; a defense puts its own name in front (``"spn/head.weight"``).
        input_shape: (C, H, W) of the client's images; ``None`` where they are not known.
        number: of the client, by which it finds what is its own among what a defense was given for each.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None
    number: int = 0

    def of_images(self, shape: tuple[int, ...]) -> "ClientState":
        """Return the same state, tensors shared, of a client whose images have this shape."""
        return replace(self, input_shape=tuple(shape))

    def of_client(self, number: int) -> "ClientState":
        """Return the same state, tensors shared, of the client of this number."""
        return replace(self, number=number)


@dataclass(frozen=True, eq=False)
class LocalStep:
    """The step that computed a gradient: all that a defense of the gradient may look at.

    Attributes:
        model: with private parts.
        sent: its values at this step, private ones with them.
        batch: of this step.
        plan: of the client.
        state: of the client.
        rng: of the defense.
        changes: of the loss, which a defense that computes the gradient anew has to make as well.
        held: names of parameters that are not trained: nothing is uploaded of them.
        losses: for a defense that computes the gradient anew to put the mean loss of the batch into.
    """

    model: nn.Module
    sent: ModelState
    batch: Batch
    plan: LocalPlan
    state: ClientState
    rng: torch.Generator
    changes: Sequence[LossChange] = ()
    held: frozenset[str] = frozenset()
    losses: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class LocalData:
    """The client whose examples are to be exchanged: all that a defense of a client's data may look at.

    Attributes:
        num_classes: K.
        state: of the client; what is kept there need not be made again.
        rng: in the same state in every round, so that what is made of the same examples is the same.
    """

    num_classes: int
    state: ClientState
    rng: torch.Generator


Inform = Callable[[Batch, Tensor], None]
Fits = Callable[[nn.Module], None]
Prepare = Callable[[tuple[int, ...]], None]
PrepareTexts = Callable[[TextModel, Tensor | None], None]
PrivateHook = Callable[[nn.Module], Collection[str]]
ModelHook = Callable[[nn.Module, ClientState, torch.Generator], nn.Module]
ExamplesHook = Callable[[Batch, LocalData], Batch]
OutcomeHook = Callable[[Tensor, int], Tensor]
DataHook = Callable[[Batch, ClientState, torch.Generator], Batch]
GradientHook = Callable[[Tensors, LocalStep], Tensors]
UploadHook = Callable[[Tensors, ClientState, torch.Generator], Tensors]


def _tensor(name: str, value: object) -> Tensor:
    """Return a gradient as a tensor that is detached from its graph."""
    found = as_tensor(value)
    if not isinstance(found, Tensor):
        raise UserError(f"The gradient {name} is expected to be a tensor or an array, but is {type(value).__name__}.")
    return found.detach()


UNNAMED = Part("unnamed")
"""Of which nothing is declared."""


@dataclass(frozen=True, kw_only=True)
class Defense:
    """A defense as hooks, each a tuple of functions run left to right; it fills those it needs.

    Attributes:
        parts: what it is composed of, in order: names, settings and effects, which an adaptive attacker may know and
            reports show. Empty of the undefended client alone: one that does something but names no part is unnamed.
        model: (Module, ClientState, rng) -> Module, a new one. Parameters and buffers that the result has beyond the
            model sent are private: they are kept in the ClientState and not uploaded. Their first values are drawn
            from ``rng``, the client's own stream, which is the same in every round.
        examples: (Batch, LocalData) -> Batch, on all that the client has, before it is cut into batches: what it
            trains on, and is probed with, instead. The number of examples may change; then ``outcome`` says so.
        outcome: (labels (N,), K) -> labels (M,) of what ``examples`` will make of examples with these labels, told
            before it is made.
        data: (Batch, ClientState, rng) -> Batch, on every batch before its gradient; as many examples, in their order.
        loss: changes of the local loss, such as extra terms, on the forward pass that the loss has anyway.
        gradient: (Tensors, LocalStep) -> Tensors, on the gradient of every local step by the parameters that were
            sent. Private ones take the gradient that they have, unless the result has another for them.
        anew: those of ``gradient`` that compute the gradients of all parameters themselves, and read nothing of theirs.
        upload: (Tensors, ClientState, rng) -> Tensors, on what is uploaded (gradient or delta);
            names that it drops are withheld.
        private: (Module) -> names of parameters and buffers of the model that stay with each client: they are neither
            sent nor uploaded, and each client keeps its own in the ClientState.
        private_passes: over its examples, in which a client trains its private parameters alone on each new model.
        fits: (Module) -> None, once before anything is trained: says in a ``UserError`` why the defense can't act on
            this model.
        prepare: (C, H, W) -> None, once before anything is trained: gets what the defense needs, or says in a
            ``UserError`` why it can't.
        texts: (TextModel, public tokens (N, L) or ``None``) -> None, instead of ``prepare`` where the data are texts. A
            defense that prepares for images and not for texts is one of images.
        informed: (Batch, attributes (N,)) -> None, instead of ``prepare``: public examples that
            are no client's, and their attributes.
    """

    parts: Description = ()
    model: tuple[ModelHook, ...] = ()
    examples: tuple[ExamplesHook, ...] = ()
    outcome: tuple[OutcomeHook, ...] = ()
    data: tuple[DataHook, ...] = ()
    loss: tuple[LossChange, ...] = ()
    gradient: tuple[GradientHook, ...] = ()
    anew: tuple[GradientHook, ...] = ()
    upload: tuple[UploadHook, ...] = ()
    private: tuple[PrivateHook, ...] = ()
    private_passes: int = 0
    fits: tuple[Fits, ...] = ()
    prepare: tuple[Prepare, ...] = ()
    texts: tuple[PrepareTexts, ...] = ()
    informed: tuple[Inform, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts and any(getattr(self, f.name) for f in fields(self)):
            object.__setattr__(self, "parts", (UNNAMED,))

    @property
    def name(self) -> str:
        """Join the names of the defense's parts."""
        return "+".join(part.name for part in self.parts) or "none"

    @property
    def computes_gradient(self) -> bool:
        """Say whether the gradient of the mean loss is of no use, since the defense computes one anew."""
        return bool(self.gradient) and self.gradient[0] in self.anew

    def prepare_for(self, model: nn.Module, input_shape: tuple[int, ...], public: Tensor | None = None) -> None:
        """Prepare the defense for the examples that ``model`` takes, before anything is trained.

        Args:
            model: of the clients.
            input_shape: (C, H, W) of an image, (L,) of a text or (F,) of a row.
            public: texts (N, L) that are no client's, where there are some.

        Raises:
            UserError: it can't be prepared for them.
        """
        for fits in self.fits:
            fits(model)
        if modality_of(model).continuous:
            for prepare in self.prepare:
                prepare(input_shape)
        else:
            assert isinstance(model, TextModel)
            for prepare_texts in self.texts:
                prepare_texts(model, public)

    def apply(
        self,
        gradients: Mapping[str, Any] | Sequence[Any],
        *,
        seed: int = 0,
        model: nn.Module | None = None,
        batch: Batch | None = None,
    ) -> Any:
        """Apply the defense to ``gradients``, or to a change of weights, as a client does before it uploads them.

        Args:
            gradients: tensors or arrays by parameter name, or in the order of ``model.parameters()``.
            seed: of its draws.
            model: whose gradients they are; for defenses that compute something of it.
            batch: whose gradients they are; as ``model``.

        Returns:
            What is uploaded, by the same names or in the same order.

        Raises:
            UserError: the defense acts on more than gradients, or needs the model and the batch.

        >>> from fl_privacy.defenses import pruning
        >>> pruning(rate=0.5).apply({"weight": torch.tensor([3.0, -4.0, 1.0, 2.0])})
        {'weight': tensor([ 3., -4.,  0.,  0.])}
        """
        self._expect_of_uploads(model, batch)
        named = isinstance(gradients, Mapping)
        if model is not None:
            values = named_tensors(model, gradients)
        else:
            pairs = gradients.items() if isinstance(gradients, Mapping) else enumerate(gradients)
            values = {str(name): _tensor(str(name), value) for name, value in pairs}
        made, rng, state = dict(values), derive_generator(seed, "defense", self.name), ClientState()
        if model is not None and batch is not None:
            step = LocalStep(model, ModelState.of(model), batch, LocalPlan(), state, rng)
            for on_gradient in self.gradient:
                made = dict(on_gradient(made, step))
        for on_upload in self.upload:
            made = dict(on_upload(made, state, rng))
        if named:
            return made
        if withheld := [name for name in values if name not in made]:
            raise UserError(
                f"{self.name} withholds {withheld[0]} and is expected to get gradients by name, but got a sequence;"
                " give a dict of names and gradients."
            )
        return [made[name] for name in values]

    def _expect_of_uploads(self, model: nn.Module | None, batch: Batch | None) -> None:
        inside = {"model": "the model", "private": "private layers", "examples": "the client's examples"}
        inside |= {"data": "each batch", "loss": "the loss"}
        if acts := [what for hook, what in inside.items() if getattr(self, hook)]:
            raise UserError(
                f"{self.name} can't be applied to gradients alone: it acts on {' and '.join(acts)}; run it by"
                f" `fl-privacy run defense={self.name}`, or in a training step by fl_privacy.flower.train_step."
            )
        if self.gradient and (model is None or batch is None):
            raise UserError(
                f"{self.name} computes with the model and the batch, but got gradients alone; give model=net and"
                " batch=Batch(images, labels)."
            )

    @property
    def changes_images(self) -> bool:
        """Say whether the same example is another one in every round, so that its updates can't be matched together."""
        return bool(self.data)


def none() -> Defense:
    """Build no defense: what is computed is uploaded."""
    return Defense()


def compose(*defenses: Defense) -> Defense:
    """Compose ``defenses`` in order: the parts and hooks of the first come first.

    >>> from fl_privacy.defenses import dp_noise, pruning
    >>> compose(pruning(rate=0.9), dp_noise(clip_norm=1.0, scale=0.01)).name
    'pruning+dp_noise'

    Raises:
        UserError: one of ``defenses`` is none.
    """
    for defense in defenses:
        if not isinstance(defense, Defense):
            raise UserError(
                f"compose is expected to get defenses, such as pruning(rate=0.9), but got {defense!r}; call what makes"
                " one."
            )
    hooks = [f.name for f in fields(Defense) if f.name != "private_passes"]
    together: dict[str, Any] = {name: tuple(x for d in defenses for x in getattr(d, name)) for name in hooks}
    return Defense(**together, private_passes=max((d.private_passes for d in defenses), default=0))
