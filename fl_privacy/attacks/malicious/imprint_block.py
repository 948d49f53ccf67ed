"""The layer in front of a model that images leave their imprint on."""

import copy
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.rng import seeded_globally

BLOCK = "imprint"
"""Name of the block in the model that it is put in front of."""

MEASURE, OFFSET, SEPARATE = f"{BLOCK}.measure.weight", f"{BLOCK}.measure.bias", f"{BLOCK}.separate.weight"
"""Names of its parameters: (bins, slices * C * H * W), (bins,), (slices * C, C, 3, 3)."""


class ImprintBlock(nn.Module):
    """Adds to an image a pattern whose strength is the number of bins that its brightness has passed.

    All bins add the same weak pattern, so each row of ``measure`` gets the same multiple of an image.

    Args:
        input_shape: (C, H, W).
        bins: rows of ``measure``.
        activation: ``relu``, or ``hardtanh`` from 0 to 1, with which a row gets images in its own bin alone.
        slices: number of clients, each with a slice of ``measure``, chosen by a convolution; ``None`` has none.
        amplitude: largest change of a pixel by an image of medium brightness.
        scale: factor on the inputs of ``measure``.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        bins: int,
        activation: Literal["relu", "hardtanh"],
        slices: int | None = None,
        amplitude: float,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.scale = scale
        self.separate: nn.Module = nn.Identity()
        with seeded_globally(torch.Generator().manual_seed(0)):
            if slices is not None:
                self.separate = nn.Conv2d(channels, slices * channels, 3, padding=1, bias=False)
            self.measure = nn.Linear((slices or 1) * channels * height * width, bins)
        self.activation: nn.Module = nn.ReLU() if activation == "relu" else nn.Hardtanh(0.0, 1.0)
        signs = torch.randint(0, 2, input_shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        self.pattern = amplitude / bins * signs

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.pattern = fn(self.pattern)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Add the pattern to images (B, C, H, W)."""
        passed = self.activation(self.measure(self.separate(self.scale * images).flatten(1)))
        marked: Tensor = images + passed.sum(1).view(-1, 1, 1, 1) * self.pattern
        return marked


def imprinted(model: nn.Module, block: ImprintBlock) -> nn.Module:
    """Copy ``model`` behind ``block``; its own parameters keep their names."""
    whole = copy.deepcopy(model)
    whole.add_module(BLOCK, block)
    whole.register_forward_pre_hook(_through_the_block)
    return whole


def _through_the_block(model: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (model.get_submodule(BLOCK)(given[0]), *given[1:])


def brightness_edges(number: int, mean: float | None, std: float | None, public: Tensor) -> Tensor:
    """Return edges (number,), ascending float64, with as many images between any two.

    They are quantiles i / (number + 1) of the mean pixel (Fowl et al. 2022, section 4).

    Args:
        number: count of edges, at least 1.
        mean, std: normal distribution of brightness; ``None`` takes quantiles of ``public``.
        public: (N, C, H, W) in [0, 1], the server's images.

    Raises:
        UserError: there are too few public images, or they are all alike.
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
    """Return weights and biases of the rows that measure brightness against ``edges``.

    Args:
        edges: ascending, one for each row and with ``hardtanh`` one more.
        scale: factor on the rows' inputs.
        like: (bins, slices * pixels) weights; all slices are alike.
    """
    lows, width = (edges, torch.ones_like(edges)) if activation == "relu" else (edges[:-1], edges.diff())
    rows = (1 / (width * scale * pixels))[:, None].expand_as(like)
    return {MEASURE: rows.to(like).contiguous(), OFFSET: (-lows / width).to(like)}
