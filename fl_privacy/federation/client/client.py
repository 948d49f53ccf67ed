"""A simulated client: its examples, its model, its defense."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fl_privacy.data.examples import Examples
from fl_privacy.defenses import ClientState, Defense, LocalData
from fl_privacy.errors import UserError
from fl_privacy.federation.client.examples import OwnExamples, augment, local_batches
from fl_privacy.federation.client.private_part import join_private, private_names, private_values
from fl_privacy.federation.client.training import LocalResult, local_update, train_private
from fl_privacy.federation.evaluation import Evaluation, evaluate_model
from fl_privacy.models import has_batch_norm
from fl_privacy.rng import Secret, derive_generator, seeded_globally
from fl_privacy.threads import cpu_threads
from fl_privacy.types import Batch, LocalPlan, ModelState


@dataclass(frozen=True, kw_only=True)
class Personalized:
    """How a client ended a round.

    Attributes:
        seconds: that training its private part took.
        evaluation: of its own model on the test examples, where it was asked for.
    """

    seconds: float
    evaluation: Evaluation | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Client:
    """One client of a federation.

    Attributes:
        id: partition number, from 0.
        examples: of all clients.
        indices: (n,) which of them are this client's.
        model: architecture; its values are not used.
        plan: how it trains.
        defense: what it does to its update.
        seed: what this client's random streams derive from, with ``id``. A number makes it a simulation: who knows the
            number repeats every draw, and removes the noise. By default a secret is drawn, as a deployed client needs;
            one that is kept (``flower.node_secret``) outlives the process, and the client where a Flower app makes
            one for each message: private layers need that. Streams that one upload uses up are then
            new for each upload, also where a server asks for the same round twice.
        audit_seed: of a deployed client that is audited: the public number which decides what batches are probed.
        device: where it computes.
        threads: CPU threads it computes with; part of the result's last bits, hence the same for every backend.
        test: examples that a client with a private part tests its own model on; ``None`` are its own.
    """

    id: int
    examples: Examples
    indices: Tensor
    model: nn.Module
    plan: LocalPlan
    defense: Defense = field(default_factory=Defense)
    seed: int | Secret = field(default_factory=Secret.draw)
    audit_seed: int | None = None
    device: torch.device | str = "cpu"
    threads: int = 1
    test: Examples | None = None

    def update(self, sent: ModelState, state: ClientState, *, round: int) -> LocalResult:
        """Train in ``round`` on the client's own examples and upload."""
        own = self._own(state)
        order = local_batches(own.number, self.plan, self._once("order", round))
        batches = self._augmented([own.batch(i) for i in order], f"round-{round}")
        examples = len(torch.cat(order).unique())
        plan = self.plan.in_round(round)
        result = self._run(sent, batches, examples, state, plan=plan, purpose=f"round-{round}")
        made = own.seconds
        return replace(result, seconds=result.seconds + made, defense_seconds=result.defense_seconds + made)

    def personalize(self, sent: ModelState, state: ClientState, *, round: int, test: bool) -> Personalized:
        """End ``round``: train the private part on the new model ``sent``, then test both together if asked."""
        started = time.perf_counter()
        if passes := self.defense.private_passes:
            own = self._own(state)
            plan = replace(self.plan.in_round(round), shares="delta", steps=None, epochs=passes)
            order = local_batches(own.number, plan, self._once("private-order", round))
            batches = self._augmented([own.batch(i) for i in order], f"round-{round}/private")
            with self._streams(self._once(f"round-{round}/private", "torch")):
                train_private(
                    self._own_model(state),
                    sent.to(self.device),
                    batches,
                    plan=plan,
                    defense=self.defense,
                    state=state,
                    rng=self._once(f"round-{round}/private", "defense"),
                )
        seconds = time.perf_counter() - started
        mine = self.examples.subset(self.indices) if self.test is None else self.test
        return Personalized(seconds=seconds, evaluation=self.evaluate(sent, state, mine) if test else None)

    def probe(self, sent: ModelState, state: ClientState, *, round: int, victim: int, batch_size: int) -> LocalResult:
        """The upload this client would make if ``victim_batch`` were all it had.

        ``state`` is left as it was, but for what the defense makes of the client's examples once.

        Raises:
            UserError: batch norm in training mode has but one value to normalize.
        """
        batch = self.victim_batch(victim, batch_size, state)
        order = local_batches(batch_size, self.plan, self._audited("probe", round, victim))
        batches = [Batch(batch.inputs[i], batch.labels[i]) for i in order]
        scratch = ClientState(dict(state.tensors))
        plan, purpose = self.plan.in_round(round, probe=True), f"round-{round}/victim-{victim}"
        batches = self._augmented(batches, purpose) if plan.augment_probes else batches
        try:
            return self._run(sent, batches, batch_size, scratch, plan=plan, purpose=purpose)
        except ValueError as error:
            if plan.batch_norm == "train" and has_batch_norm(self.model):
                raise UserError(
                    f"Batch norm in training mode can't normalize a victim of {batch_size} examples"
                    f" ({str(error).rstrip('.')}); set federation.plan.probe_batch_norm=eval or a larger batch_size."
                ) from error
            raise

    def victim_batch(self, victim: int, batch_size: int, state: ClientState | None = None) -> Batch:
        """(B, ...) the ``victim``-th of the disjoint batches that are probed; the same in every round."""
        own = self._own(ClientState() if state is None else state)
        if (victim + 1) * batch_size > own.number:
            raise UserError(
                f"Client {self.id} is expected to hold {(victim + 1) * batch_size} examples to be probed"
                f" {victim + 1} times, but has {own.number}; ask for fewer victims or a smaller batch_size."
            )
        order = torch.randperm(own.number, generator=self._audited("victims"))
        return own.batch(order[victim * batch_size : (victim + 1) * batch_size])

    @property
    def number_of_examples(self) -> int:
        """How many it trains on: its own, or those that its defense will exchange them for."""
        labels = self.examples.labels[self.indices]
        for hook in self.defense.outcome:
            labels = hook(labels, self.examples.num_classes)
        return len(labels)

    def trained_batch(self, *, round: int, state: ClientState | None = None) -> Batch:
        """The examples behind the update of ``round``, each once, in the order first visited; of a simulation only."""
        self._expect_simulated()
        own = self._own(ClientState() if state is None else state)
        order = torch.cat(local_batches(own.number, self.plan, self._rng("order", round)))
        return own.batch(torch.tensor(list(dict.fromkeys(order.tolist()))))

    def transformed_victim(
        self, sent: ModelState, state: ClientState, *, round: int, victim: int, batch_size: int
    ) -> Batch:
        """What augmentation and data hooks made of ``victim_batch`` for the probe of ``round``, in the same order.

        Of a simulation only.
        """
        self._expect_simulated()
        if not (self.plan.augment_probes or self.defense.data):
            return self.victim_batch(victim, batch_size, state)
        watched, seen = self._watched()
        watched.probe(sent, state, round=round, victim=victim, batch_size=batch_size)
        order = torch.cat(local_batches(batch_size, self.plan, self._audited("probe", round, victim))).tolist()
        return _rows(seen, [order.index(example) for example in range(batch_size)])

    def transformed_batch(self, sent: ModelState, state: ClientState, *, round: int) -> Batch:
        """What augmentation and data hooks first made of each example of ``trained_batch``, in the same order.

        Of a simulation only.
        """
        self._expect_simulated()
        if not (self.plan.augments or self.defense.data):
            return self.trained_batch(round=round, state=state)
        watched, seen = self._watched()
        watched.update(sent, state, round=round)
        order = torch.cat(local_batches(self._own(state).number, self.plan, self._rng("order", round))).tolist()
        return _rows(seen, [order.index(example) for example in dict.fromkeys(order)])

    def evaluate(self, sent: ModelState, state: ClientState, examples: Examples) -> Evaluation:
        """Accuracy of the model sent, joined with this client's private part, on ``examples``."""
        model = self._own_model(state)
        values = join_private(model, sent.to(self.device), state).to(self.device)
        with cpu_threads(self.threads):
            return evaluate_model(model, values, examples, device=self.device)

    def private_part(self, sent: ModelState, state: ClientState) -> tuple[nn.Module, ModelState]:
        """This client's architecture and the values in it that it was not sent; a secret, for the simulation only."""
        model = self._own_model(state)
        return model, private_values(model, sent.to(self.device), state).to("cpu")

    def architecture(self) -> nn.Module:
        """What this client makes of the model it is sent; its values are not used."""
        return self._own_model(ClientState())

    def keeps_private(self) -> bool:
        """Whether some of the model's values are neither sent nor uploaded."""
        return bool(private_names(self.model, self.defense))

    def _expect_simulated(self) -> None:
        if isinstance(self.seed, Secret):
            raise UserError(
                f"Client {self.id} is expected to be simulated for its draws to be repeated, but has a secret of its"
                " own; give it a number as seed."
            )

    def _own_model(self, state: ClientState) -> nn.Module:
        model, rng = self.model.to(self.device), self._rng("private")
        for hook in self.defense.model:
            model = hook(model, state.of_images(self.examples.input_shape), rng)
        return model

    def _run(
        self,
        sent: ModelState,
        batches: list[Batch],
        num_examples: int,
        state: ClientState,
        *,
        plan: LocalPlan,
        purpose: str,
    ) -> LocalResult:
        with self._streams(self._once(purpose, "torch")):
            result = local_update(
                self.model.to(self.device),
                sent.to(self.device),
                batches,
                num_examples=num_examples,
                plan=plan,
                defense=self.defense,
                state=state,
                rng=self._once(purpose, "defense"),
                private_rng=self._rng("private"),
            )
        return replace(result, upload=result.upload.to("cpu"))

    @contextmanager
    def _streams(self, rng: torch.Generator) -> Iterator[None]:
        """This client's threads, and PyTorch's global streams as they start from ``rng``."""
        with cpu_threads(self.threads), seeded_globally(rng, self.device):
            yield

    def _augmented(self, batches: list[Batch], purpose: str) -> list[Batch]:
        rng = self._once(purpose, "augmentation")
        return [augment(batch, self.plan, rng) for batch in batches] if self.plan.augments else batches

    def _own(self, state: ClientState) -> OwnExamples:
        """What the client trains on: its examples, or what its defense makes of them."""
        if not self.defense.examples:
            return OwnExamples.of(self.examples, self.indices, self.device)
        data = LocalData(num_classes=self.examples.num_classes, state=state, rng=self._rng("examples"))
        with self._streams(self._rng("examples", "torch")):
            return OwnExamples.exchanged(self.examples.batch(self.indices, self.device), self.defense, data)

    def _watched(self) -> tuple["Client", list[Batch]]:
        """This client, and the batches that will have gone through its data hooks."""
        seen: list[Batch] = []

        def watch(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
            seen.append(batch)
            return batch

        return replace(self, defense=replace(self.defense, data=(*self.defense.data, watch))), seen

    def _rng(self, *names: str | int) -> torch.Generator:
        """The stream ``names``, the same at every call."""
        return derive_generator(self.seed, "client", self.id, *names)

    def _once(self, *names: str | int) -> torch.Generator:
        """The stream ``names`` of one upload; a deployed client's never comes again."""
        return self._rng(*names, secrets.token_hex(16)) if isinstance(self.seed, Secret) else self._rng(*names)

    def _audited(self, *names: str | int) -> torch.Generator:
        """The stream ``names`` of a choice that the auditor knows."""
        return self._rng(*names) if self.audit_seed is None else replace(self, seed=self.audit_seed)._rng(*names)


def _rows(batches: list[Batch], chosen: list[int]) -> Batch:
    inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches])
    return Batch(inputs[chosen], labels[chosen])
