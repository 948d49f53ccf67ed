"""Convolutions that have taken in the frozen norm behind them: one pass over the activations instead of two.

With the norm's mean m and precision 1/s by channel, its scale g and shift h, ``g (W x + b - m) / s + h`` is the
convolution of the weight ``(g / s) W``. With G the gradient by that weight and d the sum of the outputs' gradients,
the gradients are ``(g / s) G`` of W, ``(g / s) d`` of b, d of h and, for which no activation is read,
``((G, W) + (b - m) d) / s`` of g.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from fl_privacy.gradients.convolution import FrozenConv2d, convolution_as, convolution_gradients
from fl_privacy.gradients.normalization import FrozenNorm
from fl_privacy.gradients.watch import Call, leaving
from fl_privacy.types import Tensors

_POSITIONS = 0.7
"""Outputs of a channel, per input of one of them, from which folding saves work: it reads weights, not activations."""


class FoldedConvolution(FrozenConv2d):
    """A convolution and the norm behind it; its names of their parameters are weight, bias, scale and shift."""

    scale: nn.Parameter | None
    shift: nn.Parameter | None

    @classmethod
    def of_both(cls, convolution: nn.Conv2d, norm: FrozenNorm) -> Self:
        """Of ``norm`` behind ``convolution``."""
        folded = convolution_as(cls, convolution)
        folded.scale, folded.shift = norm.weight, norm.bias
        folded._set(norm)
        return folded

    def _set(self, norm: FrozenNorm) -> None:
        self._precision = norm.slope
        self._centered = norm.offset if self.bias is None else norm.offset + norm.slope * self.bias
        self._slope = self._precision if self.scale is None else self._precision * self.scale
        offset = self._centered if self.scale is None else self._centered * self.scale
        self._folded_bias = offset if self.shift is None else offset + self.shift
        self._folded_weight = self._slope.view(-1, 1, 1, 1) * self.weight

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, O, h, w)."""
        return self.convolved(input, self._folded_weight, self._folded_bias)

    def gradients(self, inputs: Tensor, deltas: Tensor, names: Collection[str]) -> Tensors:
        """Gradients (V, *shape) of the parameters ``names`` from (V, B, C, H, W) and (V, B, O, h, w)."""
        by_weight, total = convolution_gradients(self, inputs, deltas, with_bias=True)
        assert total is not None
        found = {}
        if "weight" in names:
            found["weight"] = by_weight * self._slope.view(-1, 1, 1, 1)
        if "bias" in names:
            found["bias"] = total * self._slope
        if "scale" in names:
            found["scale"] = self._precision * (by_weight * self.weight).flatten(2).sum(2) + self._centered * total
        return {**found, "shift": total} if "shift" in names else found


@torch.no_grad()
def foldable(model: nn.Module, inputs: Tensor) -> list[tuple[str, str]]:
    """Names of the convolutions in ``model`` and of the norms behind them that are better one on ``inputs`` (N, ...).

    Whether outputs of a convolution go elsewhere, too, than into its norm can't be told: then what is folded computes
    something else.
    """
    modules = {name: m for name, m in model.named_modules() if type(m) in (FrozenConv2d, FrozenNorm)}
    with leaving(modules) as calls:
        model(inputs)
    return [(one.name, other.name) for one, other in _neighbors(calls)]


def fold(model: nn.Module, pairs: Sequence[tuple[str, str]]) -> None:
    """Put a :class:`FoldedConvolution` in the place of each pair that :func:`foldable` found."""
    for name, behind in pairs:
        convolution, norm = model.get_submodule(name), model.get_submodule(behind)
        assert isinstance(convolution, FrozenConv2d) and isinstance(norm, FrozenNorm)
        model.set_submodule(name, FoldedConvolution.of_both(convolution, norm))
        model.set_submodule(behind, nn.Identity())


def _neighbors(calls: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
    """Convolutions and norms that are called once, one with the output of the other."""
    called = [id(call.module) for call in calls]
    for one, other in pairwise(calls):
        follows = type(one.module) is FrozenConv2d and type(other.module) is FrozenNorm and other.inputs is one.output
        if follows and called.count(id(one.module)) == called.count(id(other.module)) == 1:
            weight: Tensor = one.module.weight  # type: ignore[assignment]
            if one.output[0, 0].numel() >= _POSITIONS * weight[0].numel():
                yield one, other
