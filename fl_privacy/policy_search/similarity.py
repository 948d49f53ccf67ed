"""GradSim: how alike the gradients of two images are, for many pairs at once."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fl_privacy.gradients import Layered, VictimModel, frozen_copy, victim_gradients
from fl_privacy.gradients.memory import spare_bytes, written_by
from fl_privacy.rng import derive_generator
from fl_privacy.types import LocalPlan, ModelState

Cosine = Literal["whole", "layers"]
"""``whole``: of the gradient as one vector (Eq. 5); ``layers``: the mean over its tensors (the authors' code)."""

_ELEMENTS_ON_CPU = 1 << 24
"""Elements of per-image gradients that are held at a time at most, where more would not be faster."""


@dataclass(frozen=True, eq=False)
class InnerProducts:
    """Inner products of gradients, a row for each parameter tensor.

    Attributes:
        dot: (T, S, K) of each point's gradient with its target's.
        squared: (T, S, K) of each point's with itself.
        squared_target: (T, S, 1) of each target's with itself.
    """

    dot: Tensor
    squared: Tensor
    squared_target: Tensor

    def cosine(self, of: Cosine) -> Tensor:
        """(S, K) in [-1, 1]; the cosine with a gradient that is zero is 0."""
        parts = (self.dot, self.squared, self.squared_target)
        if of == "whole":
            dot, squared, target = (part.sum(0, keepdim=True) for part in parts)
        else:
            dot, squared, target = parts
        tiny = torch.finfo(dot.dtype).tiny
        return (dot / (squared * target).sqrt().clamp_min(tiny**0.5)).mean(0)


class GradientSimilarity:
    """Compares gradients of single images at one state of a model, batch norm in evaluation mode.

    Args:
        model: architecture.
        state: its values.
        input_shape: (C, H, W).
        device: of the computation.
        dtype: of the computation.
        at_once: images whose gradients are held at a time, as many as fit in memory by default; no number depends on it
            beyond rounding.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        input_shape: tuple[int, ...],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        at_once: int | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        plan = LocalPlan(batch_norm="eval")
        frozen = frozen_copy(model, state, plan, device=self.device, dtype=dtype)
        trial = torch.rand((2, 1, *input_shape), generator=derive_generator(0, "trial"))
        trial, labels = trial.to(self.device, dtype), torch.zeros(2, 1, dtype=torch.long, device=self.device)
        self._gradients = victim_gradients(VictimModel(frozen, list(state.parameters), plan), trial, labels)
        self._factored = self._gradients.ranks(trial, labels).keys() if isinstance(self._gradients, Layered) else set()
        self._size = sum(p.numel() for name, p in state.parameters.items() if name not in self._factored)
        self._at_once = at_once or self._most(trial, labels)

    def __call__(self, starts: Tensor, targets: Tensor, labels: Tensor, shares: Tensor) -> InnerProducts:
        """Compare every point on the ways to the targets with its target.

        Args:
            starts: (R, C, H, W), of the first R targets, the next R, and so on.
            targets: (S, C, H, W).
            labels: (S,) of a target and its points.
            shares: (K,) of the target in each point.
        """
        points = min(len(shares), max(1, self._at_once - 1))
        ways = max(1, self._at_once // (points + 1))
        parts = []
        for rows in torch.split(torch.arange(len(targets), device=targets.device), ways):
            first, last = (part.to(self.device, self.dtype) for part in (starts[rows % len(starts)], targets[rows]))
            own = labels[rows.to(labels.device)].to(self.device)
            some = [self._compare(_on_the_way(first, last, chunk), own) for chunk in torch.split(shares, points)]
            dot, squared = (torch.cat([part[number][..., :-1] for part in some], 2) for number in (0, 1))
            parts.append((dot, squared, some[0][1][..., -1:]))
        return InnerProducts(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))

    def _most(self, images: Tensor, labels: Tensor) -> int:
        """How many images to differentiate at once, from a trial with the victims ``images``."""
        with torch.no_grad():
            needed = written_by(lambda: self._compare(images, labels.flatten())) / len(images)
        fit = spare_bytes(self.device) / max(1, needed)
        if self.device.type == "cpu":
            fit = min(fit, _ELEMENTS_ON_CPU / max(self._size, images[0].numel()))
        return int(fit)

    def _compare(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(T, s, K + 1) twice: inner products with the last of each row, and with itself."""
        count, length = images.shape[:2]
        inputs, repeated = images.flatten(0, 1).unsqueeze(1), labels.repeat_interleave(length).unsqueeze(1)
        products: dict[str, tuple[Tensor, Tensor]] = {}
        apart = (count, length)
        with torch.no_grad():
            if isinstance(self._gradients, Layered):
                gradients, products = self._gradients.gradients_and_products(inputs, repeated, self._factored)
            else:
                gradients = self._gradients(inputs, repeated)
            rows = [_explicit(gradient.reshape(*apart, -1)) for gradient in gradients.values()]
            rows += [
                _factored(d.reshape(*apart, *d.shape[1:]), u.reshape(*apart, *u.shape[1:]))
                for d, u in products.values()
            ]
        return torch.stack([dot for dot, _ in rows]), torch.stack([squared for _, squared in rows])


def _on_the_way(starts: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
    """(S, K + 1, C, H, W): the points between (S, C, H, W) each, then the target."""
    goals = targets.unsqueeze(1)
    points = torch.lerp(starts.unsqueeze(1), goals, shares.to(targets).view(-1, 1, 1, 1))
    return torch.cat([points, goals], 1)


def _explicit(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """From gradients (s, L, N)."""
    return (gradients @ gradients[:, -1:].mT).squeeze(-1), gradients.square().sum(-1)


def _factored(deltas: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """From the factors (s, L, O, P) and (s, L, D, P) of gradients that are not formed."""
    with_last = (deltas.mT @ deltas[:, -1:]) * (inputs.mT @ inputs[:, -1:])
    with_itself = (deltas.mT @ deltas) * (inputs.mT @ inputs)
    return with_last.sum((-2, -1)), with_itself.sum((-2, -1))
