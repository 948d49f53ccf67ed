"""Trained evaluation networks in files."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fl_privacy.errors import UserError
from fl_privacy.evaluator.network import EvaluationNetwork

REMEDY = "make one by `fl-privacy train-evaluator data=NAME out=FILE`"


def save_evaluator(network: EvaluationNetwork, file: Path, about: Mapping[str, str]) -> None:
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
    try:
        with safe_open(file, framework="pt") as stored:
            about: dict[str, str] = stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"An evaluation network is expected in {file}, but it can't be read; {REMEDY}.") from error
    if not {"input_shape", "widths"} <= about.keys():
        raise UserError(f"An evaluation network is expected in {file}, but it holds something else; {REMEDY}.")
    return about


def load_evaluator(file: Path, device: torch.device | str = "cpu") -> EvaluationNetwork:
    """The network in ``file``, frozen; read once for each device until the file changes.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    about = read_about(file)
    return _load(file, file.stat().st_mtime_ns, about["input_shape"], about["widths"], torch.device(device))


@cache
def _load(file: Path, changed: int, input_shape: str, widths: str, device: torch.device) -> EvaluationNetwork:
    with torch.random.fork_rng(devices=[]):
        network = EvaluationNetwork(input_shape=json.loads(input_shape), widths=json.loads(widths))
    with safe_open(file, framework="pt") as stored:
        values = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    try:
        network.load_state_dict(values)
    except RuntimeError as error:
        raise UserError(f"An evaluation network is expected in {file}, but its layers differ; {REMEDY}.") from error
    return network.requires_grad_(False).eval().to(device)


def expect_fit(network: EvaluationNetwork, input_shape: Sequence[int], file: Path) -> None:
    """Raise ``UserError`` unless ``network`` judges images of ``input_shape``."""
    if network.input_shape != tuple(input_shape):
        wanted, got = ("x".join(map(str, shape)) for shape in (input_shape, network.input_shape))
        channels, height, _ = input_shape
        raise UserError(
            f"An evaluation network for images of {wanted} is expected, but {file} is for {got};"
            f" {REMEDY} data.channels={channels} data.image_size={height}."
        )
