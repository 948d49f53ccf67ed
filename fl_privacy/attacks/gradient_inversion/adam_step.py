"""Recover the gradient behind a single step of Adam."""

from dataclasses import replace

import torch
from torch import Tensor

from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.types import Observation, Tensors
from fl_privacy.types.modality import modality_of

EPSILON = 1e-8
"""PyTorch's epsilon, added to the root of the second moment; another one scales the whole gradient found."""

_ARITHMETIC = 4.0
"""Error of the quotient of both moments, in units of rounding."""

_ROUNDS, _SOUND = 30, 3.0
"""Rounds of alternating least squares, and the median error of the known values, in their own units, up to which a
gradient is taken for a product of two vectors."""

_KNOWN = 0.5
"""Largest relative uncertainty of a known value."""

_MATCHED = 0.2
"""Largest relative uncertainty of a matched value."""

_SHORT = 0.5
"""Share of the learning rate; if no step is so long, no gradient would exceed epsilon."""

_LEAST_KNOWN = 2
"""Known values of a row, or of a column, that suffice to find the others."""


def without_adam(observation: Observation) -> Observation:
    """Return the observation of the gradient g behind one step of Adam; any other observation stays.

    Adam's first step is ``-delta / lr = g / (|g| + eps)``, so that ``|g| = eps r / (1 - r)`` for its size r. A weight
    in single precision holds r to half of its last digit over the learning rate. With PyTorch's settings sizes below
    1e-3 are known, to a few percent below 1e-4. For one example a linear layer's gradient is a product of two vectors,
    which gives the rest.

    If a step is longer than Adam's, or none is half as long, the observation stays, with a note.
    """
    plan = observation.plan
    if plan.shares == "gradient" or plan.optimizer == "sgd" or observation.knowledge.defense:
        return observation
    if number_of_steps(observation.upload.num_examples, plan) != 1 or not modality_of(observation.model).pixels:
        return observation
    sent = observation.sent.parameters
    lows, highs, signs = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    decay = plan.weight_decay if plan.optimizer == "adamw" else 0.0
    longest, too_long = 0.0, False
    for name, delta in observation.update().items():
        if name not in sent or sent[name].shape != delta.shape:
            return observation
        step, error = _quotient(delta, sent[name], lr=plan.lr, decay=decay)
        longest = max(longest, float(step.abs().max())) if step.numel() else longest
        too_long |= bool((step.abs() > 1 + error).any())
        lows[name], highs[name], signs[name] = _size(step.abs() - error), _size(step.abs() + error), step.sign()
    if too_long or longest < _SHORT:
        return _unlike_adam(observation, longest)
    if observation.upload.num_examples == 1:
        for name in [name for name in lows if name.endswith(".weight") and lows[name].dim() == 2]:
            _complete(lows, highs, signs, name)
    penalty = plan.weight_decay if plan.optimizer == "adam" else 0.0
    return _of_gradient(observation, (lows, highs, signs), penalty)


def _unlike_adam(observation: Observation, longest: float) -> Observation:
    """Note that the longest step, in learning rates, is not Adam's."""
    note = (
        f"The longest step is {longest:.2g} learning rates, but a first step of Adam is about one: another optimizer or"
        " learning rate than was told, a defense, or a gradient of zero. The update was attacked as it is."
    )
    return observation if note in observation.notes else replace(observation, notes=(*observation.notes, note))


def _quotient(delta: Tensor, sent: Tensor, *, lr: float, decay: float) -> tuple[Tensor, Tensor]:
    """Return Adam's step in learning rates, in double precision, and its uncertainty."""
    rounding = torch.finfo(sent.dtype).eps
    before = sent.double()
    after = before + delta.double()
    step = -delta.double() / lr - decay * before
    digit = torch.maximum(before.abs(), after.abs()).clamp_min(torch.finfo(torch.float32).tiny).log2().floor().exp2()
    roundings = 2 if decay else 1
    return step, roundings * rounding * digit / (2 * lr) + _ARITHMETIC * rounding * step.abs()


def _size(quotient: Tensor) -> Tensor:
    """Return |g| for |g| / (|g| + eps), infinite from 1 on."""
    inside = quotient.clamp_min(0)
    return torch.where(inside < 1, EPSILON * inside / (1 - inside).clamp_min(1e-300), torch.inf)


def _complete(lows: dict[str, Tensor], highs: dict[str, Tensor], signs: Tensors, name: str) -> None:
    """Find unknown sizes of a linear layer's gradient (M, N), which is a product."""
    bias = name.removesuffix("weight") + "bias"
    names = [name, bias] if bias in lows and lows[bias].shape == lows[name].shape[:1] else [name]
    low, high, sign = (torch.cat([t[n].reshape(len(t[name]), -1) for n in names], 1) for t in (lows, highs, signs))
    silent = sign == 0
    middle = torch.where(high.isfinite(), (low + high) / 2, low).clamp_min(torch.finfo(torch.float64).tiny)
    spread = torch.where(high.isfinite(), (high - low) / 2, torch.inf) / middle
    known = (spread < _KNOWN) & ~silent
    if not known.any():
        return
    weights = torch.where(known, spread.clamp_min(1e-6).square().reciprocal(), 0.0)
    rows, columns = _product(middle.log(), weights, known)
    found = (rows[:, None] + columns[None]).exp()
    unsure = (1 / weights.sum(1, keepdim=True) + 1 / weights.sum(0, keepdim=True)).sqrt()
    off = ((found - middle).abs() / (spread * middle))[known]
    sound = float(off.median()) < _SOUND and float((off < 2 * _SOUND).double().mean()) > _KNOWN
    told = (known.sum(1, keepdim=True) >= _LEAST_KNOWN) & (known.sum(0, keepdim=True) >= _LEAST_KNOWN)
    filled = told & ~silent & ~known & sound & (found >= low) & (found <= high)
    room = (_SOUND * unsure).clamp(max=_KNOWN)
    least, most = torch.maximum(low, found * (1 - room)), torch.minimum(high, found * (1 + room))
    low, high = torch.where(filled, least, low), torch.where(filled, most, high)
    widths = [lows[n].reshape(len(lows[name]), -1).shape[1] for n in names]
    for n, one, other in zip(names, torch.split(low, widths, 1), torch.split(high, widths, 1), strict=True):
        lows[n], highs[n] = one.reshape(lows[n].shape), other.reshape(highs[n].shape)


def _product(logs: Tensor, weights: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Fit the logarithms (M, N) by one number a row plus one a column."""
    columns = logs.new_zeros(logs.shape[1])
    of_rows, of_columns = weights.sum(1).clamp_min(1e-300), weights.sum(0).clamp_min(1e-300)
    values = torch.where(known, logs, 0.0)
    for _ in range(_ROUNDS):
        rows = (weights * (values - columns[None])).sum(1) / of_rows
        columns = (weights * (values - rows[:, None])).sum(0) / of_columns
    return rows, columns


def _of_gradient(observation: Observation, found: tuple[Tensors, Tensors, Tensors], penalty: float) -> Observation:
    lows, highs, signs = found
    sent, matched, total = observation.sent.parameters, 0, 0
    tensors, bounds = dict[str, Tensor](), dict[str, tuple[Tensor, Tensor]]()
    for name, sign in signs.items():
        low, high = lows[name], highs[name]
        known = (high.isfinite() & (high - low <= _MATCHED * (high + low))) | (sign == 0)
        least = torch.where(high.isfinite(), (low + high) / 2, low.nan_to_num(posinf=0.0))
        value = (sign * least - penalty * sent[name].double()).to(sent[name].dtype)
        infinite = torch.full_like(value, torch.inf)
        tensors[name] = value  # unmatched values keep their sign and least size, for labels
        bounds[name] = torch.where(known, value, -infinite), torch.where(known, value, infinite)
        matched += int((known & (sign != 0)).sum())
        total += int((sign != 0).sum())
    note = (
        f"The client's step of Adam gave away {matched / max(total, 1):.0%} of the values of its gradient, size and"
        " sign; the others were left out."
    )
    return replace(
        observation,
        upload=replace(observation.upload, tensors=tensors),
        plan=replace(observation.plan, shares="gradient", optimizer="sgd", steps=None, epochs=None, weight_decay=0.0),
        knowledge=replace(observation.knowledge, bounds=bounds),
        notes=(*observation.notes, note),
    )
