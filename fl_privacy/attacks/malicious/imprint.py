"""Crafted layers in front of the model that separate the images of a batch, or of several clients' sum."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.evident_defense import scattered_zeros
from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.attacks.malicious.from_layer import images_of_brightness, is_one_image, on_grid, reconstruction_of
from fl_privacy.attacks.malicious.imprint_block import (
    MEASURE,
    OFFSET,
    SEPARATE,
    ImprintBlock,
    bin_rows,
    brightness_edges,
    imprinted,
)
from fl_privacy.attacks.malicious.inconsistent import leaves_such_a_bias
from fl_privacy.attacks.malicious.server_attack import ServerAttack, ThreatLevel
from fl_privacy.checks import number, one_of, whole
from fl_privacy.errors import UserError
from fl_privacy.types import ModelState, Observation, Reconstruction

_SMALLEST = 1e-6
"""Differences of bias gradients below this share of the largest gradient are rounding."""

_SMALLEST_CHANGE = 1e-3
"""Lengths of changes below this share of the largest are rounding."""

_THINNED = 0.5
"""Share of zeros in rows above which a defense put them there, since rows behind a ReLU are sums of many images."""


@dataclass(frozen=True, kw_only=True)
class Imprint(ServerAttack):
    """Makes rows of a fully connected layer measure brightness, each with another threshold (Fowl et al. 2022, Eq. 4).

    A single image between two thresholds is the ratio of the differences of the rows' weight and bias gradients; images
    that share a bin come out mixed. After local steps only the change of weights shows, and the bin's brightness
    replaces the bias.

    Attributes:
        bins: thresholds; the paper takes two or more an image.
        activation: ``relu`` as published; with ``hardtanh`` each row holds its own bin alone, without rounding of
            differences.
        mean, std: normal distribution of the images' brightness, in [0, 1]; ``None`` takes quantiles of public images.
        amplitude: strength of the layer's effect on images, in pixels.
        scale: factor on the layer's inputs, divided out in its weights, which increases its gradient alone.
    """

    bins: int = 128
    activation: Literal["relu", "hardtanh"] = "relu"
    mean: float | None = None
    std: float | None = None
    amplitude: float = 0.01
    scale: float = 1.0

    level = ThreatLevel.ARCHITECTURE
    told = (
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
        block = ImprintBlock(
            input_shape=input_shape,
            bins=self.bins,
            activation=self.activation,
            amplitude=self.amplitude,
            scale=self.scale,
        )
        return imprinted(model, block)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        like = state.parameters[MEASURE]
        rows = bin_rows(self.edges(), self.activation, like.shape[1], self.scale, like)
        return ModelState({**state.parameters, **rows}, state.buffers)

    def read(self, observation: Observation) -> Reconstruction:
        gradient = as_gradient(observation)
        if missing := {MEASURE, OFFSET} - gradient.keys():
            return failed(observation, f"The gradient of {min(missing)} is expected, but was withheld.")
        weight, bias = gradient[MEASURE].double(), gradient[OFFSET].double()
        upload = observation.upload
        if observation.plan.shares == "gradient":
            images, alone, occupied = self.caught(weight, bias, upload.rounding)
            measured = self._each_bin(bias)[occupied[alone]]
            rounded = 2 * upload.rounding + _SMALLEST * float(bias.abs().max())
            told = leaves_such_a_bias(
                observation,
                images[alone],
                occupied[alone],
                measured,
                bias=OFFSET,
                error=torch.full_like(measured, rounded),
            )
            alone = alone.masked_scatter(alone, told)
        else:
            low, rounding = self.edges(), 2 * upload.rounding
            high = low[1:] if self.activation == "hardtanh" else torch.cat([low[1:], low.new_ones(1)])
            images, alone = images_of_brightness(
                self._each_bin(weight), low[: len(high)], high, smallest=_SMALLEST_CHANGE, rounding=rounding
            )
        if self.activation == "relu" and scattered_zeros({MEASURE: weight}) > _THINNED:
            alone = torch.zeros_like(alone)
        return reconstruction_of(observation, images[: upload.num_examples], alone[: upload.num_examples])

    def caught(self, weight: Tensor, bias: Tensor, rounding: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels (N, D), ``True`` for single images (N,), and the bins (N,), the strongest first.

        Args:
            weight: (bins, D) gradient of the rows, float64.
            bias: (bins,) their bias gradient.
            rounding: standard deviation of the upload's rounding.
        """
        smallest = _SMALLEST * bias.abs().max()
        weight, bias = self._each_bin(weight), self._each_bin(bias)
        strongest = bias.abs().argsort(descending=True)
        occupied = strongest[bias[strongest].abs() > smallest]
        pixels = weight[occupied] / bias[occupied, None] / self.scale
        alone = is_one_image(pixels, 2 * rounding / bias[occupied].abs() / self.scale)
        return pixels, alone & (not on_grid(weight[occupied])), occupied

    def _each_bin(self, rows: Tensor) -> Tensor:
        """Return each bin's own part; behind ReLU rows include all that is brighter."""
        return rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])]) if self.activation == "relu" else rows

    def edges(self) -> Tensor:
        """Return the thresholds, ascending, with ``hardtanh`` also the end of the last bin."""
        number = self.bins + (self.activation == "hardtanh")
        return brightness_edges(number, self.mean, self.std, self.public)


@dataclass(frozen=True, kw_only=True)
class Loki(ServerAttack):
    """Sends each client a convolution that puts its images into its own columns of one large layer (Zhao et al. 2024).

    Each row holds a bin of brightness (hard tanh from 0 to 1), so that local steps on other images leave it alone.
    Columns stay separate in the sum over clients; an image's scale is known to a bin's width, and exactly if its pixels
    are whole 255ths.

    Attributes:
        bins: rows; the paper takes four for each of a client's images.
        mean, std: normal distribution of the images' brightness, in [0, 1] (the paper's for CIFAR-10 are 0.4734 and
            0.1253); ``None`` takes quantiles of public images.
        amplitude: strength of the layer's effect on images, in pixels.
        scale: values of the convolution, divided out in the layer behind it, whose change then loses less to rounding.
    """

    bins: int = 256
    mean: float | None = None
    std: float | None = None
    amplitude: float = 0.1
    scale: float = 500.0

    level = ThreatLevel.INCONSISTENT
    told = (
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
        block = ImprintBlock(
            input_shape=input_shape,
            bins=self.bins,
            activation="hardtanh",
            slices=clients,
            amplitude=self.amplitude,
        )
        return imprinted(model, block)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        like, kernels = state.parameters[MEASURE], torch.zeros_like(state.parameters[SEPARATE])
        outer, channels, _, _ = kernels.shape
        if not 0 <= client < outer // channels:
            raise UserError(f"A client in 0..{outer // channels - 1} is expected, for each a slice, but got {client}.")
        each = torch.arange(channels)
        kernels[client * channels + each, each, 1, 1] = self.scale
        pixels = like.shape[1] * channels // outer
        rows = bin_rows(self.edges(), "hardtanh", pixels, self.scale, like)
        return ModelState({**state.parameters, **rows, SEPARATE: kernels}, state.buffers)

    def read(self, observation: Observation) -> Reconstruction:
        update = observation.update()
        if MEASURE not in update:
            return failed(observation, f"The update of {MEASURE} is expected, but was withheld.")
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
        """Return the bins' edges, (bins + 1,), ascending."""
        return brightness_edges(self.bins + 1, self.mean, self.std, self.public)
