"""Files of updates: what they hold is read, nothing of it is run, and what does not fit is said in one line."""

import copy
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fl_privacy.auditing import update_given
from fl_privacy.auditing.update_given import entrance_of, named_as_in, network_of, read_examples, shape_of
from fl_privacy.errors import UserError
from fl_privacy.files import updates
from fl_privacy.files.updates import read_arrays
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS
from tests.audit_update.files import NET, of_fedbiomed, of_flare, of_openfl

VALUES = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


class Boom:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('a file was executed')",))


def as_npz(path: Path) -> None:
    np.savez(path, **{name: value.numpy() for name, value in VALUES.items()})


WRITERS: dict[str, Callable[[Path], None]] = {
    "safetensors": lambda path: save_file(VALUES, path),
    "npz": as_npz,
    "checkpoint": lambda path: torch.save({"model": VALUES, "epoch": 3, "optimizer": {"state": {0: VALUES}}}, path),
    "weights": lambda path: of_flare(path, "WEIGHTS", VALUES, {}),
    "weights of a job": lambda path: of_flare(path, "WEIGHTS", VALUES, {}, job=True),
    "a breakpoint of Fed-BioMed": lambda path: of_fedbiomed(path, VALUES),
    "a model of OpenFL": lambda path: of_openfl(path, {**VALUES, "__opt_state_0": torch.ones(9)}, tag="model"),
    "a change of OpenFL": lambda path: of_openfl(path, VALUES, tag="delta"),
    "diff": lambda path: of_flare(path, "WEIGHT_DIFF", VALUES, {"NUM_STEPS_CURRENT_ROUND": 5}, apart=True),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_format_gives_the_arrays(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"  # a name says nothing
    WRITERS[kind](path)
    found = read_arrays(path)
    assert found.arrays.keys() == VALUES.keys() and found.is_change == (kind in {"diff", "a change of OpenFL"})
    assert all(torch.equal(found.arrays[name], value) for name, value in VALUES.items())
    assert found.steps == (5 if kind == "diff" else None)


def lying_array(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue() + b"\0" * 8


def zipped(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "."), data)


def cut(path: Path, write: Callable[[Path], None], size: int) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:size])


def damaged_lzma(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", bytes(range(200)))
    data = path.read_bytes()
    path.write_bytes(data[:49] + b"\xff" * 30 + data[79:])


def nested(path: Path) -> None:
    """Write a checkpoint of 60 mappings, each of which holds the one before twice."""
    each = (b"}q%c(X\1\0\0\0ah%cX\1\0\0\0bh%cu" % (k + 1, k, k) for k in range(60))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}q\0" + b"".join(each) + b".")
        archive.writestr("a/version", "3")
        archive.writestr("a/byteorder", "little")


MALFORMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Boom())), "is a pickle"),
    "an old checkpoint": (lambda p: torch.save(VALUES, p, _use_new_zipfile_serialization=False), "is a pickle"),
    "a checkpoint with objects": (lambda path: torch.save({"model": Boom()}, path), "would run code"),
    "pickled arrays": (lambda path: np.savez(path, a=np.array([Boom()], dtype=object)), "pickled objects"),
    "an array that lies": (lambda path: zipped(path, a__npy=lying_array((1 << 40,))), "not the number of its values"),
    "a spread tensor": (lambda path: torch.save({"a": torch.zeros(1).expand(1 << 40)}, path), "more than its values"),
    "a cut file": (lambda path: cut(path, WRITERS["safetensors"], 40), "ends before its header"),
    "a cut checkpoint": (lambda path: cut(path, WRITERS["checkpoint"], 700), "is damaged"),
    "a cut DXO": (lambda path: cut(path, WRITERS["diff"], 900), "ends within a section"),
    "metrics": (lambda path: of_flare(path, "METRICS", VALUES, {}), "of the kind METRICS"),
    "deep nesting": (lambda p: p.write_bytes(struct.pack(">BBQ", 100, 0, 2000) + b"\x91" * 2000), "is damaged|deeply"),
    "secure aggregation": (lambda path: of_fedbiomed(path, [1, 2, 3]), "secure aggregation"),
    "a mapping that lies": (
        lambda p: of_fedbiomed(p, {"a": {"__type__": "torch.Tensor", "value": [b"1234", "float32", [1 << 40]]}}),
        "not the number of its values",
    ),
    "a mapping of objects": (
        lambda p: of_fedbiomed(p, {"a": {"__type__": "torch.Tensor", "value": [b"12345678", "object", [1]]}}),
        "kind object",
    ),
    "a mapping of nothing": (lambda path: of_fedbiomed(path, {"a": {"b": 1}}), "no arrays with names"),
    "a compressed model": (
        lambda path: of_openfl(path, VALUES, tag="model", more={"int_to_float": [b"x"]}),
        "compressed by a pipeline",
    ),
    "a cut model": (lambda p: cut(p, WRITERS["a model of OpenFL"], 70), "ends within a field"),
    "a message of something else": (lambda path: path.write_bytes(b"\n\x02\x08\x01"), "begins like none"),
    "a number without end": (lambda path: path.write_bytes(b"\n" + b"\xff" * 20), "has no end"),
    "Keras": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 40), "begins like none"),
    "an empty file": (lambda path: path.write_bytes(b""), "is empty"),
    "a text": (lambda path: path.write_text("weights"), "begins like none"),
    "one array": (lambda path: path.write_bytes(lying_array((2,))), "without the names"),
    "another zip file": (lambda path: zipped(path, a__txt=b"x"), "of something else"),
    "a program": (lambda path: torch.jit.script(nn.Linear(2, 2)).save(str(path)), "holds code"),
    "nothing by name": (lambda path: torch.save([torch.zeros(2)], path), "no arrays with names"),
    "a section of 2^64 bytes": (lambda p: p.write_bytes(b"d\0" + b"\xff" * 8 + b"\x81\xa1a"), "ends within a section"),
    "a header without end": (lambda p: zipped(p, a__npy=b"\x93NUMPY\1\0\x0c\0{'descr': (("), "is damaged"),
    "an odd kind": (
        lambda p: of_fedbiomed(p, {"a": {"__type__": "np.ndarray", "value": [b"", "f4,(", [0]]}}),
        "is damaged",
    ),
    "an endless shape": (
        lambda p: of_fedbiomed(p, {"a": {"__type__": "np.ndarray", "value": [b"1234", "f4", [float("inf")]]}}),
        "is damaged",
    ),
    "damaged LZMA": (damaged_lzma, "is damaged"),
    "mappings of mappings": (nested, "no arrays with names"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_files_are_refused_in_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"
    write, why = MALFORMED[what]
    write(path)
    with pytest.raises(UserError, match=why) as caught:
        read_arrays(path)
    assert "\n" not in str(caught.value)


def test_sizes_are_compared_before_anything_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", lying_array((1 << 20,)) + b"\0" * (1 << 22))
    monkeypatch.setattr(updates, "LARGEST_FILE", 1 << 20)
    with pytest.raises(UserError, match="unpacks to more than 1 MiB"):
        read_arrays(tmp_path / "bomb.npz")
    (tmp_path / "large").write_bytes(b"\0" * (1 << 21))
    with pytest.raises(UserError, match="has 2 MiB"):
        read_arrays(tmp_path / "large")
    with pytest.raises(UserError, match="No such file"):
        read_arrays(tmp_path / "none")


def test_names_are_those_that_transformers_writes(tmp_path: Path) -> None:
    """``save_pretrained`` does not write the names of ``state_dict()`` for each model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, intermediate_size=8))
    vit.save_pretrained(tmp_path)
    found, said = named_as_in(vit, read_arrays(tmp_path / "model.safetensors").arrays, "BEFORE")
    assert said == [] and found.keys() == vit.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in vit.state_dict().items())


def test_values_that_transformers_splits_are_refused_by_their_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    assert named_as_in(experts, experts.state_dict(), "BEFORE")[0].keys() == dict(experts.named_parameters()).keys()
    experts.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"but has .*w\d.weight \(8, 8\), which the model lacks.* or save its state_dict\(\)"
    ):
        named_as_in(experts, read_arrays(tmp_path / "model.safetensors").arrays, "BEFORE")


def test_names_may_have_prefixes_and_arrays_none() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    own = net.state_dict()
    for given in (
        {f"module.model.{name}": value for name, value in own.items()},
        {f"arr_{place}": value for place, value in enumerate(own.values())},
        {str(place): p.detach() for place, p in enumerate(net.parameters())},
    ):
        found, _ = named_as_in(net, given, "AFTER")
        assert (
            found.keys() == own.keys()
            if len(given) == len(own)
            else found.keys() == dict(net.named_parameters()).keys()
        )
        assert all(torch.equal(found[name], own[name]) for name in found)
    wrapped = nn.ModuleDict({"net": net})
    assert "net.0.weight" in named_as_in(wrapped, own, "AFTER")[0]


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"0.weight": torch.zeros(2, 4)}, r"0\.weight of shape \(2, 3\).*holds \(2, 4\)"),
        (
            {"0.weight": torch.zeros(2, 3), "conv.weight": torch.zeros(1)},
            r"but has conv\.weight \(1,\), which the model lacks",
        ),
        ({"0.bias": torch.tensor([float("nan"), 0.0])}, "finite numbers"),
        ({"0.bias": torch.tensor([1e300, 0.0], dtype=torch.float64)}, "finite numbers"),
        ({"0.bias": torch.tensor([1, 0], dtype=torch.int8)}, r"0\.bias is of int8"),
        ({"0": torch.zeros(2, 3), "1": torch.zeros(2), "2": torch.zeros(2)}, "has 3"),
    ],
)
def test_what_does_not_fit_is_named(arrays: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(UserError, match=why):
        named_as_in(nn.Sequential(nn.Linear(3, 2)), arrays, "AFTER")


def test_the_first_layer_tells_what_enters(tmp_path: Path) -> None:
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    assert entrance_of(conv)[:2] == (IMAGES, 3) and entrance_of(nn.Linear(13, 2))[:2] == (ROWS, 13)
    assert entrance_of(nn.Embedding(50, 4))[:2] == (TEXTS, 50)
    assert shape_of(nn.Linear(13, 2), None, None) == (13,)
    with pytest.raises(UserError, match=r"--shape 3,HEIGHT,WIDTH"):
        shape_of(conv, None, None)
    (tmp_path / "nets.py").write_text(NET)
    assert entrance_of(network_of(f"{tmp_path}/nets.py:Net"))[0] is ROWS
    for place in ("nets.py", f"{tmp_path}/nets.py:Other", f"{tmp_path}/none.py:Net", f"{tmp_path}/nets.py"):
        with pytest.raises(UserError, match="--model is expected"):
            network_of(place)


def test_a_models_code_may_hold_dataclasses(tmp_path: Path) -> None:
    config = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    number: int = 3\n"
    (tmp_path / "nets.py").write_text(f"from __future__ import annotations\n{config}{NET}")
    assert network_of(f"{tmp_path}/nets.py:Net").hidden.in_features == 48


@pytest.mark.parametrize("batch", [1, 2])
def test_a_saved_program_has_layers_and_takes_any_batch(batch: int, tmp_path: Path) -> None:
    layers = [nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    net = nn.Sequential(*layers).eval()
    torch.export.save(torch.export.export(net, (torch.rand(batch, 2, 4, 4),)), tmp_path / "net.pt2")
    program, images = network_of(str(tmp_path / "net.pt2")), torch.rand(batch, 2, 4, 4)
    assert entrance_of(program)[:2] == (IMAGES, 2) and isinstance(program.get_submodule("3"), nn.Linear)
    assert torch.equal(copy.deepcopy(program)(images), net(images))
    assert copy.deepcopy(program)(torch.rand(3, 2, 4, 4)).shape == (3, 3)
    (tmp_path / "net.pt2").write_bytes(b"none")
    with pytest.raises(UserError, match="--model"):
        network_of(str(tmp_path / "net.pt2"))


def test_too_many_examples_are_refused_or_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", inputs=np.arange(40.0).reshape(10, 4), labels=np.arange(10))
    monkeypatch.setattr(update_given, "MOST_EXAMPLES", 6)
    given = {"kind": ROWS, "width": 4, "shape": None}
    with pytest.raises(UserError, match=r"at most 6 examples, but .* holds 10"):
        read_examples(tmp_path / "x.npz", **given)
    one, again, other = (read_examples(tmp_path / "x.npz", **given, seed=seed) for seed in (0, 0, 1))
    assert len(one.inputs) == 6 and one.labels is not None and one.inputs[:, 0].tolist() == (4 * one.labels).tolist()
    assert torch.equal(one.inputs, again.inputs) and not torch.equal(one.inputs, other.inputs)


def test_only_bytes_of_pixels_are_scaled(tmp_path: Path) -> None:
    held = np.arange(12, dtype=np.uint8).reshape(3, 4)
    np.savez(tmp_path / "x.npz", inputs=held)
    for kind in (ROWS, TEXTS):
        found = read_examples(tmp_path / "x.npz", kind=kind, width=4, shape=None).inputs
        assert found.tolist() == held.tolist()
