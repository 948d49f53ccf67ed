"""What they are like: an attribute beside the task, told from the gradient of a single example, by defense.

    python experiments/attribute_inference.py --data olivetti_halves --out runs/attribute
    python experiments/attribute_inference.py --data cifar10_animals --victims 100 --rounds 20 --defenses none recup_fl

A run that has finished is not run again. ASR in percent with its 95 % interval, beside always saying what is most
frequent, and the accuracy of the task; by classifiers that learned from plain gradients of public examples, and by
those that learned from defended ones.
"""

import argparse
from pathlib import Path

from inference_runs import finished_run, head, show, told

DEFENSES = {
    "none": ["defense=none"],
    "soteria": ["defense=soteria", "defense.scores=estimated"],
    "recup_fl": ["defense=recup_fl", "defense.budget=0.5"],
    "recup_fl 1": ["defense=recup_fl", "defense.budget=1"],
    "refiner": ["defense=refiner"],
    "refiner 1": ["defense=refiner", "defense.epsilon=1"],
    "refiner 10": ["defense=refiner", "defense.epsilon=10"],
    "dp_noise": ["defense=dp_noise", "defense.clip_norm=1", "defense.scale=0.01"],
    "dp_sgd": ["defense=dp_sgd"],
    "pruning": ["defense=pruning", "defense.rate=0.9"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="olivetti_halves")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--defenses", nargs="+", default=list(DEFENSES), choices=list(DEFENSES))
    parser.add_argument("--evaluator", help="of Refiner, by fl-privacy train-evaluator")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.1, help="of the server")
    parser.add_argument("--victims", type=int, default=200)
    parser.add_argument("--attacked", default="first", help="rounds in which victims are attacked: first, ends, all")
    parser.add_argument("--out", type=Path, default=Path("runs/attribute"))
    options = parser.parse_args()
    head(["data", "defense", "task accuracy, %", "attack", "ASR, %", "majority guess, %"])
    for name in options.defenses:
        refines = name.startswith("refiner") and options.evaluator
        evaluator = [f"defense.evaluator={options.evaluator}"] if refines else []
        run = finished_run(
            [
                f"data={options.data}", f"model={options.model}", "federation=fedsgd",
                f"federation.clients={options.clients}", f"federation.rounds={options.rounds}",
                f"federation.server_lr={options.lr}", "federation.plan.batch_size=16", "attack=none",
                "inference=attribute", f"victims={options.victims}", "batch_size=1",
                f"intercept.rounds={options.attacked}", f"evaluate_every={options.rounds}", "threat_model=adaptive",
                *DEFENSES[name], *evaluator,
            ],
            options.out,
        )  # fmt: skip
        accuracy = f"{100 * (run.summary.final_accuracy or 0):.1f}"
        for finding in run.summary.inferred:
            success = finding.measures.get("asr")
            chance = f"{100 * success.chance:.1f}" if success else "-"
            show([options.data, name, accuracy, finding.method, told(finding, "asr"), chance])


if __name__ == "__main__":
    main()
