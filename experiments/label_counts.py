"""How many labels of a batch are found by its output layer's gradient: by noise, by images' noise, with the update.

    python experiments/label_counts.py --out experiments/rows/label_counts

A cell is a network, steps of training and a batch size; in each a share of labels over some batches. What a cell comes
to is kept as it comes: a run that was stopped goes on where it was.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from auto_table import MODELS, train
from row_file import RowFile
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.labels import guessed_outputs, infer_labels, output_layer, usual_outputs
from fl_privacy.data import Dataset, load_data
from fl_privacy.models import build_model
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import ModelState

NETWORKS = ("LeNet sigmoid", "LeNet tanh", "LeNet ReLU", "MLP")


def network(name: str, steps: int, data: Dataset) -> nn.Module:
    kind, settings = MODELS[name]
    channels, size, _ = data.train.input_shape
    classes = data.train.num_classes
    model = build_model(kind, seed=0, in_channels=channels, image_size=size, num_classes=classes, **settings)
    if steps:
        train(model, data, argparse.Namespace(seed=0, training_steps=steps))
    return model.eval()


def found_by_each(model: nn.Module, data: Dataset, size: int, batches: int) -> dict[str, Any]:
    """Share of the labels that each rule finds."""
    sent, layer, classes = ModelState.of(model), output_layer(model, data.train.num_classes), data.train.num_classes
    assert layer is not None
    shape, shares = data.train.input_shape, {"noise": 0.0, "any_image": 0.0, "update": 0.0}
    for number in range(batches):
        chosen = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(100 + number))[:size]
        truth = data.test.batch(chosen)
        gradient = loss_gradients(model, sent, truth, batch_norm="eval").gradients
        noise = torch.rand((64, *shape), generator=torch.Generator().manual_seed(number))
        rules = {
            "noise": guessed_outputs(model, noise, layer[0]),
            "any_image": usual_outputs(model, shape, layer, torch.Generator().manual_seed(number)),
            "update": usual_outputs(model, shape, layer, torch.Generator().manual_seed(number), gradient),
        }
        for name, outputs in rules.items():
            labels = infer_labels(gradient, layer, size, *outputs)
            assert labels is not None
            shares[name] += _overlap(labels, truth.labels, classes) / size / batches
    return {"batches": batches, **shares}


def _overlap(found: Tensor, true: Tensor, classes: int) -> float:
    counts = (torch.bincount(labels, minlength=classes) for labels in (found, true))
    return float(torch.minimum(*counts).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/label_counts"))
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, data = RowFile(options.out), load_data(options.data)
    for name, steps in itertools.product(NETWORKS, (0, 200, 1000)):
        left = [size for size in (16, 64) if rows.find({"model": name, "steps": steps, "batch": size}) is None]
        model = network(name, steps, data) if left else None
        for size in left:
            assert model is not None
            rows.add({"model": name, "steps": steps, "batch": size}, found_by_each(model, data, size, options.batches))


if __name__ == "__main__":
    main()
