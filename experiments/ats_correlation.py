"""How well attacks read images under each policy, and whether the privacy score tells (ATS, Figure 5: 0.755).

    fl-privacy search-policies data=cifar10 model=lenet policies=100
    python experiments/ats_correlation.py SEARCH_FOLDER --named none 3 3-43 --out attacked.jsonl

Attacks images of the test split, each transformed by the policies named (`none`: as they are, `13-43-18+21-3-16`: one
of both drawn for each image) and by each of the search's first random policies, behind the search's semi-trained model
or that of a run; with ``--epochs`` behind one model for each policy, trained on images under it: the paper "applies
each to the training set", and its authors' attack loads a model that was trained under the policy attacked. Every
policy is a line of `--out`; those there are not attacked again, and `--minutes` stops in between: the same command goes
on.

Printed are the PSNR to the transformed and to the original image, and over the random policies the correlation of their
privacy scores with both. An image that was darkened or moved halfway out is easy to guess; therefore also with the PSNR
of a plain image of the right mean and of the clamped noise that attacks start from, how far the attack exceeds them,
and the part of its PSNR that does not follow from a plain image's (least squares). The scores may be another search's
of the same policies (`--scores`).
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from row_file import Row, RowFile
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from fl_privacy.data import Examples
from fl_privacy.data.transformations import Policy, Table, transform
from fl_privacy.defenses.policy_search.scores import TrainingPlan, train_model
from fl_privacy.files import write_whole
from fl_privacy.measure.images import psnr
from fl_privacy.measure.intervals import aggregate
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_attack, build_dataset, build_network
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder.records import RecordWriter, dump_json, read_records
from fl_privacy.runs.policy_search import SCORES, SEMI_TRAINED
from fl_privacy.runs.weights import load_weights
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

PLAN = LocalPlan(batch_norm="eval")
FIGURES = ("transformed", "original", "noise", "plain")


def random_scores(search: Path) -> dict[str, float]:
    """Load the privacy scores of a search's random policies, without the single operations before them."""
    records, _ = read_records(search / SCORES)
    return {record["policy"]: record["privacy"] for record in records if "-" in record["policy"]}


def images_of_all_classes(examples: Examples, number: int) -> Batch:
    """Take the first ``number`` images, the classes in turn."""
    by_class = [(examples.labels == label).nonzero().flatten() for label in range(examples.num_classes)]
    return examples.batch(torch.tensor([int(by_class[k % len(by_class)][k // len(by_class)]) for k in range(number)]))


def transformed_as(images: Tensor, name: str, table: Table) -> Tensor:
    """Transform each image by one of the policies in ``name``, which `+` joins."""
    if name == "none":
        return images
    policies = [Policy.parse(part, table) for part in name.split("+")]
    return transform(images, policies, derive_generator(1, "experiment", name))


def start_like(images: Tensor) -> Tensor:
    """Draw the clamped noise that attacks on normalized images start from."""
    noise = torch.randn(images.shape, generator=derive_generator(1, "experiment", "noise"))
    return (0.5 + 0.25 * noise).clamp(0, 1)


def compared(guesses: Tensor, goals: Tensor, originals: Tensor) -> dict[str, list[float]]:
    """Compute the PSNR of each image for each of ``FIGURES``."""
    plain = goals.mean((2, 3), keepdim=True).expand_as(goals)
    pairs = ((guesses, goals), (guesses, originals), (start_like(goals), goals), (plain, goals))
    return {name: psnr(*pair).tolist() for name, pair in zip(FIGURES, pairs, strict=True)}


class Attacked:
    """The images, the model and the attack of a command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        config = OmegaConf.load(arguments.search / "config.yaml")
        assert isinstance(config, DictConfig)
        dataset = build_dataset(config["data"])
        self._table: Table = config["table"]
        self._model = build_network(config["model"], dataset, seed=config["seed"])
        weights = arguments.weights or arguments.search / SEMI_TRAINED
        self._semi_trained = load_weights(weights, ModelState.of(self._model))
        self._seed, self._plan = config["seed"], None
        if arguments.epochs:
            training = config.training
            self._plan = TrainingPlan(epochs=arguments.epochs, lr=training.lr, batch_size=training.batch_size)
            order = torch.randperm(len(dataset.train), generator=derive_generator(1, "experiment", "training"))
            self._examples = dataset.train.batch(order[: round(training.share * len(order))])
        self._batch = images_of_all_classes(dataset.test, arguments.victims)
        self._classes = dataset.test.num_classes
        settings = {"iterations": arguments.iterations, "restarts": arguments.restarts}
        given = [f"attack.{key}={value}" for key, value in settings.items() if value is not None]
        own = compose_run([f"attack={arguments.attack}", "attack.compile=off", *given])
        self._attack = build_attack(own.attack, device="cpu")

    def __call__(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Attack the images under each policy in ``names`` together and return a record of each."""
        goals = [transformed_as(self._batch.inputs, name, self._table) for name in names]
        observed = [
            self._observe(sent, Batch(images[k : k + 1], self._batch.labels[k : k + 1]), VictimId(0, 0, k, part=name))
            for name, images, sent in zip(names, goals, map(self._sent, names), strict=True)
            for k in range(len(images))
        ]
        found = self._attack(observed, seed=0)
        if failures := [r.failure for r in found if r.batch is None]:
            raise SystemExit(f"{len(failures)} of {len(found)} attacks failed: {failures[0]}")
        guesses = torch.cat([r.batch.inputs for r in found if r.batch is not None]).view(len(names), *goals[0].shape)
        return [self._record(name, guess, goal) for name, guess, goal in zip(names, guesses, goals, strict=True)]

    def _sent(self, name: str) -> ModelState:
        if self._plan is None:
            return self._semi_trained
        seen = Batch(transformed_as(self._examples.inputs, name, self._table), self._examples.labels)
        return train_model(self._model, seen, self._plan, seed=self._seed)

    def _observe(self, sent: ModelState, batch: Batch, victim: VictimId) -> Observation:
        gradients = loss_gradients(self._model, sent, batch, batch_norm="eval").gradients
        return Observation(
            id=victim,
            model=self._model,
            sent=sent,
            upload=Upload(tensors=gradients, num_examples=1),
            plan=PLAN,
            input_shape=tuple(batch.inputs.shape[1:]),
            num_classes=self._classes,
            knowledge=Knowledge(labels=batch.labels),
        )

    def _record(self, name: str, guess: Tensor, goal: Tensor) -> dict[str, Any]:
        figures = compared(guess.clamp(0, 1), goal, self._batch.inputs)
        return {"kind": "attacked_policy", "policy": name, **figures}


def attack_all(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Attack all policies in ``names`` that time allows; records that the file has are reused."""
    settings = {k: str(v) for k, v in vars(arguments).items() if k in ("search", "weights", "attack", "victims")}
    settings |= {"kind": "settings", "iterations": arguments.iterations, "restarts": arguments.restarts}
    settings |= {"epochs": arguments.epochs} if arguments.epochs else {}
    lines = read_records(arguments.out)[0] if arguments.out.is_file() else []
    if lines and lines[0] != settings:
        raise SystemExit(f"{arguments.out} holds other attacks, {json.dumps(lines[0])}; give another --out.")
    found = {line["policy"]: line for line in lines[1:]}
    missing = [name for name in names if name not in found]
    attacked = Attacked(arguments) if missing else None
    until = time.monotonic() + 60 * arguments.minutes
    write_whole(arguments.out, "".join(f"{dump_json(line)}\n" for line in lines or [settings]))
    with closing(RecordWriter(arguments.out)) as writer:
        for start in range(0, len(missing), arguments.together):
            if attacked is None or time.monotonic() > until:
                break
            for record in attacked(missing[start : start + arguments.together]):
                found[record["policy"]] = record
                writer.append(record)
    return found


def predicted(wanted: Tensor, given: Tensor) -> Tensor:
    """Fit ``wanted`` to ``given`` by a least-squares line and return its (N,) values at ``given``."""
    centered = given - given.mean()
    return wanted.mean() + centered * (centered @ wanted) / (centered @ centered)


def in_words(values: Sequence[float]) -> str:
    found = aggregate(values)
    assert found is not None
    return f"{found.mean:.1f}" + (f" [{found.ci95[0]:.1f}, {found.ci95[1]:.1f}]" if found.ci95 else "")


def correlate(scores: dict[str, float], records: Sequence[dict[str, Any]], kept: RowFile, key: Row) -> None:
    """Print and keep how the scores of policies correlate with what their attacks reconstructed."""
    own = [scores[record["policy"]] for record in records]
    figures = [torch.tensor([record[key] for record in records]).mean(1) for key in FIGURES]
    transformed, original, noise, plain = figures
    for name, quality in (
        ("PSNR to the transformed", transformed),
        ("PSNR to the original", original),
        ("PSNR of noise", noise),
        ("PSNR beyond that of noise", transformed - noise),
        ("PSNR of a plain image", plain),
        ("PSNR beyond a plain image's", transformed - plain),
        ("PSNR that does not follow from a plain image's", transformed - predicted(transformed, plain)),
    ):
        found = pearsonr(own, quality.tolist())
        low, high = found.confidence_interval()
        rank = spearmanr(own, quality.tolist()).statistic
        pearson = {"mean": found.statistic, "ci95": [low, high], "n": len(records)}
        kept.add({"policy": f"score with {name}", **key}, {"pearson": pearson, "spearman": rank})
        print(f"score with {name}: Pearson {found.statistic:.2f} [{low:.2f}, {high:.2f}], Spearman {rank:.2f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a line for each policy; what is there is kept")
    parser.add_argument("--named", nargs="*", default=["none"])
    parser.add_argument("--policies", type=int, default=100, help="of the search's random ones")
    parser.add_argument("--scores", type=Path, help="another search, whose scores are compared")
    parser.add_argument("--weights", type=Path, help="of a run, instead of the search's semi-trained model")
    parser.add_argument("--epochs", type=int, help="train a model under each policy, as long, instead")
    parser.add_argument("--attack", default="ats_adam_cosine")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--restarts", type=int)
    parser.add_argument("--victims", type=int, default=6)
    parser.add_argument("--together", type=int, default=8, help="policies attacked in one batch")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--rows", type=Path, help="folder in which rows.jsonl keeps the means")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    scores = random_scores(arguments.scores or arguments.search)
    drawn = list(scores)[: arguments.policies]
    found, kept = attack_all([*arguments.named, *drawn], arguments), RowFile(arguments.rows)
    key: Row = {"attack": arguments.attack, "iterations": arguments.iterations, "restarts": arguments.restarts}
    key |= {"epochs": arguments.epochs} if arguments.epochs else {}
    for name in arguments.named:
        if record := found.get(name):
            kept.add({"policy": name, **key}, {figure: asdict(aggregate(record[figure])) for figure in FIGURES})
            transformed, original, noise, plain = (in_words(record[figure]) for figure in FIGURES)
            print(
                f"{name}: to the transformed {transformed} (noise {noise}, plain {plain}), to the original {original}"
            )
    done = [found[name] for name in drawn if name in found]
    print(f"{len(done)} of {len(drawn)} random policies, {arguments.victims} images each")
    if len(done) > 3:
        print(f"mean over them: {in_words([sum(r['transformed']) / len(r['transformed']) for r in done])}")
        correlate(scores, done, kept, key)


if __name__ == "__main__":
    main()
