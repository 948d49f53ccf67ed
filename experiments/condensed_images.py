"""How much condensed images show of a client's own, before anybody attacks them (DC, DSA, DM).

    python experiments/condensed_images.py --data fashion_mnist

Each client condenses its share of the training images. Shown is the PSNR of the condensed images, which reading an
upload perfectly would give, to the client's nearest own images of their class, beside that of two strangers to the same
images: test images and noise; and the PSNR to what each condensed image started as. Each client's PSNR is that of its
mean squared error, since single images may be equal; means over clients with 95 % intervals.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from row_file import Row, RowFile, takes_rows
from torch import Tensor

from fl_privacy.data import load_data
from fl_privacy.data.examples import Examples
from fl_privacy.defenses import ClientState, Defense, LocalData, dc, dm, dsa
from fl_privacy.measure.images import mse
from fl_privacy.measure.intervals import aggregate
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch

STARTS = ("noise", "real")


def methods(scale: int, images: int) -> dict[str, Callable[..., Defense]]:
    """Build each condensation method as RESULTS.md has it, with ``scale`` times its updates (0: the starts)."""
    matching = {"networks": scale, "outer_steps": 5, "inner_steps": 3}
    small = {"images_per_class": images, "width": 8, "real_batch": 16}
    return {
        "DC": partial(dc, **small, **matching),
        "DSA": partial(dsa, **small, **matching),
        "DM": partial(dm, **small, iterations=40 * scale),
    }


def condensed(defense: Defense, own: Batch, num_classes: int, client: int) -> Batch:
    rng = derive_generator(0, "client", client, "examples")
    (hook,) = defense.examples
    return hook(own, LocalData(num_classes=num_classes, state=ClientState(), rng=rng))


def nearest(images: Tensor, labels: Tensor, own: Batch) -> Tensor:
    """Find for each image the nearest one of ``own`` of the same class, (N, ...)."""
    distances = torch.cdist(images.flatten(1), own.inputs.flatten(1))
    return own.inputs[distances.masked_fill(labels[:, None] != own.labels, torch.inf).argmin(1)]


def level(images: Tensor, others: Tensor) -> float:
    """Compute the PSNR in dB of the mean squared error over all images."""
    return float(-10 * mse(images, others).mean().log10())


def statistic(values: list[float]) -> Row | None:
    found = aggregate(values)
    return asdict(found) if found else None


def shown(values: list[float]) -> str:
    found = aggregate(values)
    assert found is not None
    return f"{found.mean:.1f}" if found.ci95 is None else f"{found.mean:.1f} [{found.ci95[0]:.1f}, {found.ci95[1]:.1f}]"


def strangers(test: Examples, shares: list[Batch], count: int, kept: RowFile) -> None:
    rng = derive_generator(0, "strangers")
    drawn = test.batch(torch.randperm(len(test), generator=rng)[:count])
    noise = (0.5 + 0.25 * torch.randn(drawn.inputs.shape, generator=rng)).clamp(0, 1)
    for name, images in (("test images", drawn.inputs), ("noise", noise)):
        near = [level(images, nearest(images, drawn.labels, own)) for own in shares]
        kept.add({"method": name, "start": None, "updates": 0}, {"to_own": statistic(near), "to_start": None})
        print(f"| {name} | | | {shown(near)} | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion_mnist")
    parser.add_argument("--clients", type=int, default=10, help="between which the training images are dealt")
    parser.add_argument("--measured", type=int, default=5, help="so many of them condense")
    parser.add_argument("--images", type=int, default=10, help="condensed images a class")
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 10], help="times the updates of the table")
    parser.add_argument("--threads", type=int, default=1)
    takes_rows(parser)
    arguments = parser.parse_args()
    kept = RowFile(arguments.out)
    torch.set_num_threads(arguments.threads)
    data = load_data(arguments.data)
    order = torch.randperm(len(data.train), generator=derive_generator(0, "partition"))
    shares = [data.train.batch(part) for part in order.chunk(arguments.clients)[: arguments.measured]]
    classes = data.train.num_classes
    print("| | start | updates | PSNR to the client's nearest own | to what it started as |\n|---|---|---|---|---|")
    strangers(data.test, shares, classes * arguments.images, kept)
    for scale in arguments.scales:
        for name, make in methods(scale, arguments.images).items():
            for start in STARTS:
                to_own, to_start = [], []
                for client, own in enumerate(shares):
                    made = condensed(make(start=start), own, classes, client)
                    began = condensed(methods(0, arguments.images)[name](start=start), own, classes, client)
                    to_own.append(level(made.inputs, nearest(made.inputs, made.labels, own)))
                    to_start.append(level(made.inputs, began.inputs))
                updates = scale * (40 if name == "DM" else 5)
                key = {"method": name, "start": start, "updates": updates}
                kept.add(key, {"to_own": statistic(to_own), "to_start": statistic(to_start)})
                print(f"| {name} | {start} | {updates} | {shown(to_own)} | {shown(to_start)} |", flush=True)


if __name__ == "__main__":
    main()
