"""LOKI (Zhao et al. 2024): an imprint in a slice of its own for each client, so that their sum is read as well."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.malicious.imprint_block import MEASURE, SEPARATE, ImprintBlock, bin_rows, brightness_edges, imprinted
from fl_privacy.malicious.pixel_levels import images_of_brightness
from fl_privacy.malicious.reading import reconstruction_of
from fl_privacy.malicious.server_attack import ServerAttack, ThreatLevel
from fl_privacy.types import ModelState, Observation, Reconstruction

_SMALLEST = 1e-3
"""Rows whose gradient is below this share of the client's strongest hold nothing but rounding."""


@dataclass(frozen=True, kw_only=True)
class Loki(ServerAttack):
    """Each client is sent a convolution that puts its images into its own columns of one large layer.

    The layer's rows hold a bin of brightness each (hard tanh from 0 to 1), so that local steps on other images do not
    touch them. In the sum over clients columns stay apart, and bias gradients do not: an image is read up to its scale,
    which is known to a bin's width, and where its pixels are whole 255ths, exactly.

    Attributes:
        bins: rows; the paper takes four for each of a client's images.
        mean, std: of the brightness of images, in [0, 1], taken to be normal (the paper's for CIFAR-10 are 0.4734 and
            0.1253); ``None`` takes quantiles of public images.
        amplitude: how strongly the layer disturbs images, in pixels.
        scale: values of the convolution, divided out in the layer behind it: the layer's weights are so many times
            smaller, their change as much larger, and less of it is lost to rounding.
    """

    bins: int = 256
    mean: float | None = None
    std: float | None = None
    amplitude: float = 0.1
    scale: float = 500.0

    level = ThreatLevel.INCONSISTENT
    told = (
        "The server put a layer in front of the model and sends each client other values of it, which put its images in"
        " a place of their own: it reads them in the mean of all replies."
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
        """``model`` behind a layer with a slice for each of ``clients``."""
        block = ImprintBlock(
            input_shape=input_shape,
            bins=self.bins,
            activation="hardtanh",
            slices=clients,
            amplitude=self.amplitude,
            scale=1.0,
        )
        return imprinted(model, block)

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        """With the kernels that lead to the slice of ``client``."""
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
        """The images of the observation's client, in its own update or in the mean of all."""
        update = observation.update()
        if MEASURE not in update:
            return Reconstruction(
                id=observation.id, batch=None, failure=f"The update of {MEASURE} is expected, but was withheld."
            )
        pixels = math.prod(observation.input_shape)
        first = observation.id.client * pixels
        rows = update[MEASURE][:, first : first + pixels].double()
        images, alone = self.caught(rows, observation.upload.rounding)
        return reconstruction_of(observation, images, alone, labels=False)

    def caught(self, rows: Tensor, rounding: float = 0.0) -> tuple[Tensor, Tensor]:
        """What each row of a client's slice (bins, D) caught, the strongest first.

        Returns pixels (N, D), and (N,) whether they are a single image's; ``rounding`` is that of the upload.
        """
        edges = self.edges()
        return images_of_brightness(rows, edges[:-1], edges[1:], smallest=_SMALLEST, rounding=rounding)

    def edges(self) -> Tensor:
        """(bins + 1,) where bins begin and end, ascending."""
        return brightness_edges(self.bins + 1, self.mean, self.std, self.public)
