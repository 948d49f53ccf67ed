"""``reconstructions/film-*``: how guesses came about, images as bytes and texts as tokens, for their owner alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_privacy.checks import fits
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.film import LARGEST, Frame, TextFrame
from fl_privacy.results.pictures import MOST_BYTES, Pixels
from fl_privacy.results.sentences import Pieces
from fl_privacy.victim_ids import Attacker

if TYPE_CHECKING:
    from torch import Tensor

    from fl_privacy.metrics import VictimScore
    from fl_privacy.types import Reconstruction

FRAMES_AT_MOST = 64
"""Of a victim, in a file from elsewhere."""


_MOST_BYTES = 1 << 24
"""Of films of texts, in a file from elsewhere."""


@dataclass(frozen=True)
class TextFilm:
    """How a guess at one text came about.

    Attributes:
        id: of the victim.
        image: which of its texts.
        member: of the attacks that were tried, the one that the frames are of; empty where there was a single one.
        at: where each frame stands in the history of losses.
        frames: tokens of each.
    """

    id: str
    image: int
    member: str
    at: tuple[int, ...]
    frames: tuple[Pieces, ...]


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


def film_of(
    found: Reconstruction, score: VictimScore, pieces: Callable[[Tensor], Sequence[str]]
) -> Film | TextFilm | None:
    """The film of ``found``, and which image or text it turned out to be of; ``None`` where nothing was filmed.

    Args:
        found: with snapshots.
        score: of it.
        pieces: a text's tokens (L,) as its tokenizer writes them.
    """
    image = next((image.image for image in score.images if image.guess == 0), None)
    if not found.film or found.batch is None or image is None:
        return None
    told = {"id": str(found.id), "image": image, "member": found.member, "at": tuple(each.at for each in found.film)}
    texts = tuple(tuple(pieces(each.tokens)) for each in found.film if isinstance(each, TextFrame))
    if texts:
        return TextFilm(**told, frames=texts)  # type: ignore[arg-type]
    images = tuple(each.image.numpy() for each in found.film if isinstance(each, Frame))
    return Film(**told, frames=images)  # type: ignore[arg-type]


def write_films(folder: Path, films: Sequence[Film | TextFilm], attacker: Attacker = Attacker.PLAIN) -> list[Path]:
    """Write the films of one round, by ``attacker``, into ``folder``; a file for each modality."""
    make_private_folder(folder, folder)
    images = [film for film in films if isinstance(film, Film)]
    texts = [film for film in films if isinstance(film, TextFilm)]
    written = []
    if images:
        tensors = {_name(k): np.stack(film.frames) for k, film in enumerate(images)}
        metadata = {"told": json.dumps({"attacker": attacker, "films": [_told(film) for film in images]})}
        written.append(_free(folder, f"{attacker}.safetensors"))
        write_private(written[-1], save(tensors, metadata=metadata))
    if texts:
        rows = [{**_told(film), "frames": film.frames} for film in texts]
        written.append(_free(folder, f"{attacker}.json"))
        write_private(written[-1], json.dumps({"attacker": attacker, "films": rows}, ensure_ascii=False))
    return written


def _told(film: Film | TextFilm) -> dict[str, object]:
    return {"id": film.id, "image": film.image, "member": film.member, "at": film.at}


def _free(folder: Path, rest: str) -> Path:
    """The first path ``film-<number>-<rest>`` that is not there."""
    number = 1
    while (path := folder / f"film-{number:04d}-{rest}").exists():
        number += 1
    return path


def read_films(folder: Path) -> tuple[Mapping[Attacker, Sequence[Film | TextFilm]], list[str]]:
    """Attacker -> films of all files in ``folder``, and a line on each file that can't be read."""
    found: dict[Attacker, list[Film | TextFilm]] = {}
    problems = []
    for path in sorted([*folder.glob("film-*.safetensors"), *folder.glob("film-*.json")]):
        try:
            attacker, films = (_read_texts if path.suffix == ".json" else _read)(path)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"{path.name} can't be read ({' '.join(str(error).split())[:200]})")
        else:
            found.setdefault(attacker, []).extend(films)
    return found, problems


def _read(path: Path) -> tuple[Attacker, Sequence[Film | TextFilm]]:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size >> 20} MiB")
    with safe_open(path, framework="np") as file:
        told = json.loads((file.metadata() or {})["told"])
        rows, names = told["films"], file.keys()
        if not fits(rows, list[Mapping[str, str | int | list[int]]]) or len(rows) != len(names):
            raise ValueError("it does not say whose films it holds")
        tensors = [file.get_tensor(_name(k)) for k in range(len(rows))]
    return Attacker(told["attacker"]), [_film(row, frames) for row, frames in zip(rows, tensors, strict=True)]


def _read_texts(path: Path) -> tuple[Attacker, Sequence[Film | TextFilm]]:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("it is too large")
    told = json.loads(path.read_text(encoding="utf-8"))
    if not fits(told["films"], list[Mapping[str, str | int | list[int] | list[list[str]]]]):
        raise ValueError("it does not say whose films it holds")
    films = []
    for row in told["films"]:
        frames = row["frames"]
        if not fits(frames, list[list[str]]) or not 0 < len(frames) <= FRAMES_AT_MOST:
            raise ValueError("it holds frames that are no texts")
        films.append(TextFilm(*_whose(row, len(frames)), tuple(map(tuple, frames))))
    return Attacker(told["attacker"]), films


def _name(number: int) -> str:
    """Of a film in its file."""
    return f"film-{number:02d}"


def _film(row: Mapping[str, object], frames: Pixels) -> Film:
    usual = frames.dtype == np.uint8 and frames.ndim == 4 and frames.size and len(frames) <= FRAMES_AT_MOST
    if not usual or max(frames.shape[2:]) > LARGEST:
        raise ValueError(f"it holds frames of shape {frames.shape} and type {frames.dtype}")
    return Film(*_whose(row, len(frames)), tuple(frames))


def _whose(row: Mapping[str, object], frames: int) -> tuple[str, int, str, tuple[int, ...]]:
    """Victim, number in its batch, member, and when each of so many ``frames`` was."""
    id, image, member, at = row["id"], row["image"], row["member"], row["at"]
    if not (isinstance(id, str) and isinstance(image, int) and isinstance(member, str) and fits(at, list[int])):
        raise ValueError("it does not say whose films it holds")
    places = [place for place in at if isinstance(place, int)] if isinstance(at, list) else []
    if len(places) != frames or any(place < 0 for place in places):
        raise ValueError("it does not say when each frame was")
    return id, image, member, tuple(places)
