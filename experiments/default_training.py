"""What the default settings of training reach: every model on every data set at hand, by FedAvg and by FedSGD.

    python experiments/default_training.py

Learning rates, batch sizes and initializations are the defaults of ``conf/``; rounds are few. Narrow networks train
with the ten clients of the default; wide ones, which a CPU takes hours for, with two clients, fewer steps and digits of
16x16 pixels. Every row is a run below ``--out`` that is not done again, and is printed with those already done;
``--only`` takes the rows whose settings contain a text. Ends with status 1 if a row that is expected to learn did not
come to ``LEARNED`` times chance.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fl_privacy.config import compose_run
from fl_privacy.data.sources import ROOT_VARIABLE
from fl_privacy.experiment.contracts import Monitor, plain_loop
from fl_privacy.experiment.run import run_experiment
from fl_privacy.experiment.run_folder import folder_of
from fl_privacy.results import Summary, read_summary

LEARNED = 3
"""Times the accuracy of guessing."""

NARROW = ("mlp", "lenet", "lenet5")
WIDE = ("alexnet", "vgg16", "resnet10", "resnet18", "resnet20", "convnet", "mobilenet_v2", "vit")
UNTRAINABLE = ("lenet_dlg", "dlnet")
"""As published for attacks on untrained weights: sigmoids behind weights drawn from wide uniform distributions."""

ROUNDS: Mapping[str, Mapping[str, int]] = {
    "mnist_mini": {"fedavg": 15, "fedsgd": 100},
    "mnist": {"fedavg": 1, "fedsgd": 100},
    "fashion_mnist": {"fedavg": 1, "fedsgd": 100},
    "cifar10": {"fedavg": 2, "fedsgd": 100},
}
SHORTENED: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "fedavg": (3, ("federation.plan.epochs=null", "federation.plan.steps=25")),
    "fedsgd": (60, ("federation.plan.batch_size=32",)),
}
"""Rounds of wide networks, and what makes them cheap."""


@dataclass(frozen=True)
class Training:
    """A row of the table."""

    model: str
    data: str
    federation: str
    rounds: int
    shortened: tuple[str, ...] = ()

    def overrides(self, out: Path) -> list[str]:
        return [
            f"model={self.model}",
            f"data={self.data}",
            f"federation={self.federation}",
            f"federation.rounds={self.rounds}",
            f"evaluate_every={self.rounds}",
            "attack=none",
            "device=cpu",
            f"out={out}",
            *self.shortened,
        ]


def trainings() -> Iterator[Training]:
    for model in (*NARROW, *UNTRAINABLE):
        for data in ROUNDS if model in NARROW else ("mnist_mini",):
            for federation, rounds in ROUNDS[data].items():
                yield Training(model, data, federation, rounds)
    for model in WIDE:
        for federation, (rounds, settings) in SHORTENED.items():
            yield Training(
                model, "mnist_mini", federation, rounds, ("data.image_size=16", "federation.clients=2", *settings)
            )


def at_hand(data: str) -> bool:
    return data == "mnist_mini" or (Path(os.environ.get(ROOT_VARIABLE, "")) / data).is_dir()


def row(training: Training, summary: Summary) -> str:
    settings = " ".join(f"`{setting}`" for setting in training.shortened)
    return (
        f"| `{training.model}` | `{training.data}` | `{training.federation}` | {settings} | {training.rounds} |"
        f" {summary.final_accuracy or 0.0:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/default_training"))
    parser.add_argument("--only", default="", help="rows whose settings contain this text")
    parser.add_argument("--no-training", action="store_true", help="print what has finished")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = []
    print("| model | data | federation | beside the defaults | rounds | accuracy |")
    print("|---" * 6 + "|")
    for training in trainings():
        overrides = training.overrides(options.out)
        if options.only not in " ".join(overrides) or not at_hand(training.data):
            continue
        config = compose_run(overrides)
        if not options.no_training:
            run_experiment(config, plain_loop, Monitor())
        if (summary := read_summary(folder_of(config, "run"))) is None:
            continue
        print(row(training, summary), flush=True)
        if training.model not in UNTRAINABLE and (summary.final_accuracy or 0.0) < LEARNED / 10:
            failed.append(training)
    if failed:
        sys.exit(f"{len(failed)} trainings did not come to {LEARNED} times chance.")


if __name__ == "__main__":
    main()
