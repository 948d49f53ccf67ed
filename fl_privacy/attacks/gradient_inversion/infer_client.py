"""Infer a client's undisclosed loss, mode and input scale, and the gradient behind Adam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.labels import Head, SingleExample, labels_behind, output_layer
from fl_privacy.attacks.gradient_inversion.other_modalities import search_of
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient, is_sum_of_gradients
from fl_privacy.models import normalized
from fl_privacy.models.gradients import frozen_copy, number_of_steps
from fl_privacy.models.losses import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, SQUARED_ERROR, Loss
from fl_privacy.models.unwrap_model import detached_copy, once_each
from fl_privacy.types import Certainty, LocalPlan, ModelState, Observation, Reconstruction, Tensors
from fl_privacy.types.modality import modality_of
from fl_privacy.types.plan import Normalization
from fl_privacy.types.user_gradients import computed_in

_FITS, _ROUNDED = 1e-3, 4
"""Unexplained share of the output layer's gradient up to which a loss fits; in half precision, in units of rounding."""

_COARSE_FROM, _EQUAL = 64, 0.05  # number of values, and their share of equal ones, that show half precision
_ROUNDINGS = 4  # roundings of a probability near 1 by which the sum of all may be off
_WHOLE = 2e-3  # largest distance of targets from whole numbers

ASSUMED = (
    "The client's loss is taken for cross entropy, which the gradient of its output layer neither shows nor denies."
)

ONE_OUTPUT = (
    "The network has one output, of which there is no cross entropy: the client's loss is taken for squared error,"
    " whose targets explain the gradient of every loss. They are the client's own only if that is its loss (loss= of"
    " Observation.of_gradients)."
)

WHOLE_LABELS = (
    "The output layer's gradient is that of a cross entropy; of a batch it says neither whether labels are smoothed nor"
    " whether classes are weighted, so that plain ones are assumed: give loss= to Observation.of_gradients if they are"
    " not."
)

SOFT_LABELS = (
    "The output layer's gradient asks for more classes than the batch has examples: its labels are smoothed or mixed,"
    " and descents, which assume one class for each example, reconstruct less than with the client's loss="
    " (Observation.of_gradients)."
)


def found_loss(observation: Observation, model: nn.Module) -> tuple[Loss, str]:
    """Infer the client's loss from its output layer's gradient; return it with a sentence that explains it.

    The sentence is empty if a single example's gradient proves plain cross entropy. ``model``: frozen model with the
    sent values, in double precision. ``NotAttackableError`` if no known loss fits.
    """
    layer = output_layer(observation.model, observation.num_classes)
    plain = (SQUARED_ERROR, ONE_OUTPUT) if observation.num_classes == 1 else (CROSS_ENTROPY, ASSUMED)
    if layer is None or layer[0] not in observation.upload.tensors or not is_sum_of_gradients(observation.plan):
        return plain
    like, scale = next(model.parameters()), observation.plan.loss_scale
    sent = {n: g for n, g in as_gradient(observation).items() if n in layer}
    gradient = {n: g.to(like) / scale for n, g in sent.items()}
    fits = max(_FITS, *(_ROUNDED * torch.finfo(precision_of(g)).eps for g in sent.values()))
    if observation.upload.num_examples == 1 and layer[1] in gradient:
        single = SingleExample.of(model, observation.input_shape, layer, gradient)
        return plain if single is None else _loss_of_one(single, fits)
    return plain if observation.num_classes == 1 else _loss_of_batch(observation, layer, gradient, fits)


def precision_of(gradient: Tensor) -> torch.dtype:
    """Infer from the rounding of a gradient in which floating-point type it was computed, before any scaling."""
    values = gradient[gradient != 0].abs().sort().values
    coarse = len(values) >= _COARSE_FROM and float((values.diff() == 0).float().mean()) > _EQUAL
    return torch.bfloat16 if coarse else computed_in(gradient)


def _loss_of_one(single: SingleExample, fits: float) -> tuple[Loss, str]:
    for loss in _candidates(single.head):
        labels, left = labels_behind(single.head, loss, single.slopes)
        if loss is CROSS_ENTROPY and left < fits and not labels.is_floating_point():
            return CROSS_ENTROPY, ""
        any_number = loss.targets == "classes" or (loss is SQUARED_ERROR and labels.shape[1] == 1)
        # any number fits a squared error, but a client's targets are usually 0 or 1
        if left < fits and (any_number or (labels - labels.round().clamp(0, 1)).abs().max() < _WHOLE):
            found = _smoothed(labels) if loss is CROSS_ENTROPY else loss
            return found, f"The client's loss was found to be {found.name}, which gives its output layer's gradient."
    if not _denies_softmax(single.slopes[0], fits):
        return CROSS_ENTROPY, ASSUMED
    raise NotAttackableError(
        "None of cross entropy, binary cross entropy and squared error gives the gradient of the output layer; give the"
        " client's loss= to Observation.of_gradients."
    )


def _loss_of_batch(
    observation: Observation, layer: tuple[str, str | None], gradient: Tensors, fits: float
) -> tuple[Loss, str]:
    weight = gradient[layer[0]]
    bias = gradient.get(layer[1] or "")
    columns = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    if float(columns.sum(0).norm()) < fits * float(columns.norm()):
        asked_for = 0 if bias is None else int((bias < -fits * bias.abs().max()).sum())
        return CROSS_ENTROPY, SOFT_LABELS if asked_for > observation.upload.num_examples else WHOLE_LABELS
    rank = int((torch.linalg.svdvals(columns.cpu()) > fits * torch.linalg.matrix_norm(columns.cpu(), 2)).sum())
    unsure = rank > observation.upload.num_examples or rank == min(columns.shape)
    if bias is None or not _denies_softmax(bias, fits) or unsure:
        return CROSS_ENTROPY, ASSUMED
    raise NotAttackableError(
        "A cross entropy is expected, whose gradients of the output layer add up to 0, but the client's do not, and a"
        " batch shows no other loss; give loss= to Observation.of_gradients, as 'bce', 'mse' or a function."
    )


def _denies_softmax(slopes: Tensor, fits: float) -> bool:
    rounding = _ROUNDINGS * torch.finfo(torch.float32).eps
    return bool((slopes != 0).all()) and float(slopes.sum().abs()) > max(rounding, fits * float(slopes.norm()))


def _candidates(head: Head) -> list[Loss]:
    def summed(loss: Loss) -> Loss:
        def total(outputs: Tensor, labels: Tensor) -> Tensor:
            return outputs.shape[1] * loss.function(outputs, labels)

        return Loss(f"{loss.name}, summed over the outputs", total, targets=loss.targets, takes="rows")

    found = [CROSS_ENTROPY, BINARY_CROSS_ENTROPY, summed(BINARY_CROSS_ENTROPY), SQUARED_ERROR, summed(SQUARED_ERROR)]
    outputs = head.outputs.detach()
    if outputs.min() >= 0 and outputs.max() <= 1:
        bits = Loss("binary cross entropy of probabilities", F.binary_cross_entropy, targets="bits", takes="rows")
        found.insert(0, bits)
    return found


def _smoothed(labels: Tensor) -> Loss:
    others = labels[0].sort().values[:-1]
    share = float(others.mean()) * labels.shape[1]
    if labels.shape[1] > 2 and float(others.std()) < _WHOLE * float(others.mean()) and 0 < share < 1:
        share = round(share, 4)
        return Loss(f"cross entropy with labels smoothed by {share:g}", nn.CrossEntropyLoss(label_smoothing=share))
    return Loss("cross entropy of soft labels", F.cross_entropy)


EPSILON = 1e-8  # PyTorch's epsilon, added to the root of the second moment; another one scales the whole gradient found
_ARITHMETIC = 4.0  # error of the quotient of Adam's moments, in units of rounding

_ROUNDS, _SOUND = 30, 3.0
"""Rounds of least squares, and largest median error, in units of uncertainty, of a gradient that is a product."""

_KNOWN, _MATCHED = 0.5, 0.2  # largest relative uncertainty of a known value, and of a matched one
_SHORT = 0.5  # share of the learning rate; if no step is as long, no gradient exceeds epsilon
_LEAST_KNOWN = 2  # known values of a row, or of a column, that suffice to find the others


def without_adam(observation: Observation) -> Observation:
    """Replace one step of Adam by the gradient that it was computed from; other observations are unchanged.

    In single precision, only magnitudes below 1e-3 can be recovered, those below 1e-4 to a few percent. Larger ones are
    found for a single example, whose gradient of a linear layer is a product of two vectors.

    If a step is longer than Adam's, or the longest is less than half of it, the observation only gets a note.
    """
    plan = observation.plan
    if plan.shares == "gradient" or plan.optimizer == "sgd" or observation.knowledge.defense:
        return observation
    if number_of_steps(observation.upload.num_examples, plan) != 1 or not modality_of(observation.model).pixels:
        return observation
    sent = observation.sent.parameters
    sizes = dict[str, tuple[Tensor, Tensor, Tensor]]()  # of the gradient, lowest and highest, and its sign
    decay = plan.weight_decay if plan.optimizer == "adamw" else 0.0
    longest, too_long = 0.0, False
    for name, delta in observation.update().items():
        if name not in sent or sent[name].shape != delta.shape:
            return observation
        step, error = _adam_step(delta, sent[name], lr=plan.lr, decay=decay)
        longest = max(longest, float(step.abs().max())) if step.numel() else longest
        too_long |= bool((step.abs() > 1 + error).any())
        sizes[name] = _size(step.abs() - error), _size(step.abs() + error), step.sign()
    if too_long or longest < _SHORT:
        note = (
            f"The longest step is {longest:.2g} learning rates, but a first step of Adam is about one: another"
            " optimizer or learning rate than given, a defense, or a gradient of zero. The update was attacked as"
            " it is."
        )
        return observation if note in observation.notes else replace(observation, notes=(*observation.notes, note))
    if observation.upload.num_examples == 1:
        for name in [name for name, own in sizes.items() if name.endswith(".weight") and own[0].dim() == 2]:
            _narrow_bounds(sizes, name)
    return _of_gradient(observation, sizes, plan.weight_decay if plan.optimizer == "adam" else 0.0)


def _adam_step(delta: Tensor, sent: Tensor, *, lr: float, decay: float) -> tuple[Tensor, Tensor]:
    rounding = torch.finfo(sent.dtype).eps
    before = sent.double()
    after = before + delta.double()
    step = -delta.double() / lr - decay * before
    digit = torch.maximum(before.abs(), after.abs()).clamp_min(torch.finfo(torch.float32).tiny).log2().floor().exp2()
    roundings = 2 if decay else 1
    return step, roundings * rounding * digit / (2 * lr) + _ARITHMETIC * rounding * step.abs()


def _size(quotient: Tensor) -> Tensor:
    inside = quotient.clamp_min(0)
    return torch.where(inside < 1, EPSILON * inside / (1 - inside).clamp_min(1e-300), torch.inf)


def _narrow_bounds(sizes: dict[str, tuple[Tensor, Tensor, Tensor]], name: str) -> None:
    """Narrow, in place, the bounds on the gradient of weight ``name``, a product of two vectors for one example.

    ``sizes``: least and largest absolute value, and sign, by parameter.
    """
    bias, shape = name.removesuffix("weight") + "bias", sizes[name][0].shape
    names = [name, bias] if bias in sizes and sizes[bias][0].shape == shape[:1] else [name]
    low, high, sign = (torch.cat([sizes[n][k].reshape(shape[0], -1) for n in names], 1) for k in range(3))
    silent = sign == 0
    middle = torch.where(high.isfinite(), (low + high) / 2, low).clamp_min(torch.finfo(torch.float64).tiny)
    spread = torch.where(high.isfinite(), (high - low) / 2, torch.inf) / middle
    known = (spread < _KNOWN) & ~silent
    if not known.any():
        return
    weights = torch.where(known, spread.clamp_min(1e-6).square().reciprocal(), 0.0)
    columns, (of_columns, of_rows) = torch.zeros_like(middle[0]), (weights.sum(k).clamp_min(1e-300) for k in (0, 1))
    values = torch.where(known, middle.log(), 0.0)
    for _ in range(_ROUNDS):  # fit one number a row plus one a column
        rows = (weights * (values - columns[None])).sum(1) / of_rows
        columns = (weights * (values - rows[:, None])).sum(0) / of_columns
    found = (rows[:, None] + columns[None]).exp()
    unsure = (1 / weights.sum(1, keepdim=True) + 1 / weights.sum(0, keepdim=True)).sqrt()
    off = ((found - middle).abs() / (spread * middle))[known]
    sound = float(off.median()) < _SOUND and float((off < 2 * _SOUND).double().mean()) > _KNOWN
    determined = (known.sum(1, keepdim=True) >= _LEAST_KNOWN) & (known.sum(0, keepdim=True) >= _LEAST_KNOWN)
    filled = determined & ~silent & ~known & sound & (found >= low) & (found <= high)
    room = (_SOUND * unsure).clamp(max=_KNOWN)
    least, most = torch.maximum(low, found * (1 - room)), torch.minimum(high, found * (1 + room))
    low, high = torch.where(filled, least, low), torch.where(filled, most, high)
    widths = [sizes[n][0].numel() // shape[0] for n in names]
    for n, one, other in zip(names, torch.split(low, widths, 1), torch.split(high, widths, 1), strict=True):
        own = sizes[n][2]
        sizes[n] = one.reshape(own.shape), other.reshape(own.shape), own


def _of_gradient(
    observation: Observation, sizes: Mapping[str, tuple[Tensor, Tensor, Tensor]], penalty: float
) -> Observation:
    sent, matched, total = observation.sent.parameters, 0, 0
    tensors, bounds = dict[str, Tensor](), dict[str, tuple[Tensor, Tensor]]()
    for name, (low, high, sign) in sizes.items():
        known = (high.isfinite() & (high - low <= _MATCHED * (high + low))) | (sign == 0)
        least = torch.where(high.isfinite(), (low + high) / 2, low.nan_to_num(posinf=0.0))
        value = (sign * least - penalty * sent[name].double()).to(sent[name].dtype)
        infinite = torch.full_like(value, torch.inf)
        tensors[name] = value  # unmatched values keep their sign and least size, for labels
        bounds[name] = torch.where(known, value, -infinite), torch.where(known, value, infinite)
        matched += int((known & (sign != 0)).sum())
        total += int((sign != 0).sum())
    note = (
        f"The client's step of Adam reveals {matched / max(total, 1):.0%} of the values of its gradient, size and"
        " sign; the others were left out."
    )
    return replace(
        observation,
        upload=replace(observation.upload, tensors=tensors),
        plan=replace(observation.plan, shares="gradient", optimizer="sgd", steps=None, epochs=None, weight_decay=0.0),
        knowledge=replace(observation.knowledge, bounds=bounds),
        notes=(*observation.notes, note),
    )


_SAME = 1e-6  # largest relative difference of outputs of the same images
_UNIT = (0.0, 1.0)
DRAWS = "The model draws at random in training; the attack computes without, since the draws are the client's secret."
_RETURNS_MORE = "In training the model returns more than its outputs; it is attacked as in evaluation mode."
_IN_NO_MODE = (
    "The model draws at random in evaluation mode, too, so that gradients of guesses can't be compared; let it draw"
    " only where self.training is set."
)

_passes: "WeakKeyDictionary[nn.Module, dict[object, str]]" = WeakKeyDictionary()
"""Reasons why a model can't be attacked in a mode, by model, shape of its images, mode and batch norm."""

_scaled: "WeakKeyDictionary[nn.Module, dict[tuple[float, float], nn.Module]]" = WeakKeyDictionary()
"""Copies of models that take inputs in [0, 1], by model and by its own input range."""


@dataclass(frozen=True, eq=False)
class Disclosed:
    """An observation changed by what was inferred about its client: loss given, no random layers, inputs in [0, 1]."""

    observation: Observation
    wrong: str | None = None  # reason why it can't be attacked


def disclosed(observations: Sequence[Observation]) -> list[Disclosed]:
    """Add to each observation everything that can be inferred about its client."""
    states: dict[tuple[int, int], ModelState] = {}
    found = []
    for observation in observations:
        seen = observation
        try:
            if search_of(observation.model).completed:
                seen = _in_unit_range(_without_draws(_once_each(observation, states)))
                seen = without_adam(_with_loss(seen))
            found.append(Disclosed(seen))
        except NotAttackableError as reason:
            found.append(Disclosed(observation, str(reason)))
    return found


def restored(observation: Observation, attacked: Disclosed, found: Reconstruction) -> Reconstruction:
    """Return ``found`` with inputs in the range of ``observation``, and with notes on changes in ``attacked``."""
    assumed = {WHOLE_LABELS, SOFT_LABELS} if found.certainty is not Certainty.APPROXIMATE else set[str]()
    notes = tuple(dict.fromkeys(n for n in (*attacked.observation.notes, *found.notes) if n not in assumed))
    low, high = observation.input_range
    if found.batch is not None and observation.input_range != _UNIT:
        found = replace(found, batch=replace(found.batch, inputs=low + (high - low) * found.batch.inputs))
    return found if notes == found.notes else replace(found, notes=notes)


def _once_each(observation: Observation, states: dict[tuple[int, int], ModelState]) -> Observation:
    model, own = observation.model, {name for name, _ in observation.model.named_parameters()}
    if not {name for name, _ in model.named_parameters(remove_duplicate=False)} - own:
        return observation
    key = id(model), id(observation.sent)
    if key not in states:
        sent = observation.sent
        states[key] = ModelState(once_each(model, sent.parameters), sent.buffers)
    upload = replace(observation.upload, tensors=once_each(model, observation.upload.tensors))
    return replace(observation, sent=states[key], upload=upload)


def _without_draws(observation: Observation) -> Observation:
    if not _covers(observation):
        return observation
    plan = observation.plan
    seen, key = _passes.setdefault(observation.model, {}), (observation.input_shape, plan.mode, plan.batch_norm)
    if key not in seen:
        seen[key] = _compared(observation)
    if seen[key] == _IN_NO_MODE:
        raise NotAttackableError(_IN_NO_MODE)
    if not seen[key]:
        return observation
    return replace(observation, plan=replace(plan, mode="eval"), notes=(*observation.notes, seen[key]))


def _covers(observation: Observation) -> bool:
    assumed = observation.assumed().parameters
    return all(
        name in assumed and assumed[name].shape == parameter.shape and bool(assumed[name].isfinite().all())
        for name, parameter in observation.model.named_parameters()
    )


def _compared(observation: Observation) -> str:
    why, plan = "", observation.plan
    if plan.mode == "train":
        outputs = _outputs_of_two_passes(observation, plan)
        if outputs is not None and _alike(*outputs):
            return ""
        why, plan = _RETURNS_MORE if outputs is None else DRAWS, replace(plan, mode="eval")
    evaluated = _outputs_of_two_passes(observation, plan)
    if evaluated is None:  # the attack reports the reason
        return ""
    return why if _alike(*evaluated) else _IN_NO_MODE


@torch.no_grad()
def _outputs_of_two_passes(observation: Observation, plan: LocalPlan) -> tuple[Tensor, Tensor] | None:
    like = next(iter(observation.assumed().parameters.values()))
    model = frozen_copy(observation.model, observation.assumed(), plan, device=like.device, dtype=torch.float32)
    images = torch.rand((2, *observation.input_shape), generator=torch.Generator().manual_seed(0)).to(like.device)
    found = []
    with torch.random.fork_rng(devices=[like.device] if like.device.type == "cuda" else []):
        for seed in (1, 2):
            torch.manual_seed(seed)
            try:
                found.append(model(images))
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
                return None
    return (found[0], found[1]) if all(isinstance(outputs, Tensor) for outputs in found) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and bool((one - other).norm() <= _SAME * one.norm())
    return same or not bool(one.isfinite().all())


def _in_unit_range(observation: Observation) -> Observation:
    if observation.input_range == _UNIT:
        return observation
    low, high = observation.input_range
    copies = _scaled.setdefault(observation.model, {})
    if observation.input_range not in copies:
        scaling = Normalization([-low / (high - low)], [1 / (high - low)])
        copies[observation.input_range] = normalized(detached_copy(observation.model), scaling)
    given = {name: getattr(observation.knowledge, name) for name in ("public_images", "previous")}
    unit = {name: (images - low) / (high - low) for name, images in given.items() if images is not None}
    knowledge = replace(observation.knowledge, **unit)
    return replace(observation, model=copies[observation.input_range], input_range=_UNIT, knowledge=knowledge)


def _with_loss(observation: Observation) -> Observation:
    if observation.loss is not None:
        return observation
    sent = observation.sent.parameters
    fits = all(name in sent and sent[name].shape == value.shape for name, value in observation.upload.tensors.items())
    if not fits or not _covers(observation):
        return observation
    assumed, plan = observation.assumed(), observation.plan
    device = next(iter(assumed.parameters.values())).device
    model = frozen_copy(observation.model, assumed, plan, device=device, dtype=torch.float64)
    try:
        loss, sentence = found_loss(observation, model)
    except NotAttackableError:
        if DRAWS not in observation.notes:
            raise
        loss, sentence = CROSS_ENTROPY, ASSUMED  # the gradient depends on the draws
    return replace(observation, loss=loss, notes=(*observation.notes, *((sentence,) if sentence else ())))
