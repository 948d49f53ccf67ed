"""What attacks read of texts: DAGER by batch and behind defenses, descents beside Refiner's Table 13, SAPAG beside DLG.

    python experiments/text_attacks.py dager --model minilm --batches 1 8 32
    python experiments/text_attacks.py defended --model minilm
    python experiments/text_attacks.py federation --rounds 20
    python experiments/text_attacks.py descents --model minilm --frozen --victims 32
    python experiments/text_attacks.py descents --attacks TAG LAMP --defenses none --frozen --victims 8 --max-length 24
    python experiments/text_attacks.py sapag --victims 20
    python experiments/text_attacks.py adapters --ranks 8 16 32 --victims 8 --max-length 24 --iterations 300
    python experiments/text_attacks.py together --model bert_tiny --victims 32 --max-length 24 --iterations 100

One line of ``--out``/rows.jsonl for each cell, as it comes; ``--minutes`` ends before the next one, and the
same command goes on. ``federation`` keeps its weights in a file after each round, ``descents`` attacks these where
there are some. Texts are those of the test split; only seconds depend on the machine.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
from peak import operations, peak_rate
from row_file import Row, RowFile
from safetensors import safe_open
from safetensors.torch import save_file

from fl_privacy.attacks import Dager, ReconstructionAttack, adam_dlg, inverting_gradients, lamp, sapag, tag
from fl_privacy.data import Dataset, Iid, TextExamples, load_text
from fl_privacy.defenses import ClientState, Defense, dp_noise, pruning, quantization, refiner
from fl_privacy.federation import Client, Server, ServerPlan, evaluate_model
from fl_privacy.measure import evaluate_all
from fl_privacy.measure.intervals import aggregate
from fl_privacy.models import (
    ADAPTED,
    TextModel,
    TransformerLM,
    bert_mini,
    bert_tiny,
    build_fitting,
    gpt_tiny,
    minilm,
    with_adapters,
)
from fl_privacy.types import Batch, Certainty, Knowledge, LocalPlan, ModelState, Observation, VictimId

MODELS: dict[str, tuple[Callable[..., TextModel], dict[str, str]]] = {
    "bert_tiny": (bert_tiny, {}),
    "bert_mini": (bert_mini, {}),
    "minilm": (minilm, {"tokenizer": "minilm"}),
    "gpt_tiny": (gpt_tiny, {"tokenizer": "bpe", "target": "next_token"}),
}
DEFENSES: dict[str, Callable[[], Defense]] = {
    "none": Defense,
    "pruning 0.2": lambda: pruning(rate=0.2),
    "dp_noise 0.001": lambda: dp_noise(scale=1e-3),
    "quantization 8 bits": lambda: quantization(bits=8),
    "refiner 0.05": lambda: refiner(epsilon=0.05),
}
CLIP = 0.05
"""Of TAG's slope; rows without it are of TAG without clipping."""

DESCENTS = ("TAG", "InvertingGrad", "LAMP", "LAMP without clipping", "TAG with decay")
TABLE_13 = ("none", "pruning 0.2", "dp_noise 0.001", "refiner 0.05")
PUBLIC = slice(3, None, 4)
"""Which test texts defenders hold."""

FINE_TUNING = LocalPlan(shares="delta", optimizer="adamw", lr=5e-5, steps=4, batch_size=16, frozen=["words.weight"])
PLANS = {"gradient": LocalPlan(), "4 local steps": LocalPlan(shares="delta", lr=1e-3, steps=4, batch_size=1)}

Job = tuple[Row, Callable[[], Row]]
"""What names a row, and what measures the rest of it."""


def observe(
    model: TextModel, data: Dataset, batch_size: int, victim: int, *, plan: LocalPlan, defense: Defense, seed: int
) -> tuple[Observation, Batch]:
    """Observe the upload of one batch of test texts; return the texts too."""
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


def observed(
    model: TextModel, data: Dataset, options: argparse.Namespace, *, batch: int = 1, plan: LocalPlan, defense: str
) -> tuple[list[Observation], list[Batch]]:
    """Observe ``--victims`` uploads of ``batch`` texts each, and return the truth too."""
    made = DEFENSES[defense]()
    assert isinstance(data.test, TextExamples)
    for prepare in made.texts:
        prepare(model, data.test.tokens[PUBLIC])
    pairs = [observe(model, data, batch, v, plan=plan, defense=made, seed=options.seed) for v in range(options.victims)]
    return [seen for seen, _ in pairs], [truth for _, truth in pairs]


def figures(attack: ReconstructionAttack, seen: Sequence[Observation], truths: Sequence[Batch], data: Dataset) -> Row:
    """Run ``attack`` and compute means over the texts; a failed attack reconstructs nothing."""
    assert isinstance(data.test, TextExamples)
    began = time.process_time()
    found = attack(seen, seed=0)
    seconds = (time.process_time() - began) / len(seen)
    images = [i for score in evaluate_all(found, truths, language=data.test.vocabulary) for i in score.images]
    exact = [i.values.get("exact_match", 0.0) for i in images]
    certain = [i.certainty is Certainty.PROVEN for i in images]
    each_f1 = [i.values.get("token_f1", 0.0) for i in images]

    def mean(name: str) -> float:
        return round(sum(i.values.get(name, 0.0) for i in images) / len(images), 4)

    return {
        "texts": len(images),
        "tokens": sum(int((t.inputs >= 0).sum()) for t in truths) // len(truths),
        "exact": mean("exact_match"),
        "token_f1": mean("token_f1"),
        "token_f1_of_texts": asdict(of_texts) if (of_texts := aggregate(each_f1)) else None,
        "rouge_l": mean("rouge_l"),
        "proven": round(sum(certain) / len(images), 4),
        "wrongly_proven": sum(sure and not e for sure, e in zip(certain, exact, strict=True)),
        "failed": sum(one.batch is None for one in found),
        "cpu_seconds": round(seconds, 2),
    }


def loaded(name: str, options: argparse.Namespace) -> tuple[Dataset, TextModel]:
    """Load data and model, with the weights of the federation where there are some."""
    make, settings = MODELS[name]
    data = load_text(options.data, max_length=options.max_length, **settings)  # type: ignore[arg-type]
    model = build_fitting(make, data.train.architecture, seed=options.seed)
    assert isinstance(model, TextModel)
    return data, model


def dager(options: argparse.Namespace) -> Iterator[Job]:
    """List the jobs of DAGER: by batch size, and behind defenses."""
    data, model = loaded(options.model, options)
    cells = [(batch, "none", "gradient") for batch in options.batches]
    if options.what == "defended":
        cells = [(1, defense, "gradient") for defense in DEFENSES] + [(4, "none", "4 local steps")]
    for batch, defense, plan in cells:
        key = {"attack": "dager", "model": options.model, "batch": batch, "defense": defense, "shares": plan}
        key |= {"victims": options.victims, "max_length": options.max_length}
        yield key, partial(_read, options, data, model, cell=(batch, defense, plan))


def _read(options: argparse.Namespace, data: Dataset, model: TextModel, cell: tuple[int, str, str]) -> Row:
    batch, defense, plan = cell
    return figures(Dager(), *observed(model, data, options, batch=batch, plan=PLANS[plan], defense=defense), data)


def descents(options: argparse.Namespace) -> Iterator[Job]:
    """List the jobs of TAG, InvertingGrad and LAMP behind the defenses of Refiner's Table 13.

    Embeddings are frozen as there.
    """
    attacks: dict[str, ReconstructionAttack] = {
        "TAG": tag(iterations=options.iterations, clip=CLIP),
        "InvertingGrad": inverting_gradients(iterations=options.iterations),
        "LAMP": lamp(iterations=options.iterations),
        "LAMP without clipping": lamp(iterations=options.iterations, clip=math.inf),
        "TAG with decay": tag(iterations=options.iterations, clip=CLIP, lr=0.2, weight_decay=0.05),
    }
    data, model = loaded(options.model, options)
    trained = load_round(model, options) if options.model == "minilm" else 0
    for (attack, defense), adaptive in product(product(options.attacks, options.defenses), (False, True)):
        if adaptive and (defense == "none" or not options.adaptive):
            continue
        key = {"defense": defense, "attack": attack, "model": options.model, "frozen": options.frozen}
        key |= {"iterations": options.iterations, "victims": options.victims, "max_length": options.max_length}
        key |= {"attacker": "adaptive" if adaptive else "plain", "round": trained}
        key |= {"public": options.public} if "LAMP" in attack else {"clip": CLIP} if "TAG" in attack else {}
        yield key, partial(_descended, options, data, model, attack=attacks[attack], cell=(defense, adaptive))


def _descended(
    options: argparse.Namespace,
    data: Dataset,
    model: TextModel,
    attack: ReconstructionAttack,
    cell: tuple[str, bool],
) -> Row:
    defense, adaptive = cell
    plan = LocalPlan(frozen=[model.word_weight] if options.frozen else [])
    seen, truths = observed(model, data, options, plan=plan, defense=defense)
    public, parts = data.train.batch(torch.arange(options.public)).inputs, DEFENSES[defense]().parts
    seen = [one.given(public_images=public, defense=parts if adaptive else None) for one in seen]
    return figures(attack, seen, truths, data)


def adapters(options: argparse.Namespace) -> Iterator[Job]:
    """List the jobs of DAGER and TAG where only adapters and the head are trained and uploaded.

    Once in the first round, and once when the adapters have learned.
    """
    data, model = loaded(options.model, options)
    attacks = {"dager": Dager(), "TAG": tag(iterations=options.iterations)}
    for rank, learned, (name, attack) in product(options.ranks, (0, 50), attacks.items()):
        key = {"adapters": rank, "learned_steps": learned, "attack": name, "model": options.model}
        key |= {"victims": options.victims, "max_length": options.max_length}
        key |= {"iterations": options.iterations} if name == "TAG" else {}
        yield key, partial(_adapted, options, data, model, attack=attack, cell=(rank, learned))


def _adapted(
    options: argparse.Namespace, data: Dataset, model: TextModel, attack: ReconstructionAttack, cell: tuple[int, int]
) -> Row:
    rank, learned = cell
    torch.manual_seed(options.seed)
    adapted, plan = with_adapters(model, rank=rank), LocalPlan(trained=ADAPTED)
    held = plan.held(dict(adapted.named_parameters()))
    optimizer = torch.optim.AdamW([p for name, p in adapted.named_parameters() if name not in held], lr=1e-3)
    for step in range(learned):
        batch = data.train.batch(torch.arange(16 * step, 16 * (step + 1)))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(adapted(batch.inputs), batch.labels).backward()
        optimizer.step()
    return figures(attack, *observed(adapted, data, options, plan=plan, defense="none"), data)


def language_model(options: argparse.Namespace) -> Iterator[Job]:
    """List the jobs of SAPAG beside DLG with AdamW on its language model, 15 words each, labels inferred."""
    data = load_text(options.data, tokenizer="words", vocabulary_size=1000, max_length=15)
    model = build_fitting(TransformerLM, data.train.architecture, seed=options.seed, width=options.width)
    assert isinstance(model, TextModel)
    attacks = {
        "SAPAG": sapag(optimizer="adamw", lr=0.05, labels="auto", iterations=options.iterations),
        "DLG": adam_dlg(lr=0.05, labels="auto", reading="pseudo_inverse", iterations=options.iterations),
    }
    for name, attack in attacks.items():
        key = {"width": options.width, "attack": name, "iterations": options.iterations, "victims": options.victims}

        def measure(attack: ReconstructionAttack = attack) -> Row:
            return figures(attack, *observed(model, data, options, plan=LocalPlan(), defense="none"), data)

        yield key, measure


def together(options: argparse.Namespace) -> Iterator[Job]:
    """List the job that times TAG on all victims at once and on some one after the other, in turn.

    Beside both stands the share that their products of matrices alone would take at the rate of two large matrices.
    """
    data, model = loaded(options.model, options)

    def attacked(seen: Sequence[Observation], iterations: int) -> float:
        began = time.process_time()
        tag(iterations=iterations, compile="off")(seen, seed=0)
        return time.process_time() - began

    def measure() -> Row:
        seen, _ = observed(model, data, options, plan=LocalPlan(), defense="none")
        few, pairs = max(2, options.victims // 8), []
        attacked(seen[:1], 1)
        for _ in range(options.pairs):
            at_once = attacked(seen, options.iterations)
            alone = sum(attacked([one], options.iterations) for one in seen[:: options.victims // few][:few])
            pairs.append((at_once, alone / few * options.victims))
        at_once, alone = (statistics.median(pair[k] for pair in pairs) for k in (0, 1))
        counted = lambda iterations: operations(lambda: attacked(seen, iterations))  # noqa: E731
        products = options.iterations * (counted(2) - counted(1)) / peak_rate()
        times = sorted(pair[1] / pair[0] for pair in pairs)
        return {
            "at_once": round(at_once, 2),
            "one_by_one": round(alone, 2),
            "times": round(statistics.median(times), 2),
            "least": round(times[0], 2),
            "most": round(times[-1], 2),
            "pairs": options.pairs,
            "products_at_once": round(products / at_once, 2),
            "products_one_by_one": round(products / alone, 2),
        }

    key = {"victims": options.victims, "attack": "TAG, all victims at once", "model": options.model}
    yield {**key, "max_length": options.max_length, "iterations": options.iterations}, measure


def federation(options: argparse.Namespace) -> Iterator[Job]:
    """List the jobs that fine-tune MiniLM by ten clients with equal parts; tests show the same bits under Flower."""
    data, model = loaded("minilm", options)
    done = load_round(model, options)
    parts = Iid()(data.train, num_clients=10, seed=options.seed)
    clients = {
        k: Client(id=k, examples=data.train, indices=part, model=model, plan=FINE_TUNING, seed=options.seed)
        for k, part in enumerate(parts)
    }
    server = Server(
        state=ModelState.of(model),
        local_plan=FINE_TUNING,
        plan=ServerPlan(),
        clients=sorted(clients),
        seed=options.seed,
    )
    for number in range(done + 1, options.rounds + 1):

        def measure(number: int = number) -> Row:
            began = time.process_time()
            asked = server.select(number)
            server.receive({k: clients[k].update(server.state, ClientState(), round=number).upload for k in asked})
            took = time.process_time() - began
            found = evaluate_model(model, server.state, data.test)
            about = {"round": str(number)}
            save_file({n: p.contiguous() for n, p in server.state.parameters.items()}, options.weights, about)
            return {"accuracy": round(found.accuracy, 4), "loss": round(found.loss, 4), "seconds": round(took, 1)}

        yield {"trained": "minilm", "round": number, "clients": 10, "examples": 640}, measure


def load_round(model: TextModel, options: argparse.Namespace) -> int:
    """Load what the federation has trained into ``model``; how many rounds that were."""
    if not options.weights.is_file():
        return 0
    with safe_open(options.weights, framework="pt") as stored:
        model.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
        return int(stored.metadata()["round"])


ROWS = {
    "adapters": adapters,
    "dager": dager,
    "defended": dager,
    "descents": descents,
    "federation": federation,
    "sapag": language_model,
    "together": together,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=ROWS)
    parser.add_argument("--model", choices=MODELS, default="bert_tiny")
    parser.add_argument("--frozen", action="store_true", help="the embeddings are neither trained nor uploaded")
    parser.add_argument("--attacks", nargs="+", choices=DESCENTS, default=DESCENTS[:2])
    parser.add_argument(
        "--adaptive", action="store_true", help="an attacker that knows the defense beside the plain one"
    )
    parser.add_argument("--defenses", nargs="+", choices=DEFENSES, default=TABLE_13)
    parser.add_argument("--data", default="sst2")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--victims", type=int, default=10)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16, 32], help="of adapters")
    parser.add_argument("--rounds", type=int, default=20, help="of the federation")
    parser.add_argument("--public", type=int, default=200, help="texts that LAMP learns a language model from")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=3, help="of measurements in turn")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--width", type=int, default=5000, help="of SAPAG's language model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--weights", type=Path, default=Path("runs/minilm.safetensors"), help="of the federation")
    parser.add_argument("--out", type=Path, default=Path("runs/text_attacks"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.weights.parent.mkdir(parents=True, exist_ok=True)
    rows, began = RowFile(options.out), time.monotonic()
    for key, measure in ROWS[options.what](options):
        if rows.find(key) is None:
            if time.monotonic() - began > 60 * options.minutes:
                break
            print(rows.add(key, measure()), flush=True)


if __name__ == "__main__":
    main()
