"""Solve for the image that entered a vision transformer, from the gradients of its patch and position embeddings.

The latter is that of the embedded patches (APRIL, Lu et al. 2022, section 4), so dL/dW = sum_t dL/dp_t x_t^T has D
equations for N unknowns at each place in a patch.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import Read, is_muted
from fl_privacy.attacks.exact.first_layer import Probed, probe_first_layer
from fl_privacy.models.gradients import differentiable_twice, frozen_copy
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.types import LocalPlan, ModelState, Tensors

_RANK = 1e-7  # singular values of the position embedding's gradient below this share of the largest are rounding errors
_ROUNDING = 1e-8  # least error of an element of a gradient, as a share of the root mean square of its elements
_ALIKE = 1e-6  # gradients are the same up to this share of their length, in double precision
_SURE = 1e-3  # largest expected error of a pixel of a unique solution
_MOST_OTHERS = 16  # largest number of tokens that are no patches, such as the class token


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """A convolution on patches that do not overlap, and the parameter that is added to its output.

    Attributes:
        weight, bias: names of the convolution's parameters (D, C, P, P) and (D,).
        position: name of the position embedding, of last dimension D.
        first: row of the first patch.
        image: (C, H, W).
        shift, scale: (C, H, W) the input is ``shift + scale * pixels``.
    """

    weight: str
    bias: str
    position: str
    first: int
    image: tuple[int, ...]
    patch: tuple[int, int]
    shift: Tensor
    scale: Tensor

    @property
    def names(self) -> tuple[str, str, str]:
        return self.weight, self.bias, self.position

    def pixels(self, patches: Tensor) -> Tensor:
        """Turn the convolution's inputs (N, C P P) into an image (C, H, W)."""
        return (F.fold(patches.T[None], self.image[1:], self.patch, stride=self.patch)[0] - self.shift) / self.scale

    def cut(self, image: Tensor) -> Tensor:
        """Cut an image (C, H, W) into its patches (N, C P P)."""
        return F.unfold(image[None], self.patch, stride=self.patch)[0].T


def find_patch_embedding(
    model: nn.Module, state: ModelState, input_shape: tuple[int, ...], *, fixed_norms: bool
) -> PatchEmbedding | None:
    """Find the model's patch embedding; ``None`` if its first layer is none.

    If the model calls no layer with parameters, raise ``NotFullyConnectedError``.
    """
    seen = probe_first_layer(model, state, input_shape, fixed_norms=fixed_norms)
    layer = seen.module
    if not isinstance(layer, nn.Conv2d) or not _cuts_patches(layer, seen):
        return None
    found = _added(model, state, seen)
    if found is None:
        return None
    names, kernel = (f"{seen.name}.weight", f"{seen.name}.bias"), (layer.kernel_size[0], layer.kernel_size[1])
    return PatchEmbedding(*names, *found, input_shape, kernel, seen.black, seen.white - seen.black)


def solve(embedding: PatchEmbedding, gradients: Tensors) -> Read:
    """Solve by least squares for the image (1, C, H, W), float64, of an update of one image.

    It is unique if its pixels' expected root mean squared error, from redundant equations, is small.
    """
    own, (height, width) = embedding.image, embedding.patch
    position = gradients[embedding.position].double()
    outputs = position.reshape(-1, position.shape[-1])[embedding.first :][: own[1] // height * (own[2] // width)]
    weight = gradients[embedding.weight].double().flatten(1)
    left, values, right = torch.linalg.svd(outputs, full_matrices=False)
    kept = values > _RANK * values[0]
    inverse = torch.where(kept, 1 / values.clamp_min(torch.finfo(values.dtype).tiny), 0.0)
    patches = (left * inverse) @ (right @ weight)
    apart, length = float((outputs.T @ patches - weight).norm()), float(weight.norm())
    (unknowns, equations), error = outputs.shape, math.inf
    if equations > unknowns and bool(kept.all()):
        deviation = max(apart / math.sqrt(1 - unknowns / equations), _ROUNDING * length) / math.sqrt(weight.numel())
        spread = math.sqrt(float(values.square().reciprocal().sum()) / unknowns)
        error = deviation * spread / float(embedding.scale.abs().min())
    muted = is_muted(weight, embedding.cut(-embedding.shift / embedding.scale))
    return Read(embedding.pixels(patches)[None], error < _SURE and not muted, apart / length)


def _cuts_patches(layer: nn.Conv2d, seen: Probed) -> bool:
    height, width = seen.random.shape[1:]
    alone = layer.stride == layer.kernel_size and layer.padding in ("valid", (0, 0)) and layer.dilation == (1, 1)
    whole = height % layer.kernel_size[0] == 0 and width % layer.kernel_size[1] == 0
    fits = seen.black.shape == seen.random.shape and layer.groups == 1 and layer.bias is not None
    return alone and whole and fits and seen.one_by_one


def _added(model: nn.Module, state: ModelState, seen: Probed) -> tuple[str, int] | None:
    device = seen.random.device
    frozen = frozen_copy(model, state, LocalPlan(batch_norm="eval"), device=device, dtype=torch.float64)
    parameters = {name: value.requires_grad_() for name, value in frozen.named_parameters()}
    with differentiable_twice(), leaving({seen.name: frozen.get_submodule(seen.name)}) as calls:
        logits = frozen(seen.random.double()[None])
        output = calls[0].output
        loss = logits.logsumexp(1).sum() - logits[:, 0].sum()
        found = torch.autograd.grad(loss, [output, *parameters.values()], allow_unused=True)
    if found[0] is None or not found[0].any():
        return None
    tokens = found[0][0].flatten(1).T
    for name, gradient in zip(parameters, found[1:], strict=True):
        if gradient is None or gradient.dim() < 2 or gradient.shape[-1] != tokens.shape[1]:
            continue
        rows = gradient.reshape(-1, gradient.shape[-1])
        for first in range(min(len(rows) - len(tokens), _MOST_OTHERS) + 1):
            if float((rows[first : first + len(tokens)] - tokens).norm()) < _ALIKE * float(tokens.norm()):
                return name, first
    return None
