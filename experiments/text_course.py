"""What decides Refiner's Table 13: how far the text model has been trained, by stages of a training.

    python experiments/text_course.py lengths --victims 100 --out experiments/rows/text_course
    python experiments/text_course.py attacked --victims 24 --iterations 200 --out experiments/rows/text_course
    python experiments/text_course.py trained --out experiments/rows/text_course

Trains ``--model`` on SST-2 in one place. ``lengths`` keeps at each of ``--stages`` (steps) its accuracy, how long the
gradients of single texts are, and how far each defense takes an upload from its gradient, in parts of that length;
``attacked`` what the attacks read of such uploads. ``trained`` goes on from the last stage, behind each defense, by
rounds of ten clients, and keeps the accuracy after them.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from row_file import Row, RowFile, takes_rows
from safetensors.torch import load_file, save_file
from text_attacks import CLIP, DEFENSES, TABLE_13, figures, loaded, observed

from fl_privacy.attacks import ReconstructionAttack, inverting_gradients, tag
from fl_privacy.data import Dataset, Iid
from fl_privacy.defenses import ClientState
from fl_privacy.federation import Client, Server, ServerPlan, evaluate_model
from fl_privacy.measure import aggregate
from fl_privacy.models import TextModel
from fl_privacy.types import LocalPlan, ModelState, Observation

BATCH = 32
RATES = {"bert_tiny": 5e-4, "minilm": 5e-5}
"""By model: a pretrained one is fine-tuned more gently."""

FAR = 0.5
"""Of the gradient's length: how far an upload must be from it to count."""
ROUND = LocalPlan(shares="delta", optimizer="adamw", lr=1e-4, steps=4, batch_size=16, frozen=["words.weight"])


def train_all(model: TextModel, data: Dataset, files: Mapping[int, Path], *, lr: float, seed: int) -> None:
    """Train by AdamW on batches drawn at random, and keep the weights after as many steps as each file stands for."""
    rng, optimizer = torch.Generator().manual_seed(seed), torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for step in range(max(files) + 1):
        if step in files:
            files[step].parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.clone() for name, value in model.state_dict().items()}, files[step])
        batch = data.train.batch(torch.randint(len(data.train), (BATCH,), generator=rng))
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()


def length(observation: Observation) -> float:
    return float(torch.cat([t.flatten() for t in observation.upload.tensors.values()]).norm())


def errors(clean: Sequence[Observation], defended: Sequence[Observation]) -> list[float]:
    """Compute how far each defended upload is from its gradient, in parts of the gradient's length."""
    found = []
    for one, other in zip(clean, defended, strict=True):
        theirs = other.upload.tensors
        apart = torch.cat([(t - theirs[name]).flatten() for name, t in one.upload.tensors.items() if name in theirs])
        found.append(float(apart.norm()) / length(one))
    return found


def statistic(values: Sequence[float]) -> Row | None:
    return asdict(found) if (found := aggregate(values)) else None


def measured(model: TextModel, data: Dataset, steps: int, options: argparse.Namespace, kept: RowFile) -> None:
    """Keep how long gradients are after ``steps`` of training, and what each defense does to them."""
    plan = LocalPlan(frozen=[model.word_weight])
    clean, _ = observed(model, data, options, plan=plan, defense="none")
    accuracy = evaluate_model(model, ModelState.of(model), data.test).accuracy
    for defense in options.defenses:
        seen, _ = observed(model, data, options, plan=plan, defense=defense)
        apart = errors(clean, seen)
        key = {
            "what": "lengths",
            "model": options.model,
            "steps": steps,
            "defense": defense,
            "victims": options.victims,
        }
        key |= {"max_length": options.max_length}
        found = {"accuracy": accuracy, "length": statistic([length(one) for one in clean]), "error": statistic(apart)}
        row = kept.add(key, {**found, "far": sum(each >= FAR for each in apart) / len(apart)})
        print({name: f["median"] if isinstance(f, dict) else f for name, f in row.items()}, flush=True)


def attacked(model: TextModel, data: Dataset, steps: int, options: argparse.Namespace, kept: RowFile) -> None:
    """Keep what each attack reads behind each defense after ``steps`` of training."""
    attacks: Mapping[str, ReconstructionAttack] = {
        "InvertingGrad": inverting_gradients(iterations=options.iterations),
        "TAG": tag(iterations=options.iterations, clip=CLIP),
    }
    plan = LocalPlan(frozen=[model.word_weight])
    about = {"victims": options.victims, "iterations": options.iterations, "max_length": options.max_length}
    for name, defense in ((a, d) for a in options.attacks for d in options.defenses):
        key = {"what": "attacked", "model": options.model, "steps": steps, "attack": name, "defense": defense, **about}
        if not kept.find(key):
            seen, truths = observed(model, data, options, plan=plan, defense=defense)
            row = kept.add(key, figures(attacks[name], seen, truths, data))
            print(steps, name, defense, row["token_f1"], row["cpu_seconds"], flush=True)


def going_on(model: TextModel, data: Dataset, steps: int, options: argparse.Namespace, kept: RowFile) -> None:
    """Go on from the trained model behind each defense, and keep the accuracy after ``--rounds`` rounds."""
    if steps < max(options.stages):
        return
    start, parts = ModelState.of(model), Iid()(data.train, num_clients=10, seed=options.seed)
    for defense in options.defenses:
        key = {"what": "trained", "model": options.model, "steps": steps, "rounds": options.rounds, "defense": defense}
        key |= {"max_length": options.max_length}
        if kept.find(key):
            continue
        made = DEFENSES[defense]()
        for prepare in made.texts:
            prepare(model, data.test.tokens[3::4])  # type: ignore[attr-defined]
        clients = {
            k: Client(id=k, examples=data.train, indices=part, model=model, plan=ROUND, defense=made, seed=options.seed)
            for k, part in enumerate(parts)
        }
        own = ModelState({name: p.clone() for name, p in start.parameters.items()}, dict(start.buffers))
        server = Server(state=own, local_plan=ROUND, plan=ServerPlan(), clients=sorted(clients), seed=options.seed)
        for number in range(1, options.rounds + 1):
            asked = server.select(number)
            server.receive({k: clients[k].update(server.state, ClientState(), round=number).upload for k in asked})
        found = evaluate_model(model, server.state, data.test)
        kept.add(key, {"accuracy": found.accuracy, "texts": len(data.test)})
        print(key, found.accuracy, flush=True)


KINDS: Mapping[str, Callable[[TextModel, Dataset, int, argparse.Namespace, RowFile], None]] = {
    "lengths": measured,
    "attacked": attacked,
    "trained": going_on,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1000, 3000], help="steps of training")
    parser.add_argument("--attacks", nargs="+", default=["InvertingGrad", "TAG"], choices=["InvertingGrad", "TAG"])
    parser.add_argument("--defenses", nargs="+", default=TABLE_13, choices=DEFENSES)
    parser.add_argument("--data", default="sst2")
    parser.add_argument("--model", default="bert_tiny", choices=RATES)
    parser.add_argument("--victims", type=int, default=24)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, default=Path("runs/text_course"), help="folder of the stages' weights")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, model = loaded(options.model, options)
    kept, files = (
        RowFile(options.out),
        {stage: options.weights / options.model / f"{stage}.safetensors" for stage in options.stages},
    )
    if not all(file.is_file() for file in files.values()):
        train_all(model, data, files, lr=RATES[options.model], seed=options.seed)
    for stage, file in files.items():
        model.load_state_dict(load_file(file))
        model.eval()
        KINDS[options.what](model, data, stage, options, kept)


if __name__ == "__main__":
    main()
