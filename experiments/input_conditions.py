"""Conditions of SPN's Theorem 2.1 for the networks here (Fan et al. 2020): what is below a fully connected layer.

    python experiments/input_conditions.py

For the first digits of the test split and each network at its initial values: the rank of the Jacobian of all that is
below the first fully connected layer, beside the numbers of pixels and of features, and how many elements of that
layer's bias gradient are zero. Means over images.
"""

import argparse
import math
from statistics import mean

from measures import input_conditions
from row_file import RowFile, takes_rows

from fl_privacy.runs.build import build_dataset, build_network
from fl_privacy.runs.config import compose_run


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
