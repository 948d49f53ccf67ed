"""A photograph of 224x224 pixels, read from the gradient that its client shares: goes on where it was stopped.

    python experiments/photograph.py --hours 8 --out runs/photograph
    python experiments/photograph.py picture --out runs/photograph --picture docs/assets/photograph.png

The photograph is scikit-image's astronaut (NASA, public domain), the network ResNet-18 of ImageNet, untrained, or
a smaller one. The attack is Inverting Gradients in legs: each starts from the best guess of the one before, with a
smaller step, a hundredth of the first's in the last, and is written down when it is over.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from large_images import of_torchvision, victim_of
from row_file import RowFile
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fl_privacy.attacks import inverting_gradients
from fl_privacy.attacks.optimizers import Adam
from fl_privacy.measure.images import psnr
from fl_privacy.models import LeNet
from fl_privacy.types import Observation

SIDE = 224
SHAPE = {"in_channels": 3, "image_size": SIDE, "num_classes": 1000}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: of_torchvision("resnet18"),
    "lenet": lambda: LeNet(**SHAPE),
}


def photograph(side: int) -> Tensor:
    """Load the photograph of a face and its surroundings, (1, 3, side, side)."""
    from skimage.data import astronaut  # noqa: PLC0415

    whole = torch.from_numpy(astronaut()).movedim(-1, 0).unsqueeze(0).float() / 255
    cropped = whole[..., :384, 64:448]
    return F.interpolate(cropped, size=(side, side), mode="area")


def leg(victim: Observation, guess: Tensor | None, number: int, options: argparse.Namespace) -> tuple[Tensor, float]:
    """Attack for ``options.leg`` more iterations; return the guess and the attacker's loss of it."""
    step = 0.1 * 0.01 ** (number / max(options.legs - 1, 1))
    start = {} if guess is None else {"start": "previous"}
    published = inverting_gradients(total_variation=options.smooth, iterations=options.leg, **start)
    attack = replace(published, optimizer=Adam(lr=step, sign="hard"))
    seen = victim if guess is None else victim.given(previous=guess)
    (found,) = attack([seen], seed=number)
    assert found.batch is not None, found.failure
    return found.batch.inputs.cpu().contiguous(), found.loss


def read(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model, truth = NETWORKS[options.network](), photograph(SIDE)
    victim, kept = victim_of(model, SIDE, truth), RowFile(options.out)
    path = options.out / f"{options.network}.safetensors"
    guess = load_file(path)["guess"] if path.is_file() else None
    begun, last = time.monotonic(), max((r["leg"] for r in kept.rows if r["network"] == options.network), default=0)
    for number in range(last + 1, options.legs + 1):
        if time.monotonic() - begun > 3600 * options.hours:
            break
        before = time.process_time()
        guess, loss = leg(victim, guess, number - 1, options)
        options.out.mkdir(parents=True, exist_ok=True)
        save_file({"guess": guess}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        figures = {"psnr": float(psnr(guess, truth)), "loss": loss, "cpu_seconds": time.process_time() - before}
        row = {"network": options.network, "leg": number, "iterations": number * options.leg}
        print(json.dumps(kept.add(row, figures)), flush=True)


def draw(options: argparse.Namespace) -> None:
    """Draw the photograph and its reconstruction from each network."""
    from PIL import Image  # noqa: PLC0415

    shown = [photograph(SIDE)[0]]
    for network in NETWORKS:
        if (path := options.out / f"{network}.safetensors").is_file():
            shown.append(load_file(path)["guess"][0])
    pixels = (torch.cat(shown, -1).clamp(0, 1) * 255).round().byte().movedim(0, -1).numpy()
    Image.fromarray(pixels).save(options.picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["read", "picture"], default="read")
    parser.add_argument("--network", choices=NETWORKS, default="resnet18")
    parser.add_argument("--hours", type=float, default=math.inf)
    parser.add_argument("--legs", type=int, default=48, help="in all, also where it goes on")
    parser.add_argument("--leg", type=int, default=500, help="iterations of a leg")
    parser.add_argument("--smooth", type=float, default=1e-2, help="weight of total variation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder of the guesses and rows.jsonl")
    parser.add_argument("--picture", type=Path, default=Path("photograph.png"))
    options: Any = parser.parse_args()
    draw(options) if options.what == "picture" else read(options)


if __name__ == "__main__":
    main()
