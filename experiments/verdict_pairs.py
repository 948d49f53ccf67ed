"""How often guesses are called read of which it is known by construction whether they show the original.

Each row is a kind of guess and a data set: the share of images that are called read by the package's rule, how many of
them are identified, and the share that PSNR of 15 dB alone calls recognizable. Thresholds were fixed with ``--split
train``; ``--split test`` takes victims that had no part in that. Rows are extended where more images are asked for.

    python experiments/verdict_pairs.py --images 50 200 --out experiments/rows/verdict_pairs
"""

import argparse
import time
from collections.abc import Mapping
from itertools import product
from zlib import crc32

import torch
from row_file import Row, RowFile, takes_rows
from torch import Tensor
from verdict_kinds import EMPTY, HELD_EMPTY, HELD_READ, MORE_EMPTY, MORE_READ, READ, Make, Subjects
from verdict_turned import ALIKE_EMPTY, TURNED_READ

from fl_privacy.data import Examples, load_data
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.identification import PublicImages
from fl_privacy.measure.outcome import READ as LEAKS, Outcome, outcome_of
from fl_privacy.measure.scores import evaluate_all
from fl_privacy.types import Batch, Reconstruction, VictimId

DATA = ("mnist", "fashion_mnist", "cifar10_exact", "olivetti", "lfw", "tiny_imagenet")
KINDS: Mapping[str, Mapping[str, Make]] = {
    "to be read": READ,
    "not to be read": EMPTY,
    "to be read, further": MORE_READ,
    "not to be read, further": MORE_EMPTY,
    "to be read, held back": HELD_READ,
    "not to be read, held back": HELD_EMPTY,
    "to be read, turned or in pieces": TURNED_READ,
    "not to be read, alike": ALIKE_EMPTY,
}
CANDIDATES, SPARE = 1000, 400


def subjects(name: str, split: str, images: int) -> tuple[Subjects, PublicImages]:
    """Load originals of a split; candidates and spare images come from training, without any original."""
    data = load_data(name)
    train, test = data.train, data.test
    assert isinstance(train, Examples) and isinstance(test, Examples)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    if split == "train":
        originals, order = train.subset(order[:images]), order[images:]
    else:
        originals = test.subset(torch.randperm(len(test), generator=torch.Generator().manual_seed(1))[:images])
    spare = min(SPARE, len(order) // 3)
    public = train.subset(order[spare : spare + CANDIDATES])
    every = public.batch(torch.arange(len(public)))
    return Subjects.of(originals, train.subset(order[:spare])), PublicImages(images=every.inputs, labels=every.labels)


def judged(guesses: Tensor, s: Subjects, others: Distractors) -> list[Row]:
    """Judge each guess and return its record, as a run writes it."""
    ids = [VictimId(0, 0, probe) for probe in range(len(guesses))]
    made = [
        Reconstruction(id=id, batch=Batch(g[None], y[None])) for id, g, y in zip(ids, guesses, s.labels, strict=True)
    ]
    truths = [Batch(x[None], y[None]) for x, y in zip(s.images, s.labels, strict=True)]
    scores = evaluate_all(made, truths, others=others)
    return [
        {"failure": i.failure, "certainty": i.certainty, **i.values, **i.compared.as_record()}
        for v in scores
        for i in v.images
    ]


def figures_of(records: list[Row]) -> Row:
    """Count guesses and the shares reconstructed, identified, nearest, and past 15 dB."""
    outcomes = [outcome_of(record) for record in records]
    number = len(records)
    return {
        "images": number,
        "read": sum(outcome in LEAKS for outcome in outcomes) / number,
        "identified": sum(outcome in (Outcome.EXACT, Outcome.IDENTIFIED) for outcome in outcomes) / number,
        "first": sum(record["best_rank"] == 1 for record in records) / number,
        "old": sum(record["psnr"] >= 15 for record in records) / number,
    }


SHARES = ("read", "identified", "first", "old")


def together(ones: Row | None, others: Row) -> Row:
    """Combine the figures of two parts of the originals."""
    if ones is None:
        return others
    images = ones["images"] + others["images"]
    shares = {k: (ones[k] * ones["images"] + others[k] * others["images"]) / images for k in SHARES}
    return {**others, "images": images, **{k: round(share, 6) for k, share in shares.items()}}


def extended(row: Row | None, kind: str, make: Make, s: Subjects, others: Distractors) -> Row | None:
    """Extend ``row`` by the originals of ``s`` that it lacks; ``None`` where it lacks none."""
    done = row["images"] if row else 0
    if done >= len(s.images):
        return None
    assert others.candidates is not None
    s.rng.manual_seed(crc32(kind.encode()))
    guesses, started = make(s).float()[done:], time.perf_counter()
    figures = figures_of(judged(guesses, s.since(done), others))
    pairs = figures["images"] * len(others.candidates.images) / (time.perf_counter() - started)
    return {**together(row, figures), "candidates": len(others.candidates.images), "pairs": round(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=DATA)
    parser.add_argument(
        "--images", nargs="+", type=int, default=[200], help="of each set; several: first so many of all"
    )
    parser.add_argument("--split", choices=("train", "test"), default="test")
    parser.add_argument("--groups", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--kinds", nargs="+", help="of the groups, these kinds only")
    takes_rows(parser)
    asked = parser.parse_args()
    rows = RowFile(asked.out)
    torch.set_num_threads(1)
    for images, name in product(asked.images, asked.data):
        s, candidates = subjects(name, asked.split, images)
        others = Distractors(candidates=candidates)
        for group, kind in ((g, k) for g in asked.groups for k in KINDS[g] if not asked.kinds or k in asked.kinds):
            key = {"data": name, "group": group, "kind": kind, "split": asked.split}
            row = rows.find(key)
            if (more := extended(row, kind, KINDS[group][kind], s, others)) is not None:
                row = rows.add(key, {k: v for k, v in more.items() if k not in key})
            assert row is not None
            print(
                f"{name:14} {group:26} {kind:30} of {row['images']} read {row['read']:.3f} identified"
                f" {row['identified']:.3f} first {row['first']:.3f} | PSNR >= 15: {row['old']:.2f}"
                f" | {row['pairs']} pairs/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
