"""Conditions of SPN's Theorem 2.1 for the networks here (Fan et al. 2020): what is below a fully connected layer.

    python experiments/input_conditions.py

For the first digits of the test split and each network at its initial values: the rank of the Jacobian of all that is
below the first fully connected layer, beside the numbers of pixels and of features, and how many elements of that
layer's bias gradient are zero. Means over images.
"""

import argparse
import copy
import math
from dataclasses import dataclass
from statistics import mean

import torch
from row_file import RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.config import compose_run
from fl_privacy.errors import UserError
from fl_privacy.experiment.build import build_dataset, build_network
from fl_privacy.gradients.hooks import entering


@dataclass(frozen=True, kw_only=True)
class InputConditions:
    """Conditions at a fully connected layer under which an update determines one input (SPN, Theorem 2.1).

    Attributes:
        layer: whose input the update gives.
        inputs: numbers of the input x, N.
        features: numbers that enter the layer, F.
        rank: of the Jacobian (F, N) of all that is below the layer, at x.
        condition: largest over smallest of its singular values, of which there are min(F, N).
        bias_zeros: elements of the layer's bias gradient that are zero.
        rows: elements of that gradient.
    """

    layer: str
    inputs: int
    features: int
    rank: int
    condition: float
    bias_zeros: int
    rows: int

    @property
    def full_rank(self) -> bool:
        """Say whether the Jacobian has full rank, condition 1 as printed."""
        return self.rank == min(self.inputs, self.features)

    @property
    def invertible(self) -> bool:
        """Say whether what is below can be inverted near x, which the proof needs: a rank of ``inputs``.

        A Jacobian with fewer rows than columns has full rank and no inverse.
        """
        return self.rank == self.inputs

    @property
    def nonsingular(self) -> bool:
        """Say whether no element of the bias gradient is zero, condition 2."""
        return self.bias_zeros == 0


def input_conditions(model: nn.Module, image: Tensor, label: int, *, layer: str | None = None) -> InputConditions:
    """Compute both conditions of Theorem 2.1 for one input, in double precision and evaluation mode.

    Args:
        model: network with a fully connected layer that has a bias.
        image: (C, H, W) in [0, 1].
        label: its class, whose cross entropy is the loss.
        layer: name of the fully connected layer; ``None`` takes the first that is entered.

    Raises:
        UserError: there is no such layer, or nothing enters it.
    """
    exact = copy.deepcopy(model).double().eval()
    linear = {name: m for name, m in exact.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}
    if (layer is not None and layer not in linear) or not linear:
        raise UserError(
            f"A fully connected layer with a bias is expected, one of {', '.join(linear) or 'none in this model'}, but"
            f" got {layer or 'a model without one'}; choose another layer or model."
        )
    watched = linear if layer is None else {layer: linear[layer]}
    x = image.double()

    def features(pixels: Tensor) -> Tensor:
        with entering(watched) as calls:
            exact(pixels[None])
        return calls[0].inputs.flatten()

    with entering(watched) as calls:
        loss = nn.functional.cross_entropy(exact(x[None]), torch.tensor([label], device=x.device))
    if not calls:
        raise UserError(f"A layer that the model uses is expected, but {', '.join(watched)} is entered by no input.")
    name = calls[0].name
    bias = torch.autograd.grad(loss, linear[name].bias)[0]
    jacobian = torch.func.jacrev(features, chunk_size=_ROWS_AT_ONCE)(x).flatten(1).detach()
    values = torch.linalg.svdvals(jacobian)
    return InputConditions(
        layer=name,
        inputs=x.numel(),
        features=len(jacobian),
        rank=int((values > values[0] * max(jacobian.shape) * torch.finfo(values.dtype).eps).sum()),
        condition=float(values[0] / values[-1]),
        bias_zeros=int((bias == 0).sum()),
        rows=bias.numel(),
    )


_ROWS_AT_ONCE = 64
"""Of a Jacobian."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist_mini")
    parser.add_argument("--models", nargs="+", default=["mlp", "dlnet", "lenet", "lenet5"])
    parser.add_argument("--images", type=int, default=6)
    takes_rows(parser)
    arguments = parser.parse_args()
    kept = RowFile(arguments.out)
    print("| network | pixels | features | rank | condition | zeros of the bias gradient |\n|---|---|---|---|---|---|")
    for name in arguments.models:
        settings = compose_run([f"data={arguments.data}", f"model={name}"])
        data = build_dataset(settings.data)
        model = build_network(settings.model, data, seed=settings.seed)
        batch = data.test.batch(range(arguments.images))
        found = [input_conditions(model, x, int(y)) for x, y in zip(batch.inputs, batch.labels, strict=True)]
        condition = mean(each.condition for each in found)
        figures = {
            "layer": found[0].layer,
            "pixels": found[0].inputs,
            "features": found[0].features,
            "rank": mean(each.rank for each in found),
            "condition": condition if math.isfinite(condition) else None,
            "bias_zeros": mean(each.bias_zeros / each.rows for each in found),
            "invertible": mean(each.invertible for each in found),
            "n": len(found),
        }
        kept.add({"data": arguments.data, "model": name}, figures)
        print(
            f"| {name} | {figures['pixels']} | {figures['features']} | {figures['rank']:.1f} |"
            f" {condition:.2g} | {100 * figures['bias_zeros']:.0f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
