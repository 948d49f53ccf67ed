"""Filters of incoming and outgoing records by a policy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_privacy.site.gate.policy import COUNTERS, DTYPES, Arrays, SitePolicy, Values
from fl_privacy.site.gate.protecting import noised
from fl_privacy.site.gate.rules import RefusedError

NUMPY = "numpy.ndarray"  # Flower's name for NumPy's file format
VARIANCE = "running_var"  # last part of the names of arrays that must not become negative by noise


@dataclass(frozen=True)
class RawArray:
    """Array in Flower's serialized form."""

    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes
    older: bool = False  # ``True`` in Flower's older interface, where only ``data`` states dtype and shape


@dataclass(frozen=True)
class Records:
    """Content of a message: record -> key -> value."""

    arrays: Mapping[str, Mapping[str, RawArray]] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def in_words(self) -> str:
        values = sum(math.prod(array.shape) for record in self.arrays.values() for array in record.values())
        names = [key for held in (self.metrics, self.config) for record in held.values() for key in record]
        return ", ".join([*([f"{values} values in arrays"] if values else []), *names])

    @property
    def size(self) -> int:
        arrays = sum(len(array.data) for record in self.arrays.values() for array in record.values())
        values = [v for held in (self.metrics, self.config) for record in held.values() for v in record.values()]
        each = [one for v in values for one in (v if isinstance(v, list | tuple) else (v,))]
        return arrays + sum(8 * max(1, len(v)) if isinstance(v, str | bytes) else 8 for v in each)


def admit(policy: SitePolicy, kind: str, content: Records) -> Records:
    """Return a message's content as the app may receive it; ``RefusedError`` if ``policy`` does not allow all of it."""
    if policy.reply(kind) is None:
        raise RefusedError("kind", f"a message of kind {kind!r:.400}, which sends does not name; add it there")
    if content.size > policy.receives.most_bytes:
        raise RefusedError("size", f"a message of {content.size} bytes; send less, or raise receives.max_mib")
    for name, record in content.arrays.items():
        if name not in policy.receives.arrays:
            raise RefusedError("record", f"arrays in the record {name!r:.400}; add it to receives.records.arrays")
        for key, array in record.items():
            _expect_finite(f"{name}/{key}", array_values(f"{name}/{key}", array))
    if found := [name for name, record in content.metrics.items() if record]:
        raise RefusedError("record", f"metrics in the record {found[0]!r:.400}; send them as config")
    config = policy.receives.config
    if other := config.rules.get("*"):
        named = {key: other for record in content.config.values() for key in record}
        config = replace(config, rules={**named, **{key: one for key, one in config.rules.items() if key != "*"}})
    return replace(content, metrics={}, config=_kept("receives", config, content.config, drops=False))


def release(policy: SitePolicy, kind: str, received: Records, replied: Records) -> Records:
    """Return the part of the app's reply that may leave, with noise if the policy requires it.

    Names and order are not the app's, but those of the policy or of the received message. ``RefusedError`` if received
    arrays are missing, or for content that the policy does not name (unless ``policy.drops`` removes it).
    """
    reply = policy.reply(kind)
    if reply is None:
        raise RefusedError("kind", f"a reply to a message of kind {kind!r:.400}; add it to sends")
    values = {
        "metrics": _kept("metrics", reply.metrics, replied.metrics, drops=policy.drops),
        "config": _kept("config", reply.config, replied.config, drops=policy.drops),
    }
    if reply.arrays is not None and reply.arrays.lists is not None:
        return Records(arrays=_released_lists(reply.arrays, replied), **values)
    if not any(replied.arrays.values()):
        if reply.arrays is not None and any(received.arrays.values()):
            raise RefusedError("arrays", "the reply has no arrays; return those that came in")
        return Records(arrays={}, **values)
    if reply.arrays is None:
        raise RefusedError("record", f"arrays in the record {next(iter(replied.arrays))!r:.400}; allow arrays in sends")
    return Records(arrays=_released_arrays(policy, reply.arrays, received, replied), **values)


def noise_alone(policy: SitePolicy, kind: str, received: Records) -> Records | None:
    """Return a substitute for a reply that failed: the received arrays plus noise, so that the failure is hidden.

    ``None`` if the policy has no noise, or lets an app choose metrics or other values.
    """
    reply = policy.reply(kind)
    if policy.noising is None or reply is None or reply.arrays is None or reply.arrays.counters != "received":
        return None
    if any(rule.value is None for values in (reply.metrics, reply.config) for rule in values.rules.values()):
        return None
    renamed = {reply.arrays.record or name: record for name, record in received.arrays.items()}
    return release(policy, kind, received, Records(arrays=renamed))


def _released_arrays(
    policy: SitePolicy, rule: Arrays, received: Records, replied: Records
) -> dict[str, dict[str, RawArray]]:
    sent = {name: record for name, record in replied.arrays.items() if record}
    came = {name: record for name, record in received.arrays.items() if record}
    if rule.record is not None and len(came) == 1 and sent.keys() == {rule.record}:
        sent = {next(iter(came)): sent[rule.record]}
    if sent.keys() != came.keys():
        raise RefusedError("record", f"arrays in {sorted(sent)!r:.400}; return the records {sorted(came)!r:.400}")
    for name, record in sent.items():
        if record.keys() != came[name].keys():
            odd = sorted(record.keys() ^ came[name].keys())
            raise RefusedError("arrays", f"{name} has other arrays than came in ({odd[:2]!r:.400}); return the same")
    placed = {(name, key): sent[name][key] for name, record in came.items() for key in record}
    before = {place: array_values("/".join(place), received.arrays[place[0]][place[1]]) for place in placed}
    after = {place: _checked(place, before[place], array, rule) for place, array in placed.items()}
    floats = [place for place, array in before.items() if array.dtype.kind == "f"]
    if policy.noising is None:
        for place in floats:
            _expect_finite("/".join(place), after[place])
    else:
        if not all(np.isfinite(after[place]).all() for place in floats):
            after |= {place: before[place] for place in floats}  # no change, since noise does not cover a refusal
        came_in, went_out = ([held[place] for place in floats] for held in (before, after))
        moved: list[npt.NDArray[Any]] = noised(came_in, went_out, policy.noising)
        for place, array in zip(floats, moved, strict=True):  # finite, and variances of at least 0
            limit = np.finfo(array.dtype).max
            finite = np.clip(array, -limit, limit)
            after[place] = np.maximum(finite, 0) if place[1].rpartition(".")[2] == VARIANCE else finite
    renamed = {name: rule.record or name for name in received.arrays}
    found: dict[str, dict[str, RawArray]] = {renamed[name]: {} for name in came}
    for (name, key), array in after.items():
        flags, older = before[name, key].flags, received.arrays[name][key].older
        made = raw_array(array, fortran=flags.f_contiguous and not flags.c_contiguous)
        found[renamed[name]][key] = replace(made, older=older)
    return found


def _released_lists(rule: Arrays, replied: Records) -> dict[str, dict[str, RawArray]]:
    found, lists = dict[str, dict[str, RawArray]](), rule.lists or {}
    for name, record in replied.arrays.items():
        if name != rule.record:
            raise RefusedError("record", f"arrays in the record {name!r:.400}; send them in {rule.record}")
        if record and record.keys() != lists.keys():
            raise RefusedError("key", f"{name} has {sorted(record)[:4]!r:.400}; send {sorted(lists)[:4]}")
        found[name] = {}
        for key, most in lists.items() if record else ():
            where, array = f"{name}/{key}", record[key]
            if array.dtype not in rule.dtypes:
                raise RefusedError("dtype", f"{where} is of {array.dtype!r:.40}; send {' or '.join(rule.dtypes)}")
            if not array.shape or array.shape[0] > most[0] or tuple(array.shape[1:]) != most[1:]:
                raise RefusedError(
                    "size", f"{where} is of shape {array.shape!r:.400}; send at most {most[0]} rows of shape {most[1:]}"
                )
            _expect_finite(where, values := array_values(where, array))
            found[name][key] = raw_array(values)
    return found


def _checked(place: tuple[str, str], before: npt.NDArray[Any], array: RawArray, rule: Arrays) -> npt.NDArray[Any]:
    where = "/".join(place)
    is_float = before.dtype.kind == "f"
    if not is_float and rule.counters == "received":
        return before
    if array.dtype != str(before.dtype) or (is_float and array.dtype not in rule.dtypes):
        raise RefusedError("dtype", f"{where} is of {array.dtype!r:.40}; {before.dtype} came in: return or allow that")
    if tuple(array.shape) != before.shape:
        raise RefusedError("shape", f"{where} is of shape {array.shape!r:.400}; return the {before.shape} that came in")
    return array_values(where, array)


def _kept(
    where: str, values: Values, held: Mapping[str, Mapping[str, Any]], *, drops: bool
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, record in held.items():
        if name not in values.records or (record and not values.rules):
            if not drops and record:
                raise RefusedError("record", f"{where} in the record {name!r:.400}; allow it, or leave it out")
            continue
        if not drops and (odd := [key for key in record if key not in values.rules]):
            raise RefusedError("key", f"{where} in the record {name!r:.400} has {odd[0]!r:.400}; allow or omit it")
        found[name] = {}
        for key, rule in values.rules.items():
            if rule.value is None and key in record:
                found[name][key] = rule.apply(f"{name}/{key}", record[key])
    fixed = {key: rule.fixed for key, rule in values.rules.items() if rule.value is not None}
    if fixed:  # whatever the app replies or omits
        found.setdefault(values.records[0], {}).update(fixed)
    return {name: found[name] for name in values.records if name in found}


def _expect_finite(where: str, values: npt.NDArray[Any]) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise RefusedError("finite", f"{where} has values that are not finite; send finite ones")


def array_values(where: str, array: RawArray) -> npt.NDArray[Any]:
    """Return the values of ``array``; ``RefusedError`` about ``where`` unless the bytes fit type and shape exactly."""
    if array.stype != NUMPY:
        raise RefusedError("bytes", f"{where} is of the format {array.stype!r:.40}; send it as {NUMPY}")
    if array.dtype not in (*DTYPES, *COUNTERS):
        raise RefusedError("dtype", f"{where} is of {array.dtype!r:.40}; send one of {(*DTYPES, *COUNTERS)}")
    shape = tuple(array.shape)
    dtype, size = np.dtype(array.dtype), math.prod(shape)
    try:
        for fortran in (False, True):
            header = _header(array.dtype, shape, fortran)
            if array.data.startswith(header) and len(array.data) == len(header) + size * dtype.itemsize:
                values = np.frombuffer(array.data, dtype=dtype, offset=len(header))
                if dtype.kind == "b" and values.view(np.uint8).max(initial=0) > 1:
                    break  # a byte holds 8 bits, but true or false is one
                return values.reshape(shape, order="F" if fortran else "C")
    except (ValueError, OverflowError) as error:  # negative, or more dimensions than NumPy or its header has
        raise RefusedError("shape", f"{where} claims the shape {shape!r:.400}: {error}; serialize it anew") from error
    raise RefusedError("bytes", f"{where} claims {array.dtype} {shape!r:.400}, but holds other bytes; use numpy.save")


def raw_array(values: npt.NDArray[Any], *, fortran: bool = False) -> RawArray:
    """Serialize ``values`` like Flower, byte for byte; ``fortran`` for Fortran order."""
    dtype, shape = str(values.dtype), tuple(values.shape)
    content = np.ascontiguousarray(values.T if fortran else values)  # copied once, with the header
    return RawArray(dtype, shape, NUMPY, b"".join((_header(dtype, shape, fortran), content.data)))


@lru_cache(maxsize=4096)
def _header(dtype: str, shape: tuple[int, ...], fortran: bool) -> bytes:
    buffer = BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()
