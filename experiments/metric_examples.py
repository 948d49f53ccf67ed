"""What metrics say of changes that leave an image what it is, and of noise (Refiner, Figures 3 and 17).

    python experiments/metric_examples.py --images 50 --out experiments/rows/metric_examples

Refiner's argument for an evaluation network: a shifted, turned or recolored image shows all that it showed, and pixel
errors, SSIM and LPIPS call it another one.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from row_file import RowFile, takes_rows
from torch import Tensor
from torchvision.transforms.v2 import functional as change

from fl_privacy.data import load_data
from fl_privacy.measure import METRICS, aggregate
from fl_privacy.measure.images import mse, psnr, ssim
from fl_privacy.measure.lpips import lpips

MEASURES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": mse, "psnr": psnr, "ssim": ssim, "lpips": lpips}


def noisy(images: Tensor) -> Tensor:
    """With the noise of Figure 3, whose error is 0.004."""
    rng = torch.Generator().manual_seed(0)
    return (images + 0.004**0.5 * torch.randn(images.shape, generator=rng)).clamp(0, 1)


def scaled_pixel(images: Tensor) -> Tensor:
    """With the brightest pixel of each image ten times as bright, as Figure 3 has it, which no clamp takes back."""
    flat = images.flatten(1).clone()
    at = flat.argmax(1, keepdim=True)
    return flat.scatter(1, at, 10 * flat.gather(1, at)).view_as(images)


CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "shifted by a pixel": lambda images: torch.roll(images, (-1, -1), (2, 3)),
    "one pixel scaled": scaled_pixel,
    "noise": noisy,
    "turned by 30 degrees": lambda images: change.rotate(images, 30),
    "turned by 90 degrees": lambda images: images.rot90(1, (2, 3)),
    "mirrored": lambda images: images.flip(3),
    "color jitter": lambda images: change.adjust_hue(change.adjust_brightness(images, 1.4), 0.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--images", type=int, default=50)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, images = RowFile(options.out), load_data(options.data).test.images[: options.images].float() / 255
    for name, changed in CHANGES.items():
        other, figures = changed(images), {}
        for measure, function in MEASURES.items():
            if METRICS[measure].available:
                found = aggregate(function(other, images).tolist())
                assert found is not None
                figures[measure] = asdict(found)
        kept.add({"change": name, "data": options.data}, figures)
        print(name, {measure: round(found["mean"], 3) for measure, found in figures.items()}, flush=True)


if __name__ == "__main__":
    main()
