"""What canaries cost: processor seconds of 500 of them in a round, beside those of the round itself, in one run.

python experiments/canary_cost.py --out experiments/rows/canary_cost
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time

import torch
from row_file import RowFile, takes_rows

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.canary_stage import CanaryStage

ROUNDS = 5
DEFENSES = {
    "client": "defense=dp_noise defense.clip_norm=1.0 defense.scale=1.0",
    "example": "defense=dp_sgd defense.noise_multiplier=1.0",
}
CASES = {
    ("lenet", "mnist_mini"): "model=lenet data=mnist_mini",
    ("resnet10", "cifar10"): "model=resnet10 data=cifar10 holdout=48000 federation.plan.batch_norm=eval",
}
TRAINING = "federation=fedavg federation.clients=4 federation.plan.batch_size=32"
"""One epoch of each client's examples in a round."""


def measured(words: str) -> tuple[float, float]:
    """Measure median processor seconds of a round and of its canaries, without the first round."""
    reads: list[tuple[float, float]] = []
    read = CanaryStage.end_round

    def timed(stage: CanaryStage) -> None:
        waiting, began = stage._sent is not None, time.process_time()
        read(stage)
        if waiting:
            reads.append((began, time.process_time()))

    CanaryStage.end_round = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            common = f"run {TRAINING} federation.rounds={ROUNDS} attack=none intercept.rounds=all baseline=false"
            status = run_command_line(
                [*f"{common} evaluate_every={ROUNDS} inference=canaries {words}".split(), f"out={folder}"]
            )
    finally:
        CanaryStage.end_round = read  # type: ignore[method-assign]
    assert status == 0 and len(reads) == ROUNDS
    rounds = [begin - end for (_, end), (begin, _) in itertools.pairwise(reads)]
    return statistics.median(rounds[:-1]), statistics.median([end - begin for begin, end in reads[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = RowFile(options.out)
    for (model, data), words in CASES.items():
        for unit, defense in DEFENSES.items():
            key = {"model": model, "data": data, "unit": unit}
            if rows.find(key) is not None:
                continue
            whole, canaries = measured(f"{words} {defense}")
            figures = {
                "round_seconds": round(whole, 2),
                "canary_seconds": round(canaries, 2),
                "share": round(canaries / whole, 3),
                "canaries": 500,
            }
            print(json.dumps(rows.add(key, figures)), flush=True)


if __name__ == "__main__":
    main()
