"""``reconstructions/film-*``: how guesses came about, as bytes, for their owner alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_privacy.checks import fits
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.film import LARGEST
from fl_privacy.results.pictures import Pixels
from fl_privacy.victim_ids import Attacker

if TYPE_CHECKING:
    from fl_privacy.metrics import VictimScore
    from fl_privacy.types import Reconstruction

FRAMES_AT_MOST = 64
"""Of a victim, in a file from elsewhere."""


@dataclass(frozen=True, eq=False)
class Film:
    """How a guess at one image came about.

    Attributes:
        id: of the victim.
        image: which of its images.
        member: of the attacks that were tried, the one that the frames are of; empty where there was a single one.
        at: where each frame stands in the history of losses.
        frames: (C, H, W) each, perhaps smaller than the image.
    """

    id: str
    image: int
    member: str
    at: tuple[int, ...]
    frames: tuple[Pixels, ...]


def film_of(found: Reconstruction, score: VictimScore) -> Film | None:
    """The film of ``found``, and which image it turned out to be of; ``None`` where nothing was filmed."""
    image = next((image.image for image in score.images if image.guess == 0), None)
    if not found.film or found.batch is None or image is None:
        return None
    return Film(
        id=str(found.id),
        image=image,
        member=found.member,
        at=tuple(frame.at for frame in found.film),
        frames=tuple(frame.image.numpy() for frame in found.film),
    )


def write_films(folder: Path, films: Sequence[Film], attacker: Attacker = Attacker.PLAIN) -> Path:
    """Write the films of one round, by ``attacker``, into ``folder``."""
    make_private_folder(folder, folder)
    number = 1
    while (path := folder / f"film-{number:04d}-{attacker}.safetensors").exists():
        number += 1
    told = [{"id": film.id, "image": film.image, "member": film.member, "at": film.at} for film in films]
    tensors = {_name(k): np.stack(film.frames) for k, film in enumerate(films)}
    metadata = {"told": json.dumps({"attacker": attacker, "films": told})}
    write_private(path, save(tensors, metadata=metadata))
    return path


def read_films(folder: Path) -> tuple[Mapping[Attacker, Sequence[Film]], list[str]]:
    """Attacker -> films of all files in ``folder``, and a line on each file that can't be read."""
    found: dict[Attacker, list[Film]] = {}
    problems = []
    for path in sorted(folder.glob("film-*.safetensors")):
        try:
            attacker, films = _read(path)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"{path.name} can't be read ({' '.join(str(error).split())[:200]})")
        else:
            found.setdefault(attacker, []).extend(films)
    return found, problems


def _read(path: Path) -> tuple[Attacker, list[Film]]:
    with safe_open(path, framework="np") as file:
        told = json.loads((file.metadata() or {})["told"])
        rows, names = told["films"], file.keys()
        if not fits(rows, list[Mapping[str, str | int | list[int]]]) or len(rows) != len(names):
            raise ValueError("it does not say whose films it holds")
        tensors = [file.get_tensor(_name(k)) for k in range(len(rows))]
    return Attacker(told["attacker"]), [_film(row, frames) for row, frames in zip(rows, tensors, strict=True)]


def _name(number: int) -> str:
    """Of a film in its file."""
    return f"film-{number:02d}"


def _film(row: Mapping[str, object], frames: Pixels) -> Film:
    id, image, member, at = row["id"], row["image"], row["member"], row["at"]
    if not (isinstance(id, str) and isinstance(image, int) and isinstance(member, str) and isinstance(at, list)):
        raise ValueError("it does not say whose films it holds")
    usual = frames.dtype == np.uint8 and frames.ndim == 4 and frames.size and len(frames) <= FRAMES_AT_MOST
    if not usual or max(frames.shape[2:]) > LARGEST:
        raise ValueError(f"it holds frames of shape {frames.shape} and type {frames.dtype}")
    if len(at) != len(frames) or any(place < 0 for place in at):
        raise ValueError("it does not say when each frame was")
    return Film(id, image, member, tuple(at), tuple(frames))
