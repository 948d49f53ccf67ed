"""Who took part: every membership attack against every defense, overfitted or not, IID or not.

    python experiments/membership.py --out runs/membership                    # LeNet and ResNet-20, ten clients
    python experiments/membership.py --models lenet --fits over --defenses none dp_sgd --members 500 --others 500

A run that has finished is not run again; after a kill the same command goes on. Rates are in percent with 95 %
intervals and, in parentheses, the largest that the run's (epsilon, delta) allows.
"""

import argparse
from itertools import product
from pathlib import Path

import torch
from inference_runs import finished_run, head, show, told

MODELS = {"lenet": ["model=lenet"], "resnet20": ["model=resnet20", "model.width=16"]}
"""ResNet-20 as He et al. have it; DP-SGD, which mixes no examples, trains it with group norm."""

FITS = {
    "over": {"share": 0.02, "epochs": 5},
    "normal": {"share": 0.2, "epochs": 1},
}
"""How much of CIFAR-10's training split the clients share, and the epochs of each in a round."""

PARTITIONS = {"iid": ["partition=iid"], "dirichlet": ["partition=dirichlet", "partition.alpha=0.5"]}

DEFENSES = {
    "none": ["defense=none"],
    "pruning": ["defense=pruning", "defense.rate=0.9"],
    "quantization": ["defense=quantization", "defense.bits=2"],
    "dp_noise": ["defense=dp_noise", "defense.clip_norm=1", "defense.scale=0.001"],
    "soteria": ["defense=soteria", "defense.scores=estimated"],
    "dp_sgd inf": ["defense=dp_sgd", "defense.noise_multiplier=0"],
    "dp_sgd 8": ["defense=dp_sgd", "privacy.epsilon=8"],
    "dp_sgd 1": ["defense=dp_sgd", "privacy.epsilon=1"],
}

COLUMNS = ("tpr_at_0.1_percent", "tpr_at_1_percent", "auc", "balanced_accuracy")


def overrides(model: str, partition: str, fit: str, defense: str, options: argparse.Namespace) -> list[str]:
    kept = max(round(FITS[fit]["share"] * options.examples), options.members)
    norm = ["model.norm=group"] if defense.startswith("dp_sgd") and model == "resnet20" else []
    return [
        "data=cifar10", *MODELS[model], "federation=fedavg", f"federation.clients={options.clients}",
        f"federation.rounds={options.rounds}", f"federation.plan.lr={options.lr}", "federation.plan.batch_size=16",
        f"federation.plan.epochs={FITS[fit]['epochs']}", f"holdout={options.examples - kept}", "attack=none",
        f"evaluate_every={options.rounds}", "intercept.rounds=all", "inference=membership",
        f"inference.membership.members={options.members}", f"inference.membership.others={options.others}",
        f"inference.membership.shadows={options.shadows}", f"seed={options.seed}",
        *PARTITIONS[partition], *DEFENSES[defense], *norm,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), choices=list(PARTITIONS))
    parser.add_argument("--fits", nargs="+", default=list(FITS), choices=list(FITS))
    parser.add_argument("--defenses", nargs="+", default=list(DEFENSES), choices=list(DEFENSES))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--examples", type=int, default=50_000, help="of the training split")
    parser.add_argument("--members", type=int, default=2000)
    parser.add_argument("--others", type=int, default=2000)
    parser.add_argument("--shadows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/membership"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    head(["model", "partition", "fit", "defense", "accuracy, %", "attack", *COLUMNS, "epsilon disproved", "spent"])
    for model, partition, fit, defense in product(options.models, options.partitions, options.fits, options.defenses):
        run = finished_run(overrides(model, partition, fit, defense, options), options.out)
        accuracy = f"{100 * (run.summary.final_accuracy or 0):.1f}"
        for finding in run.summary.inferred:
            proven = "-" if finding.proven_epsilon is None else f"{finding.proven_epsilon:.2f}"
            spent = "-" if finding.epsilon is None else f"{finding.epsilon:.2f}"
            cells = [told(finding, name) for name in COLUMNS]
            show([model, partition, fit, defense, accuracy, finding.method, *cells, proven, spent])


if __name__ == "__main__":
    main()
