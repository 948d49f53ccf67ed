"""Match uploaded arrays to parameters by values, names or places, and find state written without a gradient."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from fl_privacy.auditing.clear_text.findings import Leak, leak_of
from fl_privacy.auditing.instrument.packed import Spread, spread

CLOSE, LONGER, CODED, SCALED = 1e-2, 1e-7, 0.12, 1e-4
"""Largest relative distances of an array from its parameter's value: in a shorter or longer dtype, as scaled integers
(about that of four bits), and as a multiple."""

LEAST_CODES = 8  # smallest size of a code that needs no matching name

ANEW, MOST, UNIT = 0.5, 0.9, 1e-3
"""Smallest relative change of an overwritten vector (a running mean moves less), smallest share of overwritten vectors
among the changed ones, and largest distance from one of a normalized vector's length."""


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Which parameter or buffer each array of an upload holds."""

    parameters: Mapping[str, str] = field(default_factory=dict)  # name of an array -> name of the parameter or buffer
    shares: str = "weights"  # content of arrays: ``weights``, their change (``delta``) or a ``gradient``
    by: str = "value"  # or ``scale`` (multiples or codes of values), or ``place`` (order and names of sent arrays)
    unknown: tuple[str, ...] = ()  # arrays that are neither parameters nor buffers, nor returned unchanged
    withheld: tuple[str, ...] = ()  # floating-point parameters and buffers that were not uploaded
    decoded: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)  # name of a coded array -> its values
    packed: tuple[str, ...] = ()  # arrays from which partial or joined parameters were taken


def matched(
    uploaded: Mapping[str, np.ndarray],
    sent: Mapping[str, np.ndarray],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> Matched:
    """Find out what uploaded arrays mean, by comparison with arrays ``sent`` and tensors observed in training.

    ``before``, ``after``: values before and after training. ``gradients``: those of the first step.
    """
    readings = {
        "weights": after,
        "delta": {name: after[name] - value for name, value in before.items() if name in after},
        "gradient": gradients,
    }
    # parameters that did not move have the same value before and after, and a change of zero
    best = Matched()
    for kind, values in readings.items():
        found = _by_value(uploaded, values)
        scaled = _by_scale(uploaded, values, found, divides=kind == "weights")
        known = {**found, **{key: name for key, (name, _) in scaled.items()}}
        joined = _by_parts(uploaded, values, known, gradients, before if kind == "weights" else None)
        parts = {f"{part.sources[0]}[{part.name}]": part for part in joined}
        if len(known) + len(parts) > len(best.parameters):
            decoded = {k: meant for k, (_, meant) in scaled.items()} | {k: part.values for k, part in parts.items()}
            best = Matched(
                parameters={**known, **{key: part.name for key, part in parts.items()}},
                shares=kind,
                by="scale" if decoded else "value",
                decoded=decoded,
                packed=tuple(dict.fromkeys(source for part in parts.values() for source in part.sources)),
            )
    names = {**best.parameters}
    digests = {key: _digest(array) for key, array in sent.items()} if len(names) < len(uploaded) else {}
    back = {key for key, array in uploaded.items() if key not in names and digests.get(key) == _digest(array)}
    if len(names) < len(uploaded) and not best.packed:
        placed = _by_place(uploaded, sent, before, set(names.values()), {*names, *back})
        if placed:
            best = replace(best, by="place", shares=best.shares if names else _kind(uploaded, sent, placed))
        names |= placed
    trained = [name for name in before if name in after and after[name].is_floating_point()]
    return replace(
        best,
        parameters=names,
        unknown=tuple(key for key in uploaded if key not in {*names, *back, *best.packed}),
        withheld=tuple(name for name in trained if name not in set(names.values())),
    )


def _by_parts(
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Tensor],
    known: Mapping[str, str],
    trained: Collection[str],
    base: Mapping[str, Tensor] | None,
) -> list[Spread]:
    rest = {key: array for key, array in arrays.items() if key not in known and array.dtype.kind in "fiub"}
    left = _left(values, known.values())
    if not left or not any(array.dtype.kind == "f" for array in rest.values()):
        return []
    return spread(rest, left, trained, base if base is None else {name: _numpy(value) for name, value in base.items()})


def _left(values: Mapping[str, Tensor], taken: Iterable[str]) -> dict[str, np.ndarray]:
    names = set(taken)
    return {name: _numpy(value) for name, value in values.items() if name not in names}


def _by_value(arrays: Mapping[str, np.ndarray], values: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each array to the name of the value that it equals, also in another dtype; tied weights share a name."""
    found: dict[str, str] = {}
    holders: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
    for name, value in values.items():
        holders[_digest(_numpy(value))].append(name)
    first = {digest: names[0] for digest, names in holders.items()}
    for key, array in arrays.items():
        digest = _digest(array)
        if names := holders.get(digest):
            alike = (k for k, name in enumerate(names) if name.endswith(key) or key.endswith(name.split(".", 2)[-1]))
            found[key] = names.pop(next(alike, 0))
        elif digest in first and array.size > 1 and array.min() != array.max():
            found[key] = first[digest]
    left = _left(values, found.values())
    for key, array in arrays.items():
        if key in found or array.dtype.kind != "f":
            continue
        for name in [name for name, value in left.items() if value.shape == array.shape]:
            own, kind = left[name].astype(np.float64), left[name].dtype
            least = CLOSE if kind.kind != "f" or array.dtype.itemsize < kind.itemsize else LONGER
            size, differs = float(np.linalg.norm(own)), array.dtype != kind
            if size > 0 and differs and float(np.linalg.norm(array.astype(np.float64) - own)) <= least * size:
                found[key] = name
                del left[name]
                break
    return found


def _by_scale(
    arrays: Mapping[str, np.ndarray], values: Mapping[str, Tensor], known: Mapping[str, str], *, divides: bool
) -> dict[str, tuple[str, np.ndarray]]:
    """Find arrays that are multiples of ``values``, or quantized: array -> (value's name, decoded array).

    ``known``: array -> name of the value matched before; both are skipped. ``divides=False`` corrects only the sign.
    """
    left = _left(values, known.values())
    found: dict[str, tuple[str, np.ndarray]] = {}
    for key, array in arrays.items():
        if key in known or array.size < 2 or array.dtype.kind not in "fiu":
            continue
        for name in [name for name, value in left.items() if value.shape == array.shape]:
            meant = _meant(array, left[name], divides=divides, named=name.split(".", 2)[-1] in key)
            if meant is not None:
                found[key] = name, meant
                del left[name]
                break
    return found


def _meant(array: np.ndarray, value: np.ndarray, *, divides: bool, named: bool) -> np.ndarray | None:
    own, size = value.astype(np.float64), float(np.linalg.norm(value))
    constant = not named and size > 0 and value.min() == value.max()  # any constant array is a multiple of it
    if value.dtype.kind != "f" or not size or not math.isfinite(size) or constant:
        return None
    if array.dtype.kind == "f":
        other = array.astype(np.float64)
        factor = float((other * own).sum()) / size**2
        off = np.linalg.norm(other - factor * own)
        if not (abs(factor - 1) > CLOSE and factor and off <= SCALED * abs(factor) * size):
            return None
        return (other / (factor if divides else np.sign(factor))).astype(np.float32)
    if array.dtype.itemsize == 2:  # NumPy has no bfloat16
        bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32)
        short = (bits << 16).view(np.float32).reshape(array.shape)
        if np.isfinite(short).all() and np.linalg.norm(short - own) <= CLOSE * size:
            return short
    if array.size < LEAST_CODES and not named:
        return None
    guesses = _scaled(array, own)
    return next((one.astype(np.float32) for one in guesses if np.linalg.norm(one - own) <= CODED * size), None)


def _scaled(array: np.ndarray, value: np.ndarray) -> Iterator[np.ndarray]:
    """Yield decodings of the integer codes ``array``, nearest to ``value``: by a scale, with an offset, by row."""
    plain = array.astype(np.float64)
    codes = [(plain, None), *([(plain - plain.mean(), None)] if array.size >= LEAST_CODES else [])]
    by_row = [(plain, tuple(range(1, array.ndim)))] if array.ndim > 1 and array[0].size >= LEAST_CODES else []
    for numbers, axes in (*codes, *by_row):
        mean = value.mean() if axes is None and abs(numbers.sum()) < 1e-9 * np.abs(numbers).sum() else 0.0
        over = {"axis": axes, "keepdims": True}
        steps = ((value - mean) * numbers).sum(**over) / np.maximum(np.square(numbers).sum(**over), 1e-300)
        yield numbers * steps + mean


def _by_place(
    arrays: Mapping[str, np.ndarray],
    sent: Mapping[str, np.ndarray],
    before: Mapping[str, Tensor],
    taken: set[str],
    known: set[str],
) -> dict[str, str]:
    origin, names, found = _by_value(sent, before) if sent else {}, list(sent), {}
    for place, (key, array) in enumerate(arrays.items()):
        if key in known:
            continue
        like = key if key in sent else names[place] if place < len(names) and len(names) == len(arrays) else None
        if like is None or sent[like].shape != array.shape or (name := origin.get(like)) is None or name in taken:
            continue
        if array.dtype.kind == "f" or not before[name].is_floating_point():  # otherwise an unknown code
            found[key] = name
    return found


def _kind(uploaded: Mapping[str, np.ndarray], sent: Mapping[str, np.ndarray], placed: Mapping[str, str]) -> str:
    apart = near = 0.0
    names = list(sent)
    for place, (key, array) in enumerate(uploaded.items()):
        origin = sent.get(key, sent[names[place]] if place < len(names) else None)
        if key in placed and origin is not None and origin.shape == array.shape and array.dtype.kind == "f":
            apart += float(np.square(array.astype(np.float64) - origin).sum())
            near += float(np.square(array.astype(np.float64)).sum())
    return "weights" if apart <= near else "delta"


def _digest(array: np.ndarray) -> tuple[tuple[int, ...], str]:
    content = np.ascontiguousarray(array)
    return array.shape, hashlib.blake2b(content.dtype.str.encode() + content.tobytes(), digest_size=16).hexdigest()


def _numpy(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def memories_in(
    parameters: Mapping[str, str],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    moved: Collection[str],
    counts: Collection[int],
    labels: np.ndarray | None,
) -> list[Leak]:
    """List the uploaded parameters and buffers in which the client stored a value or vector for each example.

    ``parameters``: uploaded array -> name in the model. ``before``, ``after``: name -> values before and after the
    training. ``moved``: names of values that a gradient or a mean over batches changed; they are skipped. ``counts``:
    possible numbers of examples. ``labels``: the client's classes (N,), to recognize them if stored.
    """
    found = []
    for key, name in parameters.items():
        if name in moved or name not in before or before[name].shape != after[name].shape or not before[name].dim():
            continue
        old, new = (value.detach().cpu().to(torch.float64).numpy() for value in (before[name], after[name]))
        if (leak := _memory(old, new, key, sorted({n for n in counts if n > 1}), labels)) is not None:
            found.append(leak)
    return found


def averaged(modules: Sequence[nn.Module], names: Mapping[int, str]) -> set[str]:
    """Return the names of running statistics of normalization layers; ``names``: tensors' names by ``id``."""
    layers = (layer for module in modules for layer in module.modules())
    normalizing = (layer for layer in layers if isinstance(layer, nn.modules.batchnorm._NormBase))
    found = {names[id(buffer)] for layer in normalizing for buffer in layer.buffers() if id(buffer) in names}
    return found | {name for name in names.values() if name.endswith(("moving_mean", "moving_variance"))}  # of Keras


def _memory(
    old: np.ndarray, new: np.ndarray, where: str, counts: Sequence[int], labels: np.ndarray | None
) -> Leak | None:
    candidates: list[tuple[bool, bool, int, int]] = []
    for axis in dict.fromkeys((0, old.ndim - 1)):
        rows, anew = (np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1) for each in (old, new))
        apart = np.linalg.norm(anew - rows, axis=1)
        changed = np.flatnonzero(apart > 0)
        written = apart[changed] > ANEW * np.linalg.norm(rows[changed], axis=1)
        if len(changed) < 2 or written.mean() < MOST:
            continue
        number, width = len(changed), rows.shape[1]
        if width == 1 and labels is not None and np.array_equal(np.sort(anew[changed, 0]), np.sort(labels)):
            return leak_of("labels", where, number)
        unit = width > 1 and bool((np.abs(np.linalg.norm(anew[changed], axis=1) - 1) < UNIT).all())
        if width > 1 or number in counts:
            candidates.append((unit, any(number % count == 0 for count in counts), number, width))
    if not candidates:
        return None
    *signs, number, width = max(candidates)
    sure = any(signs)
    what = f"{number} numbers" if width == 1 else f"{number} vectors of {width} numbers"
    return Leak(
        severity="facts" if sure else "look",
        what=f"{what} that the client wrote into its network's state without a gradient"
        + (", as features of single examples are" if sure else ""),
        where=where,
        why="State about single examples may be enough to rebuild them, or reveal who took part; not attacked.",
    )
