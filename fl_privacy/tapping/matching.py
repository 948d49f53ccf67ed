"""Which uploaded array is which parameter, told by values, and by names only where values leave a choice."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

CLOSE = 1e-2
"""Relative distance up to which an array is a parameter's value after another type took its digits."""


@dataclass(frozen=True, kw_only=True)
class Matched:
    """What each array of an upload is.

    Attributes:
        parameters: name of the array -> name of the parameter or buffer.
        shares: whether the arrays are ``weights``, their change, a ``delta``, or a ``gradient``.
        by: ``value``, or ``place`` where values were changed on the way and the arrays sent tell which is which.
        unknown: arrays that are neither parameters nor buffers of anything that was trained.
        withheld: parameters that do not leave.
        exact: whether all values are those of the parameters to the last bit.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    shares: str = "weights"
    by: str = "value"
    unknown: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    exact: bool = True


def matched(
    uploaded: Mapping[str, np.ndarray],
    sent: Mapping[str, np.ndarray],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> Matched:
    """Find what each uploaded array is.

    Args:
        uploaded: arrays of the reply by name, in order.
        sent: of the message that it answers.
        before: values of parameters and buffers when training began.
        after: when the reply was made.
        gradients: of parameters at the first step.
    """
    readings = {
        "weights": after,
        "delta": {name: after[name] - value for name, value in before.items() if name in after},
        "gradient": gradients,
    }
    # parameters that did not move have the same value before and after, and a change of zero
    best: dict[str, str] = {}
    shares = "weights"
    for kind, values in readings.items():
        found = _by_value(uploaded, values)
        if len(found) > len(best):
            best, shares = found, kind
    exact, by = len(best) == len(uploaded), "value"
    if len(best) < len(uploaded):
        placed = _by_place(uploaded, sent, before, set(best.values()), set(best))
        if placed and not best:
            shares = _kind(uploaded, sent, placed)
        by = "place" if placed else by
        best = {**best, **placed}
    trained = [name for name in before if name in after and after[name].is_floating_point()]
    return Matched(
        parameters=best,
        shares=shares,
        by=by,
        unknown=tuple(name for name in uploaded if name not in best),
        withheld=tuple(name for name in trained if name not in set(best.values())),
        exact=exact,
    )


def _by_value(arrays: Mapping[str, np.ndarray], values: Mapping[str, Tensor]) -> dict[str, str]:
    """Match arrays to values of equal bytes, else of equal numbers but for their type; equal ones in their order.

    An array that has the value of a parameter which is taken is another name of it, as of a weight that layers share.
    """
    found: dict[str, str] = {}
    holders: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
    for name, value in values.items():
        holders[_digest(_numpy(value))].append(name)
    first = {digest: names[0] for digest, names in holders.items()}
    for key, array in arrays.items():
        digest = _digest(array)
        if names := holders.get(digest):
            found[key] = names.pop(_likest(key, names))
        elif digest in first and array.size > 1 and array.min() != array.max():
            found[key] = first[digest]
    left = [name for name in values if name not in set(found.values())]
    for key, array in arrays.items():
        if key in found or array.dtype.kind != "f":
            continue
        for name in left:
            value = values[name]
            if tuple(value.shape) == array.shape and _near(array, value):
                found[key] = name
                left.remove(name)
                break
    return found


def _by_place(
    arrays: Mapping[str, np.ndarray],
    sent: Mapping[str, np.ndarray],
    before: Mapping[str, Tensor],
    taken: set[str],
    known: set[str],
) -> dict[str, str]:
    """Match arrays named, or placed, and shaped as arrays that were sent, by values at the start of training."""
    if not sent:
        return {}
    origin = _by_value(sent, before)
    names = list(sent)
    found = {}
    for place, (key, array) in enumerate(arrays.items()):
        if key in known:
            continue
        like = key if key in sent else names[place] if place < len(names) and len(names) == len(arrays) else None
        if like is not None and sent[like].shape == array.shape and (name := origin.get(like)) and name not in taken:
            found[key] = name
    return found


def _kind(uploaded: Mapping[str, np.ndarray], sent: Mapping[str, np.ndarray], placed: Mapping[str, str]) -> str:
    """Return ``weights`` where arrays are nearer to those sent than to zero, else ``delta``."""
    apart = near = 0.0
    names = list(sent)
    for place, (key, array) in enumerate(uploaded.items()):
        origin = sent.get(key, sent[names[place]] if place < len(names) else None)
        if key in placed and origin is not None and origin.shape == array.shape and array.dtype.kind == "f":
            apart += float(np.square(array.astype(np.float64) - origin).sum())
            near += float(np.square(array.astype(np.float64)).sum())
    return "weights" if apart <= near else "delta"


def _likest(key: str, names: Sequence[str]) -> int:
    """Index of the name that ends as ``key`` does, else 0: of equal values the first."""
    for index, name in enumerate(names):
        if name.endswith(key) or key.endswith(name.split(".", 2)[-1]):
            return index
    return 0


def _digest(array: np.ndarray) -> tuple[tuple[int, ...], str]:
    content = np.ascontiguousarray(array)
    return array.shape, hashlib.blake2b(content.dtype.str.encode() + content.tobytes(), digest_size=16).hexdigest()


def _numpy(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _near(array: np.ndarray, value: Tensor) -> bool:
    own = _numpy(value).astype(np.float64)
    other = array.astype(np.float64)
    size = float(np.linalg.norm(own))
    return size > 0 and float(np.linalg.norm(other - own)) <= CLOSE * size and _digits(array) < _digits(_numpy(value))


def _digits(array: np.ndarray) -> int:
    return array.dtype.itemsize if array.dtype.kind == "f" else 99
