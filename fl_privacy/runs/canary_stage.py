"""Train an auditor's client with canaries in each intercepted round, outside the training itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fl_privacy.attacks.inference.inference import Canaries
from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.dp_check.canaries import canary_test
from fl_privacy.dp_check.claims import Claim, Recomputed, Unit, recompute
from fl_privacy.dp_check.of_defense import clip_norm_of
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.effects import ClippedExamples
from fl_privacy.errors import UserError
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_inferences
from fl_privacy.runs.folder import RunFolder
from fl_privacy.runs.folder.claims import records_of, write_claims
from fl_privacy.runs.privacy import Privacy, guarantees
from fl_privacy.runs.run_claims import facts_of
from fl_privacy.runs.run_location import Monitor
from fl_privacy.runs.setup import Setup
from fl_privacy.types import Observation, Tensors

MOST_COORDINATES = 20_000  # most random coordinates of an update that hold canaries: noise is equal in all

NOTES: Mapping[Unit, str] = {
    "client": "Canary clients upload an update of the clipping norm each round; none enters the mean.",
    "example": "Canary examples have a gradient of the clipping norm, and are sampled in each local step at the rate"
    " of the client's batches; the client that trains with them enters no mean.",
}


@dataclass(eq=False, kw_only=True)
class CanaryStage:
    """Scores canaries (invented examples or clients): a high score suggests that the canary took part in training."""

    setup: Setup
    canaries: Canaries
    privacy: Privacy
    folder: RunFolder
    monitor: Monitor
    _sent: Observation | None = field(default=None, init=False)
    _rounds: int = field(default=0, init=False)
    _chosen: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._taken = torch.rand(self.canaries.number, generator=self._rng("coins")) < 0.5
        self._scores = torch.zeros(self.canaries.number, dtype=torch.float64)
        self._state = ClientState()

    @classmethod
    def of(cls, setup: Setup, folder: RunFolder, monitor: Monitor, privacy: Privacy) -> "CanaryStage | None":
        found = [i for i in build_inferences(setup.config.inference).values() if isinstance(i, Canaries)]
        return cls(setup=setup, canaries=found[0], privacy=privacy, folder=folder, monitor=monitor) if found else None

    @property
    def unit(self) -> Unit:
        if self.canaries.unit != "auto":
            return self.canaries.unit
        return "example" if any(isinstance(part.effect, ClippedExamples) for part in self._defense.parts) else "client"

    @property
    def _defense(self) -> Defense:
        return self.setup.defense

    def see(self, observation: Observation) -> None:
        if observation.id.probe is None and self._sent is None:
            self._sent = observation

    def end_round(self) -> None:
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        self._rounds += 1
        with self.monitor.working(f"Canaries in round {sent.id.round}"):
            self._scores += self._by_examples(sent) if self.unit == "example" else self._by_clients(sent)

    def finish(self) -> None:
        self.end_round()
        delta, privacy = self.setup.config.privacy.delta, self.privacy
        if not self._rounds:
            return
        recomputed, missing = self._recomputed(delta)
        there, absent = self._scores[self._taken].numpy(), self._scores[~self._taken].numpy()
        # what states no Gaussian noise is assumed to have noise of any shape
        noise: Literal["gaussian", "other"] = "other" if recomputed is None else "gaussian"
        test = canary_test(there, absent, delta=delta, unit=self.unit, noise=noise)
        unit: Unit = "example" if privacy.unit == "example" else "client"
        claim = None
        if privacy.epsilons:
            epsilon, rounds = privacy.epsilons[-1], self.setup.rounds
            claim = Claim(epsilon=epsilon, delta=delta, unit=unit, rounds=rounds, by="this run")
        verdict = ClaimVerdict(
            subject=f"{self._defense.name} over the {self._rounds} intercepted of {self.setup.rounds} rounds",
            claim=claim,
            recomputed=recomputed,
            canaries=test,
            notes=(*missing, NOTES[self.unit]),
        )
        write_claims(self.folder.path, records_of([verdict]))

    def _recomputed(self, delta: float) -> tuple[Recomputed | None, tuple[str, ...]]:
        found = guarantees(self.setup, delta=delta, accountant="rdp")[0]
        if found.missing is not None or found.once is not None:
            return None, ()
        try:
            return recompute(facts_of(found, self.setup.rounds), delta=delta), ()
        except UserError as error:
            return None, (str(error),)

    def _rng(self, *names: str | int) -> torch.Generator:
        return derive_generator(self.setup.config.seed, "canaries", *names)

    def _drawn(self, like: Tensors) -> tuple[Tensor, Tensor]:
        """Draw s coordinates of an update and, on these, unit vectors (m, s) for m canaries; later calls reuse both."""
        if self._chosen is None:
            size, number = sum(value.numel() for value in like.values()), self.canaries.number
            places = torch.randperm(size, generator=self._rng("coordinates"))[:MOST_COORDINATES].sort()[0]
            drawn = torch.randn(len(places), number, generator=self._rng("directions"))
            together = self.unit == "example" and number <= len(places)
            unit = torch.linalg.qr(drawn)[0] if together else drawn / drawn.norm(dim=0)
            self._chosen = places, unit.T.contiguous()
        return self._chosen

    def _by_clients(self, sent: Observation) -> Tensor:
        """Score (m,) how strongly the upload of each canary (invented client) shows its secret direction."""
        places, directions = self._drawn(sent.upload.tensors)
        # count the sorted coordinates in each array
        ends = torch.tensor([value.numel() for value in sent.upload.tensors.values()]).cumsum(0)
        counts = torch.bincount(torch.searchsorted(ends, places, right=True), minlength=len(ends))
        norm = clip_norm_of(self._defense) or 1.0
        sizes = {name: count for name, count in zip(sent.upload.tensors, counts.tolist(), strict=True) if count}
        scores = torch.zeros(len(directions), dtype=torch.float64)
        for number, direction in counted("canary", list(enumerate(directions))):
            parts = (direction * norm * bool(self._taken[number])).split(list(sizes.values()))
            update: Tensors = dict(zip(sizes, parts, strict=True))
            rng = self._rng("noise", sent.id.round, number)
            for hook in self._defense.upload:
                update = hook(update, ClientState(), rng)
            row = [update[name].flatten() if name in update else torch.zeros(size) for name, size in sizes.items()]
            scores[number] = float(torch.cat(row).cpu().to(torch.float32) @ direction)
        return scores

    def _by_examples(self, sent: Observation) -> Tensor:
        """Score (m,) how strongly an update contains the gradient of each canary (invented example)."""
        client, like, norm = self.setup.first, sent.upload.tensors, clip_norm_of(self._defense) or 1.0
        places, directions = self._drawn(like)
        rng, examples = self._rng("sampling", sent.id.round), len(client.indices)

        def with_canaries(gradients: Tensors, step: LocalStep) -> Tensors:
            size = len(step.batch)
            sampled = (torch.rand(len(directions), generator=rng) < size / examples) & self._taken
            flat = torch.zeros(sum(value.numel() for value in like.values()))
            flat[places] = sampled.to(directions) @ directions * (norm / size)
            parts = zip(like.items(), flat.split([value.numel() for value in like.values()]), strict=True)
            added = {name: part.view(value.shape) for (name, value), part in parts}
            return {n: g + added[n].to(g) if n in added else g for n, g in gradients.items()}

        defense = replace(self._defense, gradient=(*self._defense.gradient, with_canaries))
        made = replace(client, defense=defense).update(sent.sent, self._state, round=sent.id.round)
        sign = 1.0 if client.plan.shares == "gradient" else -1.0
        found = made.upload.tensors
        if client.plan.shares == "weights":
            found = {name: value - sent.sent.parameters[name].cpu() for name, value in found.items()}
        # take the chosen coordinates (s,) of ``update``; withheld values are 0
        whole = [found[name].flatten() if name in found else torch.zeros(v.numel()) for name, v in like.items()]
        chosen = torch.cat([part.cpu().to(torch.float32) for part in whole])[places]
        return sign * (directions @ chosen).to(torch.float64)
