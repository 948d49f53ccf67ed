"""Server's optimizer on the mean of the updates, and its inverse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fl_privacy.checks import number, one_of
from fl_privacy.types import Tensors


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Rule by which a server moves the model along a mean update.

    Attributes:
        name: ``sgd`` (FedAvg), ``momentum`` (FedAvgM, Hsu et al. 2019), or ``adam`` and ``yogi`` (FedAdam and FedYogi,
            Reddi et al. 2021, Algorithm 2, with moments that start at 0).
        momentum: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        tau: number above 0 that is added to the root of the second moment.
    """

    name: Literal["sgd", "momentum", "adam", "yogi"] = "sgd"
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        one_of("server_optimizer", self.name, ("sgd", "momentum", "adam", "yogi"))
        number("server_momentum", self.momentum, at_least=0, below=1, example=0.9)
        number("server_beta2", self.beta2, at_least=0, below=1, example=0.99)
        number("server_tau", self.tau, above=0, example=1e-3)


@dataclass(kw_only=True, eq=False)
class ServerSteps:
    """A server optimizer and its moments; ``step`` applies a mean update, ``mean_behind`` infers it from the change."""

    rule: ServerOptimizer = field(default_factory=ServerOptimizer)
    _moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def copied(self) -> "ServerSteps":
        found = ServerSteps(rule=self.rule)
        found._moments = dict(self._moments)
        return found

    def step(self, mean: Tensors) -> Tensors:
        return mean if self.rule.name == "sgd" else {n: self._advance(n, t) for n, t in mean.items()}

    def mean_behind(self, step: Tensors) -> Tensors:
        """Return the mean update that caused the model's change ``step``, in double precision and up to rounding.

        After the first step of Adam or Yogi, values far above ``tau`` are known only by their sign.
        """
        found = {n: t.double() for n, t in step.items()}
        if self.rule.name != "sgd":
            found = {n: self._behind(n, t) for n, t in found.items()}
            for name, mean in found.items():
                self._advance(name, mean)
        return found

    def _advance(self, name: str, mean: Tensor) -> Tensor:
        step, self._moments[name] = self._stepped(mean, *self._known(name, mean))
        return step

    def _known(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros_like(like)
        first, second = self._moments.get(name, (zero, zero))
        return first.to(like), second.to(like)

    def _stepped(self, mean: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rule = self.rule
        if rule.name == "momentum":
            first = rule.momentum * first + mean
            return first, (first, second)
        first, square = rule.momentum * first + (1 - rule.momentum) * mean, mean.square()
        kept = rule.beta2 * second + (1 - rule.beta2) * square
        second = kept if rule.name == "adam" else second - (1 - rule.beta2) * square * (second - square).sign()
        return first / (second.clamp_min(0).sqrt() + rule.tau), (first, second)

    def _behind(self, name: str, step: Tensor) -> Tensor:
        rule, (first, second) = self.rule, self._known(name, step)
        if rule.name == "momentum":
            return step - rule.momentum * first
        # (c + bx)^2 = u^2 (v + sx^2) for the mean x: step u, kept part v of the second moment, its new part s
        c, b, share = rule.momentum * first - step * rule.tau, 1 - rule.momentum, 1 - rule.beta2
        cases = [(rule.beta2 * second, share)] if rule.name == "adam" else [(second, share), (second, -share)]
        roots = [root for kept, new in cases for root in _roots(step, c, b, kept, new)]
        tried = torch.stack(roots)
        wrong = torch.stack([(self._stepped(root, first, second)[0] - step).abs() for root in roots])
        # two means may explain a step: the smaller one is likelier
        fits = wrong <= wrong.amin(0) + 1e-6 * step.abs()
        best = torch.where(fits, tried.abs(), torch.inf).argmin(0, keepdim=True)
        return tried.gather(0, best).squeeze(0)


def _roots(step: Tensor, c: Tensor, b: float, kept: Tensor, new: float) -> Sequence[Tensor]:
    square, half, rest = b * b - step.square() * new, b * c, c.square() - step.square() * kept
    root: Callable[[Tensor], Tensor] = lambda sign: half + sign * (half.square() - square * rest).clamp_min(0).sqrt()  # noqa: E731
    big = -root(torch.where(half < 0, -1.0, 1.0).to(half))  # without cancellation
    other = torch.where(big == 0, torch.zeros_like(big), rest / torch.where(big == 0, torch.ones_like(big), big))
    square = torch.where(square == 0, torch.full_like(square, 1e-300), square)
    return [big / square, other]
