"""Leakage of chosen images from an app's uploads, of a run or of one step without a federation."""

import copy
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.checks import one_of, whole
from fl_privacy.data.app_data import find_normalization, fingerprint, samples, told_normalization
from fl_privacy.defenses import ClientState, Defense, none
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.federation.interception.infer_plan import recognize_training
from fl_privacy.measure import METRICS, Metric, Statistic, VictimScore, aggregate, evaluate_all
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.intervals import share_at_most
from fl_privacy.measure.outcome import READ, Outcome, outcome_of
from fl_privacy.models import normalized
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.runs.build import attack_called
from fl_privacy.runs.distractors import MOST, at_random, others_among
from fl_privacy.runs.folder import Attacker, read_run
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Tensors, Upload
from fl_privacy.types.plan import Normalization
from fl_privacy.types.victim_ids import VictimId


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Quality of the reconstruction of each of N images.

    Attributes:
        values: values (N,) of the metric, in the order of the images.
        uploads: number (N,) of each image's upload; images of one upload were attacked together.
        victims: digest that identifies the images.
        read: number of reconstructed images, by the rule of every page; ``None`` from older versions.
    """

    metric: str
    attack: str
    values: tuple[float, ...]
    uploads: tuple[int, ...]
    victims: str
    versions: Mapping[str, str]
    read: int | None = None

    @property
    def judged_by(self) -> Metric:
        return METRICS[self.metric]

    @property
    def statistic(self) -> Statistic:
        """Return mean and 95 % interval, over uploads."""
        found = aggregate(self.values, groups=self.uploads, within=self.judged_by.range)
        assert found is not None
        return found

    @property
    def read_in_words(self) -> str:
        """Return the number of reconstructed images in words; if none, with the upper limit of the share (95 %)."""
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
    """Build a measurement of known values.

    Args:
        values: values (N,) of the metric, NaN for a failed attack.
        uploads: names (N,) of the uploads.

    Raises:
        UserError: there is no such metric, no image, or an unknown value.
    """
    expect_metric(metric)
    known = tuple(map(float, values))
    numbers: dict[object, int] = {}
    groups = tuple(numbers.setdefault(upload, len(numbers)) for upload in uploads)
    unknown = sum(math.isnan(value) for value in known)
    if unknown or not known:
        raise UserError(
            f"{metric} is expected to be known of every attacked image, but is not of {unknown or 'any'} of"
            f" {len(known)}: the attack failed, or the metric can't be computed, which says nothing of the uploads."
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
    """Measure the run, attack or audit in ``folder``: the attacked round and attacker with the worst mean.

    Raises:
        UserError: it is no run's folder, did not finish, attacked nothing, or failed on an image.
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
        raise UserError(f"{folder} is expected to hold attacked images, but none was attacked.")
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

    Each batch is an upload: ``train`` trains on it once, on a copy of the model, the worst case of the literature for
    its size. The server sees the change of the parameters, behind ``defense``, if any. The better reconstruction of
    each image counts, with and without knowledge of the defense.

    Args:
        model: the app's model, or its maker, called under ``seed``.
        train: the app's function that trains the model in place over a loader.
        data: images with labels and the app's transform: a data set, a loader or an iterable of pairs.
        images: number of images, a multiple of ``batch_size``, with at least five uploads.
        defense: defense of the upload alone (noise, clipping, pruning, quantization); others belong into ``train``.
        attack: name from ``fl-privacy list`` with settings, or an attack.

    Raises:
        UserError: an argument does not fit, or the attack failed on an image.
    """
    expect_metric(metric)
    made, name = attack_called(attack)
    if made is None:
        raise UserError("attack is expected to be one, but got none; nothing would be measured.")
    examples = _examples(data, images, batch_size)
    network, scale = _made(model, seed), told_normalization(data) or find_normalization(examples)
    pixels = [image if scale is None else scale.undo(image) for image, _ in examples]
    observed = normalized(network, scale) if scale is not None else network
    guard = none() if defense is None else _expect_on_upload(defense)
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
    knowing = [[o.told(defense=guard.parts) for o in observations]] if guard.parts else []
    judge = partial(evaluate_all, truths=truths, others=_others(data, truths, scale, seed))
    scores = [judge(made(seen, seed=seed)) for seen in (observations, *knowing)]
    return measured(
        metric=metric,
        attack=name,
        values=_worst(scores, metric),
        uploads=[o.id for o in observations for _ in range(batch_size)],
        outcomes=_most(scores),
        victims=[fingerprint(image) for image in pixels],
    )


def _others(data: object, attacked: Sequence[Batch], scale: Normalization | None, seed: int) -> Distractors:
    shape = tuple(attacked[0].inputs.shape[1:])
    taken = set(range(sum(len(batch.inputs) for batch in attacked)))
    drawn = islice(at_random(data, taken, derive_generator(seed, "candidates")), MOST)
    plain = [(image if scale is None else scale.undo(image), label) for image, label in drawn]
    return others_among([(i, label) for i, label in plain if tuple(i.shape) == shape], attacked, shape, seed=seed)


def _most(scores: Sequence[Sequence[VictimScore]]) -> list[Outcome | None]:
    """Return the worst outcome of each image; ``None`` if unknown."""
    found = [[image.outcome for score in each for image in score.images] for each in scores]
    order = list(Outcome).index
    return [None if None in each else min(filter(None, each), key=order) for each in zip(*found, strict=True)]


def _worst(scores: Sequence[Sequence[VictimScore]], metric: str) -> list[float]:
    """Return the worst value of each image; NaN if an attacker failed."""
    found = [[image.values.get(metric, math.nan) for score in each for image in score.images] for each in scores]
    worst = max if METRICS[metric].leaks == "high" else min
    return [math.nan if any(map(math.isnan, values)) else worst(values) for values in zip(*found, strict=True)]


def _examples(data: object, images: int, batch_size: int) -> list[tuple[Tensor, int]]:
    whole("batch_size", batch_size, at_least=1, example=8)
    whole("images", images, at_least=1, example=40)
    if images % batch_size:
        raise UserError(f"images is expected to be a multiple of batch_size={batch_size}, but got {images}.")
    examples = list(islice(samples(data), images))
    if len(examples) < images:
        raise UserError(f"data is expected to hold {images} images, but holds {len(examples)}; lower images.")
    return examples


def _made(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), blamed_on("model()"):
        torch.manual_seed(seed)
        made = model()
    if not isinstance(made, nn.Module):
        raise UserError(f"model is expected to be or to make a torch.nn.Module, but made {type(made).__name__}.")
    return made


def _change(model: nn.Module, train: Train, examples: Sequence[tuple[Tensor, int]], seed: int) -> ModelState:
    sent, trained = ModelState.of(model), copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), blamed_on("train(model, loader)"):
        torch.manual_seed(seed)
        train(trained, DataLoader(examples, batch_size=len(examples)))  # type: ignore[arg-type]
    after = ModelState.of(trained.cpu())
    change = {name: value - sent.parameters[name] for name, value in after.parameters.items()}
    if not any(bool(tensor.any()) for tensor in change.values()):
        raise UserError("train is expected to train the model that it is given in place, but left it as it was.")
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
