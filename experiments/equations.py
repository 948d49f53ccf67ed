"""Count the equations of a trained ResNet-20's layers, by batch and mode of batch norm, with the code of ``predict``.

    python experiments/equations.py DATA --out experiments/rows/equations

DATA holds `weights/cifar10_resnet20.safetensors` (akamaster/pytorch_resnet_cifar10). A row for each batch and mode:
of the layer with the fewest equations for each unknown, when the outputs of single images are known and when only
sums over the batch are; of all layers for each pixel; and, in training mode, the batch's means and variances, which are
further unknowns unless running statistics are uploaded.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch
from row_file import RowFile, takes_rows
from torch import nn
from trained_resnet import network

from fl_privacy.attacks.prediction import LayerEquations, PlannedTraining, predict

SHAPE = (3, 32, 32)


def of_single_outputs(mixed: LayerEquations, single: LayerEquations, batch: int) -> LayerEquations:
    """Add the outputs of each image, were they known, to the equations of several; those of one image have them."""
    return mixed if batch == 1 else replace(mixed, equations=mixed.equations + batch * single.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, model = RowFile(options.out), network("trained", options.data)
    norms = [module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    single = predict(model, SHAPE, PlannedTraining(1)).layers
    for batch in (1, 2, 4):
        for mode in ("eval", "train"):
            found = predict(model, SHAPE, PlannedTraining(batch, mode))
            apart = [of_single_outputs(one, own, batch) for one, own in zip(found.layers, single, strict=True)]
            mixed, known = (min(each, key=lambda one: one.ratio) for each in (found.layers, apart))
            in_all = sum(layer.gradient for layer in found.layers)
            figures = {
                **{"layer": mixed.name, "unknowns": mixed.unknowns, "equations": mixed.equations},
                **{"single_layer": known.name, "single_unknowns": known.unknowns, "single_equations": known.equations},
                **{"in_all": in_all, "pixels": batch * math.prod(SHAPE)},
                "statistics": 2 * sum(norms) if mode == "train" else 0,
                "predicted": found.outcome,
            }
            print(kept.add({"network": "trained", "batch": batch, "mode": mode}, figures), flush=True)


if __name__ == "__main__":
    main()
