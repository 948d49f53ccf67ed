"""What the images of a batch have in common with guesses that nobody assigns to them, beside those that are.

    python experiments/paired_at_random.py RUN_DIR... --out experiments/rows/paired_at_random

Guesses at a batch come in an order of their own. Pages assign each to the image that it suits; programs that compare
them place by place get what a random order gives, the mean over all pairs. Of each attack with batches under the
folders a row says either, and others what a gray image and each image's own mean color have. Of attacks at single
images rows say, for what the network saw of each, what was read of it and what was read of the others: where both are
as near, nothing was read.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from row_file import Row, RowFile, takes_rows
from safetensors.torch import load_file
from torch import Tensor

from fl_privacy.measure.images import psnr


def of_batch(originals: Tensor, guesses: Tensor) -> dict[str, float]:
    """Compute the mean PSNR in dB of guesses (B, C, H, W) in [0, 1], by how they are paired with images."""
    pairs = torch.stack([psnr(originals, guess.expand_as(originals)) for guess in guesses])  # (B, B)
    color = originals.mean((2, 3), keepdim=True).expand_as(originals)
    every = {
        "assigned": psnr(originals, guesses),
        "at random": pairs,
        "gray": psnr(originals, torch.full_like(originals, 0.5)),
        "mean color": psnr(originals, color),
    }
    return {name: float(values.mean()) for name, values in every.items()}


def of_singles(seen: Tensor, guesses: Tensor) -> dict[str, float]:
    """Compute the mean PSNR in dB of what was read of each image (N, C, H, W), and of what was read of the others."""
    others = [psnr(seen, guesses.roll(turn, 0)) for turn in range(1, len(seen))]
    color = seen.mean((2, 3), keepdim=True).expand_as(seen)
    every = {"own": psnr(seen, guesses), "of another": torch.stack(others), "mean color": psnr(seen, color)}
    return {name: float(values.mean()) for name, values in every.items()}


def rows_of(folder: Path) -> Iterator[tuple[Row, Row]]:
    """Yield key and figures of each pairing in a run; nothing where it attacked no batch, nor several images."""
    config = json.loads((folder / "run.json").read_text())["config"]
    size, files = config["batch_size"], sorted((folder / "reconstructions").glob("*.safetensors"))
    images = load_file(files[-1]) if files else {}
    if len(images.get("originals", ())) < 2:
        return
    seen = images.get("transformed", images["originals"]) if size < 2 else images["originals"]
    largest = 255 if images["originals"].max() > 1 else 1
    originals, guesses = (each.float() / largest for each in (seen, images["reconstructions"]))
    pairs = zip(originals.split(size), guesses.split(size), strict=True)
    found = [of_singles(originals, guesses)] if size < 2 else [of_batch(own, guessed) for own, guessed in pairs]
    chosen = {name: config["choices"][name] for name in ("attack", "model", "defense")}
    for pairing in found[0]:
        key = {"run": folder.name, "batch_size": size, **chosen, "pairing": pairing}
        yield key, {"psnr": sum(one[pairing] for one in found) / len(found), "images": len(originals)}


def main() -> None:
    """Write the rows of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders of them")
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    for told in sorted(file for folder in options.folders for file in folder.rglob("run.json")):
        for key, figures in rows_of(told.parent):
            print(kept.add(key, figures))


if __name__ == "__main__":
    main()
