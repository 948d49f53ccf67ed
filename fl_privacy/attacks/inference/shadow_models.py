"""Shadow models of clients, reference models of whole trainings, and the base of membership methods."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.inference.read_round import ReadRound, losses_of, margins_of, measured, signals_of
from fl_privacy.models.gradients import ManyModels, local_orders, models_at_once
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState

SIGNALS = 4  # loss, margin, entropy, and loss of augmented images or of the least likely tokens
FEWEST = 8  # least number of the attacker's examples in, and out of, a reference model


@dataclass(eq=False)
class ReferenceModels:
    """Signals (such as losses) of N examples under the global models and under reference models.

    The examples are the candidates for membership, then P public ones. Reference models imitate the whole training.
    """

    first: tuple[ModelState, LocalPlan] | None = None
    last: int = 0
    rounds: int = 0  # number of rounds seen
    sums: Tensor = field(default_factory=lambda: torch.zeros(()))
    seen: Tensor | None = None  # (N, 8) of the attacked training: after the last round, and means over rounds
    references: Tensor | None = None  # (M, N, 8) of M reference models
    inside: Tensor | None = None  # (M, P) ``True`` if a reference model was trained on the example
    trained: int = 0  # number of rounds that reference models were trained for

    def record(self, read: ReadRound, number: int) -> None:
        """Record one round's signals for all methods; after the last round, train ``number`` reference models."""
        model, public = read.observations[0].model.to(read.device), read.public
        if self.first is None and read.round == 1:  # later models know the members
            self.first = read.observations[0].assumed(), read.observations[0].plan
        if self.first is None or public is None or len(public) < 2 * FEWEST:
            return
        if read.round != self.last:
            now, last = _signals(lambda batch, of: measured(model, read.published, batch, of), read)
            self.last, self.rounds, self.sums = read.round, self.rounds + 1, self.sums + now
            self.seen = None if last is None else torch.cat([last, self.sums / self.rounds], 1)
        known = self.references is not None and len(self.references) >= number and self.trained == self.last
        if self.seen is not None and not known:
            self.references, self.inside = self._trained(model, read, public, number)
            self.trained = self.last

    def _trained(self, model: nn.Module, read: ReadRound, public: Batch, number: int) -> tuple[Tensor, Tensor]:
        """Train M = ``number`` reference models on subsets of the P public examples.

        Return the signals (M, N, 8) of N examples, in the order of ``seen``, and the mask (M, P) of training examples.
        """
        assert self.first is not None
        sent, plan = self.first
        sizes = [max(1, observation.upload.num_examples) for observation in read.observations]
        size = min(sum(sizes), len(public) // 2)
        plan = replace(plan, batch_size=math.ceil(size / math.ceil(max(sizes) / (plan.batch_size or max(sizes)))))
        rng, found = derive_generator(read.seed, "inference", "references"), []
        subsets = torch.rand(number, len(public), generator=rng).argsort(1)[:, :size]
        for some in torch.split(subsets, models_at_once(model, plan.batch_size or size)):
            models, sums = ManyModels.copies(model, sent.to(read.device), len(some)), torch.zeros(())
            for round in range(self.last):
                order = [rows.to(read.device) for rows in local_orders(some, plan, rng)]
                models = models.trained(public, order, plan)
                now, last = _signals(models.measured, replace(read, remaining=self.last - round - 1))
                sums = sums + now
            assert last is not None
            found.append(torch.cat([last, sums / self.last], 2))
        return torch.cat(found), torch.zeros(number, len(public), dtype=torch.bool).scatter_(1, subsets, True)


def _signals(
    measure: Callable[[Batch, Callable[[Tensor, Tensor], Tensor]], Tensor], read: ReadRound
) -> tuple[Tensor, Tensor | None]:
    """Return four signals (..., N, 4) of N examples (:func:`signals_of`), and after the last round those of its model.

    ``measure``: evaluates a function of logits and labels on a batch, under one or many models.
    """
    parts = [read.candidates, *([read.public] if read.public is not None else [])]
    inputs, labels = torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts])
    last = found = measure(Batch(inputs, labels), signals_of).double().cpu()
    if read.remaining:
        return found, None
    if inputs.dim() == 4:  # images
        moved = F.pad(inputs, (2, 0, 2, 0), mode="replicate")[..., :-2, :-2]
        losses = [measure(Batch(each, labels), losses_of).double().cpu() for each in (inputs.flip(-1), moved)]
        last = torch.cat([found[..., :-1], torch.stack(losses, -1).mean(-1, keepdim=True)], -1)
    return found, last


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of the membership methods; ``course``: reference models, trained once and shared by all methods."""

    shadows: int = 64
    shadow_rounds: int = 1
    references: int = 2
    course: ReferenceModels = field(default_factory=ReferenceModels, compare=False, repr=False)


class MembershipMethod(ABC):
    """Method that averages membership evidence over rounds; ``of_tokens``: only for next-token prediction."""

    title: ClassVar[str]
    source: ClassVar[str]
    of_tokens: ClassVar[bool] = False

    def __init__(self, candidates: int, clients: Sequence[int], options: MethodOptions) -> None:
        self.options = options
        self._columns = {client: column for column, client in enumerate(clients)}
        self._total = torch.zeros(candidates, len(clients), dtype=torch.float64)
        self._rounds = torch.zeros(candidates, len(clients))

    def add(self, read: ReadRound) -> None:
        found, columns = self.evidence(read).double(), self.columns(read)
        finite = found.isfinite()
        self._total[:, columns] += found.where(finite, 0.0)
        self._rounds[:, columns] += finite.to(self._rounds.dtype)

    def columns(self, read: ReadRound) -> Tensor:
        return torch.tensor([self._columns[observation.id.client] for observation in read.observations])

    def scores(self) -> Tensor:
        """Return the evidence (C, K) on C candidates for K clients, averaged over rounds; NaN if none was finite."""
        return torch.where(self._rounds > 0, self._total / self._rounds.clamp(min=1), torch.nan)

    @abstractmethod
    def evidence(self, read: ReadRound) -> Tensor:
        """Return one round's evidence (C, K) of C candidates for K clients, higher for members."""


def averaged(
    name: str, paper: str, shown: Callable[[ReadRound], Tensor], *, tokens: bool = False
) -> type[MembershipMethod]:
    """Return the class of a method that averages ``shown(round)`` over rounds.

    ``shown`` gives the evidence (C, K) on C candidates in K clients' uploads. ``name``, ``paper``: title and source of
    the method. ``tokens``: ``True`` if it needs a model that predicts next tokens.
    """

    class Averaged(MembershipMethod):
        title, source, of_tokens = name, paper, tokens

        def evidence(self, read: ReadRound) -> Tensor:
            return shown(read)

    return Averaged


SHARE = 0.5  # share of the pool that a shadow model trains on, if a client has as many examples
PRIOR = 4.0  # weight, in shadow models, of the pooled difference between members and others
LEAST_SPREAD = 1e-3  # least standard deviation of a margin
LONGEST = 1.0  # largest gradient norm when diverged shadow models are trained again


class ShadowModels(MembershipMethod):
    """Membership inference by likelihood ratios of examples' margins under shadow models (LiRA, Carlini et al. 2022).

    Each shadow model trains like a client, on as many examples, drawn from the candidates and the attacker's examples.
    The margin log(p / (1 - p)) is assumed normal, with one variance for all examples (Sec. IV-C). Membership raises an
    example's mean margin; the estimated rise is shrunk toward the average of all examples.
    """

    title, source = "LiRA, shadow clients", "Carlini et al. 2022"

    def evidence(self, read: ReadRound) -> Tensor:
        found = torch.full((len(read.candidates), len(read.observations)), torch.nan)
        if read.remaining >= self.options.shadow_rounds:
            return found
        observed = read.after_each(margins_of)
        for number, (model, sent, own) in enumerate(read.same_sent):
            sizes = torch.tensor([max(1, read.observations[column].upload.num_examples) for column in own])
            rng = derive_generator(read.seed, "inference", "shadows", read.round, number)
            plan, size = read.observations[own[0]].plan, int(sizes.median())
            margins, inside = self._shadows(read, model, sent, plan=plan, size=size, rng=rng)
            found[:, own] = likelihood_ratio(observed[:, own], margins, inside).float()
        return found

    def _shadows(
        self, read: ReadRound, model: nn.Module, sent: ModelState, *, plan: LocalPlan, size: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return log odds (S, C) of C candidates' true class under S shadow models, and the mask (S, C) of members."""
        pool, missing = read.candidates, math.ceil(size / SHARE) - len(read.candidates)
        if read.public is not None and missing > 0:
            more = read.public.first(missing)
            pool = Batch(torch.cat([pool.inputs, more.inputs]), torch.cat([pool.labels, more.labels]))
        size = min(size, max(1, int(SHARE * len(pool))))
        subsets = torch.rand(self.options.shadows, len(pool), generator=rng).argsort(1)[:, :size]
        inside = torch.zeros(self.options.shadows, len(pool), dtype=torch.bool).scatter_(1, subsets, True)
        at_once, margins = models_at_once(model, min(plan.batch_size or size, size)), []

        def trained(some: Tensor, longest: float = math.inf) -> Tensor:
            order = [rows.to(read.device) for rows in local_orders(some, plan, rng)]
            models = ManyModels.copies(model, sent, len(some)).trained(pool, order, plan, longest=longest)
            return models.measured(read.candidates, margins_of).cpu()

        for some in torch.split(subsets, at_once):
            found = trained(some)
            diverged = ~found.isfinite().all(1)
            if diverged.any():
                found[diverged] = trained(some[diverged], LONGEST)
            margins.append(found)
        return torch.cat(margins), inside[:, : len(read.candidates)]


def likelihood_ratio(observed: Tensor, margins: Tensor, inside: Tensor) -> Tensor:
    """Return the log likelihood ratio (C, K) of membership to non-membership, for C examples and K clients.

    ``observed``: margins (C, K) of the true class under the clients' models. ``margins``: (S, C) under S shadow models;
    NaN and infinity are ignored. ``inside``: (S, C) ``True`` if the shadow model was trained on the example.
    """
    margins, known = margins.double(), margins.isfinite()
    with_it, without = known & inside, known & ~inside
    mean_out = _mean(margins, without)
    number = with_it.sum(0)
    shift = torch.where(number > 0, _mean(margins, with_it) - mean_out, 0.0)
    counted = ((number > 0) & mean_out.isfinite()).double() * number
    pooled = (shift.nan_to_num() * counted).sum() / counted.sum().clamp(min=1)
    mean_in = mean_out + (number * shift + PRIOR * pooled) / (number + PRIOR)
    spread_in, spread_out = _spread(margins, with_it), _spread(margins, without)
    values = observed.double()
    z_in, z_out = (values - mean_in[:, None]) / spread_in, (values - mean_out[:, None]) / spread_out
    return (z_out.square() - z_in.square()) / 2 + (spread_out / spread_in).log()


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return values.where(counted, 0.0).sum(0) / counted.sum(0)


def _spread(values: Tensor, counted: Tensor) -> Tensor:
    several = counted & (counted.sum(0) > 1)
    if not several.any():
        return values[values.isfinite()].std().clamp(min=LEAST_SPREAD)
    deviations = (values - _mean(values, counted).nan_to_num()).where(several, 0.0)
    return (deviations.square().sum() / (several.sum() - several.any(0).sum())).sqrt().clamp(min=LEAST_SPREAD)
