"""What ATS's attack reads behind a network that was trained to its end (ATS, Tables 2, 4, 7 and 10).

    python experiments/ats_trained_weights.py DATA --out experiments/rows/ats_trained_weights
    python experiments/ats_trained_weights.py DATA --network lenet --epochs 30 --iterations 600

DATA holds `weights/cifar10_resnet20.safetensors`, He et al.'s ResNet-20 for CIFAR-10 as published (91.7 % by its
authors), and `cifar10_exact`. For a policy, the weights are trained on for ``--epochs`` of that set's training split
under the policy, as ATS's clients train; a LeNet is trained for as long from its start. The attacked images are the
first of each class of its test split, batch norm in evaluation mode. Lines are `standard`, policies
(`13-43-18+21-3-16`: one of both for each image), a policy from black or gray (`21-3-16 black`; gray is that of the
authors' program), and defenses of the gradient (`noise 0.01`, `pruning 0.9`). Rows that are there are kept.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from ats_correlation import compared, images_of_all_classes, transformed_as
from row_file import Row, RowFile, takes_rows
from torch import Tensor, nn
from trained_resnet import network

from fl_privacy.data import Examples, load_data
from fl_privacy.defenses.policy_search.scores import TrainingPlan, train_model
from fl_privacy.measure.intervals import aggregate
from fl_privacy.models import LeNet
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_attack
from fl_privacy.runs.config import compose_run
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

LINES = ("standard", "21-3-16", "21-3-16 black", "13-43-18+21-3-16")
PLAN = LocalPlan(batch_norm="eval")
TESTED = 500
STARTS = ("black", "gray")


def policy_of(line: str) -> str:
    """Name the policy of a line; `none` where a defense of the gradient or nothing is used."""
    return line.partition(" ")[0] if line[0].isdigit() else "none"


def start_of(line: str) -> str:
    """Name the start of a line; empty where it is noise."""
    start = line.rpartition(" ")[2]
    return start if start in STARTS else ""


def defended(gradient: Tensor, line: str, name: str) -> Tensor:
    """Add the line's noise to a gradient, or zero the smallest of its elements."""
    kind, _, strength = line.partition(" ")
    if kind == "noise":
        noise = torch.randn(gradient.shape, generator=derive_generator(0, "experiment", line, name))
        return gradient + float(strength) * noise
    if kind == "pruning":
        kept = max(1, round((1 - float(strength)) * gradient.numel()))
        least = gradient.abs().flatten().topk(kept).values[-1]
        return torch.where(gradient.abs() >= least, gradient, 0.0)
    return gradient


def observe(model: nn.Module, sent: ModelState, goals: Tensor, labels: Tensor, line: str) -> list[Observation]:
    """Observe the update of each image, as the line's defense leaves it."""
    found = []
    for k in range(len(goals)):
        batch = Batch(goals[k : k + 1], labels[k : k + 1])
        gradients = loss_gradients(model, sent, batch, batch_norm="eval").gradients
        tensors = {name: defended(gradient, line, f"{name} {k}") for name, gradient in gradients.items()}
        found.append(
            Observation(
                id=VictimId(0, 0, k, part=re.sub(r"[^\w+-]", "_", line)),
                model=model,
                sent=sent,
                upload=Upload(tensors=tensors, num_examples=1),
                plan=PLAN,
                input_shape=tuple(goals.shape[1:]),
                num_classes=10,
                knowledge=Knowledge(labels=batch.labels),
            )
        )
    return found


def trained_on(model: nn.Module, train: Examples, policy: str, options: argparse.Namespace) -> ModelState:
    """Train the weights on under a policy, a LeNet's under none, too."""
    lenet = options.network == "lenet"
    if (policy == "none" and not lenet) or options.network == "untrained" or not options.epochs:
        return ModelState.of(model)
    seen = train.batch(torch.arange(min(len(train), options.examples)))
    seen = Batch(transformed_as(seen.inputs, policy, "paper"), seen.labels)
    plan = TrainingPlan(epochs=options.epochs, lr=0.05 if lenet else 0.01, batch_size=64)
    return train_model(model, seen, plan, seed=0)


def network_of(options: argparse.Namespace) -> nn.Module:
    """Build the network with the weights that training starts from."""
    if options.network != "lenet":
        return network(options.network, options.data)
    torch.manual_seed(0)
    return LeNet(in_channels=3, image_size=32, num_classes=10, activation="tanh", mean=(0.5,), std=(0.25,))


@torch.no_grad()
def accuracy(model: nn.Module, sent: ModelState, test: Examples) -> float:
    """Compute the accuracy on images as they are."""
    batch = test.batch(torch.arange(TESTED))
    model.eval()
    logits = torch.func.functional_call(model, {**sent.parameters, **sent.buffers}, (batch.inputs,))
    return float((logits.argmax(1) == batch.labels).float().mean())


def attacked(lines: Sequence[str], options: argparse.Namespace, kept: RowFile) -> None:
    """Attack the images of all lines that start alike in one call, and keep a row for each line."""
    data = load_data("cifar10_exact", root=str(options.data))
    batch = images_of_all_classes(data.test, options.victims)
    model = network_of(options)
    states: dict[str, ModelState] = {}
    for line in lines:
        if policy_of(line) not in states:
            states[policy_of(line)] = trained_on(model, data.train, policy_of(line), options)
    goals = {line: transformed_as(batch.inputs, policy_of(line), "paper") for line in lines}
    seen = [one for line in lines for one in observe(model, states[policy_of(line)], goals[line], batch.labels, line)]
    start = [f"attack.start={start_of(lines[0])}"] if start_of(lines[0]) else []
    given = ["attack=ats_adam_cosine", "attack.compile=off", f"attack.iterations={options.iterations}", *start]
    found = build_attack(compose_run(given).attack, device="cpu")(seen, seed=0)
    for place, line in enumerate(lines):
        own = found[place * len(batch) : (place + 1) * len(batch)]
        guess, goal = torch.cat([one.batch.inputs for one in own if one.batch is not None]).clamp(0, 1), goals[line]
        figures: Row = {
            name: asdict(aggregate(values))  # type: ignore[arg-type]
            for name, values in compared(guess, goal, batch.inputs).items()
        }
        right = accuracy(model, states[policy_of(line)], data.test)
        print(kept.add(key_of(line, options), {**figures, "accuracy": right, "tested": TESTED}), flush=True)


def key_of(line: str, options: argparse.Namespace) -> Row:
    """Return the fields that name a row."""
    names = ("network", "victims", "iterations", "epochs", "examples")
    return {"line": line, **{name: getattr(options, name) for name in names}}


def add_options(parser: argparse.ArgumentParser, *, victims: int, iterations: int, epochs: int) -> None:
    """Add what says behind which weights, and how long."""
    parser.add_argument("data", type=Path)
    parser.add_argument("--network", choices=("trained", "untrained", "lenet"), default="trained")
    parser.add_argument("--victims", type=int, default=victims)
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--examples", type=int, default=10**6, help="that they are trained on, at most")
    parser.add_argument("--epochs", type=int, default=epochs, help="for which they are trained on under a policy")
    takes_rows(parser)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, victims=10, iterations=1200, epochs=1)
    parser.add_argument("--lines", nargs="+", default=list(LINES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    missing = [line for line in options.lines if kept.find(key_of(line, options)) is None]
    for start in ("", *STARTS):
        if lines := [line for line in missing if start_of(line) == start]:
            attacked(lines, options, kept)


if __name__ == "__main__":
    main()
