"""The layer that the pixels enter, where it is fully connected."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.gradients import frozen_copy
from fl_privacy.gradients.watch import entering, owners
from fl_privacy.types import LocalPlan, ModelState


class NotFullyConnectedError(NotAttackableError):
    """Why a model's first layer gives no linear system for its pixels, in one line."""


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """A fully connected layer on pixels that were at most shifted and scaled one by one.

    Attributes:
        weight, bias: names of its parameters (M, N) and (M,).
        shift, scale: (N,) the layer's input is ``shift + scale * pixels``.
    """

    weight: str
    bias: str
    shift: Tensor
    scale: Tensor

    def pixels(self, inputs: Tensor) -> Tensor:
        """Inputs of the layer (..., N) -> pixels (..., N)."""
        return (inputs - self.shift) / self.scale


def find_first_layer(model: nn.Module, state: ModelState, input_shape: tuple[int, ...]) -> FirstLayer:
    """The first layer of ``model`` at ``state``, found by watching where test images go.

    Args:
        model: architecture.
        state: its values.
        input_shape: (C, H, W).

    Raises:
        NotFullyConnectedError: another layer comes first, it has no bias, or pixels are mixed before.
    """
    values = next(iter(state.parameters.values()))
    plan = LocalPlan(batch_norm="eval")
    frozen = frozen_copy(model, state, plan, device=values.device, dtype=values.dtype).eval()
    random = torch.rand(input_shape, generator=torch.Generator().manual_seed(0)).to(values)
    probes = torch.stack([torch.zeros_like(random), torch.ones_like(random), random])
    name, module, seen = _first_call(frozen, probes)
    if not isinstance(module, nn.Linear) or module.bias is None:
        what = type(module).__name__ + ("" if getattr(module, "bias", None) is not None else " without bias")
        raise NotFullyConnectedError(
            f"The first layer is expected to be fully connected with a bias, but {name} is {what};"
            " use attack=dlg or another that optimizes images."
        )
    if seen.shape != (3, random.numel()):
        raise NotFullyConnectedError(f"The layer {name} is expected to take all pixels, but takes {tuple(seen.shape)}.")
    black, white, mixed = seen
    scale = white - black
    if not torch.allclose(mixed, black + scale * random.flatten(), rtol=1e-4, atol=1e-6) or not scale.all():
        raise NotFullyConnectedError(f"The pixels are expected to enter {name} one by one, but they are mixed before.")
    return FirstLayer(f"{name}.weight", f"{name}.bias", black, scale)


@torch.no_grad()
def _first_call(model: nn.Module, inputs: Tensor) -> tuple[str, nn.Module, Tensor]:
    """Name and module of the first layer with parameters that is called, and what enters it."""
    with entering(owners(model)) as calls:
        model(inputs)
    if not calls:
        raise NotFullyConnectedError("The model is expected to call a layer with parameters, but calls none.")
    return calls[0].name, calls[0].module, calls[0].inputs
