"""How often guesses are called read of which it is known by construction whether they show the original.

Each row is a kind of guess and a data set: the share of images that are called read by the package's rule, how many of
them are identified, and the share that PSNR of 15 dB alone calls recognizable. Thresholds were fixed with ``--split
train``; ``--split test`` takes victims that had no part in that.

    python experiments/verdict_pairs.py --images 50 --out experiments/rows/verdict_pairs
"""

import argparse
import time
from collections.abc import Mapping

import torch
from row_file import Row, RowFile, takes_rows
from torch import Tensor
from verdict_kinds import EMPTY, HELD_EMPTY, HELD_READ, MORE_EMPTY, MORE_READ, READ, Make, Subjects

from fl_privacy.data import Examples, load_data
from fl_privacy.metrics.beyond import Others
from fl_privacy.metrics.outcome import READ as LEAKS
from fl_privacy.metrics.outcome import Outcome, outcome_of
from fl_privacy.metrics.public_images import PublicImages
from fl_privacy.metrics.scores import evaluate_all
from fl_privacy.types import Batch, Reconstruction, VictimId

DATA = ("mnist", "fashion_mnist", "cifar10_exact", "olivetti", "tiny_imagenet")
KINDS: Mapping[str, Mapping[str, Make]] = {
    "to be read": READ,
    "not to be read": EMPTY,
    "to be read, further": MORE_READ,
    "not to be read, further": MORE_EMPTY,
    "to be read, held back": HELD_READ,
    "not to be read, held back": HELD_EMPTY,
}
CANDIDATES, SPARE = 1000, 400
QUANTILES = torch.tensor([0.05, 0.5, 0.95, 1.0])


def subjects(name: str, split: str, images: int) -> tuple[Subjects, PublicImages]:
    """Originals of a split; candidates and spare images of the training split, none of them an original."""
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


def judged(guesses: Tensor, s: Subjects, others: Others) -> list[Row]:
    """A record of each guess, as a run writes it."""
    ids = [VictimId(0, 0, probe) for probe in range(len(guesses))]
    made = [
        Reconstruction(id=id, batch=Batch(g[None], y[None])) for id, g, y in zip(ids, guesses, s.labels, strict=True)
    ]
    truths = [Batch(x[None], y[None]) for x, y in zip(s.images, s.labels, strict=True)]
    scores = evaluate_all(made, truths, others=others)
    return [
        {"failure": i.failure, "certainty": i.certainty, **i.values, **i.compared} for v in scores for i in v.images
    ]


def figures_of(records: list[Row]) -> Row:
    outcomes = [outcome_of(record) for record in records]
    number = len(records)
    return {
        "images": number,
        "read": sum(outcome in LEAKS for outcome in outcomes) / number,
        "identified": sum(outcome in (Outcome.EXACT, Outcome.IDENTIFIED) for outcome in outcomes) / number,
        "first": sum(record["rank"] == 1 for record in records) / number,
        "lead": [
            round(x, 2) for x in torch.tensor([r.get("lead", 99.0) for r in records]).quantile(QUANTILES).tolist()
        ],
        "old": sum(record["psnr"] >= 15 for record in records) / number,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=DATA)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--split", choices=("train", "test"), default="test")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--moved", action="store_true", help="also scaled and rotated")
    takes_rows(parser)
    asked = parser.parse_args()
    rows = RowFile(asked.out)
    for name in asked.data:
        s, candidates = subjects(name, asked.split, asked.images)
        others = Others(candidates=candidates, moved=asked.moved)
        for group in asked.kinds:
            for kind, make in KINDS[group].items():
                key = {"data": name, "group": group, "kind": kind, "split": asked.split, "moved": asked.moved}
                if (row := rows.find({**key, "images": len(s.images)})) is None:
                    started = time.perf_counter()
                    records = judged(make(s).float(), s, others)
                    pairs = len(records) * len(candidates.images) / (time.perf_counter() - started)
                    row = rows.add(
                        key, {**figures_of(records), "candidates": len(candidates.images), "pairs": round(pairs)}
                    )
                print(
                    f"{name:14} {group:26} {kind:30} read {row['read']:.2f} identified {row['identified']:.2f}"
                    f" first {row['first']:.2f} | PSNR >= 15: {row['old']:.2f} | {row['pairs']} pairs/s"
                    f" | lead {row['lead']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
