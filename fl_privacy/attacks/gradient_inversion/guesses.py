"""Inputs that stand for a client's where only its model is known, and what the model makes of them."""

import torch
from torch import Tensor, nn

from fl_privacy.gradients.watch import entering
from fl_privacy.models import TextModel
from fl_privacy.types import Tensors

OutputLayer = tuple[str, str | None]
"""Names of the weight (K, F) and the bias (K,) of a model's last linear layer."""

_GUESSES = 64
"""Images of each kind, or texts."""

_CONTRAST = 0.25
"""Standard deviation of their pixels."""


def usual_outputs(
    model: nn.Module, shape: tuple[int, ...], layer: OutputLayer, rng: torch.Generator, gradient: Tensors | None = None
) -> tuple[Tensor, Tensor]:
    """Mean softmax (K,) and mean input (F,) of the output layer, as expected of a client.

    The input is that of images of noise, half of them with the spectrum of photographs. Their mean softmax is drawn to
    equal shares, the more the further the images' are apart: where a model answers all of them alike, it answers a
    client's so, and where it does not, it has learned something, and its answers follow the classes, none of which is
    known to be rarer.

    With the layer's ``gradient``, what the client's own features say takes the place of that by the share that they
    have in common. For a weight's gradient G (K, F) and the bias' b, h = G^T b / |b|^2 are those features where all of
    the client's examples have the same, and rho = |b h^T|^2 / |G|^2 is the share of the gradient that they explain. Of
    the answer to h and the mean answer to noise, as deviations d, e from equal shares, the mean m is trusted as far as
    they agree, by d e / |m|^2 within [0, 1]: errors that have nothing in common cancel there (James and Stein 1961).

    ``experiments/label_counts.py`` compares them. The features that quotients give each class (iLRG, Ma et al. 2023)
    find fewer labels on trained LeNets.

    Args:
        model: with the values that the attacker works with.
        shape: (C, H, W), or (L,) of tokens.
        layer: names of weight and bias of its last linear layer.
        rng: on the CPU.
        gradient: of the client's mean loss, unscaled, as far as it was sent.
    """
    weight, bias = layer
    like = next(model.parameters())
    if isinstance(model, TextModel):
        tokens = torch.randint(model.words.num_embeddings, (_GUESSES, *shape), generator=rng)
        return guessed_outputs(model, tokens.to(like.device), weight)
    noise = torch.rand((_GUESSES, *shape), generator=rng)
    each, features = _outputs(model, torch.cat([noise, _natural_noise(shape, rng)]).to(like), weight)
    mean, equal = each.mean(0), 1 / each.shape[1]
    constant, apart = (mean - equal).square().sum(), (each - mean).square().sum(1).mean()
    found = equal + constant / (constant + apart).clamp_min(_least(like)) * (mean - equal)
    if gradient is not None and bias is not None and {weight, bias} <= set(gradient):
        answer, explained = _answer_of_common_features(model, (weight, bias), gradient)
        common, one, other = 0.5 * (answer + mean) - equal, answer - equal, mean - equal
        trust = ((one * other).sum() / common.square().sum().clamp_min(_least(like))).clamp(0, 1)
        found = explained * (equal + trust * common) + (1 - explained) * found
    return found, features


@torch.no_grad()
def _answer_of_common_features(model: nn.Module, layer: tuple[str, str], gradient: Tensors) -> tuple[Tensor, Tensor]:
    """What the output layer answers (K,) to the features that a client's examples have in common, and which share of
    its ``gradient`` these explain."""
    whole, residual = (gradient[name] for name in layer)
    size = residual.square().sum().clamp_min(_least(residual))
    features = whole.T @ residual / size
    explained = size * features.square().sum() / whole.square().sum().clamp_min(_least(whole))
    weight, bias = (model.get_parameter(name) for name in layer)
    return (weight @ features + bias).softmax(0), explained.clamp(0, 1)


def _least(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def guessed_outputs(model: nn.Module, inputs: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """Mean softmax (K,) and mean input (F,) of the output layer whose weight is ``layer``, for ``inputs``."""
    each, features = _outputs(model, inputs, layer)
    return each.mean(0), features


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """Softmax of each (..., K), and the mean input (F,)."""
    owner = layer.rpartition(".")[0]
    with entering({owner: model.get_submodule(owner)}) as calls:
        logits = model(inputs)
    return logits.softmax(1), calls[0].inputs.flatten(0, -2).mean(0)


def _natural_noise(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Images (N, C, H, W) whose amplitudes fall with the frequency as those of photographs do, mostly gray."""
    height, width = shape[-2:]
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    amplitude = (rows.square() + columns.square()).clamp_min(1 / max(height, width) ** 2).rsqrt()
    gray = torch.randn((_GUESSES, 1, height, width), generator=rng)
    colored = gray + 0.3 * torch.randn((_GUESSES, *shape), generator=rng)
    waves: Tensor = torch.fft.irfft2(torch.fft.rfft2(colored) * amplitude, s=(height, width))
    spread = waves.flatten(1).std(1)[:, None, None, None]
    return torch.clamp(0.5 + _CONTRAST * waves / spread, 0, 1)
