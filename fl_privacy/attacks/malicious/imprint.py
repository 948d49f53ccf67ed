"""Crafted layers before the model that separate images of a batch or of a sum over clients."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Self

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion import evident_defense, grouping, targets
from fl_privacy.attacks.malicious.inconsistent import leaves_such_a_bias
from fl_privacy.attacks.malicious.server_attack import (
    BLOCK,
    ServerAttack,
    ThreatLevel,
    images_of_brightness,
    is_one_image,
    reconstruction_of,
)
from fl_privacy.checks import number, one_of, whole
from fl_privacy.errors import UserError
from fl_privacy.rng import seeded_globally
from fl_privacy.types import ModelState, Observation, Reconstruction

MEASURE, OFFSET, SEPARATE = f"{BLOCK}.measure.weight", f"{BLOCK}.measure.bias", f"{BLOCK}.separate.weight"
"""Names of the block's parameters: (bins, slices * C * H * W), (bins,), (slices * C, C, 3, 3)."""


class ImprintBlock(nn.Module):
    """Block before a model that stores images in rows of a layer's gradient, one for each bin of brightness.

    The layer, ``measure``, has a gradient because the sum of its outputs, times a pattern, is added to the image.

    Args:
        bins: number of bins of brightness.
        activation: ``relu``, or ``hardtanh`` from 0 to 1, with which a row responds only to images in its own bin.
        slices: number of clients; a convolution passes each client's images to its own columns of ``measure``. ``None``
            for no convolution.
        amplitude: largest change of a pixel by the block, for an image of medium brightness.
        scale: factor on the inputs of ``measure``.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        bins: int,
        activation: Literal["relu", "hardtanh"],
        *,
        amplitude: float,
        slices: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale, channels = scale, input_shape[0]
        self.separate: nn.Module = nn.Identity()
        with seeded_globally(torch.Generator().manual_seed(0)):
            if slices is not None:
                self.separate = nn.Conv2d(channels, slices * channels, 3, padding=1, bias=False)
            self.measure = nn.Linear((slices or 1) * math.prod(input_shape), bins)
        self.activation: nn.Module = nn.ReLU() if activation == "relu" else nn.Hardtanh(0.0, 1.0)
        signs = torch.randint(0, 2, input_shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        self.pattern = amplitude / bins * signs

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.pattern = fn(self.pattern)
        return self

    def forward(self, images: Tensor) -> Tensor:
        passed = self.activation(self.measure(self.separate(self.scale * images).flatten(1)))
        return torch.add(images, passed.sum(1).view(-1, 1, 1, 1) * self.pattern)

    def in_front_of(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` whose inputs first pass this block; the model's parameters keep their names."""
        whole = copy.deepcopy(model)
        whole.add_module(BLOCK, self)
        whole.register_forward_pre_hook(lambda model, given: (model.get_submodule(BLOCK)(given[0]), *given[1:]))
        return whole


def brightness_edges(number: int, mean: float | None, std: float | None, public: Tensor) -> Tensor:
    """Return ``number`` ascending thresholds of brightness, float64, with equally many images in each bin.

    They are quantiles i / (number + 1) of the mean pixel (Fowl et al. 2022, section 4): of a normal distribution with
    ``mean`` and ``std``, or if one is ``None``, of ``public`` images (N, C, H, W). ``UserError`` if these do not
    suffice.
    """
    shares = torch.arange(1, number + 1, dtype=torch.float64) / (number + 1)
    if mean is not None and std is not None:
        normal = NormalDist(mean, std)
        return torch.tensor([normal.inv_cdf(share) for share in shares.tolist()], dtype=torch.float64)
    edges = public.double().flatten(1).mean(1).quantile(shares) if len(public) > number else shares[:0]
    if len(edges) != number or not (edges.diff() > 0).all():
        raise UserError(
            f"More than {number} public images of different brightness are expected for the bins, but there are"
            f" {len(public)}; set server.mean and server.std, or lower server.bins."
        )
    return edges


def bin_rows(edges: Tensor, activation: str, pixels: int, scale: float, like: Tensor) -> dict[str, Tensor]:
    """Return weight and bias, by name, of neurons that compare the brightness of an image with ascending ``edges``.

    With ``relu``, each neuron has one edge; n neurons with ``hardtanh`` have n + 1. ``pixels``: number of values of an
    image. ``scale``: factor on the layer's inputs, by which weights are divided. ``like``: weight with shape and dtype.
    """
    lows, width = (edges, torch.ones_like(edges)) if activation == "relu" else (edges[:-1], edges.diff())
    rows = (1 / (width * scale * pixels))[:, None].expand_as(like)
    return {MEASURE: rows.to(like).contiguous(), OFFSET: (-lows / width).to(like)}


_SMALLEST = 1e-6  # differences of bias gradients below this share of the largest gradient are rounding
_SMALLEST_CHANGE = 1e-3  # lengths of changes below this share of the largest are rounding
_THINNED = 0.5  # share of zeros in rows above which a defense set them, since rows behind a ReLU sum many images


@dataclass(frozen=True, kw_only=True)
class Imprint(ServerAttack):
    """Adds a layer whose rows compare an image's brightness with thresholds (Fowl et al. 2022, Eq. 4).

    A single image between two thresholds is the difference of two rows' weight gradients, divided by that of their bias
    gradients; images that share a bin are mixed.

    Attributes:
        bins: number of thresholds; the paper takes two or more for each image.
        activation: ``relu`` as published; with ``hardtanh`` a row fires for one bin, so that no difference is needed.
        mean, std: normal distribution of the images' brightness, in [0, 1]; ``None`` takes quantiles of public images.
        amplitude: largest change of a pixel by the added layer, for an image of medium brightness.
        scale: factor on the layer's inputs; its weights are divided by it, so that only gradients grow.
    """

    bins: int = 128
    activation: Literal["relu", "hardtanh"] = "relu"
    mean: float | None = None
    std: float | None = None
    amplitude: float = 0.01
    scale: float = 1.0

    level = ThreatLevel.ARCHITECTURE
    description = (
        "The server put a layer in front of the model whose rows sort images by brightness, and reconstructs them from"
        " its gradient."
    )
    trains = True

    def __post_init__(self) -> None:
        whole("server.bins", self.bins, at_least=2, example=128)
        one_of("server.activation", self.activation, ("relu", "hardtanh"))
        number("server.amplitude", self.amplitude, above=0, example=0.01)
        number("server.scale", self.scale, above=0, example=1.0)
        if self.std is not None:
            number("server.std", self.std, above=0, example=0.125)

    def architecture(self, model: nn.Module, input_shape: tuple[int, ...], clients: int) -> nn.Module:
        block = ImprintBlock(input_shape, self.bins, self.activation, amplitude=self.amplitude, scale=self.scale)
        return block.in_front_of(model)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        like = state.parameters[MEASURE]
        rows = bin_rows(self.edges(), self.activation, like.shape[1], self.scale, like)
        return ModelState({**state.parameters, **rows}, state.buffers)

    def read(self, observation: Observation) -> Reconstruction:
        gradient = targets.as_gradient(observation)
        if missing := {MEASURE, OFFSET} - gradient.keys():
            return grouping.failed(
                observation, f"The gradient of {min(missing)} is expected, but was withheld; use defense=none."
            )
        weight, bias, upload = gradient[MEASURE].double(), gradient[OFFSET].double(), observation.upload
        if observation.plan.shares == "gradient":
            images, alone, occupied = self.caught(weight, bias, upload.rounding)
            measured = self._each_bin(bias)[occupied[alone]]
            error = torch.full_like(measured, 2 * upload.rounding + _SMALLEST * float(bias.abs().max()))
            known = leaves_such_a_bias(observation, images[alone], occupied[alone], measured, bias=OFFSET, error=error)
            alone = alone.masked_scatter(alone, known)
        else:
            low, rounding = self.edges(), 2 * upload.rounding
            high = low[1:] if self.activation == "hardtanh" else torch.cat([low[1:], low.new_ones(1)])
            rows, low = self._each_bin(weight), low[: len(high)]
            images, alone = images_of_brightness(rows, low, high, smallest=_SMALLEST_CHANGE, rounding=rounding)
        if self.activation == "relu" and evident_defense.scattered_zeros({MEASURE: weight}) > _THINNED:
            alone = torch.zeros_like(alone)
        return reconstruction_of(observation, images[: upload.num_examples], alone[: upload.num_examples])

    def caught(self, weight: Tensor, bias: Tensor, rounding: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each bin with a gradient, its image (D,), ``True`` unless that is a mixture, and the bin's index.

        The strongest bins come first. ``weight`` (bins, D) and ``bias`` (bins,) are gradients in float64, and
        ``rounding`` is the standard deviation of the upload's rounding.
        """
        smallest = _SMALLEST * bias.abs().max()
        weight, bias = self._each_bin(weight), self._each_bin(bias)
        strongest = bias.abs().argsort(descending=True)
        occupied = strongest[bias[strongest].abs() > smallest]
        pixels = weight[occupied] / bias[occupied, None] / self.scale
        error = 2 * rounding / bias[occupied].abs() / self.scale
        return pixels, is_one_image(pixels, error, rows=weight[occupied]), occupied

    def _each_bin(self, rows: Tensor) -> Tensor:
        return rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])]) if self.activation == "relu" else rows

    def edges(self) -> Tensor:
        return brightness_edges(self.bins + (self.activation == "hardtanh"), self.mean, self.std, self.public)


@dataclass(frozen=True, kw_only=True)
class Loki(ServerAttack):
    """Gives each client's images separate columns of one large layer, using a convolution (LOKI, Zhao et al. 2024).

    Each row responds to one range (bin) of brightness, so that local steps on other images do not change it. Columns
    stay separate in the sum over clients. An image's brightness is known only to lie in its bin, but exactly for 8-bit
    images.

    Attributes:
        bins: number of rows; the paper takes four for each of a client's images.
        mean, std: normal distribution of the images' brightness, in [0, 1]; ``None`` takes quantiles of public images.
        amplitude: largest change of a pixel by the added layer.
        scale: factor of the convolution; the next layer's weights are divided by it and lose less to rounding.
    """

    bins: int = 256
    mean: float | None = None
    std: float | None = None
    amplitude: float = 0.1
    scale: float = 500.0

    level = ThreatLevel.INCONSISTENT
    description = (
        "The server put a layer in front of the model and sends each client other values of it, which put its images in"
        " a place of their own: it reconstructs them from the mean of all replies."
    )
    reads_sum = True
    trains = True

    def __post_init__(self) -> None:
        whole("server.bins", self.bins, at_least=2, example=256)
        number("server.amplitude", self.amplitude, above=0, example=0.1)
        number("server.scale", self.scale, above=0, example=500.0)
        if self.std is not None:
            number("server.std", self.std, above=0, example=0.125)

    def architecture(self, model: nn.Module, input_shape: tuple[int, ...], clients: int) -> nn.Module:
        block = ImprintBlock(input_shape, self.bins, "hardtanh", slices=clients, amplitude=self.amplitude)
        return block.in_front_of(model)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        like, kernels = state.parameters[MEASURE], torch.zeros_like(state.parameters[SEPARATE])
        outer, channels, _, _ = kernels.shape
        if not 0 <= client < outer // channels:
            raise UserError(f"A client in 0..{outer // channels - 1} is expected, but got {client}; craft for more.")
        each = torch.arange(channels)
        kernels[client * channels + each, each, 1, 1] = self.scale
        rows = bin_rows(self.edges(), "hardtanh", like.shape[1] * channels // outer, self.scale, like)
        return ModelState({**state.parameters, **rows, SEPARATE: kernels}, state.buffers)

    def read(self, observation: Observation) -> Reconstruction:
        update = observation.update()
        if MEASURE not in update:
            return grouping.failed(
                observation, f"The update of {MEASURE} is expected, but was withheld; use defense=none."
            )
        pixels = math.prod(observation.input_shape)
        first = observation.id.client * pixels
        whole = update[MEASURE].double()
        if observation.plan.weight_decay and observation.plan.shares != "gradient":
            # the same share of each weight is the median, since most bins of most slices are empty
            sent = observation.sent.parameters[MEASURE].double()
            there = sent != 0
            whole = whole - (whole[there] / sent[there]).median() * sent if there.any() else whole
        rows, edges, rounding = whole[:, first : first + pixels], self.edges(), observation.upload.rounding
        images, alone = images_of_brightness(rows, edges[:-1], edges[1:], smallest=_SMALLEST_CHANGE, rounding=rounding)
        return reconstruction_of(observation, images, alone, labels=False)

    def edges(self) -> Tensor:
        return brightness_edges(self.bins + 1, self.mean, self.std, self.public)
