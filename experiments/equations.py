"""Count the equations of a trained ResNet-20's layers, by batch and mode of batch norm, with the code of ``predict``.

    python experiments/equations.py DATA --out experiments/rows/equations

DATA holds `weights/cifar10_resnet20.safetensors` (akamaster/pytorch_resnet_cifar10). A row for each batch and mode:
of the layer with the fewest equations for each unknown, when the outputs of single images are known and when only
sums over the batch are; of all layers for each pixel; and, in training mode, the batch's means and variances, which are
further unknowns unless running statistics are uploaded. Images are separated by the gradient of the last convolution if
``places``, with one more row and column, are not above ``rank``, the order of the matrix of its taps.
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


def of_last_convolution(model: nn.Module) -> tuple[int, int]:
    """Return the places of an image in front of the last convolution, and the order of the matrix of its taps."""
    last = [module for module in model.modules() if isinstance(module, nn.Conv2d)][-1]
    shapes = list[torch.Size]()
    handle = last.register_forward_hook(lambda module, inputs, outputs: shapes.append(outputs.shape))
    model.eval()(torch.zeros(1, *SHAPE))
    handle.remove()
    return (shapes[0][2] + 1) * (shapes[0][3] + 1), 4 * min(last.in_channels, last.out_channels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, model = RowFile(options.out), network("trained", options.data)
    norms = [module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    places, rank = of_last_convolution(model)
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
                **{"places": batch * places, "rank": rank},
                "predicted": found.outcome,
            }
            print(kept.add({"network": "trained", "batch": batch, "mode": mode}, figures), flush=True)


if __name__ == "__main__":
    main()
