"""A simulated client: examples, augmentation, model and defense."""

import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.data.examples import LabelledExamples
from fl_privacy.defenses import ClientState, Defense, LocalData
from fl_privacy.defenses.guard import ModelGuard
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.federation import training
from fl_privacy.federation.replies import UnfitMessageError
from fl_privacy.federation.server import Evaluation, evaluate_model
from fl_privacy.models import has_batch_norm
from fl_privacy.rng import Secret, cpu_threads, derive_generator, seeded_globally
from fl_privacy.types import Batch, LocalPlan, ModelState
from fl_privacy.types.modality import modality_of_inputs


@dataclass(frozen=True)
class OwnExamples:
    """Training examples of a client, or the examples by which its defense replaces them."""

    number: int
    batch: Callable[[Tensor], Batch]  # function from indices below ``number`` to a batch
    seconds: float = 0.0  # time that the defense took


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalWork:
    """The local training steps that lead to one upload."""

    order: Sequence[Tensor]  # indices of the examples of each step
    batches: Sequence[Batch]
    plan: LocalPlan
    purpose: str  # name of the random streams
    num_examples: int | None = None  # number of examples to state; ``None`` counts those in ``order``
    seconds: float = 0.0  # time that the defense took to replace the examples


def local_batches(num_examples: int, plan: LocalPlan, rng: torch.Generator) -> list[Tensor]:
    """Return the example indices of each local step of a round, drawn without replacement within each pass.

    A plan without steps and epochs makes one step. Only the last batch of an epoch may be short.
    """
    size = min(plan.batch_size or num_examples, num_examples)
    if plan.epochs is not None:
        return [batch for _ in range(plan.epochs) for batch in torch.randperm(num_examples, generator=rng).split(size)]
    steps = plan.steps or 1
    per_pass = num_examples // size
    passes = math.ceil(steps / per_pass)
    order = [torch.randperm(num_examples, generator=rng)[: per_pass * size].split(size) for _ in range(passes)]
    return [batch for one_pass in order for batch in one_pass][:steps]


def augment(batch: Batch, plan: LocalPlan, rng: torch.Generator) -> Batch:
    """Crop and flip each image of ``batch`` at random, as ``plan`` says; ``UserError`` for texts or rows."""
    images = batch.inputs
    if not (kind := modality_of_inputs(images)).pixels:
        raise UserError(
            f"plan.crop_padding and plan.flip are expected with images, but the data are {kind.data}; leave them out."
        )
    if plan.crop_padding:
        offsets = torch.randint(2 * plan.crop_padding + 1, (2, len(images)), generator=rng, device=rng.device)
        images = cropped(images, plan.crop_padding, offsets.to(images.device))
    if plan.flip:
        flips = torch.rand(len(images), generator=rng, device=rng.device) < 0.5
        images = torch.where(flips.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)
    return Batch(images, batch.labels)


def cropped(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Crop a window of the images' size from each padded image.

    ``images``: (B, C, H, W). ``padding``: black pixels added on every side. ``offsets``: (2, B) first row and column of
    each window in the padded image, from 0 to twice ``padding``.
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (padding,) * 4).movedim(1, -1)
    top, left = offsets.unsqueeze(-1)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    each = torch.arange(len(images), device=images.device)
    return padded[each[:, None, None], rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


@dataclass(frozen=True, kw_only=True)
class Personalized:
    """Duration of a client's personalization after a round, and the test of its model, if requested."""

    seconds: float
    evaluation: Evaluation | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Client:
    """One client of a federation.

    Attributes:
        id: partition number, from 0.
        indices: (n,) indices of this client's examples.
        model: architecture; its values are not used.
        seed: source of this client's random streams, with ``id``. A number makes it a simulation: anyone who knows it
            can repeat every draw and remove the noise. By default a new secret, as a deployed client needs. Private
            layers in a Flower app need a stored secret (``flower.node_secret``).
        audit_seed: public number that decides which batches of a deployed client are attacked in an audit.
        threads: CPU threads, which affect the last bits of results.
        test: examples on which a client with a private part tests its own model; ``None`` takes its training examples.
        guard: check of each model before training, if any. On a deployed client that promises differential privacy it
            checks the weights alone.
    """

    id: int
    examples: LabelledExamples
    indices: Tensor
    model: nn.Module
    plan: LocalPlan
    defense: Defense = field(default_factory=Defense)
    seed: int | Secret | None = field(default_factory=Secret.draw)
    audit_seed: int | None = None
    device: torch.device | str = "cpu"
    threads: int = 1
    test: LabelledExamples | None = None
    guard: ModelGuard | None = None

    def __post_init__(self) -> None:
        if self.seed is None:  # the operating system's, as wherever a seed may be left out
            object.__setattr__(self, "seed", Secret.draw())

    def update(self, sent: ModelState, state: ClientState, *, round: int) -> training.LocalResult:
        """Train on the client's examples; return the upload. ``RefusedModelError`` if ``guard`` rejects ``sent``."""
        looked = self._look(sent, state)
        result = self.do(self.training_work(state, round=round), sent, state)
        if self.guard:
            state.tensors.update(self.guard.remembered(sent))
        return replace(result, seconds=result.seconds + looked, defense_seconds=result.defense_seconds + looked)

    def personalize(self, sent: ModelState, state: ClientState, *, round: int, test: bool) -> Personalized:
        started = time.perf_counter()
        if passes := self.defense.private_passes:
            own = self._own(state)
            plan = replace(self.plan.in_round(round), shares="delta", steps=None, epochs=passes)
            order = local_batches(own.number, plan, self._once("private-order", round))
            batches = self._augmented([own.batch(i) for i in order], f"round-{round}/private")
            with self._streams(self._once(f"round-{round}/private", "torch")):
                training.train_private(
                    self._own_model(state),
                    sent.to(self.device),
                    batches,
                    plan=plan,
                    defense=self.defense,
                    state=state.of_client(self.id),
                    rng=self._once(f"round-{round}/private", "defense"),
                )
        seconds = time.perf_counter() - started
        mine = self.examples.subset(self.indices) if self.test is None else self.test
        return Personalized(seconds=seconds, evaluation=self.evaluate(sent, state, mine) if test else None)

    def probe(
        self, sent: ModelState, state: ClientState, *, round: int, probe: int, batch_size: int
    ) -> training.LocalResult:
        """Return the upload from the client's batch number ``probe`` alone, without changing ``state``.

        ``UserError`` if batch norm in training mode has only one value to normalize, or ``guard`` rejects the model.
        """
        self._look(sent, state)
        work = self.probe_work(state, round=round, probe=probe, batch_size=batch_size)
        try:
            return self.do(work, sent, ClientState(dict(state.tensors)))
        except ValueError as error:
            if work.plan.batch_norm == "train" and has_batch_norm(self.model):
                raise UnfitMessageError(
                    f"Batch norm in training mode expects a larger victim, but got {batch_size} examples"
                    f" ({str(error).rstrip('.')}); set federation.plan.probe_batch_norm=eval or a larger batch_size."
                ) from error
            raise

    def victim_batch(self, probe: int, batch_size: int, state: ClientState | None = None) -> Batch:
        """Return the client's batch number ``probe`` (B, ...), from 0, of those disjoint batches that an audit attacks.

        They are the same in every round. ``state``: holds the defense's substitutes for the client's examples, if any.
        """
        own = self._own(ClientState() if state is None else state)
        return own.batch(self._probed(probe, batch_size, own.number))

    def probed_examples(self, probe: int, batch_size: int) -> Tensor:
        return self.indices[self._probed(probe, batch_size, len(self.indices))]

    def _probed(self, probe: int, batch_size: int, number: int) -> Tensor:
        if (probe + 1) * batch_size > number:
            raise UnfitMessageError(
                f"Client {self.id} is expected to hold {(probe + 1) * batch_size} examples to be probed"
                f" {probe + 1} times, but has {number}; ask for fewer victims or a smaller batch_size."
            )
        order = torch.randperm(number, generator=self._audited("victims"))
        return order[probe * batch_size : (probe + 1) * batch_size]

    @property
    def number_of_examples(self) -> int:
        labels = self.examples.labels[self.indices]
        for hook in self.defense.outcome:
            labels = hook(labels, self.examples.num_classes)
        return len(labels)

    def training_work(self, state: ClientState, *, round: int) -> LocalWork:
        own, purpose = self._own(state), f"round-{round}"
        order = local_batches(own.number, self.plan, self._once("order", round))
        batches = self._augmented([own.batch(i) for i in order], purpose)
        plan = self.plan.in_round(round)
        return LocalWork(order=order, batches=batches, plan=plan, purpose=purpose, seconds=own.seconds)

    def probe_work(self, state: ClientState, *, round: int, probe: int, batch_size: int) -> LocalWork:
        batch, purpose = self.victim_batch(probe, batch_size, state), f"round-{round}/victim-{probe}"
        order = local_batches(batch_size, self.plan, self._audited("probe", round, probe))
        batches = [Batch(batch.inputs[i], batch.labels[i]) for i in order]
        batches = self._augmented(batches, purpose) if self.plan.augment_probes else batches
        plan = self.plan.in_round(round, probe=True)
        return LocalWork(order=order, batches=batches, plan=plan, purpose=purpose, num_examples=batch_size)

    def do(self, work: LocalWork, sent: ModelState, state: ClientState) -> training.LocalResult:
        number = work.num_examples or len(torch.cat(list(work.order)).unique())
        with self._streams(self._once(work.purpose, "torch")):
            result = training.local_update(
                _placed(self.model, self.device),
                sent.to(self.device),
                work.batches,
                num_examples=number,
                plan=work.plan,
                defense=self.defense,
                state=state.of_client(self.id),
                rng=self._once(work.purpose, "defense"),
                private_rng=self._rng("private"),
            )
        upload, defended = result.upload.to("cpu"), result.defense_seconds + work.seconds
        return replace(result, upload=upload, seconds=result.seconds + work.seconds, defense_seconds=defended)

    def examples_of(self, indices: Tensor, state: ClientState) -> Batch:
        return self._own(state).batch(indices)

    def evaluate(self, sent: ModelState, state: ClientState, examples: LabelledExamples) -> Evaluation:
        model = self._own_model(state)
        values = training.join_private(model, sent.to(self.device), state).to(self.device)
        with cpu_threads(self.threads):
            return evaluate_model(model, values, examples, device=self.device)

    def private_part(self, sent: ModelState, state: ClientState) -> tuple[nn.Module, ModelState]:
        model = self._own_model(state)
        return model, training.private_values(model, sent.to(self.device), state).to("cpu")

    def architecture(self) -> nn.Module:
        return self._own_model(ClientState())

    def _look(self, sent: ModelState, state: ClientState) -> float:
        if self.guard is None:
            return 0.0
        started = time.perf_counter()
        if isinstance(self.seed, Secret) and promises_privacy(self.defense):
            if reason := self.guard.refusal_of_weights(sent, state.tensors):
                raise UnfitMessageError(f"The model was refused: {reason}; loosen the guard only for a trusted server.")
            return time.perf_counter() - started
        shown = self.examples.batch(self.indices[: self.guard.examples], self.device)
        with cpu_threads(self.threads):
            self.guard.expect_honest(self.model.to(self.device), sent.to(self.device), shown, state.tensors)
        return time.perf_counter() - started

    def _own_model(self, state: ClientState) -> nn.Module:
        model, rng = _placed(self.model, self.device), self._rng("private")
        for hook in self.defense.model:
            model = hook(model, state.of_images(self.examples.input_shape), rng)
        return model

    @contextmanager
    def _streams(self, rng: torch.Generator) -> Iterator[None]:
        with cpu_threads(self.threads), seeded_globally(rng, self.device):
            yield

    def _augmented(self, batches: list[Batch], purpose: str) -> list[Batch]:
        if not self.plan.augments:
            return batches
        rng = self._once(purpose, "augmentation")
        return [augment(batch, self.plan, rng) for batch in batches]

    def _own(self, state: ClientState) -> OwnExamples:
        if not self.defense.examples:
            return OwnExamples(len(self.indices), lambda i: self.examples.batch(self.indices[i], self.device))
        data = LocalData(num_classes=self.examples.num_classes, state=state, rng=self._rng("examples"))
        with self._streams(self._rng("examples", "torch")):
            batch, started = self.examples.batch(self.indices, self.device), time.perf_counter()
            for hook in self.defense.examples:
                batch = hook(batch, data)
        seconds = time.perf_counter() - started + sum(data.spared)
        return OwnExamples(len(batch), lambda i: Batch(batch.inputs[i], batch.labels[i]), seconds)

    def _rng(self, *names: str | int) -> torch.Generator:
        assert self.seed is not None, "drawn when it was left out"
        return derive_generator(self.seed, "client", self.id, *names)

    def _once(self, *names: str | int) -> torch.Generator:
        return self._rng(*names, secrets.token_hex(16)) if isinstance(self.seed, Secret) else self._rng(*names)

    def _audited(self, *names: str | int) -> torch.Generator:
        return self._rng(*names) if self.audit_seed is None else replace(self, seed=self.audit_seed)._rng(*names)


def _placed(model: nn.Module, device: torch.device | str) -> nn.Module:
    values, wanted = itertools.chain(model.parameters(), model.buffers()), torch.device(device)
    return model if all(value.device == wanted for value in values) else model.to(device)


ClientSource = Callable[[], Mapping[int, Client]]
"""Function that makes the clients, by id, in their process; picklable, best a partial over a few strings."""
