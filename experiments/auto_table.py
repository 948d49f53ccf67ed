"""``attack=auto`` beside every preset at the same CPU time for a victim: what is read, recognizable and proven.

    python experiments/auto_table.py --out runs/auto_table --minutes 60
    python experiments/auto_table.py --out runs/auto_table --minutes 0      # the table of what there is

A cell is a network, untrained or trained, and a batch size; ``auto`` goes first in each, and the presets get as many
iterations as fit into the CPU seconds that it took, with one start. One line of ``rows.jsonl`` for each cell and
attack, appended as it comes: a run that was stopped goes on where it was. The most telling rows come first: single
images and untrained networks first, the strongest presets before the others.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from fl_privacy.attacks import (
    AnalyticInversion,
    AutoAttack,
    ExactInversion,
    GradientInversion,
    ReconstructionAttack,
    adam_dlg,
    ats_attack,
    dlg,
    grad_inversion,
    idlg,
    inverting_gradients,
    sapag,
)
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.data import Dataset, load_data
from fl_privacy.measure import aggregate, evaluate_all
from fl_privacy.models import MLP, ConvNet, LeNet, ResNet20, ViT, build_model
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, Certainty, LocalPlan, ModelState, Observation, Reconstruction, Upload, VictimId

NORMALIZED = {"mean": [0.5], "std": [0.25]}
MODELS: Mapping[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "LeNet sigmoid": (LeNet, {"init": "uniform_0.5"}),
    "LeNet tanh": (LeNet, {"activation": "tanh", **NORMALIZED}),
    "LeNet ReLU": (LeNet, {"activation": "relu", **NORMALIZED}),
    "MLP": (MLP, {"widths": [256, 128], **NORMALIZED}),
    "ResNet-20": (ResNet20, {"width": 16, "init": "kaiming_normal_fan_out", **NORMALIZED}),
    "ConvNet": (ConvNet, {"width": 16, **NORMALIZED}),
    "ViT": (ViT, {"depth": 2, "token_width": 96, "heads": 3, "mlp_width": 192, **NORMALIZED}),
}
STRONG: Mapping[str, ReconstructionAttack] = {
    "inverting_gradients": inverting_gradients(),
    "inverting_gradients_code": inverting_gradients(total_variation=0.1),
    "idlg": idlg(),
}
OTHERS: Mapping[str, ReconstructionAttack] = {
    "dlg": dlg(),
    "sapag": sapag(),
    "grad_inversion": grad_inversion(),
    "ats_adam_l1": ats_attack(distance="l1"),
    "ats_adam_l2": ats_attack(distance="l2"),
    "ats_sgd_cosine": ats_attack(optimizer="sgd"),
    "ats_lbfgs_cosine": ats_attack(optimizer="lbfgs"),
    "ats_lbfgs_l2": ats_attack(optimizer="lbfgs", distance="l2"),
    "adam_dlg": adam_dlg(),
    "exact": ExactInversion(),
    "analytic": AnalyticInversion(),
}
RECOGNIZABLE = 25.0
"""PSNR in dB above which an image counts as recognizable here: well above the 15 dB of the package's pages."""

TRIAL = 3
"""Iterations from which the time of one is measured, beside a single one."""


@dataclass(frozen=True)
class Cell:
    """What is attacked."""

    model: str
    trained: bool
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {'trained' if self.trained else 'untrained'}, batch {self.batch}"


@dataclass(frozen=True)
class Row:
    """What an attack read in a cell; seconds of CPU a victim."""

    model: str
    trained: bool
    batch: int
    attack: str
    data: str
    recognizable_above: float
    victims: int
    evaluations: int
    iterations: int | None
    psnr: float
    low: float | None
    high: float | None
    recognizable: float
    proven: float
    seconds: float
    members: dict[str, int]
    failures: int


def cells() -> Iterator[tuple[Cell, Sequence[str]]]:
    """List the table's cells with the attacks on them, the most telling ones first."""
    for batch, trained in ((1, False), (1, True), (4, False), (4, True), (16, False), (16, True)):
        for attacks in (("auto", *STRONG), OTHERS):
            for model in MODELS:
                yield Cell(model, trained, batch), tuple(attacks)


def network(cell: Cell, data: Dataset, options: argparse.Namespace) -> nn.Module:
    """Build the network of a cell, trained if it asks for that; the training is kept in a file."""
    kind, settings = MODELS[cell.model]
    channels, size, _ = data.train.input_shape
    model = build_model(
        kind, seed=options.seed, in_channels=channels, image_size=size, num_classes=data.train.num_classes, **settings
    )
    if not cell.trained:
        return model.eval()
    path = options.out / f"{cell.model.lower().replace(' ', '_')}.safetensors"
    if not path.exists():
        train(model, data, options)
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    model.load_state_dict(load_file(path))
    return model.eval()


def train(model: nn.Module, data: Dataset, options: argparse.Namespace) -> None:
    rng = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(options.training_steps):
        batch = data.train.batch(torch.randint(len(data.train), (64,), generator=rng))
        optimizer.zero_grad()
        F.cross_entropy(model.train()(batch.inputs), batch.labels).backward()
        optimizer.step()


def victims_of(model: nn.Module, cell: Cell, data: Dataset, options: argparse.Namespace) -> Iterator[Any]:
    """Yield each victim's observation and truth; batch norm runs in evaluation mode."""
    sent = ModelState.of(model)
    order = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(options.seed))
    for number in range(options.victims):
        truth = data.test.batch(order[number * cell.batch : (number + 1) * cell.batch])
        tensors = loss_gradients(model, sent, truth, batch_norm="eval").gradients
        yield (
            Observation(
                id=VictimId(0, 0, number),
                model=model,
                sent=sent,
                upload=Upload(tensors=tensors, num_examples=cell.batch),
                plan=LocalPlan(batch_norm="eval"),
                input_shape=data.train.input_shape,
                num_classes=data.train.num_classes,
            ),
            truth,
        )


def timed(work: Callable[[], list[Reconstruction]]) -> tuple[list[Reconstruction], float]:
    began = time.process_time()
    return work(), time.process_time() - began


def sized(attack: ReconstructionAttack, seen: Sequence[Observation], seconds: float) -> ReconstructionAttack:
    """Set the attack's iterations to as many as fit into ``seconds`` of CPU time, from one start."""
    if not isinstance(attack, GradientInversion):
        return attack
    attack = replace(attack, restarts=1, enough=0.0, compile="off")
    if isinstance(attack.optimizer, LBFGS):
        once = replace(attack, iterations=1)
        more = replace(attack, iterations=2)
    else:
        once, more = replace(attack, iterations=1), replace(attack, iterations=1 + 10 * TRIAL)
    (_, short), (_, long) = (timed(lambda each=each: each(seen, seed=0)) for each in (once, more))
    each = max(long - short, 1e-4) / (more.iterations - 1)
    return replace(attack, iterations=max(1, 1 + int((seconds - short) / each)))


def attacked(cell: Cell, name: str, seconds: float | None, data: Dataset, options: argparse.Namespace) -> Row:
    model = network(cell, data, options)
    seen, truths = zip(*victims_of(model, cell, data, options), strict=True)
    attack: ReconstructionAttack = AutoAttack(evaluations=options.evaluations)
    if name != "auto":
        assert seconds is not None
        attack = sized((STRONG | OTHERS)[name], seen, seconds * len(seen))
    found, took = timed(lambda: attack(seen, seed=options.seed))
    told = {"attack": name, "data": options.data, "evaluations": options.evaluations}
    return Row(**asdict(cell), **told, **figures(attack, found, truths, took))


def figures(
    attack: ReconstructionAttack, found: Sequence[Reconstruction], truths: Sequence[Batch], took: float
) -> dict[str, Any]:
    scores = evaluate_all(found, truths)
    images = [(score.id, image.values["psnr"]) for score in scores for image in score.images if image.values]
    mean = aggregate([min(value, 200.0) for _, value in images], groups=[str(id) for id, _ in images])
    sure = [one.certainty is Certainty.PROVEN for one in found]
    members = [one.member for one in found if one.member]
    return {
        "victims": len(found),
        "iterations": attack.iterations if isinstance(attack, GradientInversion) else None,
        "psnr": mean.mean if mean else float("nan"),
        "low": mean.ci95[0] if mean and mean.ci95 else None,
        "high": mean.ci95[1] if mean and mean.ci95 else None,
        "recognizable_above": RECOGNIZABLE,
        "recognizable": sum(value > RECOGNIZABLE for _, value in images) / max(1, len(images)),
        "proven": sum(sure) / len(found),
        "seconds": took / len(found),
        "members": {member: members.count(member) for member in dict.fromkeys(members)},
        "failures": sum(one.failure is not None for one in found),
    }


def read_rows(path: Path) -> dict[tuple[Cell, str], Row]:
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]
    return {(Cell(row.model, row.trained, row.batch), row.attack): row for row in rows}


def table(rows: Mapping[tuple[Cell, str], Row]) -> str:
    """Tabulate cells by attacks: mean PSNR in dB, share recognizable; what ``auto`` proved and which won."""
    names = [name for name in ("auto", *STRONG, *OTHERS) if any(own == name for _, own in rows)]
    lines = [f"| cell | seconds | proven | {' | '.join(names)} | won |", f"|{'---|' * (len(names) + 4)}"]
    for cell in dict.fromkeys(cell for cell, _ in cells()):
        own = rows.get((cell, "auto"))
        if own is None:
            continue
        first, *others = (shown(rows.get((cell, name))) for name in names)
        best = max((r.psnr for (c, name), r in rows.items() if c == cell and name != "auto"), default=None)
        lead = "" if best is None else f" ({own.psnr - best:+.1f})"
        won = ", ".join(f"{member} {count}" for member, count in own.members.items())
        lines.append(
            " | ".join([f"| {cell}", f"{own.seconds:.1f}", f"{own.proven:.0%}", first + lead, *others, won]) + " |"
        )
    return "\n".join(lines)


def shown(row: Row | None) -> str:
    if row is None:
        return ""
    return "failed" if row.failures == row.victims else f"{row.psnr:.1f}, {row.recognizable:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/auto_table"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--victims", type=int, default=16)
    parser.add_argument(
        "--evaluations", type=int, default=600, help="of auto, for each victim; 600 is attack.budget=quick"
    )
    parser.add_argument("--training-steps", type=int, default=200)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 16], choices=[1, 4, 16])
    parser.add_argument("--presets", nargs="*", default=[*STRONG, *OTHERS], choices=[*STRONG, *OTHERS])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    rows, began = read_rows(path), time.monotonic()
    data = load_data(options.data)
    asked = {"auto", *options.presets}
    found = [(cell, name) for cell, names in cells() for name in names if name in asked]
    wanted = [(c, name) for c, name in found if c.model in options.models and c.batch in options.batches]
    for cell, name in itertools.filterfalse(rows.__contains__, wanted):
        if time.monotonic() - began > 60 * options.minutes:
            break
        own = rows.get((cell, "auto"))
        row = attacked(cell, name, own.seconds if own else None, data, options)
        rows[cell, name] = row
        with path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"{cell}, {name}: {row.psnr:.1f} dB, {row.proven:.0%} proven, {row.seconds:.2f} s", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
