"""Predicted against true noise ratio (Refiner, Figure 4)."""

import torch
from torch import Tensor

from fl_privacy.evaluator.blend import blend_with_noise
from fl_privacy.evaluator.network import EvaluationNetwork

CHUNK = 512
"""Images judged at a time."""


def noise_curve(network: EvaluationNetwork, images: Tensor, ratios: Tensor, *, seed: int = 0) -> Tensor:
    """(R, N) predicted noise ratio of each image at each true one.

    Args:
        network: the judge, on any device.
        images: (N, C, H, W) uint8 in its input shape.
        ratios: (R,) in [0, 1].
        seed: of the noise.
    """
    device = next(network.parameters()).device
    rng = torch.Generator(device=device).manual_seed(seed)
    rows = []
    with torch.no_grad():
        for ratio in ratios.tolist():
            parts = [
                network(blend_with_noise(part, torch.full((len(part),), ratio), rng)).cpu()
                for part in (chunk.to(device).float() / 255 for chunk in torch.split(images, CHUNK))
            ]
            rows.append(torch.cat(parts))
    return torch.stack(rows)
