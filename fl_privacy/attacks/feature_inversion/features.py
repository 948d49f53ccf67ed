"""Recover the output of the private layers from the public gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl_privacy.attacks.attack import Progress
from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models import Front, Rest
from fl_privacy.types import ModelState, Observation, Tensors


def recover_by_lemma(layer: nn.Module, weight: Tensor, bias: Tensor) -> Tensor | None:
    """Recover a layer's input (D,) or (C, H, W) from its gradients for a single example.

    If the output has one position, ``grad_W = grad_b . O^T`` (Gu et al. 2021, Lemma 1; Geiping et al. 2020), solved in
    least squares: for linear layers, and for unpadded convolutions as large as their input. The result is ``None`` if
    the bias's gradient is zero or the layer is of another kind.
    """
    if not isinstance(layer, nn.Linear | nn.Conv2d) or (isinstance(layer, nn.Conv2d) and layer.groups != 1):
        return None
    squared = bias.square().sum()
    if squared == 0:
        return None
    return (bias @ weight.flatten(1) / squared).reshape(weight.shape[1:])


def applies(layer: nn.Module, seen: tuple[int, ...], batch_size: int) -> bool:
    """Return ``True`` if ``recover_by_lemma`` is exact for inputs of shape ``seen``."""
    if batch_size != 1 or not isinstance(layer, nn.Linear | nn.Conv2d) or layer.bias is None:
        return False
    if isinstance(layer, nn.Linear):
        return len(seen) == 1
    return layer.groups == 1 and layer.padding in ("valid", (0, 0), 0) and tuple(seen[1:]) == layer.kernel_size


_GUESSES = 64
_ROOM = 2.0  # range, around 0, in which features are searched, as a multiple of random images' range


class _Stretched(nn.Module):
    """``rest`` behind a map of [0, 1] onto [low, low + width], the range of features."""

    def __init__(self, rest: Rest, low: float, width: float) -> None:
        super().__init__()
        self.rest, self.low, self.width = rest, low, width

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.rest(self.low + self.width * inputs)
        return logits


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The input of the first public layer, by Lemma 1 or else by ``matching`` the uploaded gradients."""

    matching: GradientInversion

    def __call__(
        self, observations: Sequence[Observation], front: Front, *, seed: int, progress: Progress
    ) -> list[Tensor | str]:
        first, shape = observations[0], seen_shape(front, observations[0])
        layer = first.model.get_submodule(front.layer)
        if applies(layer, shape, first.upload.num_examples):
            by_lemma: list[Tensor | str] = []
            for gradient in map(as_gradient, observations):
                weight, bias = (gradient.get(f"{front.layer}.{name}") for name in ("weight", "bias"))
                input_ = None if weight is None or bias is None else recover_by_lemma(layer, weight, bias)
                missing = f"The gradient of {front.layer} was withheld or is zero."
                by_lemma.append(missing if input_ is None else input_[None])
            return by_lemma
        values, generator = next(front.parameters()), torch.Generator().manual_seed(seed % 2**63)
        with torch.no_grad():
            guesses = front(torch.rand(_GUESSES, *first.input_shape, generator=generator).to(values))
        low = _ROOM * min(float(guesses.min()), 0.0)
        width = _ROOM * max(float(guesses.max()), 0.0) - low

        def renamed(tensors: Tensors) -> dict[str, Tensor]:
            return {f"rest.model.{name}": tensor for name, tensor in tensors.items()}

        rest = _Stretched(Rest(first.model, front.layer, first.input_shape), low, width)
        assumed = first.assumed()
        sent = ModelState(renamed(assumed.parameters), renamed(assumed.buffers))
        inner = [
            replace(
                o,
                id=replace(o.id, part="features"),
                model=rest,
                sent=sent,
                upload=replace(o.upload, tensors=renamed(o.upload.tensors), buffers=renamed(o.upload.buffers)),
                input_shape=shape,
            ).told(private=None, features=None, defense=None)
            for o in observations
        ]
        return [
            low + width * r.batch.inputs if r.batch is not None else f"Its features were not found: {r.failure}"
            for r in self.matching(inner, seed=seed, progress=progress)
        ]


@torch.no_grad()
def seen_shape(front: Front, observation: Observation) -> tuple[int, ...]:
    """Return the shape of one example at the layer that ``front`` ends at."""
    return tuple(front(next(front.parameters()).new_zeros(1, *observation.input_shape)).shape[1:])
