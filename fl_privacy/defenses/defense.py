"""Interface of defenses: a ``Defense`` holds functions for several points of a client's round."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_privacy.effects import Description, Part
from fl_privacy.errors import UserError
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import GradientResult, LossChange, batch_loss, loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors
from fl_privacy.types.modality import modality_of
from fl_privacy.types.user_gradients import as_tensor, named_tensors


@dataclass(eq=False)
class ClientState:
    """State that a client keeps between rounds and never sends, such as private layers."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # names begin with the defense's ("spn/head.weight")
    input_shape: tuple[int, ...] | None = None  # (C, H, W) of the client's images; ``None`` if unknown
    number: int = 0  # number of the client, for settings that differ between clients

    def of_images(self, shape: tuple[int, ...]) -> "ClientState":
        return replace(self, input_shape=tuple(shape))

    def of_client(self, number: int) -> "ClientState":
        return replace(self, number=number)


@dataclass(frozen=True, eq=False)
class LocalStep:
    """Local training step in which a defense changes the gradient: model, values, batch, plan, and random generator."""

    model: nn.Module
    sent: ModelState  # model's values at this step, including private ones
    batch: Batch
    plan: LocalPlan
    state: ClientState
    rng: torch.Generator
    changes: Sequence[LossChange] = ()  # changes of the loss; a defense that recomputes the gradient applies them
    held: frozenset[str] = frozenset()  # names of parameters that are neither trained nor uploaded
    losses: list[Tensor] = field(default_factory=list)  # mean loss, from a defense that recomputes the gradient

    def gradients(self) -> GradientResult:
        norm, scale = self.plan.batch_norm, self.plan.loss_scale
        return loss_gradients(
            self.model, self.sent, self.batch, batch_norm=norm, loss_scale=scale, changes=self.changes
        )

    def loss(self, *, batch_norm: Literal["train", "eval"] | None = None) -> Tensor:
        norm, scale = batch_norm or self.plan.batch_norm, self.plan.loss_scale
        return batch_loss(self.model, self.sent, self.batch, batch_norm=norm, loss_scale=scale, changes=self.changes)[0]


@dataclass(frozen=True, eq=False)
class LocalData:
    """What a defense that replaces a client's examples gets besides these examples.

    A defense may cache results in ``state``, which lasts over rounds. ``rng`` is the same in every round.
    """

    num_classes: int
    state: ClientState
    rng: torch.Generator
    spared: list[float] = field(default_factory=list)  # seconds of work that another job of this command has done


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


UNNAMED = Part("unnamed")  # part of an undeclared defense


@dataclass(frozen=True, kw_only=True)
class Defense:
    """Defense of a client: functions (hooks) for several points of its training.

    Each field is a tuple of hooks that run left to right. Parameters and buffers that are not uploaded are private. A
    probe is an extra upload made for the attack.

    Attributes:
        parts: public descriptions of the components, in order; empty for no defense.
        fits: (Module) -> None, before training; raises ``UserError`` if the defense can't act on this model.
        prepare: (C, H, W) -> None, before training on images; loads files, or raises ``UserError``.
        texts: (TextModel, public tokens (N, L) or ``None``) -> None, before training on texts. A defense that has
            ``prepare`` but no ``texts`` is for images only.
        informed: (Batch, attributes (N,)) -> None, before training; gets public examples and their attributes.
        model: (Module, ClientState, rng) -> new Module. Additional parameters and buffers are private: they are kept in
            the ClientState. ``rng`` is the same in every round.
        private: (Module) -> names of parameters and buffers that stay in the ClientState.
        examples: (Batch, LocalData) -> Batch that replaces all examples for training and probes.
        outcome: (labels (N,), K) -> labels (M,) of the examples that ``examples`` returns, if M differs from N.
        data: (Batch, ClientState, rng) -> Batch of as many examples in the same order, for each gradient.
        gradient: (Tensors, LocalStep) -> Tensors, for each local gradient; the result may hold those of private
            parameters.
        anew: functions in ``gradient`` that compute all gradients themselves and ignore their input.
        upload: (Tensors, ClientState, rng) -> Tensors to upload (gradient or delta), without names to withhold.
    """

    parts: Description = ()
    model: tuple[ModelHook, ...] = ()
    examples: tuple[ExamplesHook, ...] = ()
    outcome: tuple[OutcomeHook, ...] = ()
    data: tuple[DataHook, ...] = ()
    loss: tuple[LossChange, ...] = ()  # changes of the local loss, such as extra terms
    gradient: tuple[GradientHook, ...] = ()
    anew: tuple[GradientHook, ...] = ()
    upload: tuple[UploadHook, ...] = ()
    private: tuple[PrivateHook, ...] = ()
    private_passes: int = 0  # passes over the examples that train only the private parameters of each new model
    fits: tuple[Fits, ...] = ()
    prepare: tuple[Prepare, ...] = ()
    texts: tuple[PrepareTexts, ...] = ()
    informed: tuple[Inform, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts and any(getattr(self, f.name) for f in fields(self)):
            object.__setattr__(self, "parts", (UNNAMED,))

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts) or "none"

    @property
    def computes_gradient(self) -> bool:
        return bool(self.gradient) and self.gradient[0] in self.anew

    def prepare_for(self, model: nn.Module, input_shape: tuple[int, ...], public: Tensor | None = None) -> None:
        """Run the hooks that come before training: ``fits``, then ``prepare`` or, for texts, ``texts``."""
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
        """Return ``gradients``, or a change of weights, after the defense, as they would be uploaded.

        ``UserError`` if the defense does not act on gradients alone, or needs the model and the batch.

        Args:
            gradients: tensors or arrays by parameter name, or in the order of ``model.parameters()``.
            model: model of the gradients; some defenses need it and the ``batch``.

        >>> from fl_privacy.defenses import pruning
        >>> pruning(rate=0.5).apply({"weight": torch.tensor([3.0, -4.0, 1.0, 2.0])})
        {'weight': tensor([ 3., -4.,  0.,  0.])}
        """
        self._expect_of_uploads(model, batch)
        values = {} if model is None else named_tensors(model, gradients)
        if model is None:
            for name, value in gradients.items() if isinstance(gradients, Mapping) else enumerate(gradients):
                if not isinstance(found := as_tensor(value), Tensor):
                    kind = type(value).__name__
                    raise UserError(f"The gradient {name} is expected to be a tensor, but is {kind}; convert it.")
                values[str(name)] = found.detach()
        made, rng, state = dict(values), derive_generator(seed, "defense", self.name), ClientState()
        if model is not None and batch is not None:
            step = LocalStep(model, ModelState.of(model), batch, LocalPlan(), state, rng)
            for on_gradient in self.gradient:
                made = dict(on_gradient(made, step))
        for on_upload in self.upload:
            made = dict(on_upload(made, state, rng))
        if isinstance(gradients, Mapping):
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
                f"apply expects a defense of gradients, but {self.name} acts on {' and '.join(acts)}; run it by"
                f" `fl-privacy run defense={self.name}`, or in a training step by fl_privacy.flower.train_step."
            )
        if self.gradient and (model is None or batch is None):
            raise UserError(
                f"{self.name} is expected to get model and batch, but got gradients alone; give model=net and"
                " batch=Batch(images, labels)."
            )

    @property
    def changes_images(self) -> bool:
        return bool(self.data)


def none() -> Defense:
    """Build the empty defense, which leaves uploads unchanged."""
    return Defense()


def compose(*defenses: Defense) -> Defense:
    """Return one defense that applies ``defenses`` in order.

    >>> from fl_privacy.defenses import dp_noise, pruning
    >>> compose(pruning(rate=0.9), dp_noise(clip_norm=1.0, scale=0.01)).name
    'pruning+dp_noise'
    """
    for defense in defenses:
        if not isinstance(defense, Defense):
            raise UserError(
                f"compose is expected to get defenses, but got {defense!r:.200}; call a function such as"
                " pruning(rate=0.9)."
            )
    hooks = [f.name for f in fields(Defense) if f.name != "private_passes"]
    together: dict[str, Any] = {name: tuple(x for d in defenses for x in getattr(d, name)) for name in hooks}
    return Defense(**together, private_passes=max((d.private_passes for d in defenses), default=0))
