"""Infer an unknown defense from the noise, zeros or levels in an update."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.adaptive import Constraints
from fl_privacy.attacks.adaptive.constraints import AT_BOUND
from fl_privacy.attacks.gradient_inversion import layer_statistics, objectives, targets
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.effects import Clipped, Description, MutedFeatures, Noise, Part, Quantized, Sparse, Truncated
from fl_privacy.models.gradients import differentiable_twice, loss_gradients, set_mode
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Observation, Tensors

_LOUDEST = 3.0  # ratio of noise to gradient above which more smoothing leaves only gray
_FEWEST = 8  # fewest columns of the output layer for an estimate

_STRENGTH, _EDGE = 0.25, 0.05
"""Largest gradient of total variation with respect to a pixel, as a share of what noise adds to the objective's
gradient; and the shift of a pixel by noise from which it is used, about that of neighbors in photographs."""

_COARSE = 4  # side of the random images on which noise is measured, before they are resized to the victim's


def noise_over_gradient(observation: Observation) -> float | None:
    """Return the ratio of the update's noise norm to its gradient norm, at most 3.

    Without noise, columns of the output layer's gradient sum to zero under cross entropy. The ratio is ``None`` without
    an output layer, with too few columns, or for steps of Adam.
    """
    of_adam = observation.plan.shares != "gradient" and observation.plan.optimizer != "sgd"
    return None if of_adam else _ratio(targets.as_gradient(observation), observation)


def _ratio(update: Tensors, observation: Observation) -> float | None:
    layer = output_layer(observation.model, observation.num_classes) or ()
    found = [update[name].double() for name in layer if name is not None and name in update]
    sums = torch.cat([tensor.sum(0).flatten() for tensor in found]) if found else torch.zeros(0)
    if len(sums) < _FEWEST:
        return None
    count = sum(tensor.numel() for tensor in update.values())
    squared = sum(float(tensor.double().square().sum()) for tensor in update.values())
    noise = count * float(sums.square().mean()) / len(found[0])
    return math.sqrt(min(noise / max(squared - noise, 1e-300), _LOUDEST**2)) if squared else 0.0


Smoothing = tuple[float, float]
"""Weights of total variation against noise: next to the attack's objective, and to the update's cosine distance."""


def smoothing_of(
    observations: Sequence[Observation], problem: Callable[[slice], Problem], at_once: int
) -> list[Smoothing] | None:
    """Choose two total variation weights (:data:`Smoothing`) for each observation from its noise.

    ``None`` if any noise is unknown. ``problem``: function that takes a slice of ``observations`` and returns the
    problem to minimize for them. ``at_once``: length of these slices.
    """
    ratios = [noise_over_gradient(observation) for observation in observations]
    noisy = [ratio for ratio in ratios if ratio is not None]
    if len(noisy) < len(ratios):
        return None
    found: list[Smoothing] = []
    for begin in range(0, len(noisy), at_once):
        chunk = slice(begin, begin + at_once)
        found += zip(*(weights.tolist() for weights in _smoothing(problem(chunk), noisy[chunk])), strict=True)
    return found


def _smoothing(problem: Problem, ratios: Sequence[float]) -> tuple[Tensor, Tensor]:
    # The best weight grows with the noise (Rudin, Osher and Fatemi 1992), measured by its effect on random images.
    loud = torch.tensor(ratios).to(problem.zero_loss())
    rng = derive_generator(0, "rehearsed noise")
    size, channels, *sides = problem.shape
    coarse = [torch.rand((size, channels, _COARSE, _COARSE), generator=rng) for _ in range(2)]  # the same for all
    resized = (F.interpolate(one, sides, mode="bilinear").expand(len(loud), *problem.shape) for one in coarse)
    images, other = (one.contiguous().to(loud) for one in resized)
    speckled = images + _EDGE * torch.randn(images.shape[1:], generator=rng).to(loud)
    labels = problem.labels
    if labels is None:
        labels = loud.new_full((len(loud), len(images[0]), problem.num_classes), 1 / problem.num_classes)
    own = replace(problem, constraints=Constraints())
    angle = replace(own, settings=replace(problem.settings, objective=objectives.Cosine()))
    with differentiable_twice(), torch.no_grad():
        gradients = [{n: g.detach() for n, g in one.gradients(images, labels).items()} for one in problem.rounds]
    noise = [{name: torch.randn(t.shape[1:], generator=rng).to(t) for name, t in one.items()} for one in gradients]
    clean = angle.matching([_noisy(one, more, 0 * loud) for one, more in zip(gradients, noise, strict=True)])
    rounds = [_noisy(one, more, loud) for one, more in zip(gradients, noise, strict=True)]
    pull = _pull(angle.matching(rounds), images, labels)
    rises = []  # of the objective towards other images, per half the squared distance
    with differentiable_twice(), torch.no_grad():
        for each in (other, speckled):
            risen = clean.mismatch(each, labels, [None] * len(clean.rounds))
            rises.append(2 * risen / (each - images).flatten(1).square().sum(1))
    moved = pull / torch.stack(rises).amin(0)
    strength = _STRENGTH * (moved / _EDGE).clamp(max=1) * (1 + loud.square()).sqrt() * images[0].numel()
    rehearsed = own.matching(rounds)
    unit = problem.zero_loss() / rehearsed.zero_loss()
    weights = strength * _pull(rehearsed, images, labels) * unit, strength * pull / len(rounds)
    known = torch.stack(weights).isfinite().all(0)
    return weights[0].where(known, 0), weights[1].where(known, 0)


def _noisy(gradients: Tensors, noise: Tensors, loud: Tensor) -> dict[str, layer_statistics.Target]:
    length = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt()
    each = loud * length / torch.stack([value.square().sum() for value in noise.values()]).sum().sqrt()
    factors = {name: each.view(-1, *[1] * (value.dim() - 1)) for name, value in gradients.items()}
    return {name: layer_statistics.Target.of(value + factors[name] * noise[name]) for name, value in gradients.items()}


def _pull(problem: Problem, images: Tensor, labels: Tensor) -> Tensor:
    with differentiable_twice():
        leaf = images.detach().requires_grad_()
        (slope,) = torch.autograd.grad(problem.mismatch(leaf, labels, [None] * len(problem.rounds)).sum(), leaf)
    return slope.flatten(1).square().mean(1).sqrt()


_ENOUGH = 64  # least number of elements of a tensor whose values are counted
_MORE_ZEROS = 0.05  # excess of zeros or empty columns, as a share, from which a defense is inferred
_MOST_BITS = 12

_OFF_GRID, _AT_THRESHOLD = 0.02, 0.02
"""Largest distance of levels from a grid, in steps; share of elements near the least size that shows a threshold."""

_NOISY, _UNUSUAL = 1e-4, 100.0
"""Ratio of noise to gradient above which noise is inferred, absolute and relative to an undefended gradient's."""

CLIPPED: Description = (Part("norm", effect=Clipped(norm=None)),)
"""A clipped update whose bound is unknown, so that the update's own norm is taken."""


@dataclass(frozen=True)
class Usual:
    """Statistics of undefended gradients, with which those of an update are compared."""

    scattered: float  # share of zeros outside of all-zero rows and columns
    columns: float  # share of all-zero columns in the output layer
    noise: float  # norm of noise and rounding, over that of the gradient


def usual_of(observation: Observation) -> Usual:
    """Measure, on random images and the observation's model, the statistics of a gradient without a defense."""
    rng = torch.Generator().manual_seed(0)
    count = observation.upload.num_examples
    like = next(iter(observation.sent.parameters.values()))
    found = list[tuple[float, float, float]]()
    model, state, loss = detached_copy(observation.model), observation.assumed(), observation.loss or CROSS_ENTROPY
    set_mode(model, "eval")
    if observation.plan.mode == "eval":
        model.eval()
    for _ in range(3):
        images = torch.rand((count, *observation.input_shape), generator=rng).to(like)
        labels = torch.randint(observation.num_classes, (count,), generator=rng).to(like.device)
        with torch.random.fork_rng(devices=[like.device] if like.device.type == "cuda" else []):
            torch.manual_seed(0)
            result = loss_gradients(model, state, Batch(images, labels), batch_norm=None, loss_function=loss)
        own = result.gradients
        found.append((scattered_zeros(own), _empty_columns(observation, own), _ratio(own, observation) or 0.0))
    return Usual(*map(max, zip(*found, strict=True)))


def evident_defense(observation: Observation, usual: Usual) -> Description:
    """Infer a defense from signs in the update: few distinct values, a shared largest magnitude, zeros or noise.

    Return () if there are no signs. ``usual``: statistics of undefended gradients; zeros or noise are signs if an
    update has clearly more of them.
    """
    update = observation.update()
    grids = [grid_bits(value) for value in update.values() if value.numel() >= _ENOUGH and bool(value.any())]
    if grids and None not in grids:
        return (Part("few levels", effect=Quantized(bits=max(bits for bits in grids if bits is not None))),)
    cut: Description = ()
    sizes = [value.abs() for value in update.values() if value.numel()]
    largest = max((float(size.max()) for size in sizes), default=0.0)
    reached = sum(int((size >= (1 - AT_BOUND) * largest).sum()) for size in sizes)
    if observation.plan.optimizer == "sgd" and largest > 0 and reached >= _FEWEST:  # several have the largest magnitude
        cut = (Part("cut", effect=Truncated(bound=None)),)
    if scattered_zeros(update) > usual.scattered + _MORE_ZEROS:
        return Part("zeros", effect=_sparse(update)), *cut
    if cut:
        return cut
    if _empty_columns(observation, update) > usual.columns + max(_MORE_ZEROS, 0.2 * usual.columns):
        return (Part("empty columns", effect=MutedFeatures()),)
    if (noise_over_gradient(observation) or 0.0) > max(_NOISY, _UNUSUAL * usual.noise):
        return (Part("noise", effect=Noise(std=None, clip=None)),)
    return ()


_LEAST_NOISE = 0.01  # least median size of evident noise in a text's update, as a share of a word's largest change


def noise_of_words(observation: Observation) -> Description:
    """Infer added noise from the embedding gradients of words that do not occur in the batch; () if there is none."""
    update, name = observation.update(), str(getattr(observation.model, "word_weight", ""))
    plan = observation.plan  # Adam makes full steps of a decay
    full = plan.shares != "gradient" and plan.optimizer == "adam" and plan.weight_decay
    if full or getattr(observation.model, "next_token", True) or name not in update:
        return ()
    rows, sent = update[name].double(), observation.sent.parameters[name].double()
    if len(rows) <= 4 * observation.upload.num_examples * math.prod(observation.input_shape):
        return ()
    left = (rows - sent * (rows / sent).nan_to_num().median()).abs()
    evident = float(left.median()) > _LEAST_NOISE * float(left.max())
    return (Part("noise", effect=Noise(std=None, clip=None)),) if evident else ()


def undo_evident_defenses(observations: Sequence[Observation], *, clips: bool = False) -> list[Observation]:
    """Return the observations; those without a known defense get the one inferred from their update, if any.

    ``clips``: ``True`` also assumes clipping, to the update's own norm, if an update shows only noise or no defense.
    """
    usual: dict[tuple[object, ...], Usual | None] = {}
    seen = []
    for observation in observations:
        whole = observation.knowledge.bounds is None
        if observation.knowledge.defense is None and whole and targets.why_not_attackable(observation) is None:
            shape = observation.upload.num_examples, observation.input_shape, observation.num_classes
            key = id(observation.model), id(observation.sent), *shape
            if key not in usual:
                try:
                    usual[key] = usual_of(observation)
                except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
                    usual[key] = None
            own = usual[key]
            found = noise_of_words(observation) if own is None else evident_defense(observation, own)
            if clips and own is not None and all(isinstance(part.effect, Noise) for part in found):
                found = (*CLIPPED, *found)
            observation = observation.given(defense=found) if found else observation  # noqa: PLW2901
        seen.append(observation)
    return seen


def scattered_zeros(update: Tensors) -> float:
    """Return the share of zeros, leaving out rows and columns of zeros, which come from dead neurons."""
    zeros = total = 0
    for value in update.values():
        if value.dim() > 1:
            empty = value.flatten(1) == 0
            live = empty[~empty.all(1)][:, ~empty.all(0)]
            zeros, total = zeros + int(live.sum()), total + live.numel()
    return zeros / total if total else 0.0


def _empty_columns(observation: Observation, update: Tensors) -> float:
    layer = output_layer(observation.model, observation.num_classes)
    if layer is None or layer[0] not in update:
        return 0.0
    empty = (update[layer[0]] == 0).all(0)
    return 0.0 if bool(empty.all()) else float(empty.double().mean())


def _sparse(update: Tensors) -> Sparse:
    votes = total = 0
    for value in update.values():
        kept = value[value != 0].abs()
        if len(kept) >= _ENOUGH:
            total += len(kept)
            votes += len(kept) if int((kept <= 2 * kept.min()).sum()) >= max(4, _AT_THRESHOLD * len(kept)) else 0
    return Sparse(largest=2 * votes > total, scope="layer")


def grid_bits(value: Tensor) -> int | None:
    """Return the bit width of a uniform grid that contains all elements of ``value``.

    ``None`` if there is none, or if the number of distinct values exceeds 4096 or half the number of elements.
    """
    most = max(2, min(2**_MOST_BITS, value.numel() // 2))
    if len(torch.unique(value.flatten()[: 2 * most])) > most:
        return None
    levels = torch.unique(value.double())
    if len(levels) == 2 and float(levels[0]) == -float(levels[1]):
        return 1
    if len(levels) < 3 or len(levels) > most:
        return None
    largest, step = float(value.abs().max()), float(levels.diff().min())
    highest = round(largest / step)
    if highest > 2**_MOST_BITS:
        return None
    places = levels * highest / largest
    if float((places - places.round()).abs().max()) > _OFF_GRID:
        return None
    return max(2, math.ceil(math.log2(2 * highest + 2)))
