"""Measure how well chosen images are reconstructed, in a run or from an app's training function, and compare."""

import copy
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.checks import fits, one_of, whole
from fl_privacy.data.app_data import declared_normalization, find_normalization, fingerprint, samples
from fl_privacy.defenses import ClientState, Defense, none
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.federation.interception.infer_plan import recognize_training
from fl_privacy.files import write_whole
from fl_privacy.measure import METRICS, Metric, Statistic, VictimScore, aggregate, evaluate_all, share_at_most
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.outcome import READ, Outcome, outcome_of
from fl_privacy.models import normalized
from fl_privacy.models.unwrap_model import made_of
from fl_privacy.rng import derive_generator, derive_seed, streams_put_back
from fl_privacy.runs.build import attack_called
from fl_privacy.runs.distractors import MOST, at_random, others_among
from fl_privacy.runs.folder import Attacker, read_run
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Tensors, Upload, VictimId
from fl_privacy.types.plan import Normalization


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Quality of the reconstruction of each of N images."""

    metric: str
    attack: str
    values: tuple[float, ...]  # values (N,) of the metric, in the order of the images
    uploads: tuple[int, ...]  # number (N,) of each image's upload; images of one upload were attacked together
    victims: str  # digest that identifies the images
    versions: Mapping[str, str]
    read: int | None = None  # number of reconstructed images, by the rule of every page; ``None`` from older versions

    @property
    def judged_by(self) -> Metric:
        return METRICS[self.metric]

    @property
    def statistic(self) -> Statistic:
        found = aggregate(self.values, groups=self.uploads, within=self.judged_by.range)
        assert found is not None
        return found

    @property
    def read_in_words(self) -> str:
        if self.read is None:
            return f"an unknown number of {len(self.values)} images"
        if self.read:
            return f"{self.read} of {len(self.values)} images"
        upper = share_at_most(0, len(self.values), groups=len(set(self.uploads)))
        return f"none of {len(self.values)} images (up to {100 * upper:.0f} % of such images may be)"


def expect_metric(metric: str) -> None:
    """Raise ``UserError`` unless ``metric`` compares images."""
    one_of("metric", metric, [name for name, known in METRICS.items() if known.of == "images"])


def measured(
    *,
    metric: str,
    attack: str,
    values: Iterable[float],
    uploads: Iterable[object],
    victims: Iterable[str],
    outcomes: Iterable[Outcome | None] = (),
) -> Measurement:
    """Build a measurement from the ``values`` (N,) that ``metric`` gave for N images.

    ``uploads``: identifier (N,) of each image's upload. ``victims``: identifier (N,) of each image. ``outcomes``:
    outcome (N,) of each attack, if known. ``UserError`` if the metric is unknown, there is no image, or a value is NaN.
    """
    expect_metric(metric)
    known = tuple(map(float, values))
    numbers: dict[object, int] = {}
    groups = tuple(numbers.setdefault(upload, len(numbers)) for upload in uploads)
    unknown = sum(math.isnan(value) for value in known)
    if unknown or not known:
        raise UserError(
            f"{metric} is expected for at least one attacked image and for all of them, but is unknown for {unknown} of"
            f" {len(known)}: the attack failed, or the metric can't be computed; choose another attack or metric."
        )
    found = list(outcomes)
    return Measurement(
        metric=metric,
        attack=attack,
        values=known,
        uploads=groups,
        victims=hashlib.sha256("\n".join(victims).encode()).hexdigest(),
        versions={package: version(package) for package in ("fl-privacy", "torch")},
        read=None if not found or None in found else sum(outcome in READ for outcome in found),
    )


def measure_run(folder: Path, *, metric: str = "psnr") -> Measurement:
    """Measure the reconstructions in the ``folder`` of a run, an attack or an audit.

    Of several attackers and rounds, those with the greatest mean leakage are measured. ``UserError`` if ``folder``
    holds no finished run, nothing was attacked, or the attack failed on an image.
    """
    run = read_run(folder)
    if not run.finished:
        raise UserError(f"{folder} is expected to hold a run that finished, but it did not; start it again.")
    expect_metric(metric)
    found: dict[tuple[Attacker, int], list[Mapping[str, Any]]] = {}
    for attacker in Attacker:
        for image in run.of_kind("image", attacker):
            found.setdefault((attacker, image["round"]), []).append(image)
    if not found:
        raise UserError(f"{folder} is expected to hold attacked images, but has none; attack some (attack=auto).")
    sign = 1 if METRICS[metric].leaks == "high" else -1

    def leakage(one: tuple[Attacker, int]) -> float:
        values = [value for image in found[one] if not math.isnan(value := _value(image, metric))]
        return sign * (sum(values) / len(values) if values else -math.inf)

    attacker, round = max(found, key=leakage)
    images = found[attacker, round]
    choices = run.identity.config.get("choices", {})
    return measured(
        metric=metric,
        attack=f"{choices.get('attack', 'an attack')}, {attacker} attacker, round {round}",
        values=[_value(image, metric) for image in images],
        uploads=[image["id"] for image in images],
        outcomes=[outcome_of(image) for image in images],
        victims=[f"{choices.get('data')} {VictimId.parse(str(i['id'])).source} {i['image']}" for i in images],
    )


def _value(image: Mapping[str, Any], metric: str) -> float:
    value = None if image.get("failure") else image.get(metric)
    return math.nan if value is None else float(value)


Train = Callable[[nn.Module, DataLoader], object]
UPLOAD_HOOKS = {"parts", "upload", "outcome"}


def measure_training(
    *,
    model: nn.Module | Callable[[], nn.Module],
    train: Train,
    data: object,
    batch_size: int = 1,
    images: int = 40,
    defense: Defense | None = None,
    attack: str | ReconstructionAttack = "auto attack.budget=quick",
    metric: str = "psnr",
    seed: int = 0,
) -> Measurement:
    """Measure how well an honest-but-curious server reconstructs the first ``images`` of ``data``.

    Each batch is an upload: ``train`` trains on it once, on a copy of the model. The
    server sees the parameters' change, defended by ``defense``. The attacker tries without and with knowledge of the
    defense, and the better result counts. ``UserError`` for an unfit argument, or a failed attack.

    Args:
        model: the app's model, or a function that builds it, called with the random state of ``seed``.
        train: the app's function that trains the model in place over a loader.
        data: images with labels and the app's transform: a data set, a loader or an iterable of pairs.
        images: number of images, a multiple of ``batch_size``, with at least five uploads.
        defense: defense that changes the upload only (noise, clipping, pruning, quantization); ``train`` has to apply
            others itself.
        attack: name from ``fl-privacy list`` with settings, or an attack.
    """
    expect_metric(metric)
    made, name = attack_called(attack)
    if made is None:
        raise UserError("attack is expected to name an attack, but got none; try auto.")
    guard = none() if defense is None else _expect_on_upload(defense)
    examples = _examples(data, images, batch_size)
    with streams_put_back(seed), blamed_on("model()"):
        network = copy.deepcopy(made_of(model))
    scale = declared_normalization(data) or find_normalization(examples)
    pixels = [image if scale is None else scale.undo(image) for image, _ in examples]
    observed = normalized(network, scale) if scale is not None else network
    observations, truths = [], []
    for index in range(images // batch_size):
        rows, drawn = slice(index * batch_size, (index + 1) * batch_size), derive_seed(seed, "upload", index)
        change = _change(network, train, examples[rows], drawn)
        tensors = _defended(change.parameters, guard, drawn)
        upload = Upload(tensors=tensors, buffers=change.buffers, num_examples=batch_size)
        truth = Batch(torch.stack(pixels[rows]).clamp(0, 1), torch.tensor([label for _, label in examples[rows]]))
        observations.append(_observation(network, observed, upload, index, tuple(truth.inputs.shape[1:])))
        truths.append(truth)
    rate = statistics.median(o.plan.lr for o in observations)  # one for all, so that they are attacked together
    observations = [replace(o, plan=replace(o.plan, lr=rate)) for o in observations]
    knowing = [[o.given(defense=guard.parts) for o in observations]] if guard.parts else []
    judge = partial(evaluate_all, truths=truths, others=_others(data, truths, scale, seed))
    values, outcomes = _worst([judge(made(seen, seed=seed)) for seen in (observations, *knowing)], metric)
    return measured(
        metric=metric,
        attack=name,
        values=values,
        uploads=[o.id for o in observations for _ in range(batch_size)],
        outcomes=outcomes,
        victims=[fingerprint(image) for image in pixels],
    )


def _worst(attackers: Sequence[Sequence[VictimScore]], metric: str) -> tuple[list[float], list[Outcome | None]]:
    worst, order = max if METRICS[metric].leaks == "high" else min, list(Outcome).index
    values, outcomes = [], []
    for image in zip(*([image for score in each for image in score.images] for each in attackers), strict=True):
        found, known = [one.values.get(metric, math.nan) for one in image], [one.outcome for one in image]
        values.append(math.nan if any(map(math.isnan, found)) else worst(found))
        outcomes.append(None if None in known else min(filter(None, known), key=order))
    return values, outcomes


def _others(data: object, attacked: Sequence[Batch], scale: Normalization | None, seed: int) -> Distractors:
    shape = tuple(attacked[0].inputs.shape[1:])
    taken = set(range(sum(len(batch.inputs) for batch in attacked)))
    drawn = islice(at_random(data, taken, derive_generator(seed, "candidates")), MOST)
    plain = [(image if scale is None else scale.undo(image), label) for image, label in drawn]
    return others_among([(i, label) for i, label in plain if tuple(i.shape) == shape], attacked, shape, seed=seed)


def _examples(data: object, images: int, batch_size: int) -> list[tuple[Tensor, int]]:
    whole("batch_size", batch_size, at_least=1, example=8)
    whole("images", images, at_least=1, example=40)
    if images % batch_size:
        more = images + batch_size - images % batch_size
        raise UserError(f"images is expected to be a multiple of {batch_size=}, but got {images}; try {more}.")
    examples = list(islice(samples(data), images))
    if len(examples) < images:
        raise UserError(f"data is expected to hold {images} images, but holds {len(examples)}; lower images.")
    return examples


def _change(model: nn.Module, train: Train, examples: Sequence[tuple[Tensor, int]], seed: int) -> ModelState:
    sent, trained = ModelState.of(model), copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), blamed_on("train(model, loader)"):
        torch.manual_seed(seed)
        train(trained, DataLoader(examples, batch_size=len(examples)))  # type: ignore[arg-type]
    after = ModelState.of(trained.cpu())
    change = {name: value - sent.parameters[name] for name, value in after.parameters.items()}
    if not any(bool(tensor.any()) for tensor in change.values()):
        raise UserError("train is expected to train its model in place, but left it as it was; step on its parameters.")
    return ModelState(change, after.buffers)


def _expect_on_upload(defense: Defense) -> Defense:
    if inside := [name for name in vars(defense) if name not in UPLOAD_HOOKS and getattr(defense, name)]:
        raise UserError(
            f"defense is expected to act on the upload alone, but {defense.name} has {inside[0]}; call it in train"
            " (fl_privacy.flower.train_step)."
        )
    return defense


def _defended(change: Tensors, defense: Defense, seed: int) -> Tensors:
    state, rng = ClientState(), torch.Generator().manual_seed(derive_seed(seed, "defense"))
    for hook in defense.upload:
        change = hook(change, state, rng)
    return change


def _observation(
    model: nn.Module, observed: nn.Module, upload: Upload, index: int, shape: tuple[int, ...]
) -> Observation:
    with torch.no_grad():
        logits = copy.deepcopy(observed).eval()(torch.zeros(1, *shape))
    seen = Observation(
        id=VictimId(0, 0, index),
        model=observed,
        sent=ModelState.of(model),
        upload=upload,
        plan=LocalPlan(shares="delta", steps=1),
        input_shape=shape,
        num_classes=logits.shape[-1],
    )
    return recognize_training(seen)[0]


LEVEL, FEWEST = 0.05, 5
"""Probability of a false alarm without a change, and smallest number of groups for which p can be below it."""

EXACT = 14  # largest number of independent groups with all sign flips; beyond, 2^14 random ones


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of a paired test against a baseline: ``worse`` if significantly more leaks; ``p``: the test's p-value."""

    worse: bool
    p: float
    change: Statistic
    sentence: str


def compare(before: Measurement, now: Measurement) -> Comparison:
    """Test whether the same images are reconstructed better ``now`` than ``before``.

    It is a one-sided sign-flip (permutation) test of the mean difference, paired by image. Images that shared an upload
    in either measurement are flipped together. A rise too small to change the printed mean is ignored. ``UserError`` if
    images or metrics differ, or there are too few uploads.
    """
    expect_enough(before.uploads)
    expect_enough(now.uploads)
    if before.metric != now.metric:
        raise UserError(f"The baseline is expected to be of {now.metric}, but is of {before.metric}; update it.")
    if before.victims != now.victims or len(before.values) != len(now.values):
        raise UserError(
            "The baseline is expected to be of the same images, but those attacked now are others"
            f" ({len(before.values)} then, {len(now.values)} now); measure the same ones, or update it."
        )
    places = np.array(before.uploads), np.array(now.uploads) + max(before.uploads) + 1
    graph = coo_array((np.ones(len(places[0])), places), shape=(places[1].max() + 1,) * 2)
    groups = np.unique(connected_components(graph, directed=False)[1][places[0]], return_inverse=True)[1]
    expect_enough(groups.tolist())
    difference = np.asarray(now.values) - np.asarray(before.values)
    sign = 1.0 if now.judged_by.leaks == "high" else -1.0
    p = sign_flip_p(np.bincount(groups, weights=sign * difference))
    change = aggregate(difference.tolist(), groups=groups.tolist())
    assert change is not None
    shown = now.judged_by.digits
    rises = shown(before.statistic.mean) != shown(now.statistic.mean)  # otherwise it may be rounding
    worse = p < LEVEL and rises
    return Comparison(worse=worse, p=p, change=change, sentence=_sentence(before, now, change, p, worse=worse))


def sign_flip_p(sums: np.ndarray) -> float:
    """Return the one-sided p-value of the sum of ``sums`` (G,), if each of these has a random sign.

    ``sums``: one for each independent group. See Fisher 1935, "The Design of Experiments", section 21. The p-value is
    estimated if there are more than ``EXACT`` groups.
    """
    count = len(sums)
    if count <= EXACT:
        flips = 1 - 2 * ((np.arange(1 << count)[:, None] >> np.arange(count)) & 1)
    else:
        flips = np.random.default_rng(0).choice((-1, 1), (1 << EXACT, count))
        # the draws include the observed signs (Phipson and Smyth 2010)
        flips[0] = 1
    slack = 1e-9 * np.abs(sums).sum()
    return float(np.mean(flips @ sums >= sums.sum() - slack))


def _sentence(before: Measurement, now: Measurement, change: Statistic, p: float, *, worse: bool) -> str:
    metric, old, new = now.judged_by, before.statistic.mean, now.statistic.mean
    unit = f" {metric.unit}" if metric.unit else ""
    low, high = change.ci95 or (change.mean, change.mean)
    verdict = "more than before" if worse else "no more than before, as far as this test can detect"
    read = f" Reconstructed: {now.read_in_words}; before: {before.read_in_words}."
    others = [f"{k} {before.versions.get(k)} -> {v}" for k, v in now.versions.items() if before.versions.get(k) != v]
    also = [f"the attack was {before.attack} and is {now.attack}"] if before.attack != now.attack else []
    note = f" ({'; '.join([*others, *also])})" if others or also else ""
    return (
        f"The uploads leak {verdict}: mean {metric.name_within} {metric.digits(old)} -> {metric.digits(new)}{unit}"
        f" ({change.mean:+.2g}{unit}, 95 % interval {low:+.2g} to {high:+.2g}; p = {p:.2g}, {change.groups} independent"
        f" groups of uploads){note}.{read}"
    )


def expect_enough(uploads: Sequence[int]) -> None:
    """Raise ``UserError`` if the images come from fewer than ``FEWEST`` uploads; ``uploads``: upload of each image."""
    if (found := len(set(uploads))) < FEWEST:
        raise UserError(
            f"At least {FEWEST} independent uploads are expected in both measurements, but got {found}: with fewer no"
            " rise could be distinguished from chance; attack more images, or smaller batches."
        )


FORMAT, MOST_BYTES = 1, 1 << 24

_KINDS: Mapping[str, Any] = {
    "metric": str,
    "attack": str,
    "values": list[float],
    "uploads": list[int],
    "victims": str,
    "versions": Mapping[str, str],
}


def read_baseline(path: Path) -> dict[str, Measurement]:
    """Return measurements by name, empty if ``path`` does not exist; ``UserError`` if the file has another format."""
    if not path.is_file():
        return {}
    wrong = UserError(
        f"{path} is expected to be a baseline as `pytest --fl-privacy-update` or `fl-privacy check-leakage --update`"
        " write it, but is damaged; write it anew."
    )
    try:
        content = json.loads(path.read_text()) if path.stat().st_size <= MOST_BYTES else None
    except (ValueError, RecursionError) as error:
        raise wrong from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("tests"), dict):
        raise wrong
    return {name: _read(entry, wrong) for name, entry in content["tests"].items()}


def write_baseline(path: Path, measurements: Mapping[str, Measurement]) -> None:
    """Write ``measurements`` by name to a file, with mean and confidence interval for human readers."""
    tests = {}
    for name, measurement in sorted(measurements.items()):
        found = measurement.statistic
        seen = {"mean": found.mean, "ci95": found.ci95, "images": found.n, "independent_uploads": found.groups}
        tests[name] = {**seen, **asdict(measurement)}
    write_whole(path, json.dumps({"format": FORMAT, "tests": tests}, indent=1) + "\n")


def _read(entry: Any, wrong: UserError) -> Measurement:
    if not isinstance(entry, dict) or any(not fits(entry.get(name), kind) for name, kind in _KINDS.items()):
        raise wrong
    if not entry["values"] or len(entry["values"]) != len(entry["uploads"]) or entry["metric"] not in METRICS:
        raise wrong
    chosen: dict[str, Any] = {name: entry[name] for name in _KINDS} | {"read": entry.get("read")}
    if not fits(chosen["read"], int | None) or not 0 <= (chosen["read"] or 0) <= len(entry["values"]):
        raise wrong
    chosen |= {name: tuple(entry[name]) for name in ("values", "uploads")}
    return Measurement(**chosen)
