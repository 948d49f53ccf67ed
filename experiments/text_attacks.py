"""What attacks read of texts: DAGER by batch and behind defenses, descents beside Refiner's Table 13, SAPAG beside DLG.

python experiments/text_attacks.py dager --model minilm --batches 1 8 32 --out runs/text
python experiments/text_attacks.py defended --model minilm --out runs/text
python experiments/text_attacks.py descents --model minilm --frozen --out runs/text
python experiments/text_attacks.py sapag --victims 20 --width 200 --out runs/text
python experiments/text_attacks.py together --victims 32 --out runs/text

Every row is kept in a file of ``--out`` as soon as it is there, and not computed again.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from row_file import Row, RowFile

from fl_privacy.attacks import Dager, ReconstructionAttack, adam_dlg, inverting_gradients, sapag, tag
from fl_privacy.data import Dataset, TextExamples, load_text
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.defenses.compression import pruning, quantization
from fl_privacy.defenses.noise import dp_noise
from fl_privacy.federation import Client
from fl_privacy.metrics import evaluate_all
from fl_privacy.models import TextModel, TransformerLM, bert_mini, bert_tiny, build_fitting, gpt_tiny, minilm
from fl_privacy.types import Batch, Certainty, Knowledge, LocalPlan, ModelState, Observation, VictimId

MODELS: dict[str, tuple[Callable[..., TextModel], dict[str, str]]] = {
    "bert_tiny": (bert_tiny, {}),
    "bert_mini": (bert_mini, {}),
    "minilm": (minilm, {"tokenizer": "minilm"}),
    "gpt_tiny": (gpt_tiny, {"tokenizer": "bpe", "target": "next_token"}),
}
DEFENSES: dict[str, Callable[[], Defense]] = {
    "none": Defense,
    "dp_noise 0.001": lambda: dp_noise(scale=1e-3),
    "pruning 0.2": lambda: pruning(rate=0.2),
    "quantization 8 bits": lambda: quantization(bits=8),
}


def observe(
    model: TextModel, data: Dataset, batch_size: int, victim: int, *, plan: LocalPlan, defense: Defense, seed: int
) -> tuple[Observation, Batch]:
    """The upload of one batch of test texts, and these."""
    examples = data.test
    assert isinstance(examples, TextExamples)
    client = Client(
        id=0, examples=examples, indices=torch.arange(len(examples)), model=model, plan=plan, defense=defense, seed=seed
    )
    sent = ModelState.of(model)
    upload = client.probe(sent, ClientState(), round=1, probe=victim, batch_size=batch_size).upload
    truth = client.victim_batch(victim, batch_size)
    seen = Observation(
        id=VictimId(1, 0, victim),
        model=model,
        sent=sent,
        upload=upload,
        plan=plan.in_round(1, probe=True),
        input_shape=examples.input_shape,
        num_classes=examples.num_classes,
        knowledge=Knowledge(lengths=(truth.inputs >= 0).sum(1)),
    )
    return seen, truth


def row_of(
    attack: ReconstructionAttack, seen: Sequence[Observation], truths: Sequence[Batch], data: Dataset
) -> dict[str, Any]:
    """Figures of ``attack``: means over the texts, an attack that failed read nothing."""
    assert isinstance(data.test, TextExamples)
    began = time.process_time()
    found = attack(seen, seed=0)
    seconds = (time.process_time() - began) / len(seen)
    images = [i for score in evaluate_all(found, truths, language=data.test.vocabulary) for i in score.images]
    exact = [i.values.get("exact_match", 0.0) for i in images]
    wrong = sum(i.certainty is Certainty.PROVEN and not e for i, e in zip(images, exact, strict=True))

    def mean(name: str) -> float:
        return sum(i.values.get(name, 0.0) for i in images) / len(images)

    return {
        "texts": len(images),
        "tokens": sum(int((t.inputs >= 0).sum()) for t in truths) // len(truths),
        "exact": sum(exact) / len(images),
        "token_f1": mean("token_f1"),
        "rouge_l": mean("rouge_l"),
        "proven": sum(one.certainty is Certainty.PROVEN for one in found) / len(found),
        "wrongly_proven": wrong,
        "failed": sum(one.batch is None for one in found),
        "cpu_seconds": round(seconds, 2),
    }


class Table:
    """Rows in a folder, each written as soon as it is there."""

    def __init__(self, folder: Path) -> None:
        self._rows = RowFile(folder)

    def add(self, key: Row, make: Callable[[], Row]) -> None:
        """The row of ``key``, made if it is not there yet, and print it."""
        row = self._rows.find(key) or self._rows.add(key, make())
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print("| " + " | ".join(f"{k} {v}" for k, v in shown.items()) + " |", flush=True)


def prepared(options: argparse.Namespace) -> tuple[Dataset, TextModel]:
    """Data and model of ``--model``."""
    make, settings = MODELS[options.model]
    data = load_text(options.data, max_length=options.max_length, **settings)  # type: ignore[arg-type]
    model = build_fitting(make, data.train.architecture, seed=options.seed)
    assert isinstance(model, TextModel)
    return data, model


def dager_rows(options: argparse.Namespace, table: Table) -> None:
    """By batch, and behind defenses."""
    data, model = prepared(options)
    plans = {"gradient": LocalPlan(), "4 local steps": LocalPlan(shares="delta", lr=1e-3, steps=4, batch_size=1)}
    jobs = [(b, "none", "gradient") for b in options.batches]
    if options.what == "defended":
        jobs = [(1, name, "gradient") for name in DEFENSES] + [(4, "none", "4 local steps")]
    for batch, defense, plan in jobs:

        def make(batch: int = batch, defense: str = defense, plan: str = plan) -> dict[str, Any]:
            made = [
                observe(model, data, batch, v, plan=plans[plan], defense=DEFENSES[defense](), seed=options.seed)
                for v in range(options.victims)
            ]
            return row_of(Dager(), [seen for seen, _ in made], [truth for _, truth in made], data)

        key = {"attack": "dager", "model": options.model, "batch": batch, "defense": defense, "shares": plan}
        table.add({**key, "victims": options.victims, "max_length": options.max_length}, make)


def descent_rows(options: argparse.Namespace, table: Table) -> None:
    """TAG and InvertingGrad, undefended and behind what Refiner's Table 13 has."""
    data, model = prepared(options)
    plan = LocalPlan(frozen=[model.word_weight] if options.frozen else [])
    attacks = {
        "TAG": tag(iterations=options.iterations),
        "InvertingGrad": inverting_gradients(iterations=options.iterations),
    }
    for defense in ("none", "pruning 0.2", "dp_noise 0.001"):
        made = [
            observe(model, data, 1, v, plan=plan, defense=DEFENSES[defense](), seed=options.seed)
            for v in range(options.victims)
        ]
        seen, truths = [s for s, _ in made], [t for _, t in made]
        for name, attack in attacks.items():
            key = {"attack": name, "model": options.model, "defense": defense, "frozen": options.frozen}
            key |= {"iterations": options.iterations, "victims": options.victims}
            table.add(key, lambda attack=attack, seen=seen, truths=truths: row_of(attack, seen, truths, data))


def sapag_rows(options: argparse.Namespace, table: Table) -> None:
    """SAPAG beside DLG with AdamW on its language model, 15 words each, labels told as in neither paper's text."""
    data = load_text(options.data, tokenizer="words", vocabulary_size=1000, max_length=15)
    model = build_fitting(TransformerLM, data.train.architecture, seed=options.seed, width=options.width)
    assert isinstance(model, TextModel)
    made = [
        observe(model, data, 1, v, plan=LocalPlan(), defense=Defense(), seed=options.seed)
        for v in range(options.victims)
    ]
    seen, truths = [s for s, _ in made], [t for _, t in made]
    attacks = {
        "SAPAG": sapag(optimizer="adamw", lr=0.05, labels="auto", iterations=options.iterations),
        "DLG": adam_dlg(lr=0.05, labels="auto", reading="pseudo_inverse", iterations=options.iterations),
    }
    for name, attack in attacks.items():
        key = {"attack": name, "width": options.width, "iterations": options.iterations, "victims": options.victims}
        table.add(key, lambda attack=attack: row_of(attack, seen, truths, data))


def together_rows(options: argparse.Namespace, table: Table) -> None:
    """CPU seconds of TAG on so many victims at once, and on one after the other."""
    data, model = prepared(options)
    made = [
        observe(model, data, 1, v, plan=LocalPlan(), defense=Defense(), seed=options.seed)
        for v in range(options.victims)
    ]
    attack = tag(iterations=options.iterations, compile="off")
    few = max(2, options.victims // 8)

    def measure() -> dict[str, Any]:
        began = time.process_time()
        attack([seen for seen, _ in made], seed=0)
        at_once = time.process_time() - began
        began = time.process_time()
        for seen, _ in made[:few]:
            attack([seen], seed=0)
        one_by_one = (time.process_time() - began) / few * options.victims
        return {"at once": at_once, "one by one": one_by_one, "times": one_by_one / at_once}

    key = {"attack": "TAG, all victims at once", "model": options.model}
    table.add({**key, "iterations": options.iterations, "victims": options.victims}, measure)


ROWS = {
    "dager": dager_rows,
    "defended": dager_rows,
    "descents": descent_rows,
    "sapag": sapag_rows,
    "together": together_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=ROWS)
    parser.add_argument("--model", choices=MODELS, default="bert_tiny")
    parser.add_argument("--data", default="sst2")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--victims", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--width", type=int, default=5000, help="of SAPAG's language model")
    parser.add_argument("--frozen", action="store_true", help="the embeddings are neither trained nor uploaded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/text"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ROWS[options.what](options, Table(options.out))


if __name__ == "__main__":
    main()
