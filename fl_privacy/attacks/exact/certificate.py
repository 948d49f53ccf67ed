"""Certify reconstructed images without the originals: infer their labels and recompute the update."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.exact.spear import columns_of
from fl_privacy.attacks.gradient_inversion import labels as labeling
from fl_privacy.attacks.gradient_inversion.grouping import without_labels
from fl_privacy.attacks.gradient_inversion.infer_client import DRAWS, precision_of
from fl_privacy.attacks.gradient_inversion.labels import Head, labels_behind, output_layer
from fl_privacy.attacks.gradient_inversion.targets import as_gradient, is_sum_of_gradients, why_not_attackable
from fl_privacy.models.gradients import frozen_copy, loss_gradients, number_of_steps
from fl_privacy.models.gradients.hooks import entering
from fl_privacy.models.losses import CROSS_ENTROPY, Loss, is_plain
from fl_privacy.types import Batch, Certainty, ModelState, Observation, Reconstruction, Tensors
from fl_privacy.types.schema import Schema, schema_of
from fl_privacy.types.user_gradients import COUNTED_BY_RANK

ROUNDING = 1e-3
"""Updates whose distance is below this share of their length are equal up to rounding in single precision."""

EXACT = 3e-5  # the same share for a single image, for which no sign in front of a ReLU confirms the result
_HALF = 2  # the same share in half precision, in units of its rounding
_LEAST_GAIN = 1e-13  # slope, relative to the sums, at which least squares are solved
_BEYOND = 0.01  # distance by which inputs may leave [0, 1] due to rounding
_ROUNDED = 1e-6  # share of a label that is rounding of a softmax in single precision, if a network is sure of it
_MIXED = 0.01  # margin of a label's second probability over the others above which labels are mixed, and not smoothed

CHANGED_BEFORE = (
    "The client draws random numbers between its data and its network, as for crops, flips or mixup: the examples that"
    " entered the network are attacked, and may differ from the originals."
)
"""Note of an observation whose client draws such numbers."""

_PROVEN = "What is proven is what entered the first layer, which"
_NEARLY_SAME = 0.01  # errors of the outputs match those of classes up to this share of their length


@dataclass(frozen=True, eq=False)
class Read:
    """Images (B, C, H, W) that solve a layer's equations, before they are certified.

    ``unique``: ``True`` if no other images solve them. ``loss``: residual. ``confirmed``: ``True`` if redundant
    equations confirm the images, even if later layers draw random numbers.
    """

    images: Tensor
    unique: bool
    loss: float
    note: str = ""
    confirmed: bool = False


@dataclass(frozen=True, eq=False)
class Reproduction:
    """Recomputes gradients of reconstructed images, and compares them with the observed update, in double precision."""

    observation: Observation
    model: nn.Module

    def labels(self, inputs: Tensor, network: nn.Module | None = None) -> Tensor | None:
        """Infer the labels of ``inputs`` from the output layer's gradient; ``None`` if it is withheld.

        Return classes (B,) or, if none fit, soft labels (B, K). ``network``: later layers, if ``inputs`` enter these.
        """
        found = self.errors(inputs, network)
        if found is None or is_plain(self.loss):
            return _labels(found)
        return labels_behind(self.head(inputs, network), self.loss, found[1] / len(inputs))[0]

    def errors(self, inputs: Tensor, network: nn.Module | None = None) -> tuple[Tensor, Tensor] | None:
        """Return the softmax p of ``inputs`` and p - y (B, K) for their labels y; ``None`` if y can't be inferred.

        For losses other than cross-entropy, the second is B times the loss's gradient with respect to the outputs.
        ``network`` computes p in place of the model.
        """
        observation, inputs = self.observation, self._entering(inputs)
        output = labeling.output_layer(observation.model, observation.num_classes)
        single, gradient = output is None, as_gradient(observation)
        output = output or labeling.logit_layer(observation.model, observation.num_classes)
        if output is None:
            return None
        weight, bias = gradient.get(output[0]), gradient.get(output[1] or "")
        if weight is None and (bias is None or len(inputs) > 1):
            return None
        owner = output[0].rpartition(".")[0]
        with torch.no_grad(), entering({owner: self.model.get_submodule(owner)}) as calls:
            probabilities = (network or self.model)(inputs).softmax(1)
        if weight is None:  # the bias's gradient alone, of one example
            assert bias is not None
            bias = torch.cat([-bias, bias]) if single else bias
            return probabilities, bias.double()[None] / observation.plan.loss_scale
        entered, observed = calls[0].inputs, weight.double()
        if entered.dim() != 2:
            return None
        if bias is not None:
            entered = torch.cat([entered, torch.ones_like(entered[:, :1])], 1)
            observed = torch.cat([observed, bias.double()[:, None]], 1)
        errors = len(inputs) / observation.plan.loss_scale * least_squares(entered.T, observed.T)
        return probabilities, torch.cat([-errors, errors], 1) if single else errors

    def head(self, inputs: Tensor, network: nn.Module | None = None) -> Head:
        output = labeling.output_layer(self.observation.model, self.observation.num_classes)
        path = "" if output is None else output[0].rpartition(".")[0]
        return Head.of(network or self.model, self._entering(inputs), path, self.model.get_submodule(path))

    def classes(self, images: Tensor) -> Tensor | None:
        if not is_plain(self.loss):
            return self.labels(images)
        found = self.errors(images)
        return None if found is None else found[1].argmin(1)

    def equals(self, distance: float) -> bool:
        """Return whether rounding explains the relative ``distance`` of a recomputed gradient from the update."""
        if not ROUNDING <= distance < _HALF * torch.finfo(torch.bfloat16).eps:
            return distance < ROUNDING
        kinds = (precision_of(value) for value in as_gradient(self.observation).values() if value.dim() > 1)
        return distance < _HALF * min((torch.finfo(kind).eps for kind in kinds), default=0.0)

    @property
    def loss(self) -> Loss:
        return self.observation.loss or CROSS_ENTROPY

    def distance(self, batch: Batch, *, any_scale: bool = True) -> float:
        """Return the distance of ``batch``'s gradient from the observed one, relative to the observed norm.

        The tensor with the largest distance counts. If ``any_scale``, a common factor is fitted first.
        """
        found, observed = self._gradients(batch), as_gradient(self.observation)
        inner = sum(float((found[name] * value.double()).sum()) for name, value in observed.items())
        squared = sum(float(found[name].double().square().sum()) for name in observed)
        factor = (max(inner, 0.0) / squared if squared else 0.0) if any_scale else 1.0
        lengths = {name: float(value.double().norm()) for name, value in observed.items()}
        least = ROUNDING * max(lengths.values())
        apart = {name: float((factor * found[name] - value.double()).norm()) for name, value in observed.items()}
        shares = [apart[name] / max(lengths[name], least) for name in observed]
        return math.nan if any(map(math.isnan, shares)) else max(shares)

    def share(self, batch: Batch, weight: float) -> float:
        found, observed = self._gradients(batch), as_gradient(self.observation)
        return max(weight * float(found[name].norm()) / float(v.norm()) for name, v in observed.items() if v.any())

    def _gradients(self, batch: Batch) -> Tensors:
        plan, labels = self.observation.plan, batch.labels.to(self._device)
        return loss_gradients(
            self.model,
            ModelState(dict(self.model.named_parameters()), dict(self.model.named_buffers())),
            Batch(self._entering(batch.inputs), labels.double() if labels.is_floating_point() else labels),
            batch_norm=None,
            loss_scale=plan.loss_scale,
            loss_function=self.loss,
        ).gradients

    def _entering(self, inputs: Tensor) -> Tensor:
        return inputs.to(self._device, torch.float64 if inputs.is_floating_point() else inputs.dtype)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def least_squares(known: Tensor, sums: Tensor) -> Tensor:
    """Solve ``known`` (m, n) X = ``sums`` (m, k) by least squares; return the solution X (n, k) of least norm."""
    # on a GPU, lstsq fails without full rank, as with two equal examples
    found: Tensor = torch.linalg.lstsq(known.cpu(), sums.cpu(), driver="gelsd").solution
    return found.to(sums.device)


def nonnegative_least_squares(known: Tensor, sums: Tensor) -> Tensor:
    """Solve ``known`` (m, n) x = ``sums`` (m,) for the nearest x (n,) >= 0, as far as the time limit allows."""
    found, used = known.new_zeros(known.shape[1]), torch.zeros(known.shape[1], dtype=torch.bool)
    for _ in timely(range(3 * len(found))):  # one more entry at a time (Lawson and Hanson 1974)
        gain = (known.T @ (sums - known @ found)).masked_fill(used, -torch.inf)
        if gain.max() < _LEAST_GAIN * sums.norm():
            break
        used[gain.argmax()] = True
        while (best := least_squares(known[:, used], sums[:, None])[:, 0]).min() < 0:
            now, low = found[used], best < 0
            found[used] = now + (now / (now - best))[low].min() * (best - now)
            used &= found > torch.finfo(found.dtype).eps
            found[~used] = 0
            if not used.any():
                return found
        found[used] = best
    return found


def model_as_sent(observation: Observation) -> nn.Module:
    """Return the frozen model with the sent values, in double precision."""
    state, plan = observation.assumed(), observation.plan
    device = next(iter(state.parameters.values())).device
    return frozen_copy(observation.model, state, plan, device=device, dtype=torch.float64)


def certified(reproduction: Reproduction, read: Read, *, ordered: bool = True) -> Reconstruction:
    """Certify the images in ``read``: recompute their gradient, and compare it with the update.

    Return a reconstruction, marked as failed if labels are unknown and can't be inferred. ``ordered``: ``True`` if
    known labels have the images' order. Otherwise, or if ``read`` is unique, labels are inferred.
    """
    observation = reproduction.observation
    labels, source = observation.knowledge.labels, "known"
    if labels is None or read.unique or not ordered:  # known labels are not in the order of the images
        labels, source = reproduction.labels(read.images), "inferred"
    if labels is None:
        return without_labels(observation)
    apart = reproduction.distance(Batch(read.images, labels))
    certainty = Certainty.CONSISTENT if read.confirmed or reproduction.equals(apart) else Certainty.APPROXIMATE
    if read.unique and apart < (EXACT if len(read.images) == 1 else ROUNDING):
        certainty = Certainty.PROVEN
    solved = certainty is not Certainty.APPROXIMATE
    images, notes = within_range(read.images, solved=solved, schema=schema_of(observation.model))
    if certainty is Certainty.PROVEN:
        notes += _limits(observation, labels)
    return Reconstruction(
        id=observation.id,
        batch=Batch(images.to(observation.precision).cpu(), labels.cpu()),
        loss=read.loss,
        history=(read.loss,),
        label_source=source,
        certainty=certainty,
        notes=(*notes, *((read.note,) if read.note else ())),
    )


def _limits(observation: Observation, labels: Tensor) -> tuple[str, ...]:
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in observation.model.modules())
    if DRAWS in observation.notes or (drops and observation.plan.mode == "train"):
        return (
            f"{_PROVEN} is behind draws of the model's own, such as dropout: if these were on, the original differs.",
        )
    if labels.is_floating_point() and labels.shape[1] > 1:
        several = labels.sort(1, descending=True).values
        if bool((several[:, 1] > several[:, 2:].amax(1) + _MIXED if several.shape[1] > 2 else several[:, 1] > 0).any()):
            return (f"{_PROVEN} has mixed labels, as after mixup: the client's examples may be parts of it.",)
    return ()


def within_range(images: Tensor, *, solved: bool, schema: Schema | None = None) -> tuple[Tensor, tuple[str, ...]]:
    """Clamp ``images`` to [0, 1]; also return notes for the user.

    Images that exactly solve equations (``solved``) but lie outside stay unchanged, since the client's inputs have
    another scale. Rows of a table with a ``schema`` are also unchanged if ``solved``, else the nearest valid rows are
    returned.
    """
    if schema is not None:
        return (images if solved else schema.nearest(images)), ()
    low, high = float(images.min()), float(images.max())
    if not solved or (low > -_BEYOND and high < 1 + _BEYOND):
        return images.clamp(0, 1), ()
    return images, (
        f"The solution is not in [0, 1] but from {low:.3g} to {high:.3g}: the client's inputs have another scale; give"
        " it by input_range=.",
    )


def limits_of(model: nn.Module, like: Tensor) -> Tensor:
    """Return the least and largest valid values (2, N) of the model's N inputs, with dtype and device of ``like``."""
    ends = torch.stack([torch.zeros_like(like), torch.ones_like(like)])
    if (schema := schema_of(model)) is not None:
        ends = (ends - schema.shift.to(ends)) / schema.scale.to(ends)
        ends[:, schema.number_values] = schema.bounds.to(ends)
    return ends


def is_muted(weight: Tensor, shade: Tensor) -> bool:
    """Return whether a defense probably muted inputs: columns of the layer's weight gradient are zero.

    A column is also zero if all images have the pixel value that enters the layer as zero. ``shade``: that value for
    each column. Columns with a shade outside of (0, 1), which images often share, do not count.
    """
    return bool(((weight == 0).all(0) & (shade > 0) & (shade < 1)).any())


def _labels(found: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """Infer classes (B,), or soft labels (B, K), from ``found``: probabilities p and errors p - y, each (B, K)."""
    if found is None:
        return None
    probabilities, errors = found
    classes = errors.argmin(1)
    others = F.one_hot(classes, errors.shape[1]) == 0
    factor = (errors * others).sum() / (probabilities * others).sum()
    scaled = factor * (probabilities - F.one_hot(classes, errors.shape[1]))
    if factor > 0 and float((errors - scaled).norm()) < _NEARLY_SAME * float(errors.norm()):
        return classes
    labels = (probabilities - errors).clamp_min(0)
    if bool((labels.amax(1) > (1 - _ROUNDED) * labels.sum(1)).all()):
        return labels.argmax(1)
    return labels / labels.sum(1, keepdim=True).clamp_min(torch.finfo(labels.dtype).tiny)


_WHOLE = 0.05  # largest distance of a number of occurrences from a whole number
_TARGET = 0.02  # largest distance of summed targets from whole numbers
_MOST_WAYS = 1000  # largest number of compared combinations of occurrences
_MOST = 8  # largest mean number of occurrences for a batch of unknown size

Times = Callable[[int], list[int] | None]
"""Function from a batch size to the number of times each distinct example occurs; ``None`` if no whole numbers fit."""


def with_repeats(victim: Reproduction, images: Tensor) -> tuple[Tensor, str]:
    """Repeat each of R distinct ``images`` as often as it occurs in the victim's batch; also return a note or ""."""
    rank, observation = len(images), victim.observation
    size = observation.upload.num_examples
    stated = not any(note.startswith(COUNTED_BY_RANK) for note in observation.notes)
    if rank > size or (rank == size and (stated or size == 1)):
        return images, ""
    occurrences = times_of(victim, images)
    fitting = (occurrences(number) for number in ([size] if stated else range(rank, _MOST * rank + 1)))
    times = next((found for found in fitting if found is not None), None)
    if times is None:
        equal = torch.full((rank,), size // rank) + (torch.arange(rank) < size % rank)
        note = f"{_different(size, rank)}; how often each occurs the update does not show." if size > rank else ""
        return images.repeat_interleave(equal.to(images.device), 0), note
    found = sum(times)
    *most, least = sorted(times, reverse=True)
    note = f"{_different(found, rank)}, which occur {', '.join(map(str, most))} and {least} times."
    note = note if most else _same(found)
    return images.repeat_interleave(torch.tensor(times, device=images.device), 0), note if found > rank else ""


def _different(size: int, rank: int) -> str:
    return f"The batch is of {size} examples but has {rank} different ones"


def _same(size: int) -> str:
    return f"All {size} examples of the batch are the same."


def times_of(victim: Reproduction, inputs: Tensor, network: nn.Module | None = None) -> Times:
    """Return a function from batch size to the number of times that each of ``inputs`` occurs in the batch.

    It returns ``None`` if no whole numbers fit. ``network``: later layers, if ``inputs`` enter these.
    """
    rank, loss = len(inputs), victim.loss
    if rank == 1:
        return lambda size: [size]
    found = victim.errors(inputs, network)
    observation = victim.observation
    if found is None or (not is_plain(loss) and output_layer(observation.model, observation.num_classes) is None):
        return lambda size: None
    probabilities, errors = found
    if is_plain(loss):
        absent = errors > 0
        return _in_proportion((errors * absent).sum(1) / (probabilities * absent).sum(1))
    head = victim.head(inputs, network)
    if loss.targets == "classes":
        labels, _ = labels_behind(head, loss, errors / rank)
        slopes = head.slopes(loss, labels)
        return _in_proportion((slopes * errors).sum(1) / slopes.square().sum(1))
    base = rank * head.slopes(loss, torch.zeros_like(errors))
    change = rank * head.slopes(loss, torch.ones_like(errors)) - base
    change = torch.where(change.abs() > 0, change, 1)

    def times(size: int) -> list[int] | None:
        ways: list[tuple[list[int], int]] = [([], 0)]
        for own, first, each in zip(errors * size / rank, base, change, strict=True):
            fitting = []
            for number in range(1, size - rank + 2):
                targets = (own - number * first) / each
                whole = targets.round()
                fits = bool(((targets - whole).abs() < _TARGET).all() & (whole >= 0).all() & (whole <= number).all())
                if fits and (loss.targets == "bits" or (int(whole.sum()) == number and len(whole) > 1)):
                    fitting.append(number)
            ways = [([*way, n], total + n) for way, total in ways for n in fitting if total + n <= size]
            if len(ways) > _MOST_WAYS:
                return None
        found = [way for way, total in ways if total == size]
        return found[0] if len(found) == 1 else None

    return times


def _in_proportion(weights: Tensor) -> Times:
    shares = (weights / weights.sum()).nan_to_num(0.0)

    def times(size: int) -> list[int] | None:
        whole = (shares * size).round().clamp_min(1)
        return whole.long().tolist() if float((shares * size - whole).abs().max()) < _WHOLE else None

    return times


def as_one(observation: Observation) -> Observation | None:
    """Return the observation with batch size 1 if its batch surely consists of copies of one example, else ``None``."""
    size, labels = observation.upload.num_examples, observation.knowledge.labels
    plan = observation.plan
    one_step = plan.shares == "gradient" or (is_sum_of_gradients(plan) and number_of_steps(size, plan) == 1)
    if size == 1 or not one_step or why_not_attackable(observation) is not None:
        return None
    layer = output_layer(observation.model, observation.num_classes)
    if observation.num_classes < 3 or layer is None or layer[0] not in observation.upload.tensors:
        return None
    basis = columns_of(as_gradient(observation)[layer[0]], 1)
    if basis is None or basis.shape[1] != 1 or (labels is not None and not bool((labels == labels[0]).all())):
        return None
    return replace(
        observation,
        upload=replace(observation.upload, num_examples=1),
        knowledge=replace(observation.knowledge, labels=None if labels is None else labels[:1]),
    )


def repeated(found: Reconstruction, size: int) -> Reconstruction:
    """Repeat a reconstructed example ``size`` times, with a note."""
    assert found.batch is not None
    batch = Batch(found.batch.inputs.repeat_interleave(size, 0), found.batch.labels.repeat_interleave(size, 0))
    return replace(found, batch=batch, notes=(*found.notes, _same(size)))
