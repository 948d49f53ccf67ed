"""Does the privacy score tell how well attacks read transformed images? (ATS, Figure 5: 0.755)

    fl-privacy search-policies data=cifar10 model=lenet policies=100
    python experiments/ats_correlation.py SEARCH_FOLDER... --weights RUN_FOLDER --policies 100 --victims 6

Attacks images of the test split, each transformed by every one of the first random policies of the searches, behind the
model of a run. For each search it prints the correlation of the policies' privacy scores with their mean PSNR, to the
transformed image and to the original. An image that was darkened or moved halfway out is easy to guess; therefore also
with the PSNR of a plain image of the right mean, how far the attack exceeds it, and the part of the attack's PSNR that
does not follow from it (least squares). Several searches, such as one of a semi-trained model and one of the very model
that is attacked (`weights=RUN_FOLDER`), draw the same policies from the same seed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from fl_privacy.attacks import ats
from fl_privacy.config import build_dataset
from fl_privacy.config.build import build_network
from fl_privacy.config.foreign import recorded_parts
from fl_privacy.data import Examples
from fl_privacy.gradients import loss_gradients
from fl_privacy.metrics.pixel import psnr
from fl_privacy.pipeline.policy_search import SCORES, SEMI_TRAINED
from fl_privacy.pipeline.weights import load_weights
from fl_privacy.policy_search import transformed_by
from fl_privacy.results.records import read_records
from fl_privacy.transformations import OPERATIONS, Policy
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload

PLAN = LocalPlan(batch_norm="eval")


def observe(model, sent, batch, name, num_classes):
    gradients = loss_gradients(model, sent, batch, batch_norm="eval").gradients
    return Observation(
        id=name,
        model=model,
        sent=sent,
        upload=Upload(tensors=gradients, num_examples=1),
        plan=PLAN,
        input_shape=tuple(batch.inputs.shape[1:]),
        num_classes=num_classes,
        knowledge=Knowledge(labels=batch.labels),
    )


def random_scores(search: Path) -> dict[str, float]:
    """Privacy scores of the random policies of a search, without the single operations that come first."""
    records, _ = read_records(search / SCORES)
    return {record["policy"]: record["privacy"] for record in records[len(OPERATIONS) :]}


def images_of_all_classes(examples: Examples, number: int) -> Batch:
    """The first ones, the classes in turn."""
    by_class = [(examples.labels == label).nonzero().flatten() for label in range(examples.num_classes)]
    return examples.batch(torch.tensor([int(by_class[k % len(by_class)][k // len(by_class)]) for k in range(number)]))


def attacked(observations: Sequence[Observation], iterations: int) -> Tensor:
    """What is read of each: (N, C, H, W)."""
    attack = ats(optimizer="adam", distance="cosine", iterations=iterations, compile="off")
    found = attack(observations, seed=0)
    if failures := [r.failure for r in found if r.batch is None]:
        raise SystemExit(f"{len(failures)} of {len(found)} attacks failed: {failures[0]}")
    guesses = torch.cat([r.batch.inputs for r in found if r.batch is not None])
    return guesses.clamp(0, 1)


def predicted(wanted: Tensor, given: Tensor) -> Tensor:
    """(N,) the line through (``given``, ``wanted``) by least squares, at ``given``."""
    centered = given - given.mean()
    return wanted.mean() + centered * (centered @ wanted) / (centered @ centered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("searches", type=Path, nargs="+")
    parser.add_argument("--weights", type=Path, help="of a run; by default the semi-trained model of the first search")
    parser.add_argument("--policies", type=int, default=100)
    parser.add_argument("--victims", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=2500)
    arguments = parser.parse_args()

    config = recorded_parts(arguments.searches[0] / "config.yaml", ("data", "model", "seed"))
    dataset = build_dataset(config)
    model = build_network(config, dataset)
    sent = load_weights(arguments.weights or arguments.searches[0] / SEMI_TRAINED, ModelState.of(model))
    tables = {search: random_scores(search) for search in arguments.searches}
    common = [policy for policy in tables[arguments.searches[0]] if all(policy in t for t in tables.values())]
    chosen = common[: arguments.policies]

    batch = images_of_all_classes(dataset.test, arguments.victims)
    transformed = [transformed_by(batch.inputs, Policy.parse(policy), seed=1) for policy in chosen]
    goals = [batch.inputs, *transformed]
    observations = [
        observe(model, sent, Batch(images[k : k + 1], batch.labels[k : k + 1]), f"{n}-{k}", dataset.test.num_classes)
        for n, images in enumerate(goals)
        for k in range(arguments.victims)
    ]
    guesses = attacked(observations, arguments.iterations).view(len(goals), *batch.inputs.shape)
    plain = psnr(guesses[0], batch.inputs)
    beside = torch.stack([psnr(guess, goal) for guess, goal in zip(guesses[1:], transformed, strict=True)]).mean(1)
    original = torch.stack([psnr(guess, batch.inputs) for guess in guesses[1:]]).mean(1)
    plain_images = [goal.mean((2, 3), keepdim=True).expand_as(goal) for goal in transformed]
    trivial = torch.stack([psnr(guess, goal) for guess, goal in zip(plain_images, transformed, strict=True)]).mean(1)
    print(
        f"{len(chosen)} policies, {arguments.victims} victims each, PSNR {beside.min():.1f} to {beside.max():.1f} dB"
        f" (mean {beside.mean():.1f}), to the original {original.mean():.1f}; untransformed {plain.mean():.1f},"
        f" plain images {trivial.mean():.1f}"
    )
    for search, table in tables.items():
        scores = [table[policy] for policy in chosen]
        for name, quality in (
            ("PSNR to the transformed", beside),
            ("PSNR to the original", original),
            ("PSNR beyond a plain image's", beside - trivial),
            ("PSNR of a plain image", trivial),
            ("PSNR that does not follow from a plain image's", beside - predicted(beside, trivial)),
        ):
            found = pearsonr(scores, quality.tolist())
            low, high = found.confidence_interval()
            print(
                f"{search.name}: score with {name}: Pearson {found.statistic:.2f} [{low:.2f}, {high:.2f}],"
                f" Spearman {spearmanr(scores, quality.tolist()).statistic:.2f}"
            )


if __name__ == "__main__":
    main()
