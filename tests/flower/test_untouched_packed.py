"""Updates in another form than an array a parameter: packed in bytes, joined, as values with places; and memories."""

import base64
import bz2
import gzip
import io
import lzma
import os
import pickle
import random
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fl_privacy.auditing.instrument.matching import averaged, matched, memories_in
from fl_privacy.auditing.instrument.packed import unpacked
from tests.flower.test_untouched_codes import AFTER, BEFORE, CHANGE
from tests.flower.untouched_apps import PLAIN, audited, rung

WEIGHTS = {name.removeprefix("parts.0."): value for name, value in AFTER.items()}


def _saved(what: object, **how: object) -> bytes:
    file = io.BytesIO()
    torch.save(what, file, **how)
    return file.getvalue()


def _npz(values: Mapping[str, Tensor]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **{name: value.numpy() for name, value in values.items()})
    return file.getvalue()


def _flat(values: Mapping[str, Tensor]) -> np.ndarray:
    return np.concatenate([value.numpy().ravel() for value in values.values()])


PACKINGS: Mapping[str, Callable[[Mapping[str, Tensor]], object]] = {
    "torch": lambda v: _saved(dict(v)),
    "torch_old": lambda v: _saved(dict(v), _use_new_zipfile_serialization=False),
    "zipped_torch": lambda v: zlib.compress(_saved({"state": dict(v), "epoch": 3})),
    "npz": _npz,
    "safetensors": lambda v: save(dict(v)),
    "pickled_arrays": lambda v: pickle.dumps([value.numpy() for value in v.values()]),
    "pickled_tensors": lambda v: pickle.dumps(dict(v), protocol=2),
    "gzipped_pickle": lambda v: gzip.compress(pickle.dumps({k: value.numpy() for k, value in v.items()})),
    "bz2_raw": lambda v: bz2.compress(_flat(v).tobytes()),
    "lzma_raw": lambda v: lzma.compress(_flat(v).astype(np.float64).tobytes()),
    "raw_half": lambda v: _flat(v).astype(np.float16).tobytes(),
    "base64": lambda v: base64.b64encode(zlib.compress(_flat(v).tobytes())).decode(),
    "numbers": lambda v: _flat(v).tolist(),
    "twice": lambda v: gzip.compress(zlib.compress(_saved(dict(v)))),
    "one_each": lambda v: [zlib.compress(value.numpy().tobytes()) for value in v.values()],
}
"""How an app may pack what it sends."""


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("values", "shares"), [(AFTER, "weights"), (CHANGE, "delta")], ids=["weights", "delta"])
def test_what_is_packed_is_the_parameters(packing: str, values: dict[str, Tensor], shares: str) -> None:
    """The arrays of the message go back as they came."""
    sent = {f"arrays/{name}": BEFORE[f"parts.0.{name}"].numpy() for name in WEIGHTS}
    packed = PACKINGS[packing]({name.removeprefix("parts.0."): value for name, value in values.items()})
    found = matched({**sent, **unpacked({"update/blob": packed})}, sent, BEFORE, AFTER, {})
    assert set(found.parameters.values()) == set(BEFORE) and found.shares == shares and not found.withheld
    for key, name in found.parameters.items():
        assert not key.startswith("arrays/"), "what came back as it was says nothing"
        if key in found.decoded:
            assert np.linalg.norm(found.decoded[key] - values[name].numpy()) < 2e-3 * float(values[name].norm())


def test_nothing_that_packed_bytes_name_is_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    for content in (pickle.dumps(Harm()), gzip.compress(pickle.dumps({"a": Harm()})), _saved({"a": Harm()})):
        assert not unpacked({"c/blob": content}) or not (tmp_path / "harm").exists()
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"PK\x03\x04" * 9, b"\x1f\x8b" * 20, b"\x80\x04" * 20, b"x" * 64, random.Random(0).randbytes(99)),
        b"8\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}  ' + bytes(4),
        b"\x93NUMPY\1\0\x0c\0{'descr': ((",
    ],
)
def test_bytes_of_another_kind_are_no_parameters(content: bytes) -> None:
    found = matched(unpacked({"c/blob": content, "c/text": "A" * 100}), {}, BEFORE, AFTER, {})
    assert not found.parameters


def _top(value: Tensor, share: float) -> tuple[np.ndarray, np.ndarray]:
    flat = value.flatten()
    places = flat.abs().topk(max(1, int(share * flat.numel()))).indices
    return flat[places].numpy(), places.numpy()


def _each(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    pairs = {name: _top(value, 0.3) for name, value in values.items()}
    return {f"a/{n}.{end}": array for n, pair in pairs.items() for end, array in zip(("val", "idx"), pair, strict=True)}


def _apart(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """All places first, then all values, under numbers."""
    pairs = [_top(value, 0.3) for value in values.values()]
    return {f"a/{k}": array for k, array in enumerate([p.astype(np.int16) for _, p in pairs] + [v for v, _ in pairs])}


def _joined(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    numbers, places = _top(torch.cat([value.flatten() for value in values.values()]), 0.2)
    return {"a/coords": places, "a/payload": numbers}


def _masked(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    made = {}
    for name, value in values.items():
        mask = (value.abs() >= value.abs().flatten().kthvalue(value.numel() // 2).values).numpy()
        made |= {f"a/{name}.m": mask.astype(np.uint8), f"a/{name}.v": value.numpy()[mask]}
    return made


def _coordinates(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    made = {}
    for name, value in values.items():
        numbers, places = _top(value, 0.3)
        made |= {f"a/{name}.v": numbers, f"a/{name}.at": np.stack(np.unravel_index(places, value.shape), 1)}
    return made


def _side_by_side(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    pairs = [_top(value, 0.3) for value in values.values()]
    return {f"a/{k}": np.stack([p.astype(np.float32), v]) for k, (v, p) in enumerate(pairs)}


def _rows_of_two(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {key: array[::-1].T.copy() for key, array in _side_by_side(values).items()}


def _as_numbers(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {key: array.astype(np.float32) for key, array in _each(values).items()}


@pytest.mark.parametrize(
    "form", [_each, _apart, _joined, _masked, _coordinates, _as_numbers, _side_by_side, _rows_of_two]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_values_with_their_places_are_the_parameters(form: Callable, sign: int) -> None:
    uploaded = form({name: sign * value for name, value in CHANGE.items()})
    found = matched(uploaded, {}, BEFORE, AFTER, {})
    assert found.shares == "delta" and not found.unknown and not found.withheld
    assert set(found.parameters.values()) == set(CHANGE) and set(found.packed) == set(uploaded)
    for key, name in found.parameters.items():
        dense, change = found.decoded[key], CHANGE[name].numpy()
        assert dense.shape == change.shape and 0 < np.count_nonzero(dense) < change.size
        assert np.array_equal(dense[dense != 0], change[dense != 0])


def test_weights_at_some_places_are_as_sent_elsewhere() -> None:
    found = matched(_joined(AFTER), {}, BEFORE, AFTER, {})
    assert found.shares == "weights" and len(found.parameters) == len(AFTER)
    dense, after, before = (
        np.concatenate([values[at].ravel() for at in places])
        for values, places in (
            (found.decoded, found.parameters),
            *(({n: v.numpy() for n, v in some.items()}, found.parameters.values()) for some in (AFTER, BEFORE)),
        )
    )
    new = np.isclose(dense, after)
    assert (new | np.isclose(dense, before)).all() and new.sum() == int(0.2 * len(dense))


def test_numbers_at_other_places_are_no_parameters() -> None:
    rng = np.random.default_rng(0)
    wrong = {key: rng.permutation(array) if "val" in key else array for key, array in _each(CHANGE).items()}
    assert len(matched(wrong, {}, BEFORE, AFTER, {}).parameters) <= 1, "a single value has no order"
    noise = {"a/v": rng.normal(size=50).astype(np.float32), "a/i": rng.permutation(50)}
    assert not matched(noise, {}, BEFORE, AFTER, {}).parameters


REPLY = '    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(x)})'
SENT_APART = {
    "zipped": """
    import zlib
    start = msg.content["arrays"].to_torch_state_dict()
    file = __import__("io").BytesIO()
    torch.save({k: v - start[k] for k, v in net.state_dict().items()}, file)
    blob = ConfigRecord({"blob": zlib.compress(file.getvalue())})
    found = {"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": len(x)}), "update": blob}
    return Message(RecordDict(found), reply_to=msg)""",
    "top": """
    start, made = msg.content["arrays"].to_torch_state_dict(), {}
    for k, v in net.state_dict().items():
        d = (v - start[k]).flatten()
        i = d.abs().topk(max(1, d.numel() // 2)).indices
        made[k + "_a"], made[k + "_b"] = Array(d[i].numpy()), Array(i.numpy())
    return answer(msg, ArrayRecord(made), **{"num-examples": len(x)})""",
    "coded": """
    key = bytes(b ^ 90 for v in net.state_dict().values() for b in v.numpy().tobytes())
    found = {"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict({**found, "update": ConfigRecord({"blob": key})}), reply_to=msg)""",
}
"""Ends of a client that sends no array a parameter."""


@pytest.mark.parametrize("name", SENT_APART)
def test_an_app_that_packs_its_update_is_attacked_or_said_not_to_be_understood(name: str, tmp_path: Path) -> None:
    assert REPLY in PLAIN
    client = PLAIN.replace(REPLY, SENT_APART[name]).replace(", momentum=0.9", "")
    record = audited(tmp_path, name, client, victims=1, clients=1)
    if name == "coded":
        assert record["headline"].startswith("No upload was attacked: what is uploaded was not understood")
        assert not any("zero" in each["reason"] for each in record["rungs"])
    else:
        assert rung(record, "one")["counts"]["read"] == 1, record["rungs"]
        assert not any(each["severity"] == "look" for each in record["findings"])


def _queue(size: int, examples: int, features: int, *, axis: int, unit: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    old, new = torch.randn(size, features, generator=g), torch.randn(examples, features, generator=g)
    old, new = (torch.nn.functional.normalize(one) if unit else one for one in (old, new))
    after = old.clone()
    after[torch.arange(examples) % size] = new
    return (old, after) if axis == 0 else (old.T.clone(), after.T.clone())


@pytest.mark.parametrize(
    ("size", "axis", "unit"), [(64, 1, True), (64, 0, True), (64, 0, False), (16, 1, True), (40, 0, False)]
)
def test_a_buffer_that_holds_a_vector_of_each_example_is_a_fact(size: int, axis: int, unit: bool) -> None:
    old, new = _queue(size, 40, 8, axis=axis, unit=unit)
    (leak,) = memories_in({"a/queue": "queue"}, {"queue": old}, {"queue": new}, moved=(), counts={0, 40}, labels=None)
    assert leak.severity == "facts" and leak.what.startswith(f"{min(size, 40)} vectors of 8 numbers")
    assert leak.where == "a/queue"


def test_labels_in_a_queue_are_data_and_losses_facts() -> None:
    labels = np.arange(40) % 4
    queue = torch.full((64,), -1)
    filled = queue.clone()
    filled[:40] = torch.from_numpy(labels)
    found = {"counts": {40}, "moved": (), "labels": labels}
    (leak,) = memories_in({"a/y": "y"}, {"y": queue}, {"y": filled}, **found)
    assert leak.severity == "data" and "the class of each of the client's 40 examples" in leak.what
    losses, after = torch.zeros(64), torch.zeros(64)
    after[:40] = torch.rand(40) + 0.1
    (leak,) = memories_in({"a/l": "l"}, {"l": losses}, {"l": after}, **found)
    assert leak.severity == "facts" and leak.what.startswith("40 numbers")


def test_what_gradients_and_means_move_is_no_memory() -> None:
    net = nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    teacher = before["0.weight"].clone() * 0.99 + 0.01 * torch.randn(40, 8)
    net.train()(5 + 3 * torch.randn(16, 8))
    names = {id(value): name for name, value in net.named_buffers()}
    after = {**net.state_dict(), "0.weight": before["0.weight"] + 1, "teacher": teacher, "count": torch.tensor(9)}
    before |= {"teacher": before["0.weight"], "count": torch.tensor(0)}
    keys = {f"a/{name}": name for name in after}
    moved = {"0.weight", "0.bias", "1.weight", "1.bias", *averaged([net], names)}
    assert not memories_in(keys, before, after, moved=moved, counts={40}, labels=None)


MOCO = PLAIN.replace(
    "def Net(): return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4))",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(36, 8)), nn.Linear(8, 4)
        self.register_buffer("queue", F.normalize(torch.randn(8, 64), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
    def forward(self, x):
        found, place = F.normalize(self.body(x)), int(self.place)
        self.queue[:, place:place + len(x)] = found.detach().T
        self.place[0] = (place + len(x)) % 64
        return self.head(found)
""",
)


def test_an_app_with_a_queue_of_features_is_said_to_send_them(tmp_path: Path) -> None:
    record = audited(tmp_path, "moco", MOCO, victims=1, clients=1)
    (found,) = (each for each in record["findings"] if each["where"] == "arrays/queue")
    assert found["severity"] == "facts" and found["what"].startswith("40 vectors of 8 numbers")
    page = next(tmp_path.rglob("report.html")).read_text()
    assert "No client data was found" not in page


def test_means_of_classes_are_to_be_looked_at() -> None:
    """They are written anew as well, and are of many examples."""
    old, new = torch.randn(4, 8), torch.randn(4, 8) + 3
    (leak,) = memories_in({"a/p": "p"}, {"p": old}, {"p": new}, moved=(), counts={40}, labels=None)
    assert leak.severity == "look" and "single examples" not in leak.what


def test_moving_means_of_keras_are_running_statistics() -> None:
    assert averaged([], {1: "parts.0.norm/moving_mean", 2: "parts.0.queue"}) == {"parts.0.norm/moving_mean"}
