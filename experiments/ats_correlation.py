"""Does the privacy score tell how well attacks read transformed images? (ATS, Figure 5: 0.755)

    fl-privacy search-policies data=fashion_mnist model=lenet policies=200
    python experiments/ats_correlation.py SEARCH_FOLDER --weights RUN_FOLDER --policies 100 --victims 4

Attacks images of the test split, each transformed by every one of the first random policies of the search, behind the
model of a run; prints Pearson's correlation of the policies' privacy scores and their mean PSNR.
"""

import argparse
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from scipy.stats import pearsonr, spearmanr

from fl_privacy.attacks import ats
from fl_privacy.config import build_dataset
from fl_privacy.config.build import build_network
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path)
    parser.add_argument("--weights", type=Path, help="of a run; by default the semi-trained model of the search")
    parser.add_argument("--policies", type=int, default=100)
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=600)
    arguments = parser.parse_args()

    config = OmegaConf.load(arguments.search / "config.yaml")
    assert isinstance(config, DictConfig)
    dataset = build_dataset(config)
    model = build_network(config, dataset)
    sent = load_weights(arguments.weights or arguments.search / SEMI_TRAINED, ModelState.of(model))
    records, _ = read_records(arguments.search / SCORES)
    chosen = records[len(OPERATIONS) :][: arguments.policies]

    # the classes in turn
    by_class = [(dataset.test.labels == label).nonzero().flatten() for label in range(dataset.test.num_classes)]
    rows = [int(by_class[k % len(by_class)][k // len(by_class)]) for k in range(arguments.victims)]
    batch = dataset.test.batch(torch.tensor(rows))
    goals = [transformed_by(batch.inputs, Policy.parse(record["policy"]), seed=1) for record in chosen]
    classes = dataset.test.num_classes
    observations = [
        observe(model, sent, Batch(images[k : k + 1], batch.labels[k : k + 1]), f"{number}-{k}", classes)
        for number, images in enumerate(goals)
        for k in range(arguments.victims)
    ]
    attack = ats(optimizer="adam", distance="cosine", iterations=arguments.iterations, compile="off")
    attacked = attack(observations, seed=0)
    if failures := [r.failure for r in attacked if r.batch is None]:
        raise SystemExit(f"{len(failures)} of {len(attacked)} attacks failed: {failures[0]}")
    guesses = torch.cat([r.batch.inputs for r in attacked])
    quality = psnr(guesses.clamp(0, 1), torch.cat(goals)).view(len(goals), -1).mean(1)

    scores = [record["privacy"] for record in chosen]
    found = pearsonr(scores, quality.tolist())
    low, high = found.confidence_interval()
    print(
        f"{len(chosen)} policies, {arguments.victims} victims each, PSNR {quality.min():.1f} to {quality.max():.1f} dB"
    )
    print(f"Pearson {found.statistic:.3f} [{low:.3f}, {high:.3f}], Spearman {spearmanr(scores, quality).statistic:.3f}")


if __name__ == "__main__":
    main()
