"""Trained evaluation networks in files."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.evaluator.network import EvaluationNetwork
from fl_privacy.evaluator.words import WordEvaluator
from fl_privacy.network_files import read_network, read_once, take_values

Evaluator = EvaluationNetwork | WordEvaluator
"""Of images (C, H, W), or of the embeddings (d,) of words."""

REMEDY = "make one by `fl-privacy train-evaluator data=NAME out=FILE`"

MOST_LAYERS, MOST_SIZE = 16, 1 << 24
"""Of a network in a file, which is laid out before anything is allocated."""


def save_evaluator(network: Evaluator, file: Path, about: Mapping[str, str]) -> None:
    """Write the weights and, as metadata, shape, widths and ``about``; a reader never sees half a file."""
    metadata = {
        **about,
        "input_shape": json.dumps(network.input_shape),
        "widths": json.dumps(network.widths),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".partial")
    os.close(handle)
    try:
        save_file({name: t.cpu() for name, t in network.state_dict().items()}, temporary, metadata)
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_about(file: Path) -> dict[str, str]:
    """The metadata of an evaluation network's file.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    return _read(file, tensors=False)[0]


def load_evaluator(file: Path, device: torch.device | str = "cpu") -> Evaluator:
    """The network in ``file``, frozen; read once for each device until the file changes.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        return _load(file, torch.device(device))
    except OSError as error:
        raise _unreadable(file) from error


@read_once
def _load(file: Path, device: torch.device) -> Evaluator:
    about, values = _read(file, tensors=True)
    shape, widths = (_sizes(about[key]) for key in ("input_shape", "widths"))
    if len(shape) not in (1, 3) or not 1 <= len(widths) <= MOST_LAYERS:
        raise UserError(f"An evaluation network is expected in {file}, but its shape or widths are none; {REMEDY}.")
    with torch.device("meta"):
        network: Evaluator = (
            WordEvaluator(width=shape[0], widths=widths)
            if len(shape) == 1
            else EvaluationNetwork(input_shape=shape, widths=widths)
        )
    if wrong := take_values(network, values):
        raise UserError(f"An evaluation network is expected in {file}, but {wrong}; {REMEDY}.")
    return network.to(device)


def _sizes(text: str) -> list[int]:
    """Whole numbers from 1 in JSON; empty where it is something else."""
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        return []
    whole = isinstance(sizes, list) and all(type(size) is int and 1 <= size <= MOST_SIZE for size in sizes)
    return sizes if whole else []


def _read(file: Path, *, tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and, if wanted, weights."""
    try:
        about, values = read_network(file, tensors=tensors)
    except OSError as error:
        raise _unreadable(file) from error
    if not {"input_shape", "widths"} <= about.keys():
        raise UserError(f"An evaluation network is expected in {file}, but it holds something else; {REMEDY}.")
    return about, values


def _unreadable(file: Path) -> UserError:
    return UserError(f"An evaluation network is expected in {file}, but it can't be read; {REMEDY}.")


def expect_fit(network: Evaluator, input_shape: Sequence[int], file: Path) -> EvaluationNetwork:
    """``network``, which judges images of ``input_shape``; ``UserError`` where it does not."""
    if isinstance(network, WordEvaluator):
        raise UserError(f"An evaluation network for images is expected, but {file} is for texts; {REMEDY}.")
    if network.input_shape != tuple(input_shape):
        wanted, got = ("x".join(map(str, shape)) for shape in (input_shape, network.input_shape))
        channels, height, _ = input_shape
        raise UserError(
            f"An evaluation network for images of {wanted} is expected, but {file} is for {got};"
            f" {REMEDY} data.channels={channels} data.image_size={height}."
        )
    return network
