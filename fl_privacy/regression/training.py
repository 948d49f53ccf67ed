"""What one step of an app's own training function gives away, measured without a federation."""

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.checks import whole
from fl_privacy.data.own_examples import find_normalization, fingerprint, samples, told_normalization
from fl_privacy.defenses import ClientState, Defense, none
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.experiment.attack_by_name import attack_called
from fl_privacy.experiment.candidates import MOST
from fl_privacy.experiment.unattacked import at_random, others_among
from fl_privacy.interception.recognition import recognize_training
from fl_privacy.metrics import METRICS, VictimScore, evaluate_all
from fl_privacy.metrics.beyond import Others
from fl_privacy.metrics.outcome import Outcome, outcome_of
from fl_privacy.models import normalized
from fl_privacy.normalization import Normalization
from fl_privacy.regression.measurement import Measurement, expect_metric, measured
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Tensors, Upload, VictimId

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
    """How well an honest-but-curious server reads the first ``images`` of ``data`` from uploads of one batch each.

    Each batch is trained on by ``train``, once, on a copy of the model as it is: the worst case of the literature for
    its size. The change of the parameters is what the server sees, behind ``defense`` if there is one: then an attacker
    that knows it attacks as well, and of each image that one counts which read more.

    Args:
        model: the app's model, or what makes it; its values are drawn under ``seed`` in that case.
        train: the app's own training function; trains the model in place over the loader that it is given.
        data: images with labels, with the app's transform: a data set, a loader or an iterable of pairs.
        batch_size: examples in each upload.
        images: how many in all; a whole number of batches, at least five.
        defense: of the upload alone (noise, clipping, pruning, quantization); others belong into ``train``.
        attack: a name that ``fl-privacy list`` shows, with settings after it, or an attack.
        metric: a name in ``METRICS`` that compares images.
        seed: of all randomness.

    Raises:
        UserError: something does not fit, or the attack failed on an image.
    """
    expect_metric(metric)
    examples = _examples(data, images, batch_size)
    network, scale = _made(model, seed), told_normalization(data) or find_normalization(examples)
    pixels = [image if scale is None else scale.undo(image) for image, _ in examples]
    observed = normalized(network, scale) if scale is not None else network
    guard = none() if defense is None else _expect_on_upload(defense)
    observations, truths = [], []
    for index in range(images // batch_size):
        rows = slice(index * batch_size, (index + 1) * batch_size)
        drawn = derive_seed(seed, "upload", index)
        change = _change(network, train, examples[rows], drawn)
        tensors = _defended(change.parameters, guard, drawn)
        upload = Upload(tensors=tensors, buffers=change.buffers, num_examples=batch_size)
        truth = Batch(torch.stack(pixels[rows]).clamp(0, 1), torch.tensor([label for _, label in examples[rows]]))
        observations.append(_observation(network, observed, upload, index, tuple(truth.inputs.shape[1:])))
        truths.append(truth)
    made, name = _called(attack)
    knowing = [[o.told(defense=guard.parts) for o in observations]] if guard.parts else []
    judge = partial(evaluate_all, truths=truths, others=_others(data, truths, scale, seed))
    scores = [judge(made(_at_one_rate(o), seed=seed)) for o in (observations, *knowing)]
    return measured(
        metric=metric,
        attack=name,
        values=_worst_values(scores, metric),
        uploads=[o.id for o in observations for _ in range(batch_size)],
        outcomes=_most(scores),
        victims=[fingerprint(image) for image in pixels],
    )


def _others(data: object, attacked: Sequence[Batch], scale: Normalization | None, seed: int) -> Others:
    """Images of the same data that are not attacked, with shipped ones where there are few."""
    shape = tuple(attacked[0].inputs.shape[1:])
    taken = set(range(sum(len(batch.inputs) for batch in attacked)))
    drawn = islice(at_random(data, taken, derive_generator(seed, "candidates")), MOST)
    plain = [(image if scale is None else scale.undo(image), label) for image, label in drawn]
    return others_among([(i, label) for i, label in plain if tuple(i.shape) == shape], attacked, shape, seed=seed)


def _called(attack: str | ReconstructionAttack) -> tuple[ReconstructionAttack, str]:
    """The attack and its name."""
    made, name = attack_called(attack)
    if made is None:
        raise UserError("attack is expected to be one, but got none; nothing would be measured.")
    return made, name


def _at_one_rate(observations: Sequence[Observation]) -> list[Observation]:
    """With the learning rate that ``train`` most likely has, so that all are attacked together."""
    rate = statistics.median(o.plan.lr for o in observations)
    return [replace(o, plan=replace(o.plan, lr=rate)) for o in observations]


def _read(scores: Sequence[VictimScore], metric: str) -> list[float]:
    """Of each image, NaN after a failure."""
    return [image.values.get(metric, math.nan) for score in scores for image in score.images]


def _worst_values(scores: Sequence[Sequence[VictimScore]], metric: str) -> list[float]:
    """Of each image, by the attacker that read most of it."""
    return [_worst(metric, values) for values in zip(*(_read(found, metric) for found in scores), strict=True)]


def _most(scores: Sequence[Sequence[VictimScore]]) -> list[Outcome | None]:
    """The most that any attacker read of each image; ``None`` where that cannot be said of one of them."""
    found = zip(*map(_outcomes, scores), strict=True)
    return [None if None in each else min(filter(None, each), key=list(Outcome).index) for each in found]


def _outcomes(scores: Sequence[VictimScore]) -> list[Outcome | None]:
    """What was read of each image."""
    return [
        outcome_of({**image.values, **image.compared, "certainty": image.certainty, "failure": image.failure})
        for score in scores
        for image in score.images
    ]


def _worst(metric: str, values: Sequence[float]) -> float:
    """Of what several attackers read of an image; NaN where one of them failed, as is not known what it can."""
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if METRICS[metric].leaks == "high" else min(values)


def _examples(data: object, images: int, batch_size: int) -> list[tuple[Tensor, int]]:
    """The first ``images`` of ``data``."""
    whole("batch_size", batch_size, at_least=1, example=8)
    whole("images", images, at_least=1, example=40)
    if images % batch_size:
        raise UserError(f"images is expected to be a multiple of batch_size={batch_size}, but got {images}.")
    examples = list(islice(samples(data), images))
    if len(examples) < images:
        raise UserError(f"data is expected to hold {images} images, but holds {len(examples)}; lower images.")
    return examples


class _Batch(Dataset[tuple[Tensor, int]]):
    def __init__(self, examples: Sequence[tuple[Tensor, int]]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._examples[index]


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
    """Of the parameters, by one training on ``examples``; buffers as they are then."""
    sent, trained = ModelState.of(model), copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), blamed_on("train(model, loader)"):
        torch.manual_seed(seed)
        train(trained, DataLoader(_Batch(examples), batch_size=len(examples)))
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
    """By a client that starts anew with each upload."""
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
