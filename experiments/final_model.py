"""What the finished model remembers of its members, by who sees what, and by how many reference models.

    python experiments/final_model.py --out experiments/rows/final_model
    python experiments/final_model.py --cells mlp resnet20 --minutes 10

Four clients train; members and others are asked about, and further examples are the attacker's: ``CELLS`` has their
numbers, at least 1,000 others except for the instructions, which are 1,000 in all. The control asks the same of clients
that trained on none of them, with the same reference models. One line of ``--out``/rows.jsonl for each cell and method,
as it comes; ``--minutes`` ends before the next cell, and the same command goes on. Epsilon is the accountant's for
Poisson sampling; batches here are drawn without replacement. ``cpu_seconds`` are without the control.
"""

import argparse
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from observed_rounds import observed_rounds
from row_file import Row, RowFile
from torch import Tensor, nn

from fl_privacy.attacks.inference import ReadRound
from fl_privacy.attacks.inference.membership import METHODS
from fl_privacy.attacks.inference.shadow_models import MethodOptions, ReferenceModels
from fl_privacy.data import LabelledExamples, load_data, load_text
from fl_privacy.defenses import Defense, dp_sgd
from fl_privacy.defenses.privacy import noise_multiplier_for
from fl_privacy.measure.roc import Separation, auc, auc_bound, tpr_at, tpr_bound
from fl_privacy.models import ADAPTED, MLP, ResNet20, TextModel, build_fitting, gpt_tiny, with_adapters
from fl_privacy.types import Batch, LocalPlan

CLIENTS, BATCH, DELTA = 4, 16, 1e-5
REFERENCES = (4, 2, 1)
NAMES = ("rmia", "lira", "stacked")
BY_SERVER = ("loss", "fedmia_loss", "rmia")
RATES = (0.001, 0.01)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A training whose members are asked about."""

    model: str
    data: str
    rounds: int
    epochs: int = 2
    lr: float = 0.05
    adapters: int = 0
    epsilon: float = math.inf
    members: int
    others: int
    public: int


IMAGES = {"data": "cifar10", "members": 400, "others": 2000, "public": 800}
TEXTS = {"model": "gpt_tiny", "rounds": 4, "epochs": 4, "lr": 2e-3}
SMALL = {"members": 200, "others": 1000, "public": 400}
CELLS = {
    "mlp": Cell(model="mlp", rounds=5, epochs=10, lr=0.02, **IMAGES),
    "mlp, epsilon 8": Cell(model="mlp", rounds=5, epochs=10, lr=0.02, epsilon=8, **IMAGES),
    "mlp, epsilon 2": Cell(model="mlp", rounds=5, epochs=10, lr=0.02, epsilon=2, **IMAGES),
    "mlp, epsilon 0.5": Cell(model="mlp", rounds=5, epochs=10, lr=0.02, epsilon=0.5, **IMAGES),
    "mlp, 1 round": Cell(model="mlp", rounds=1, epochs=10, lr=0.02, **IMAGES),
    "gpt_tiny, sst2": Cell(data="sst2", **TEXTS, **SMALL),
    "gpt_tiny, instructions": Cell(data="instructions", **TEXTS, members=200, others=300, public=300),
    "gpt_tiny, sst2, LoRA": Cell(data="sst2", adapters=8, **TEXTS, **SMALL),
    "resnet20": Cell(model="resnet20", data="cifar10", rounds=4, epochs=5, **SMALL),
}


def examples_and_model(cell: Cell) -> tuple[LabelledExamples, nn.Module]:
    torch.manual_seed(0)
    if cell.data == "cifar10":
        examples = load_data("cifar10").train
        make = partial(MLP, widths=(128,)) if cell.model == "mlp" else partial(ResNet20, width=8)
        return examples, build_fitting(make, examples.architecture, seed=0)
    columns = {"text_column": "output", "label_column": "input"} if cell.data == "instructions" else {}
    tokens = {"tokenizer": "bpe", "vocabulary_size": 1000, "max_length": 24}
    examples = load_text(cell.data, target="next_token", **tokens, **columns).train  # type: ignore[arg-type]
    model = build_fitting(gpt_tiny, examples.architecture, seed=0)
    assert isinstance(model, TextModel)
    return examples, with_adapters(model, rank=cell.adapters) if cell.adapters else model


def trained(
    cell: Cell, examples: LabelledExamples, model: nn.Module, owned: Sequence[Tensor], known: tuple[Batch, Batch]
) -> Iterator[ReadRound]:
    """Train on the examples at ``owned``, one part for each client; yield what the server sees of each round.

    ``known`` are the candidates and the attacker's examples.
    """
    text = cell.data != "cifar10"
    plan = LocalPlan(
        shares="delta",
        lr=cell.lr,
        epochs=cell.epochs,
        batch_size=BATCH,
        optimizer="adamw" if text else "sgd",
        momentum=0.0 if text else 0.9,
        trained=list(ADAPTED) if cell.adapters else [],
    )
    steps = cell.rounds * cell.epochs * math.ceil(cell.members / CLIENTS / BATCH)
    defense = Defense()
    if math.isfinite(cell.epsilon):
        rate = BATCH * CLIENTS / cell.members
        noise = noise_multiplier_for(epsilon=cell.epsilon, sample_rate=rate, steps=steps, delta=DELTA)
        defense = dp_sgd(noise_multiplier=noise, clip_norm=1.0)
    seen_by_server = observed_rounds(model, examples, owned, plan, rounds=cell.rounds, defense=lambda: defense)
    for number, seen in enumerate(seen_by_server, 1):
        left = cell.rounds - number
        yield ReadRound(observations=tuple(seen), candidates=known[0], public=known[1], remaining=left, seed=0)


def of_the_others(read: ReadRound) -> ReadRound:
    """Return what client 0 sees: the mean of the other clients' uploads, as one client's."""
    first, *_ = others = read.observations[1:]
    mean = {n: torch.stack([o.upload.tensors[n] for o in others]).mean(0) for n in first.upload.tensors}
    return replace(read, observations=(replace(first, upload=replace(first.upload, tensors=mean)),))


def answered(
    cell: Cell, reads: Iterator[ReadRound], course: ReferenceModels
) -> tuple[dict[tuple[str, str, int], Tensor], float]:
    """Return scores (N, K) by who sees what, method and number of reference models, and CPU seconds of references."""
    options, ids, seconds = MethodOptions(course=course), list(range(CLIENTS)), 0.0
    size = cell.members + cell.others
    methods = {("server", name, 0): METHODS[name](size, ids, options) for name in BY_SERVER}
    methods |= {("another site", "loss", 0): METHODS["loss"](size, ids, options)}
    methods |= {("outsider", "final_loss", 0): METHODS["final_loss"](size, ids, options)}
    for number in REFERENCES:
        few = replace(options, references=number)
        for who, models in (("outsider", "final"), ("another site", "rounds")):
            for name in NAMES if number > 1 else NAMES[:2]:
                methods[who, f"{models}_{name}", number] = METHODS[f"{models}_{name}"](size, ids, few)
    for read in reads:
        began = time.process_time()
        course.see(read, REFERENCES[0])
        seconds += (time.process_time() - began) * (read.remaining == 0)
        for (who, name, _), method in methods.items():
            method.add(of_the_others(read) if (who, name) == ("another site", "loss") else read)
    return {key: method.scores() for key, method in methods.items()}, seconds


def separated(cell: Cell, scores: Tensor, who: str, name: str) -> Separation:
    """Pair members with their own client, and others with any; of another site's sum, members of the others alone."""
    part = cell.members // CLIENTS
    owner = torch.cat([torch.arange(CLIENTS).repeat_interleave(part), torch.arange(cell.others) % CLIENTS])
    summed = (who, name) == ("another site", "loss")
    picked = scores[torch.arange(len(scores)), owner.clamp(1, 1) if summed else owner].double()
    first = part if summed else 0
    return Separation(positives=picked[first : cell.members].numpy(), negatives=picked[cell.members :].numpy())


def rows_of(cell: Cell, kept: Path) -> Iterator[tuple[Row, Row]]:
    examples, model = examples_and_model(cell)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    sizes = [cell.members, cell.others, cell.public, cell.members]
    members, others, public, strangers = torch.split(order[: sum(sizes)], sizes)
    known = examples.batch(torch.cat([members, others])), examples.batch(public)
    own, control = ReferenceModels(), ReferenceModels()
    of_cell = replace(cell, epsilon=math.inf)  # reference models are trained without the defense
    place = kept / f"{hashlib.sha256(repr(of_cell).encode()).hexdigest()[:12]}.pt"
    own_references = not place.is_file()
    if not own_references:
        own.references, own.inside, own.trained = torch.load(place)
    began = time.process_time()
    found, seconds = answered(cell, trained(cell, examples, model, members.view(CLIENTS, -1), known), own)
    every = time.process_time() - began
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save((own.references, own.inside, own.trained), place)
    turned = {}
    if math.isinf(cell.epsilon):
        control.references, control.inside, control.trained = own.references, own.inside, own.trained
        turned, _ = answered(cell, trained(cell, examples, model, strangers.view(CLIENTS, -1), known), control)
    for who, name, number in found:
        key = who, name, number
        scores, without = (separated(cell, each[key], who, name) if each else None for each in (found, turned))
        assert scores is not None
        figures: Row = {"members": len(scores.positives), "others": len(scores.negatives)}
        measures = {"auc": auc, **{f"tpr_at_{100 * r:g}_percent": partial(tpr_at, fpr=r) for r in RATES}}
        for label, measure in measures.items():
            if (estimate := measure(scores)) is None:  # fewer than 1,000 others
                continue
            ends = [round(estimate.low, 4), round(estimate.high, 4)]
            figures[label] = {"mean": round(estimate.value, 4), "ci95": ends}
            if without is not None and (unrelated := measure(without)) is not None:
                figures[f"{label}_control"] = round(unrelated.value, 4)
        if math.isfinite(cell.epsilon):
            allowed = tpr_bound(torch.tensor(RATES).numpy(), epsilon=cell.epsilon, delta=DELTA)
            figures |= {
                f"tpr_bound_at_{100 * r:g}_percent": round(float(b), 4) for r, b in zip(RATES, allowed, strict=True)
            }
            figures["auc_bound"] = round(auc_bound(epsilon=cell.epsilon, delta=DELTA), 4)
        figures |= {"cpu_seconds": round(every, 1)}
        if own_references:
            figures["cpu_seconds_of_references"] = round(seconds, 1)
        yield {"who": who, "method": name, "references": number}, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=Path("experiments/rows/final_model"))
    parser.add_argument(
        "--kept", type=Path, default=Path("runs/final_model"), help="folder of reference models' signals"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, began = RowFile(options.out), time.monotonic()
    for name in options.cells:
        if rows.find({"cell": name}) is not None:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            break
        made: Sequence[tuple[Row, Row]] = list(rows_of(CELLS[name], options.kept))
        for key, figures in made:
            print(rows.add({"cell": name, **key}, figures), flush=True)


if __name__ == "__main__":
    main()
