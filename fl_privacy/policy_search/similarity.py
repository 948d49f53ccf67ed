"""GradSim: how alike the gradients of two images are, for many pairs at once."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fl_privacy.attacks.victim_gradients import choose, frozen_copy
from fl_privacy.attacks.victim_gradients.base import Setting
from fl_privacy.attacks.victim_gradients.layered import Layered
from fl_privacy.rng import derive_generator
from fl_privacy.types import LocalPlan, ModelState

Cosine = Literal["whole", "layers"]
"""``whole``: of the gradient as one vector (Eq. 5); ``layers``: the mean over its tensors (the authors' code)."""

_CHUNK_ELEMENTS = 1 << 24
"""Elements of per-image gradients that are held at a time."""


@dataclass(frozen=True, eq=False)
class Products:
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
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        input_shape: tuple[int, ...],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        plan = LocalPlan(batch_norm="eval")
        frozen = frozen_copy(model, state, plan, device=self.device, dtype=dtype)
        trial = torch.rand((2, 1, *input_shape), generator=derive_generator(0, "trial"))
        trial, labels = trial.to(self.device, dtype), torch.zeros(2, 1, dtype=torch.long, device=self.device)
        self._gradients = choose(Setting(frozen, list(state.parameters), plan), trial, labels)
        self._factored = self._gradients.ranks(trial, labels).keys() if isinstance(self._gradients, Layered) else set()
        self._size = sum(p.numel() for name, p in state.parameters.items() if name not in self._factored)

    def __call__(self, points: Tensor, targets: Tensor, labels: Tensor) -> Products:
        """Compare every point with its target.

        Args:
            points: (S, K, C, H, W).
            targets: (S, C, H, W).
            labels: (S,) of a target and its points.
        """
        images = torch.cat([points, targets.unsqueeze(1)], 1).to(self.device, self.dtype)
        some = max(1, _CHUNK_ELEMENTS // (images.shape[1] * max(self._size, targets[0].numel())))
        chunks = zip(torch.split(images, some), torch.split(labels.to(self.device), some), strict=True)
        parts = [self._compare(*chunk) for chunk in chunks]
        dot, squared = (torch.cat([part[number] for part in parts], 1) for number in (0, 1))
        return Products(dot[..., :-1], squared[..., :-1], squared[..., -1:])

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


def _explicit(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """From gradients (s, L, N)."""
    return (gradients @ gradients[:, -1:].mT).squeeze(-1), gradients.square().sum(-1)


def _factored(deltas: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """From the factors (s, L, O, P) and (s, L, D, P) of gradients that are not formed."""
    with_last = (deltas.mT @ deltas[:, -1:]) * (inputs.mT @ inputs[:, -1:])
    with_itself = (deltas.mT @ deltas) * (inputs.mT @ inputs)
    return with_last.sum((-2, -1)), with_itself.sum((-2, -1))
