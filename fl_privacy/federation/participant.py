"""A simulated client: its examples, its model, its defense."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fl_privacy.data.examples import Examples
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.errors import UserError
from fl_privacy.federation.batching import local_batches
from fl_privacy.federation.evaluation import Evaluation, evaluate_model
from fl_privacy.federation.local_update import LocalResult, local_update
from fl_privacy.federation.private_part import join_private, private_names, private_values
from fl_privacy.federation.private_pass import train_private
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.types import Batch, LocalPlan, ModelState


@dataclass(frozen=True, kw_only=True)
class Settled:
    """How a client ended a round.

    Attributes:
        seconds: that training its private part took.
        evaluation: of its own model on the test examples, where it was asked for.
    """

    seconds: float
    evaluation: Evaluation | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Participant:
    """One client of a federation.

    Attributes:
        id: partition number, from 0.
        examples: of all clients.
        indices: (n,) which of them are this client's.
        model: architecture; its values are not used.
        plan: how it trains.
        defense: what it does to its update.
        seed: of the whole run; this client's streams derive from it and ``id``.
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
    seed: int = 0
    device: torch.device | str = "cpu"
    threads: int = 1
    test: Examples | None = None

    def update(self, sent: ModelState, state: ClientState, *, round: int) -> LocalResult:
        """Train in ``round`` on the client's own examples and upload."""
        order = local_batches(len(self.indices), self.plan, self._rng("order", round))
        batches = [self.examples.batch(self.indices[i], self.device) for i in order]
        return self._run(sent, batches, len(torch.cat(order).unique()), state, round=round, purpose=f"round-{round}")

    def settle(self, sent: ModelState, state: ClientState, *, round: int, test: bool) -> Settled:
        """End ``round``: train the private part on the new model ``sent``, then test both together if asked."""
        started = time.perf_counter()
        if passes := self.defense.private_passes:
            plan = replace(self.plan.in_round(round), shares="delta", steps=None, epochs=passes)
            order = local_batches(len(self.indices), plan, self._rng("private-order", round))
            batches = [self.examples.batch(self.indices[i], self.device) for i in order]
            with self._streams(f"round-{round}/private"):
                train_private(
                    self._own_model(state),
                    sent.to(self.device),
                    batches,
                    plan=plan,
                    defense=self.defense,
                    state=state,
                    rng=self._rng(f"round-{round}/private", "defense"),
                )
        seconds = time.perf_counter() - started
        mine = self.examples.subset(self.indices) if self.test is None else self.test
        return Settled(seconds=seconds, evaluation=self.evaluate(sent, state, mine) if test else None)

    def probe(self, sent: ModelState, state: ClientState, *, round: int, victim: int, batch_size: int) -> LocalResult:
        """The upload this client would make if ``victim_batch`` were all it had; ``state`` is left as it was."""
        batch = self.victim_batch(victim, batch_size)
        order = local_batches(batch_size, self.plan, self._rng("probe", round, victim))
        batches = [Batch(batch.inputs[i], batch.labels[i]) for i in order]
        scratch = ClientState(dict(state.tensors))
        return self._run(sent, batches, batch_size, scratch, round=round, purpose=f"round-{round}/victim-{victim}")

    def victim_batch(self, victim: int, batch_size: int) -> Batch:
        """(B, ...) the ``victim``-th of the disjoint batches that are probed; the same in every round."""
        if (victim + 1) * batch_size > len(self.indices):
            raise UserError(
                f"Client {self.id} is expected to hold {(victim + 1) * batch_size} examples to be probed"
                f" {victim + 1} times, but has {len(self.indices)}; ask for fewer victims or a smaller batch_size."
            )
        order = torch.randperm(len(self.indices), generator=self._rng("victims"))
        chosen = order[victim * batch_size : (victim + 1) * batch_size]
        return self.examples.batch(self.indices[chosen], self.device)

    def trained_batch(self, *, round: int) -> Batch:
        """The examples behind the update of ``round``, each once, in the order first visited."""
        order = torch.cat(local_batches(len(self.indices), self.plan, self._rng("order", round)))
        chosen = list(dict.fromkeys(order.tolist()))
        return self.examples.batch(self.indices[chosen], self.device)

    def evaluate(self, sent: ModelState, state: ClientState, examples: Examples) -> Evaluation:
        """Accuracy of the model sent, joined with this client's private part, on ``examples``."""
        model = self._own_model(state)
        values = join_private(model, sent.to(self.device), state).to(self.device)
        with _threads(self.threads):
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

    def _own_model(self, state: ClientState) -> nn.Module:
        model = self.model.to(self.device)
        for hook in self.defense.model:
            model = hook(model, state, self._rng("private"))
        return model

    def _run(
        self,
        sent: ModelState,
        batches: list[Batch],
        num_examples: int,
        state: ClientState,
        *,
        round: int,
        purpose: str,
    ) -> LocalResult:
        with self._streams(purpose):
            result = local_update(
                self.model.to(self.device),
                sent.to(self.device),
                batches,
                num_examples=num_examples,
                plan=self.plan.in_round(round),
                defense=self.defense,
                state=state,
                rng=self._rng(purpose, "defense"),
                private_rng=self._rng("private"),
            )
        return replace(result, upload=result.upload.to("cpu"))

    @contextmanager
    def _streams(self, purpose: str) -> Iterator[None]:
        """This client's threads, and PyTorch's global stream as that of ``purpose``."""
        with _threads(self.threads), torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "client", self.id, purpose, "torch"))
            yield

    def _rng(self, *names: str | int) -> torch.Generator:
        return derive_generator(self.seed, "client", self.id, *names)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
