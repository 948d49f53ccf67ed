"""What inference attacks answered beside what is true."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fl_privacy.experiment.inference_questions import Asked
from fl_privacy.inference import About
from fl_privacy.metrics import FEW, aggregate
from fl_privacy.metrics.epsilon_bounds import auc_bound, balanced_accuracy_bound, proven_epsilon, tpr_bound
from fl_privacy.metrics.roc import (
    Estimate,
    Separation,
    answer_success,
    auc,
    balanced_accuracy,
    correlation,
    thinned_curve,
    threshold_success,
    tpr_at,
)
from fl_privacy.results import Finding, Measure

TPR_AT = {"tpr_at_0.1_percent": 0.001, "tpr_at_1_percent": 0.01}
"""Measures -> FPR."""

FROM_TEST = (
    "Those that nobody trained on are of the test split: what tells the splits apart counts as membership (holdout=N"
    " takes them from the same split)."
)


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Epsilon that the worst-off client had spent by a round, ``None`` without guarantee, and its delta."""

    epsilon: Callable[[int], float | None]
    delta: float


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What was read: how many rounds, the last of them, and the ids of all clients in the order of the columns."""

    rounds: int
    last_round: int
    clients: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class InferenceJudge:
    """Lays answers beside the truth.

    Attributes:
        asked: the examples asked about.
        attributes: (V,) of the victims, -1 where it is not known.
        spending: of the clients.
        seed: of resampling.
    """

    asked: Asked
    attributes: Tensor
    spending: Spending
    seed: int

    def findings(
        self, about: About, answers: Mapping[str, Tensor], titles: Mapping[str, tuple[str, str]], watched: Watched
    ) -> list[Finding]:
        """One for each method."""
        judges = {
            About.MEMBERSHIP: self._membership,
            About.SOURCE: self._source,
            About.ATTRIBUTE: self._attribute,
            About.PROPERTY: self._property,
        }
        return [
            judges[about](
                answer,
                Finding(
                    about=about,
                    method=name,
                    title=titles[name][0],
                    source=titles[name][1],
                    rounds=watched.rounds,
                    last_round=watched.last_round,
                ),
                watched,
            )
            for name, answer in answers.items()
        ]

    def _membership(self, scores: Tensor, finding: Finding, watched: Watched) -> Finding:
        columns = _columns(watched.clients, self.asked.clients)
        own = scores[torch.arange(len(scores)), columns].double()
        answered = own.isfinite()
        member = self.asked.is_member
        found = Separation(
            positives=own[answered & member].numpy(), negatives=own[answered & ~member].numpy(), seed=self.seed
        )
        if min(len(found.positives), len(found.negatives)) < 2:
            reason = "there is too little evidence, as of too few clients or rounds"
            return replace(finding, failure=reason)
        epsilon = self.spending.epsilon(watched.last_round)
        left_out = int((~answered).sum())
        notes = [FROM_TEST] * self.asked.from_test
        notes += [f"{left_out} examples of clients that were never read are left out."] * bool(left_out)
        fpr, tpr = thinned_curve(found)
        return replace(
            finding,
            positives=len(found.positives),
            negatives=len(found.negatives),
            measures=self._measures(found, epsilon),
            fpr=fpr,
            tpr=tpr,
            epsilon=epsilon,
            delta=self.spending.delta,
            proven_epsilon=proven_epsilon(found, delta=self.spending.delta if epsilon is not None else 0.0),
            notes=notes,
        )

    def _source(self, scores: Tensor, finding: Finding, watched: Watched) -> Finding:
        owners = _columns(watched.clients, self.asked.clients[: self.asked.members])
        own = scores[: len(owners)]
        answered = own.isfinite().any(1)
        own, owners = own[answered].nan_to_num(nan=-math.inf), owners[answered]
        if not len(own):
            return replace(finding, failure="no client was read")
        right = int((own.argmax(1) == owners).sum())
        majority = float(owners.bincount().max()) / len(owners)
        success = answer_success(right, len(owners), majority=majority)
        return replace(finding, positives=len(owners), measures={"asr": _measure(success, None)})

    def _attribute(self, scores: Tensor, finding: Finding, watched: Watched) -> Finding:
        answered = scores.isfinite().all(1) & (self.attributes >= 0)
        guessed, true = scores[answered].argmax(1), self.attributes[answered]
        if not len(true):
            return replace(finding, failure="no victim was read whose attribute is known")
        majority = float(true.bincount().max()) / len(true)
        success = answer_success(int((guessed == true).sum()), len(true), majority=majority)
        return replace(finding, positives=len(true), measures={"asr": _measure(success, None)})

    def _property(self, guessed: Tensor, finding: Finding, watched: Watched) -> Finding:
        answered = guessed.isfinite().all(1)
        guessed, shares = guessed[answered].double(), self.asked.shares[answered].double()
        if len(guessed) < 2:
            return replace(finding, failure="fewer than two clients were read")
        errors = (guessed - shares).abs().mean(1).tolist()
        by_mean = float((self.asked.shares.double().mean(0) - shares).abs().mean())
        found = aggregate(errors, within=(0.0, 1.0))
        assert found is not None
        low, high = found.ci95 or (0.0, 1.0)
        measures = {"error": Measure(value=found.mean, low=low, high=high, chance=by_mean)}
        deviations = shares - shares.mean(0)
        if deviations.abs().max() > 0 and len(guessed) >= FEW:
            measures["correlation"] = _measure(
                correlation((guessed - guessed.mean(0)).numpy(), deviations.numpy(), seed=self.seed), None
            )
        largest, wanted = guessed.argmax(1), shares.argmax(1)
        majority = float(wanted.bincount().max()) / len(wanted)
        success = answer_success(int((largest == wanted).sum()), len(wanted), majority=majority)
        return replace(finding, positives=len(guessed), measures={**measures, "asr": _measure(success, None)})

    def _measures(self, found: Separation, epsilon: float | None) -> dict[str, Measure]:
        measures = {}
        for name, rate in TPR_AT.items():
            if (estimate := tpr_at(found, rate)) is not None:
                measures[name] = _measure(estimate, self._tpr_bound(rate, epsilon))
        budget = {"epsilon": epsilon or 0.0, "delta": self.spending.delta}
        bounded = epsilon is not None and math.isfinite(epsilon)
        measures["auc"] = _measure(auc(found), auc_bound(**budget) if bounded else None)
        measures["balanced_accuracy"] = _measure(
            balanced_accuracy(found), balanced_accuracy_bound(**budget) if bounded else None
        )
        measures["asr"] = _measure(threshold_success(found), None)
        return measures

    def _tpr_bound(self, fpr: float, epsilon: float | None) -> float | None:
        if epsilon is None or not math.isfinite(epsilon):
            return None
        return float(tpr_bound(np.array([fpr]), epsilon=epsilon, delta=self.spending.delta)[0])


def _measure(estimate: Estimate, bound: float | None) -> Measure:
    return Measure(value=estimate.value, low=estimate.low, high=estimate.high, chance=estimate.chance, bound=bound)


def _columns(clients: tuple[int, ...], asked: Tensor) -> Tensor:
    places = {client: column for column, client in enumerate(clients)}
    return torch.tensor([places[client] for client in asked.tolist()])
