"""What enters a layer, in closed form from the layer's gradient."""

from torch import Tensor, nn

from fl_privacy.types import Tensors


def recover_by_lemma(layer: nn.Module, weight: Tensor, bias: Tensor) -> Tensor | None:
    """The input of a layer from the gradients of its weight and bias, for a single example.

    Where the layer's output has one position, the weight's gradient is the outer product of the bias's gradient and the
    input, ``grad_W = grad_b . O^T`` (Gu et al. 2021, Lemma 1; Geiping et al. 2020), which is solved in least squares.
    That holds for linear layers, and for convolutions as large as their input and without padding.

    Args:
        layer: linear or a convolution.
        weight: gradient of its weight.
        bias: gradient of its bias.

    Returns:
        (D,) for a linear layer, (C, H, W) for a convolution; ``None`` where the bias's gradient is zero or the layer
        is of another kind.
    """
    if not isinstance(layer, nn.Linear | nn.Conv2d) or (isinstance(layer, nn.Conv2d) and layer.groups != 1):
        return None
    squared = bias.square().sum()
    if squared == 0:
        return None
    recovered: Tensor = (bias @ weight.flatten(1) / squared).reshape(weight.shape[1:])
    return recovered


def applies(layer: nn.Module, seen: tuple[int, ...], batch_size: int) -> bool:
    """Whether ``recover_by_lemma`` is exact for ``layer`` when one example of shape ``seen`` enters it."""
    if batch_size != 1:
        return False
    if isinstance(layer, nn.Linear):
        return layer.bias is not None and len(seen) == 1
    if isinstance(layer, nn.Conv2d):
        unpadded = layer.padding in ("valid", (0, 0), 0)
        return layer.bias is not None and layer.groups == 1 and unpadded and tuple(seen[1:]) == layer.kernel_size
    return False


def layer_gradients(gradients: Tensors, layer: str) -> tuple[Tensor, Tensor] | None:
    """Gradients of weight and bias of ``layer``; ``None`` where one was withheld."""
    weight, bias = gradients.get(f"{layer}.weight"), gradients.get(f"{layer}.bias")
    return None if weight is None or bias is None else (weight, bias)
