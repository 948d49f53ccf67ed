"""What inference attacks answered beside what is true."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fl_privacy.experiment.inferences import Asked
from fl_privacy.inference import About
from fl_privacy.metrics.epsilon_bounds import auc_bound, balanced_accuracy_bound, proven_epsilon, tpr_bound
from fl_privacy.metrics.roc import (
    Estimate,
    Separation,
    auc,
    balanced_accuracy,
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
        spending: of the clients.
        seed: of resampling.
    """

    asked: Asked
    spending: Spending
    seed: int

    def findings(
        self, about: About, answers: Mapping[str, Tensor], titles: Mapping[str, tuple[str, str]], watched: Watched
    ) -> list[Finding]:
        """One for each method."""
        judges = {About.MEMBERSHIP: self._membership}
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
