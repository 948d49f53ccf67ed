"""Apply defenses that act within the training, in a client's own training function."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from fl_privacy.checks import whole
from fl_privacy.data.app_data import IMAGE_KEYS, LABEL_KEYS
from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import expect_sound
from fl_privacy.federation.training import StepGradients, private_names, private_values, public_state, store_private
from fl_privacy.flower import _node_memory, records, reply_cache
from fl_privacy.models import normalized
from fl_privacy.rng import Secret, derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors
from fl_privacy.types.plan import Normalization


def train_step(
    defense: Defense,
    net: nn.Module,
    context: Context | None = None,
    *,
    lr: float = 0.01,
    normalization: Normalization | None = None,
    round: int | None = None,
    seed: int | Secret | None = None,
) -> "DefendedTraining":
    """Return a context whose ``step`` replaces ``loss.backward()``: it sets gradients that ``defense`` has changed.

    For defenses that act within training (Refiner, Soteria, SPN, passports, private layers, ATS, DP-SGD)::

        with train_step(defense, net, context, lr=lr, round=config["server-round"]) as step:
            for images, labels in loader:
                optimizer.zero_grad()
                loss = step(images, labels)  # instead of loss_function(net(images), labels) and loss.backward()
                optimizer.step()

    It trains on the cross entropy only. Layers that the defense keeps private are trained by plain SGD and stay in
    ``context.state``. Hooks that change the upload need ``defense_mod``, too. A step returns the loss; outside of a
    simulation it is NaN if the defense promises differential privacy, since an app may report it. ``UserError`` if the
    defense replaces the data. On entering, ``UserError`` if the round is missing, after the last one, or trained
    before, or if the network's values are not finite or absurdly large.

    Args:
        defense: defense that does not replace all of the client's data; for that, use a ``PrivacyClient``.
        context: client's context, with its state and secret; ``None`` keeps nothing for the next round.
        normalization: normalization of the loader's images, which hooks see in [0, 1].
        round: ``server-round`` of the config, required of a deployed client. A round is trained once, also after a
            restart; ``answer_once_mod`` can repeat the answer instead of an error.
        seed: seed of the defense's draws in a simulation, which may train twice; by default the node's own secret.
    """
    if defense.examples:
        raise UserError(
            f"train_step expects a defense of single steps, but {defense.name} exchanges all of a client's examples"
            " before the training; make the client a PrivacyClient."
        )
    memory = RecordDict() if context is None else context.state
    answers = None if seed is not None or context is None else reply_cache.Answers(context)
    plan, draws = LocalPlan(lr=lr, batch_norm="train"), _Draws.of(seed, context)
    return DefendedTraining(defense, net, memory, plan, normalization, draws, answers, round)


def private_loader(
    loader: Iterable[Any],
    defense: Defense,
    context: Context | None = None,
    *,
    normalization: Normalization | None = None,
    seed: int | Secret | None = None,
) -> Iterator[Any]:
    """Yield the batches of ``loader``, changed by a defense that acts on data alone, such as InstaHide (mixed images).

    Batches are pairs (images, labels) or mappings with both; mixed labels are probabilities (B, K) of K classes. Random
    numbers come from ``seed``, by default the secret of ``context``; an integer gives the same ones in each call.
    Without an integer, list ``answer_once_mod`` first, or a repeated message shows the server the batch under other
    noise. ``UserError`` if the defense acts on more than the data.
    """
    others = [h for h in ("model", "private", "examples", "loss", "gradient", "upload") if getattr(defense, h)]
    if others or not defense.data:
        raise UserError(
            f"A defense that changes batches is expected, but {defense.name} {'also' if defense.data else 'only'} acts"
            f" on {' and '.join(others) or 'nothing'}; use train_step, or defense_mod for the upload."
        )
    state, rng = ClientState(), _Draws.of(seed, context).once("data")
    for batch in loader:
        images, labels, put = _taken(batch)
        changed = _hooked(defense, Batch(_plain(images, normalization), labels), state, rng)
        yield put(changed.inputs if normalization is None else normalization(changed.inputs), changed.labels)


@dataclass(eq=False)
class DefendedTraining:
    """A client's defended training steps in one round; made by ``train_step``, used as a context."""

    defense: Defense
    net: nn.Module
    memory: RecordDict
    plan: LocalPlan
    normalization: Normalization | None
    draws: "_Draws"
    answers: reply_cache.Answers | None = None
    round: int | None = None
    _state: ClientState = field(default_factory=ClientState, init=False)
    _kept: frozenset[str] = field(default=frozenset(), init=False)
    _model: nn.Module | None = field(default=None, init=False)
    _private: ModelState = field(default_factory=lambda: ModelState({}, {}), init=False)

    def __enter__(self) -> Self:
        if self.answers is not None:
            expect_sound(self.net.state_dict())
            if self.round is not None:
                number = whole("round", self.round, at_least=0, example=1)
                self.answers.expect_new(_KIND, number)
                self.answers.note(number, _KIND)
            elif not self.answers.forgets:
                raise UserError(
                    "train_step is expected to get round=, the server-round of the message's config, but got none:"
                    " without it, noise could be averaged away; pass round=config['server-round']."
                )
        self._state = records.load_state(self.memory, next(self.net.parameters()).device).of_client(self.draws.number)
        self._rng = self.draws.once("defense")
        self._kept = private_names(self.net, self.defense)
        return self

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Set the network's gradients to defended ones, and return the batch's mean cross entropy; NaN if withheld."""
        batch = Batch(_plain(images, self.normalization), labels)
        batch = _hooked(self.defense, batch, self._state, self._rng)
        model = self._prepared(tuple(batch.inputs.shape[1:]))
        layers = [module for module in self.net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        still = layers and not any(layer.training for layer in layers)
        plan = replace(self.plan, batch_norm="eval" if still else "train", loss_scale=1.0)
        public, own = public_state(self.net, self.defense), self._private
        values = ModelState({**own.parameters, **public.parameters}, {**own.buffers, **public.buffers})
        held = frozenset(name for name, p in self.net.named_parameters() if not p.requires_grad)
        step = LocalStep(model, values, batch, plan, self._state, self._rng, self.defense.loss, held)
        plain = StepGradients(step, self.defense)
        shared = plain.only(frozenset(public.parameters))
        for hook in self.defense.gradient:
            shared = hook(shared, step)
        moved = step.sent.parameters.keys() - public.parameters.keys() - step.held
        private: Tensors = {n: plain[n] for n in plain if n in moved and n not in shared}
        gradients = {**private, **shared}
        for name, parameter in self.net.named_parameters():
            parameter.grad = gradients[name].to(parameter) if name in shared else None
        lr = self.plan.lr
        trained = {n: p - lr * gradients[n] if n in gradients else p for n, p in own.parameters.items()}
        self._private = replace(own, parameters=trained)
        with torch.no_grad():
            for name, buffer in self.net.named_buffers():
                if name not in self._kept:
                    buffer.copy_(plain.buffers[name])
        withheld = self.answers is not None and promises_privacy(self.defense)
        return torch.full_like(plain.loss, torch.nan) if withheld else plain.loss

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._model is not None:
            store_private(self._private, ModelState({}, {}), self._state)
            records.save_state(self.memory, self._state)

    def _prepared(self, shape: tuple[int, ...]) -> nn.Module:
        if self._model is None:
            model, rng = self.net, self.draws.always("private")
            for hook in self.defense.model:
                model = hook(model, self._state.of_images(shape), rng)
            self._private = private_values(model, public_state(self.net, self.defense), self._state)
            self._model = model if self.normalization is None else normalized(model, self.normalization)
        return self._model


_KIND = "train-step"


@dataclass(frozen=True)
class _Draws:
    seed: int | Secret
    client: str

    @classmethod
    def of(cls, seed: int | Secret | None, context: Context | None) -> "_Draws":
        if context is None:
            return cls(Secret.draw() if seed is None else seed, "0")
        client = str(context.node_config.get(records.PARTITION, context.node_id))
        return cls(_node_memory.node_secret(context) if seed is None else seed, client)

    @property
    def number(self) -> int:
        return int(self.client) if self.client.isdecimal() else 0

    def always(self, purpose: str) -> torch.Generator:
        return derive_generator(self.seed, "client", self.client, purpose)

    def once(self, purpose: str) -> torch.Generator:
        return derive_generator(Secret.draw(), purpose) if isinstance(self.seed, Secret) else self.always(purpose)


def _hooked(defense: Defense, batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
    for hook in defense.data:
        batch = hook(batch, state, rng)
    return batch


def _plain(images: Tensor, normalization: Normalization | None) -> Tensor:
    return images if normalization is None else normalization.undo(images).clamp(0, 1)


def _taken(batch: Any) -> tuple[Tensor, Tensor, Any]:
    if isinstance(batch, Mapping):
        image, label = [next((key for key in keys if key in batch), None) for keys in (IMAGE_KEYS, LABEL_KEYS)]
        if image is None or label is None:
            got = ", ".join(map(str, batch))
            raise UserError(f"A batch is expected with keys image and label, but has {got}; rename its keys.")
        return batch[image], batch[label], lambda x, y: {**batch, image: x, label: y}
    if isinstance(batch, Sequence) and len(batch) == 2:
        return batch[0], batch[1], lambda x, y: (x, y) if isinstance(batch, tuple) else [x, y]
    raise UserError(
        f"A batch is expected to be (images, labels) or a mapping with both, but is {type(batch).__name__}; let the"
        " loader's collate_fn make one."
    )
