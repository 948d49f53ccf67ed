"""Weights of somebody's file: what is asked for is read, and nothing that is larger."""

import json
from pathlib import Path

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.runs.weights import load_weights, write_weights
from fl_privacy.types import ModelState

LIKE = ModelState({"a": torch.zeros(3)}, {"b": torch.zeros((), dtype=torch.int64)})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    held = ModelState({"a": torch.arange(3.0)}, {"b": torch.tensor(7)})
    write_weights(tmp_path / "model.safetensors", held)
    read = load_weights(tmp_path, LIKE)
    assert torch.equal(read.parameters["a"], held.parameters["a"]) and read.buffers["b"] == 7


def test_a_module_that_the_file_has_not_is_fresh_and_one_that_it_has_is_read(tmp_path: Path) -> None:
    like = ModelState({"a": torch.zeros(3), "block.w": torch.ones(2)}, {})
    write_weights(tmp_path / "without", ModelState({"a": torch.arange(3.0)}, {}))
    assert torch.equal(load_weights(tmp_path / "without", like, fresh="block").parameters["block.w"], torch.ones(2))
    write_weights(tmp_path / "with", ModelState({"a": torch.arange(3.0), "block.w": torch.full((2,), 5.0)}, {}))
    assert load_weights(tmp_path / "with", like, fresh="block").parameters["block.w"][0] == 5
    with pytest.raises(UserError, match=r"hold block\.w of shape \(2,\), but holds nothing"):
        load_weights(tmp_path / "without", like)


@pytest.mark.parametrize("name", ["a", "more"])
def test_a_tensor_of_sixteen_gibibytes_takes_no_memory(tmp_path: Path, name: str) -> None:
    size = 1 << 34
    header = {name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    if name != "a":
        header["a"] = {"dtype": "F32", "shape": [3], "data_offsets": [size, size + 12]}
        header["b"] = {"dtype": "I64", "shape": [], "data_offsets": [size + 12, size + 20]}
        size += 20
    text = json.dumps(header).encode()
    with (tmp_path / "sparse").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    if name == "a":
        with pytest.raises(UserError, match="hold a of shape"):
            load_weights(tmp_path / "sparse", LIKE)
    else:
        assert torch.equal(load_weights(tmp_path / "sparse", LIKE).parameters["a"], torch.zeros(3))
