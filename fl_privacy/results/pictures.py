"""``reconstructions/``: originals and guesses as bytes, a file a round, for their owner alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_privacy.checks import fits
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.victim_ids import Attacker

if TYPE_CHECKING:
    from torch import Tensor

    from fl_privacy.metrics import VictimScore

MOST_BYTES = 1 << 30
"""Of a file of pictures, or of films of them."""

Pixels = NDArray[np.uint8]
"""Images of (C, H, W), grey or color."""


@dataclass(frozen=True, eq=False)
class Pair:
    """An original and its guesses.

    Attributes:
        original: what was attacked; ``None`` where nobody knows it.
        guess: of the plain attacker; ``None`` where its attack failed.
        adaptive: of the adaptive attacker; ``None`` where there was none, or its attack failed.
        transformed: what the defense put in place of the original; ``None`` where it did not.
    """

    original: Pixels | None
    guess: Pixels | None
    adaptive: Pixels | None = None
    transformed: Pixels | None = None


def write_pairs(folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker = Attacker.PLAIN) -> Path:
    """Write what ``attacker`` made of ``round`` into ``folder``; a second call for a round adds a file."""
    images = [image for score in scores for image in score.images]
    known = [score.originals is not None for score in scores for _ in score.images]
    tensors = {
        "originals": np.concatenate([_bytes(s.guesses * 0 if s.originals is None else s.originals) for s in scores]),
        "reconstructions": np.concatenate([_bytes(score.guesses) for score in scores]),
        "found": np.asarray([image.failure is None for image in images]),
    }
    if not all(known):
        tensors["known"] = np.asarray(known)
    replaced = [_bytes(score.transformed) for score in scores if score.transformed is not None]
    if len(replaced) == len(scores):
        tensors["transformed"] = np.concatenate(replaced)
    ids = [[str(score.id), image.image] for score in scores for image in score.images]
    make_private_folder(folder, folder)
    name = f"round-{round:04d}" + ("" if attacker == Attacker.PLAIN else f"-{attacker}")
    path, number = folder / f"{name}.safetensors", 1
    while path.exists():
        path, number = folder / f"{name}-{number}.safetensors", number + 1
    told = {"round": round, "attacker": attacker, "ids": ids}
    # one entry, since several come out in an order of chance: equal runs leave equal bytes
    write_private(path, save(tensors, metadata={"told": json.dumps(told)}))
    return path


def read_pairs(folder: Path) -> tuple[Mapping[tuple[str, int], Pair], list[str]]:
    """(victim id, image) -> pair of all files in ``folder``, and a line on each file that can't be read."""
    pairs: dict[tuple[str, int], Pair] = {}
    problems = []
    for path in sorted(folder.glob("round-*.safetensors")):
        try:
            for key, original, guess, attacker, transformed in _read(path):
                pair = pairs.setdefault(key, Pair(original, None, transformed=transformed))
                pairs[key] = (
                    replace(pair, adaptive=guess) if attacker == Attacker.ADAPTIVE else replace(pair, guess=guess)
                )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problems.append(f"{path.name} can't be read ({' '.join(str(error).split())[:200]})")
    return pairs, problems


def _read(path: Path) -> Iterator[tuple[tuple[str, int], Pixels | None, Pixels | None, str, Pixels | None]]:
    """(victim id, image), original, guess, whose it is, and what the defense put in place of the original."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size >> 20} MiB")
    with safe_open(path, framework="np") as file:
        told = json.loads(file.metadata()["told"])
        originals, guesses, found = (file.get_tensor(n) for n in ("originals", "reconstructions", "found"))
        transformed = file.get_tensor("transformed") if "transformed" in file.keys() else None  # noqa: SIM118
        known = file.get_tensor("known") if "known" in file.keys() else np.ones_like(found)  # noqa: SIM118
    ids, attacker = told["ids"], told["attacker"]
    if not isinstance(ids, list) or not isinstance(attacker, str):
        raise ValueError("its names are none")
    if not len(originals) == len(guesses) == len(found) == len(ids):
        raise ValueError(f"it names {len(ids)} images and holds {len(originals)}")
    if guesses.shape != originals.shape or (transformed is not None and transformed.shape != originals.shape):
        raise ValueError("its images are not of one shape")
    for images in (originals, guesses) if transformed is None else (originals, guesses, transformed):
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(ids) or not images.size:
            raise ValueError(f"it holds images of shape {tuple(images.shape)} and type {images.dtype}")
    if any(which.dtype != np.bool_ or which.shape != (len(ids),) for which in (found, known)):
        raise ValueError("it does not say which were found")
    if not all(isinstance(id, list) and len(id) == 2 and fits(id[0], str) and fits(id[1], int) for id in ids):
        raise ValueError("its names are none")
    for k, (victim, image) in enumerate(ids):
        guess = guesses[k] if found[k] else None
        original = originals[k] if known[k] else None
        yield (victim, image), original, guess, attacker, None if transformed is None else transformed[k]


def _bytes(images: Tensor) -> Pixels:
    """[0, 1] -> uint8, (B, C, H, W)."""
    shown: Pixels = (images.clamp(0, 1) * 255).round().byte().numpy()
    return shown
