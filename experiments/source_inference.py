"""Whose is it: how often the source of an example is told, over the skew of the partition and the local epochs.

    python experiments/source_inference.py --out runs/source
    python experiments/source_inference.py --alphas 0.1 10 --epochs 1 5 --rounds 5 --examples 3000

A run that has finished is not run again. ASR in percent with its 95 % interval, beside always naming the client that
has most of the examples asked about.
"""

import argparse
from itertools import product
from pathlib import Path

from inference_runs import finished_run, head, show, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 1.0, 10.0, 100.0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--examples", type=int, default=5000, help="that the clients share")
    parser.add_argument("--split", type=int, default=50_000, help="training examples that there are")
    parser.add_argument("--members", type=int, default=1000, help="asked about")
    parser.add_argument("--out", type=Path, default=Path("runs/source"))
    options = parser.parse_args()
    head(["alpha", "local epochs", "accuracy, %", "attack", "ASR, %", "majority guess, %"])
    for alpha, epochs in product(options.alphas, options.epochs):
        run = finished_run(
            [
                f"data={options.data}", f"model={options.model}", "federation=fedavg",
                f"federation.clients={options.clients}", f"federation.rounds={options.rounds}",
                f"federation.plan.lr={options.lr}", "federation.plan.batch_size=16",
                f"federation.plan.epochs={epochs}", "partition=dirichlet", f"partition.alpha={alpha}",
                f"holdout={options.split - options.examples}", "attack=none", "intercept.rounds=all",
                f"evaluate_every={options.rounds}", "inference=source", f"inference.source.members={options.members}",
            ],
            options.out,
        )  # fmt: skip
        accuracy = f"{100 * (run.summary.final_accuracy or 0):.1f}"
        for finding in run.summary.inferred:
            success = finding.measures.get("asr")
            chance = f"{100 * success.chance:.1f}" if success else "-"
            show([alpha, epochs, accuracy, finding.method, told(finding, "asr"), chance])


if __name__ == "__main__":
    main()
