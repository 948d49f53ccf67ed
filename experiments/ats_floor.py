"""What an attack that reads nothing has: PSNR of the noise it starts from to what the model saw (ATS, Tables 2 to 9).

    python experiments/ats_floor.py DATA --out experiments/rows/ats_floor

DATA holds `cifar10_exact` and `fashion_mnist`. The first test images of all classes are transformed by policies of the
paper; the noise is a normal draw on normalized images, clamped to [0, 1], as the authors' program starts and as it
leaves an image after its first step. That program shifts an image at random by up to four pixels of black on each side
and mirrors every second one before a policy, also where it attacks, and leaves plain images as they are; ``cropped`` is
the PSNR with that. The paper says that images that are attacked are not augmented. Paper and program have other
operations 16 and 43; ``_code`` is the program's.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ats_correlation import images_of_all_classes, transformed_as
from row_file import Row, RowFile, takes_rows
from torch import Tensor

from fl_privacy.data import load_data
from fl_privacy.data.transformations import Table
from fl_privacy.measure.images import psnr
from fl_privacy.measure.intervals import aggregate
from fl_privacy.rng import derive_generator

PADDING, SIDE = 4, 32
TABLES: tuple[Table, ...] = ("paper", "code")
POLICIES = {
    "cifar10_exact": (
        *("none", "3", "3-43", "3-43-15", "13-43-18", "21-3-16", "13-43-18+21-3-16"),
        *("21-13-3", "15-48-15", "21-13-3+15-48-15", "3-1-7", "43-18-18", "3-1-7+43-18-18"),
        *("6-20-42", "38-15-48", "6-20-42+38-15-48"),
    ),
    "fashion_mnist": (
        *("none", "31-38-48", "26-39-40", "31-38-48+26-39-40", "26-11-4", "15-27-13", "26-11-4+15-27-13"),
        *("13-43-18", "21-3-16", "13-43-18+21-3-16"),
    ),
}
NORMALIZED = {
    "cifar10_exact": ((0.4915, 0.4823, 0.4468), (0.2470, 0.2435, 0.2616)),
    "fashion_mnist": ((0.1307,), (0.3081,)),
}


def cropped(images: Tensor, seed: int) -> Tensor:
    """Shift each image at random by up to four black pixels on each side, and mirror every second one or so."""
    rng = derive_generator(seed, "experiment", "crop")
    padded = F.pad(images, (PADDING,) * 4)
    places = torch.randint(2 * PADDING + 1, (len(images), 2), generator=rng).tolist()
    parts = [one[:, y : y + SIDE, x : x + SIDE] for one, (y, x) in zip(padded, places, strict=True)]
    mirrored = torch.rand(len(images), generator=rng) < 0.5
    return torch.stack([one.flip(-1) if flip else one for one, flip in zip(parts, mirrored.tolist(), strict=True)])


def noise_like(images: Tensor, data: str, seed: int) -> Tensor:
    """Draw what attacks start from, clamped."""
    mean, std = (torch.tensor(values)[:, None, None] for values in NORMALIZED[data])
    noise = torch.randn(images.shape, generator=derive_generator(seed, "experiment", "floor"))
    return (mean + std * noise).clamp(0, 1)


def floor(goals: Tensor, data: str) -> dict[str, Any]:
    """Compute the PSNR of noise to images, with its interval."""
    found = aggregate(psnr(noise_like(goals, data, 0), goals).tolist())
    assert found is not None
    return asdict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--images", type=int, default=100)
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    for data, policies in POLICIES.items():
        examples = load_data(data, root=str(options.data), image_size=SIDE).test
        images = images_of_all_classes(examples, options.images).inputs
        for policy in policies:
            key: Row = {"data": data, "policy": policy, "images": options.images}
            shown = {"noise": images, "cropped": images if policy == "none" else cropped(images, 0)}
            figures = {
                kind if table == "paper" else f"{kind}_{table}": floor(transformed_as(one, policy, table), data)
                for table in TABLES
                for kind, one in shown.items()
            }
            kept.add(key, figures)
            print(data, policy, ", ".join(f"{name} {one['mean']:.2f}" for name, one in figures.items()), flush=True)


if __name__ == "__main__":
    main()
