"""What adapters give away: LoRA by rank, batch, round, optimizer and precision, beside a control of other texts.

    python experiments/adapters.py --models bert_tiny gpt_tiny minilm
    python experiments/adapters.py --page

One line of ``--out``/rows.jsonl for each cell, as it comes; ``--minutes`` ends before the next one, and the same
command goes on. A cell is the upload of one step, weights as ``peft`` saves them, with B still zero (step 1) or after
nine steps on texts of others (step 10). Words are read by the bag of words from the first block, single texts by DAGER
as well; the control compares what was read with the texts of another client.
"""

import argparse
import copy
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from row_file import Row, RowFile
from text_attacks import MODELS

from fl_privacy.attacks import Dager
from fl_privacy.attacks.attack import within
from fl_privacy.attacks.text import BagOfWords
from fl_privacy.data import TextExamples, load_text
from fl_privacy.measure import evaluate_all
from fl_privacy.models import ADAPTED, TextModel, build_fitting, with_adapters
from fl_privacy.types import Batch, Certainty, Knowledge, LocalPlan, ModelState, Observation, Tensors, Upload, VictimId

PAGE = Path(__file__).resolve().parents[1] / "docs" / "adapters.md"
RANKS, BATCHES, STEPS = (4, 8, 16, 64), (1, 4, 16), (1, 10)
OPTIMIZERS = {"sgd": 0.1, "adamw": 2e-4}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LONGEST = {"bert_tiny": 24, "gpt_tiny": 24, "minilm": 16}
"""Tokens of a text, at most."""
VICTIMS = {1: 4, 4: 3, 16: 2}
"""Updates of each batch size."""
LEAST = 0.05
"""Least F1 of a row of the page's tables."""


def trained(model: TextModel, batch: Batch, optimizer: str, dtype: torch.dtype) -> Tensors:
    """Return the adapters and the head after one step in ``dtype``, as float32; ``model`` keeps its values."""
    client = copy.deepcopy(model).to(dtype)
    plan = LocalPlan(trained=list(ADAPTED))
    held = plan.held(dict(client.named_parameters()))
    moved = {name: p for name, p in client.named_parameters() if name not in held}
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    step = kinds[optimizer](moved.values(), lr=OPTIMIZERS[optimizer], weight_decay=0.0)
    logits = client(batch.inputs)
    loss = F.cross_entropy(logits.float(), batch.labels, ignore_index=-100)
    for parameter in client.parameters():
        parameter.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    step.step()
    return {name: p.detach().float() for name, p in moved.items()}


def batches(examples: TextExamples, size: int, number: int, *, begin: int) -> Iterator[Batch]:
    """Yield batches of ``size`` texts, one after the other."""
    for k in range(number):
        yield examples.batch(torch.arange(begin + k * size, begin + (k + 1) * size))


def advanced(model: TextModel, examples: TextExamples, steps: int, cell: Row) -> TextModel:
    """Copy ``model`` after ``steps`` steps of the server on texts of others."""
    model = copy.deepcopy(model)
    for batch in batches(examples, cell["batch"], steps, begin=3000):
        found = trained(model, batch, cell["optimizer"], DTYPES[cell["dtype"]])
        for name, value in found.items():
            model.get_parameter(name).data.copy_(value)
    return model


def observed(model: TextModel, examples: TextExamples, cell: Row) -> tuple[list[Observation], list[Batch]]:
    """Observe the uploads of a cell, and return the truth too."""
    dtype = DTYPES[cell["dtype"]]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    sent, name = ModelState.of(model), cell["optimizer"]
    plan = LocalPlan(
        trained=list(ADAPTED), shares="weights", optimizer=name, lr=OPTIMIZERS[name], steps=1, batch_size=cell["batch"]
    )
    truths = list(batches(examples, cell["batch"], VICTIMS[cell["batch"]], begin=0))
    seen = [
        Observation(
            id=VictimId(1, k, 0),
            model=model,
            sent=sent,
            upload=Upload(tensors=trained(model, truth, name, dtype), num_examples=len(truth.inputs)),
            plan=plan,
            input_shape=examples.input_shape,
            num_classes=examples.num_classes,
            knowledge=Knowledge(lengths=(truth.inputs >= 0).sum(1)),
        )
        for k, truth in enumerate(truths)
    ]
    return seen, truths


def _f1(guess: set[int], truth: set[int]) -> tuple[float, float, float]:
    common = len(guess & truth)
    precision, recall = common / max(1, len(guess)), common / max(1, len(truth))
    return precision, recall, 2 * common / max(1, len(guess) + len(truth))


def _said_alike(notes: Sequence[str]) -> float:
    """Return how many words the attack itself says may be named for no more than being like others."""
    found = [re.search(r"and (\d+) may be named for no more than being like others", note) for note in notes]
    return sum(float(match[1]) for match in found if match)


def measured(model: TextModel, examples: TextExamples, cell: Row, options: argparse.Namespace) -> Row:
    """Measure one cell."""
    model = advanced(model, examples, cell["step"] - 1, cell)
    seen, truths = observed(model, examples, cell)
    began = time.process_time()
    bags = BagOfWords()(seen, seed=0)
    exact = list(bags)
    if cell["batch"] == 1:
        with within(options.seconds):
            read = Dager()(seen, seed=0)
        exact = [
            one if one.certainty is not Certainty.APPROXIMATE or b.batch is None else b
            for one, b in zip(read, bags, strict=True)
        ]
    seconds = (time.process_time() - began) / len(seen)
    special = examples.vocabulary.special
    named = [set() if b.words is None else set(b.words.tolist()) - special for b in bags]
    words = [set(t.inputs[t.inputs >= 0].tolist()) - special for t in truths]
    own = [_f1(guess, truth) for guess, truth in zip(named, words, strict=True)]
    turned = [_f1(guess, truth) for guess, truth in zip([*named[1:], named[0]], words, strict=True)]
    images = [i for score in evaluate_all(exact, truths, language=examples.vocabulary) for i in score.images]
    sure = [i.certainty is Certainty.PROVEN for i in images]
    right = [i.values.get("exact_match", 0.0) for i in images]
    said = [note for bag in bags for note in bag.notes if "expected to be false" in note]

    def mean(values: Sequence[float]) -> float:
        return round(statistics.fmean(values), 4)

    return {
        "texts": len(images),
        "tokens": mean([len(truth) for truth in words]),
        "precision": mean([p for p, _, _ in own]),
        "recall": mean([r for _, r, _ in own]),
        "f1": mean([f for _, _, f in own]),
        "named": mean([len(guess) for guess in named]),
        "false": mean([len(guess - truth) for guess, truth in zip(named, words, strict=True)]),
        "expected_false": said[0].split("; ")[1].partition(" are expected")[0] if said else "",
        "alike": mean([_said_alike(bag.notes) for bag in bags]),
        "exact": mean(right),
        "rouge_l": mean([i.values.get("rouge_l", 0.0) for i in images]),
        "proven": mean([float(s) for s in sure]),
        "wrongly_proven": sum(s and not e for s, e in zip(sure, right, strict=True)),
        "control_f1": mean([f for _, _, f in turned]),
        "cpu_seconds": round(seconds, 2),
    }


def cells(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the cells, small ranks last: what is read most comes first."""
    for model, dtype, optimizer in product(options.models, DTYPES, OPTIMIZERS):
        for rank, batch, step in product(sorted(options.ranks, reverse=True), options.batches, STEPS):
            yield {"model": model, "rank": rank, "batch": batch, "step": step, "optimizer": optimizer, "dtype": dtype}


def table(rows: RowFile, model: str) -> str:
    """Write the rows of ``model`` as a table: F1 of words and what was read of the texts, by rank and batch."""
    ranks = [r for r in RANKS if rows.find({"model": model, "rank": r})]
    heads = [f"step {step}: r={ranks[0]}" if rank == ranks[0] else f"r={rank}" for step in STEPS for rank in ranks]
    lines = ["| Trained | Batch | Words | " + " | ".join(heads) + " |", "|---|---|---|" + "---|" * len(heads)]
    left_out = []
    for optimizer, dtype, batch in product(OPTIMIZERS, DTYPES, BATCHES):
        key = {"model": model, "optimizer": optimizer, "dtype": dtype, "batch": batch}
        found = [rows.find({**key, "step": step, "rank": rank}) for step in STEPS for rank in ranks]
        if all(found) and all(row["f1"] < LEAST for row in found if row):
            left_out.append(f"{optimizer}, {dtype}, batch {batch}")
        elif any(found):
            words = next(f"{row['tokens']:.0f}" for row in found if row)
            shown = ["-" if row is None else f"{row['f1']:.2f}" + _exact(row) for row in found]
            lines.append(f"| {optimizer}, {dtype} | {batch} | {words} | " + " | ".join(shown) + " |")
    below = f"\n\nBelow {LEAST:g} at every rank and step: {'; '.join(left_out)}." if left_out else ""
    return "\n".join(lines) + below


def _exact(row: Row) -> str:
    said = [f"{row['exact']:.0%} exact"] if row["exact"] else []
    said += [f"{row['proven']:.0%} proven"] if row["proven"] else []
    alike = f" of {row['alike']:.3g} alike" if "alike" in row else ""
    said += [f"{row['false']:.3g} false{alike}"] if row["false"] else []
    return f" ({', '.join(said)})" if said else ""


def _false_of_each(rows: Sequence[Row]) -> str:
    """Say of each model how many of the words named are not there."""
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        named, false = (sum(row[name] for row in rows if row["model"] == model) for name in ("named", "false"))
        told.append(f"{model} {named:.0f}, {false:.0f} of them false")
    return ", ".join(told)


def page(rows: RowFile) -> str:
    """Write the page of all rows."""
    every = rows.rows
    seconds = statistics.median(row["cpu_seconds"] for row in every)
    alike = any("alike" in row and row["false"] for row in every)
    parts = [
        "# Adapters, cell by cell",
        "<!-- Written by experiments/adapters.py --page; do not edit. -->",
        "What the upload of one step reveals of SST-2 sentences when clients train the head and LoRA adapters next to"
        " queries and values, by `experiments/adapters.py`. Figures are the F1 of an update's different words, without"
        " special tokens. In *step 1* B is still zero; *step 10* follows nine steps on others' texts."
        f" Learning rates are {OPTIMIZERS['sgd']:g} (SGD) and {OPTIMIZERS['adamw']:g} (AdamW). *Words* is the number of"
        " different words of an update. In brackets: shares of texts reconstructed word for word and proven, and the"
        " mean number of named words that are in no text"
        + (", *alike* those that the attack itself marks as named for their likeness only" if alike else "")
        + ".",
        f"In {len(every)} cells {sum(row['wrongly_proven'] for row in every)} texts were wrongly proven. Named words:"
        f" {_false_of_each(every)}; a pretrained model's false words mostly have embeddings like those of true ones."
        " The control, the same words against another client's texts, has an F1 of at most"
        f" {max(row['control_f1'] for row in every):.2f}. The median cost is {seconds:.1f} CPU seconds an update.",
    ]
    for model in dict.fromkeys(row["model"] for row in every):
        longest = LONGEST[model]
        parts += [f"## {model}, {longest} tokens at most", table(rows, model)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=LONGEST, default=list(LONGEST))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--data", default="sst2")
    parser.add_argument("--seconds", type=float, default=60, help="of DAGER for a cell")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} from the rows, and no more")
    parser.add_argument("--out", type=Path, default=Path("experiments/rows/adapters"))
    options = parser.parse_args()
    rows, began = RowFile(options.out), time.monotonic()
    if options.page:
        PAGE.write_text(page(rows), encoding="utf-8")
        return
    torch.set_num_threads(1)
    built: dict[tuple[str, int], tuple[TextModel, TextExamples]] = {}
    for cell in cells(options):
        key = {"data": options.data, "max_length": LONGEST[cell["model"]], **cell}
        if rows.find(key) is not None:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            break
        name = (cell["model"], cell["rank"])
        if name not in built:
            make, settings = MODELS[cell["model"]]
            data = load_text(options.data, max_length=LONGEST[cell["model"]], **settings)  # type: ignore[arg-type]
            base = build_fitting(make, data.train.architecture, seed=0)
            assert isinstance(base, TextModel) and isinstance(data.train, TextExamples)
            torch.manual_seed(0)
            built[name] = with_adapters(base, rank=cell["rank"]).eval(), data.train
        print(rows.add(key, measured(*built[name], cell, options)), flush=True)


if __name__ == "__main__":
    main()
