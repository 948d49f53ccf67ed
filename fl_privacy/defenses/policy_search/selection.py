"""Selection of ATS policies by their scores, the share of altered images, and FSIM."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.checks.packages import lacks
from fl_privacy.data.transformations import Policy, disjoint
from fl_privacy.defenses.policy_search.scores import transformed_by
from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Policy (sequence of image operations) with its privacy and accuracy scores; ``UserError`` for NaN or infinity."""

    policy: Policy
    privacy: float  # S_pri, lower is better for the client
    accuracy: float  # S_acc, higher is better
    altered: float  # share of the images that it visibly alters
    fsim: float | None = None  # mean FSIM in [0, 1], if computed
    mean: float | None = None
    variance: float | None = None

    def __post_init__(self) -> None:
        for name in ("privacy", "accuracy"):
            score, remedy = f"The {name} score of policy {self.policy}", "lower training.lr or give other weights"
            checks.number(score, getattr(self, name), example=remedy)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Requirements on policies (sequences of image operations for the ATS defense), and the number to choose."""

    accuracy_at_least: float | None = None  # T_acc; ``None`` keeps the ``accuracy_share`` best
    accuracy_share: float = 0.5  # share in (0, 1] of the policies with an effect
    altered_at_least: float = 0.9  # least share of images that a policy visibly alters, in (0, 1]
    fsim_at_least: float | None = None
    keep: int = 2  # number n of chosen policies, which have no operation in common

    def __post_init__(self) -> None:
        checks.number("accuracy_share", self.accuracy_share, above=0, at_most=1, example=0.5)
        checks.number("altered_at_least", self.altered_at_least, above=0, at_most=1, example=0.9)
        if self.fsim_at_least is not None:
            checks.number("fsim_at_least", self.fsim_at_least, at_least=0, at_most=1, example=0.7)
        checks.whole("keep", self.keep, at_least=1, example=2)

    def has_effect(self, scored: Scored) -> bool:
        return scored.altered >= self.altered_at_least

    def threshold(self, scored: Sequence[Scored]) -> float:
        if self.accuracy_at_least is not None:
            return self.accuracy_at_least
        best_first = sorted((s.accuracy for s in scored if self.has_effect(s)), reverse=True)
        return best_first[max(1, round(self.accuracy_share * len(best_first))) - 1] if best_first else -math.inf

    def accepted(self, scored: Sequence[Scored], untransformed: float) -> list[Scored]:
        least = self.threshold(scored)
        useful = [s for s in scored if self.has_effect(s) and s.accuracy >= least and s.privacy < untransformed]
        if self.fsim_at_least is not None:
            useful = [s for s in useful if s.fsim is not None and s.fsim >= self.fsim_at_least]
        return sorted(useful, key=lambda s: s.privacy)

    def chosen(self, scored: Sequence[Scored], untransformed: float) -> list[Scored]:
        """Return the ``keep`` policies of lowest privacy score that meet the requirements and share no operation.

        ``untransformed``: score of unchanged images, which policies must be below. ``UserError`` if too few are left.
        """
        by_policy = {s.policy: s for s in self.accepted(scored, untransformed)}
        found = disjoint(list(by_policy), self.keep)
        if len(found) < self.keep:
            least = self.threshold(scored)
            raise UserError(
                f"{self.keep} policies without a common operation are expected, but only {len(found)} of"
                f" {len(scored)} are left: {sum(not self.has_effect(s) for s in scored)} leave the images as they are,"
                f" {sum(s.accuracy < least for s in scored)} make them less useful than asked for,"
                f" {sum(s.privacy >= untransformed for s in scored)} score no more private than no transformation"
                f" ({untransformed:.4g}); search more policies or lower the demands."
            )
        return [by_policy[policy] for policy in found]


VISIBLE = 40.0  # PSNR in dB above which a transformed image looks like its original


def altered_shares(images: Tensor, policies: Sequence[Policy], *, seed: int) -> list[float]:
    """Return, for each policy, the share of ``images`` that it alters to a PSNR of at most ``VISIBLE``."""
    least = 10 ** (-VISIBLE / 10)
    changes = (transformed_by(images, policy, seed) - images for policy in policies)
    return (torch.stack([change.square().flatten(1).mean(1) for change in changes]) >= least).double().mean(1).tolist()


def require_fsim() -> ModuleType:
    """Return the module piq; ``UserError`` if it is not installed."""
    try:
        return importlib.import_module("piq")
    except ImportError as error:
        raise lacks("piq", "fsim_at_least", instead="or leave it null") from error


def fsim_scores(images: Tensor, policies: Sequence[Policy], *, seed: int) -> list[float]:
    """Return, for each policy, the mean similarity FSIM (Zhang et al. 2011) of transformed and original ``images``."""
    fsim = partial(require_fsim().fsim, data_range=1.0, chromatic=images.shape[1] == 3)
    found = [float(fsim(transformed_by(images, policy, seed), images)) for policy in policies]
    return torch.tensor(found).nan_to_num(0.0).tolist()


_ROUNDING = 1e-9  # rounding error of a share of images


@dataclass(frozen=True, kw_only=True)
class PrivacyAware:
    """Limits within which a policy of image operations is privacy-aware (Gao et al. 2023, Def. 2, Eq. 3 and 4)."""

    epsilon: float  # PSNR in dB of a reconstruction to the transformed image, below which the image is hidden
    delta: float  # largest share of images that are not hidden, in [0, 1]
    gamma: float  # upper bound on the loss of accuracy, in [0, 1]

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon, example=20.0)
        checks.number("delta", self.delta, at_least=0, at_most=1, example=0.1)
        checks.number("gamma", self.gamma, at_least=0, at_most=1, example=0.01)

    def holds(self, psnr: Tensor | Sequence[float], *, accuracy: float, transformed: float) -> bool:
        """Return whether a policy meets these limits; ``UserError`` if ``psnr`` is empty or has NaN.

        ``psnr`` (N,): PSNR in dB of each reconstruction to the transformed image. ``accuracy``, ``transformed``:
        accuracy without and with the policy.
        """
        hidden = _checked(psnr) < self.epsilon
        return int(hidden.sum()) >= len(hidden) * (1 - self.delta) - _ROUNDING and accuracy - transformed < self.gamma


def least_epsilon(psnr: Tensor | Sequence[float], *, delta: float) -> float:
    """Return the PSNR in dB that at most a share ``delta`` of reconstructions exceeds (Gao et al. 2023, Eq. 3).

    It is the lower limit for ``epsilon``, a PSNR, in :class:`PrivacyAware`; -inf if ``delta`` is 1. ``psnr`` (N,): PSNR
    of each reconstruction to the transformed image; ``UserError`` if it is empty or has NaN.
    """
    checks.number("delta", delta, at_least=0, at_most=1, example=0.1)
    values = _checked(psnr).sort().values
    hidden = math.ceil(len(values) * (1 - delta) - _ROUNDING)
    return float(values[hidden - 1]) if hidden else -math.inf


def _checked(psnr: Tensor | Sequence[float]) -> Tensor:
    values = torch.as_tensor(psnr, dtype=torch.float64).flatten()
    if len(values) == 0 or bool(values.isnan().any()):
        raise UserError(f"psnr is expected to be numbers, at least one, but got {values.tolist()!s:.80}; give those.")
    return values
