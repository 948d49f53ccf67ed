"""Gradients under uniform and normal weights and of an attack's start, as SAPAG observes them (Wang et al. 2020, IV-C).

    python experiments/sapag_gradients.py --images 64 --out experiments/rows/sapag_gradients
    python experiments/sapag_gradients.py --images 64 --data cifar100 --out experiments/rows/sapag_gradients

LeNet-5 at its initial values, on digits or on CIFAR-100's samples. A row for each distribution of the weights: mean
over images of the gradient's standard deviation, of the share of its elements below 0.01 and of that within a tenth of
its deviation, and of the norm of the gradient of a dummy image and label from N(0, 1), in parts of the true gradient's.
"""

import argparse

import torch
from refiner_distance import statistic
from refiner_pictures import client_steps, gradient
from row_file import RowFile, takes_rows
from sapag_forms import DATA, INITS, overrides_of
from torch.nn import functional as F

from fl_privacy.defenses import LocalStep
from fl_privacy.runs.config import compose_run
from fl_privacy.types import Tensors


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def of_dummy(step: LocalStep) -> torch.Tensor:
    """Compute the gradient of an image and a soft label that are drawn from N(0, 1)."""
    logits = step.model(torch.randn_like(step.batch.inputs))
    loss = -(torch.randn_like(logits).softmax(1) * F.log_softmax(logits, 1)).sum()
    return torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, list(step.model.parameters()))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--data", default="mnist", choices=list(DATA), help="cifar100: the samples `cifar100_samples`")
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.manual_seed(0)
    for init in INITS:
        cell = {"data": options.data, "form": "DLG", "optimizer": "lbfgs", "init": init, "iterations": 1}
        config = compose_run(overrides_of(cell))
        steps = client_steps(config, options.images)
        true = [flat(gradient(step, step.batch.inputs)) for step in steps]
        near = [(one.abs() < 0.01).float().mean() for one in true]
        within = [(one.abs() < one.std() / 10).float().mean() for one in true]
        dummy = [of_dummy(step).norm() / one.norm() for step, one in zip(steps, true, strict=True)]
        figures = {"deviation": [one.std() for one in true], "near_zero": near, "within_tenth": within, "dummy": dummy}
        found = {name: statistic(torch.stack(values)) for name, values in figures.items()}
        print(init, found)
        kept.add({"data": options.data, "init": init}, {**found, "images": len(steps)})


if __name__ == "__main__":
    main()
