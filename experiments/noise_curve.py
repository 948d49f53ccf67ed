"""Predicted against true noise ratio on data that the evaluation network never saw (Refiner, Figure 4).

python experiments/noise_curve.py --evaluator evaluator.safetensors --data cifar10 svhn mnist --picture figure_4.png
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from matplotlib.figure import Figure
from row_file import RowFile, takes_rows

from fl_privacy.data import load_data
from fl_privacy.measure import aggregate
from fl_privacy.models.pretrained.evaluator import noise_curve
from fl_privacy.models.pretrained.evaluator_files import load_evaluator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluator", type=Path, required=True)
    parser.add_argument("--data", nargs="+", default=["cifar10"])
    parser.add_argument("--images", type=int, default=1000, help="of the test split of each")
    parser.add_argument("--picture", type=Path, default=Path("noise_curve.png"))
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    network = load_evaluator(options.evaluator)
    channels, size, _ = network.input_shape
    ratios = torch.linspace(0, 1, 11)
    figure = Figure(figsize=(4.5, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    print("| data | " + " | ".join(f"{r:.1f}" for r in ratios.tolist()) + " | rises |")
    print("|---" * (len(ratios) + 2) + "|")
    for name in options.data:
        images = load_data(name, channels=channels, image_size=size).test.images[: options.images]
        predicted = noise_curve(network, images, ratios)
        mean, spread = predicted.mean(1), predicted.std(1)
        axes.plot(ratios, mean, marker="o", markersize=3, label=name)
        axes.fill_between(ratios, mean - spread, mean + spread, alpha=0.15)
        for ratio, of_ratio in zip(ratios.tolist(), predicted, strict=True):
            found = aggregate(of_ratio.tolist(), within=(0.0, 1.0))
            kept.add({"data": name, "ratio": round(ratio, 1)}, {"predicted": asdict(found) if found else None})
        rises = "yes" if bool((mean.diff() > 0).all()) else "no"
        print(f"| {name} | " + " | ".join(f"{p:.2f}" for p in mean.tolist()) + f" | {rises} |")
    axes.set(xlabel="true noise ratio", ylabel="predicted noise ratio", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False)
    figure.savefig(options.picture)


if __name__ == "__main__":
    main()
