"""Adapters behind the embeddings beside those of ``peft``: the same texts, one step, and who reads what of them.

    python experiments/bottleneck_adapters.py
    python experiments/bottleneck_adapters.py --models minilm --data sst2 --batches 1 8 --updates 2

"Gradient Inversion Attack for Adapter-based Federated LLMs" (2601.17533) puts bottlenecks of its own, linear, ReLU,
linear, ReLU without a way around them, behind the embeddings and each block, and reports ROUGE above 99. Its public
code takes which tokens belong to one text from the truth, and averages ROUGE over texts of which all tokens were found:
*all words there* is the share of these. One line of ``--out``/rows.jsonl for each cell, as it comes;
``--minutes`` ends before the next one, and the same command goes on.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from adapters import LONGEST
from row_file import Row, RowFile
from text_attacks import MODELS
from torch import Tensor, nn

from fl_privacy.attacks import Dager
from fl_privacy.attacks.attack import within
from fl_privacy.attacks.text import BagOfWords
from fl_privacy.data import TextExamples, load_text
from fl_privacy.measure import evaluate_all
from fl_privacy.models import ADAPTED, TextModel, build_fitting, with_adapters
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.transformers import Bert
from fl_privacy.types import Batch, Certainty, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

KINDS = ("bottleneck d/2", "bottleneck d/8", "peft d/2", "peft 16", "peft 4")
"""Of adapters: a bottleneck's units are a share of the width, peft's LoRA has a rank."""

TRAINED = {"bottleneck": ["*.adapter.*", "classifier.*"], "peft": list(ADAPTED)}


class Bottlenecked(nn.Module):
    """A layer and an adapter behind it: what enters it, narrowed and widened, each time through ReLU.

    Args:
        base: whose first argument and output are (..., d).
        width: d.
        units: of the bottleneck.
    """

    def __init__(self, base: nn.Module, width: int, units: int) -> None:
        super().__init__()
        self.base = base
        self.adapter = nn.Sequential(nn.Linear(width, units), nn.ReLU(), nn.Linear(units, width), nn.ReLU())

    def forward(self, *inputs: Tensor, **settings: bool) -> Tensor:
        adapted: Tensor = self.adapter(self.base(*inputs, **settings))
        return adapted


class BottleneckedBert(Bert):
    """An encoder with adapters behind its embeddings and its blocks."""

    @property
    def entry_norm(self) -> None:  # type: ignore[override]
        """Return none: what leaves the norm enters an adapter before it enters attention."""
        return None

    @property
    def attention_weights(self) -> Sequence[tuple[str, ...]]:
        """Return the names of attention's weights, within what the adapters are behind."""
        return [tuple(n.replace(".attention", ".base.attention") for n in names) for names in super().attention_weights]


def with_bottlenecks(base: Bert, units: int) -> TextModel:
    """Copy ``base`` with adapters of this many units."""
    model, width = copy.deepcopy(base), base.words.embedding_dim
    model.__class__ = BottleneckedBert
    model.embedding_norm = Bottlenecked(model.embedding_norm, width, units)  # type: ignore[assignment]
    model.blocks = nn.ModuleList(Bottlenecked(block, width, units) for block in model.blocks)
    return model


def adapted(base: TextModel, kind: str) -> TextModel:
    """Copy ``base`` with adapters of a kind, as drawn."""
    assert isinstance(base, Bert)
    torch.manual_seed(0)
    name, size = kind.split()
    width = base.words.embedding_dim
    units = width // int(size.removeprefix("d/")) if size.startswith("d/") else int(size)
    made = with_bottlenecks(base, units) if name == "bottleneck" else with_adapters(base, rank=units)
    return made.eval()


def observed(model: TextModel, examples: TextExamples, truths: Sequence[Batch], kind: str) -> list[Observation]:
    """Observe the gradient of what clients train, in the first step."""
    plan, state = LocalPlan(trained=TRAINED[kind.partition(" ")[0]]), ModelState.of(model)
    held, seen = plan.held(state.parameters), []
    for number, truth in enumerate(truths):
        gradients = loss_gradients(model, state, truth).gradients
        tensors = {name: g for name, g in gradients.items() if name not in held}
        seen.append(
            Observation(
                id=VictimId(1, number, 0),
                model=model,
                sent=state,
                upload=Upload(tensors=tensors, num_examples=len(truth.inputs)),
                plan=plan,
                input_shape=examples.input_shape,
                num_classes=examples.num_classes,
                knowledge=Knowledge(lengths=(truth.inputs >= 0).sum(1)),
            )
        )
    return seen


def measured(model: TextModel, examples: TextExamples, cell: Row, options: argparse.Namespace) -> Row:
    """Measure one cell: words, texts whose words were all named, texts read whole."""
    size = cell["batch"]
    truths = [examples.batch(torch.arange(k * size, (k + 1) * size)) for k in range(options.updates)]
    seen = observed(model, examples, truths, cell["adapters"])
    began = time.process_time()
    found = BagOfWords()(seen, seed=0)
    guesses = list(found)
    if size == 1 and cell["adapters"].startswith("peft"):
        with within(options.seconds):
            read = Dager()(seen, seed=0)
        guesses = [r if r.batch is not None else b for r, b in zip(read, found, strict=True)]
    seconds = (time.process_time() - began) / len(seen)
    special = examples.vocabulary.special
    named = [set() if one.words is None else set(one.words.tolist()) - special for one in found]
    words = [[set(t[t >= 0].tolist()) - special for t in truth.inputs] for truth in truths]
    union = [set().union(*own) for own in words]
    f1 = [2 * len(n & u) / max(1, len(n) + len(u)) for n, u in zip(named, union, strict=True)]
    turned = [2 * len(n & u) / max(1, len(n) + len(u)) for n, u in zip([*named[1:], named[0]], union, strict=True)]
    images = [i for score in evaluate_all(guesses, truths, language=examples.vocabulary) for i in score.images]
    exact = [i.values.get("exact_match", 0.0) for i in images]
    sure = [i.certainty is Certainty.PROVEN for i in images]
    return {
        "trained_numbers": sum(t.numel() for t in seen[0].upload.tensors.values()),
        "words": round(statistics.fmean(map(len, union)), 1),
        "f1": round(statistics.fmean(f1), 3),
        "control_f1": round(statistics.fmean(turned), 3),
        "false_words": sum(len(n - u) for n, u in zip(named, union, strict=True)),
        "all_words_there": round(statistics.fmean(w <= n for n, own in zip(named, words, strict=True) for w in own), 3),
        "exact": round(statistics.fmean(exact), 3),
        "rouge_l": round(statistics.fmean(i.values.get("rouge_l", 0.0) for i in images), 3),
        "wrongly_proven": sum(s and not e for s, e in zip(sure, exact, strict=True)),
        "cpu_seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["bert_tiny", "minilm"], default=["bert_tiny"])
    parser.add_argument("--data", nargs="+", default=["sst2", "cola", "rotten_tomatoes"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--adapters", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--updates", type=int, default=4, help="of each cell")
    parser.add_argument("--seconds", type=float, default=30, help="of DAGER for a cell")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path("experiments/rows/bottleneck_adapters"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, began = RowFile(options.out), time.monotonic()
    for name, data in product(options.models, options.data):
        make, settings = MODELS[name]
        loaded = load_text(data, max_length=LONGEST[name], **settings)  # type: ignore[arg-type]
        base, examples = build_fitting(make, loaded.train.architecture, seed=0), loaded.train
        assert isinstance(base, TextModel) and isinstance(examples, TextExamples)
        for batch, kind in product(options.batches, options.adapters):
            cell: Row = {"model": name, "data": data, "batch": batch, "adapters": kind, "updates": options.updates}
            if rows.find(cell) is not None:
                continue
            if time.monotonic() - began > 60 * options.minutes:
                return
            print(rows.add(cell, measured(adapted(base, kind), examples, cell, options)), flush=True)


if __name__ == "__main__":
    main()
