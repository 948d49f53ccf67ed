"""Save and load ``reconstructions/``: images, texts, table rows and films, readable only by their owner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_privacy.checks import fits
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.types.film import LARGEST, Frame, TextFrame
from fl_privacy.types.victim_ids import Attacker

if TYPE_CHECKING:
    from torch import Tensor

    from fl_privacy.measure import VictimScore
    from fl_privacy.types import Reconstruction


UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of loading an untrusted file; a type that NumPy lacks raises ``AttributeError``."""

MOST_BYTES = 1 << 30
"""Largest file of pictures or their films."""

Pixels = NDArray[np.uint8]
"""Images of (C, H, W), grey or color."""


@dataclass(frozen=True, eq=False)
class Pair:
    """An original and its guesses.

    Attributes:
        original: original; ``None`` if not known.
        guess: plain attacker's guess; ``None`` if its attack failed.
        adaptive: adaptive attacker's guess; ``None`` without one.
        transformed: defense's substitute for the original, if any.
    """

    original: Pixels | None
    guess: Pixels | None
    adaptive: Pixels | None = None
    transformed: Pixels | None = None


def new_file(folder: Path, name: str, attacker: Attacker, suffix: str) -> Path:
    """Return the path of a new file in a private folder, numbered from the second one of an attacker on."""
    make_private_folder(folder, folder)
    name = name if attacker == Attacker.PLAIN else f"{name}-{attacker}"
    names = chain([name], (f"{name}-{number}" for number in count(1)))
    return next(path for each in names if not (path := folder / f"{each}{suffix}").exists())


def read_each(paths: Iterable[Path], read: Callable[[Path], None]) -> list[str]:
    """Read untrusted files in order of their names; return a line on each unreadable one."""
    problems = []
    for path in sorted(paths):
        try:
            read(path)
        except UNREADABLE as error:
            problems.append(f"{path.name} can't be read ({' '.join(str(error).split())[:200]})")
    return problems


def write_pairs(folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker = Attacker.PLAIN) -> Path:
    """Write the reconstructions of ``round``; a second call for a round adds a file."""
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
    path = new_file(folder, f"round-{round:04d}", attacker, ".safetensors")
    told = {"round": round, "attacker": attacker, "ids": ids}
    # one entry, since the order of several varies: equal runs write equal bytes
    write_private(path, save(tensors, metadata={"told": json.dumps(told)}))
    return path


def read_pairs(folder: Path) -> tuple[Mapping[tuple[str, int], Pair], list[str]]:
    """Return the pairs of all files in ``folder`` by (victim id, image), and a line on each unreadable file."""
    pairs: dict[tuple[str, int], Pair] = {}

    def read(path: Path) -> None:
        for key, original, guess, attacker, transformed in _read(path):
            pair = pairs.setdefault(key, Pair(original, None, transformed=transformed))
            pairs[key] = replace(pair, adaptive=guess) if attacker == Attacker.ADAPTIVE else replace(pair, guess=guess)

    return pairs, read_each(folder.glob("round-*.safetensors"), read)


def _read(path: Path) -> Iterator[tuple[tuple[str, int], Pixels | None, Pixels | None, str, Pixels | None]]:
    """Yield (victim id, image), original, guess, its attacker, and the defense's substitute for the original."""
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
    """Convert images in [0, 1] to uint8, (B, C, H, W)."""
    shown: Pixels = (images.clamp(0, 1) * 255).round().byte().numpy()
    return shown


Pieces = tuple[str, ...]
"""Tokens as the tokenizer writes them."""

SENTENCE_FILES = "sentences-*.json"

_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Sentence:
    """A text and its guesses.

    Attributes:
        original: original tokens; ``None`` if not known.
        guess: plain attacker's guess; ``None`` if its attack failed.
        adaptive: adaptive attacker's guess; ``None`` without one.
    """

    original: Pieces | None
    guess: Pieces | None = None
    adaptive: Pieces | None = None


def write_sentences(
    folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker = Attacker.PLAIN
) -> Path:
    """Write the reconstructed texts of ``round``; a second call for a round adds a file."""
    rows = [
        {
            "id": str(score.id),
            "image": image.image,
            "original": original and list(original),
            "guess": guess and list(guess),
        }
        for score in scores
        for image, (original, guess) in zip(score.images, score.sentences, strict=True)
    ]
    path = new_file(folder, f"sentences-{round:04d}", attacker, ".json")
    write_private(path, json.dumps({"attacker": attacker, "sentences": rows}, ensure_ascii=False))
    return path


def read_sentences(folder: Path) -> tuple[Mapping[tuple[str, int], Sentence], list[str]]:
    """Return the sentences of all files in ``folder`` by (victim id, number), and a line on each unreadable one."""
    found: dict[tuple[str, int], Sentence] = {}

    def read(path: Path) -> None:
        content = read_small(path, _MOST_BYTES)
        for row in content["sentences"]:
            key, original, guess = (row["id"], row["image"]), row["original"], row["guess"]
            if not fits(list(key), list[str | int]) or not fits([original, guess], list[list[str] | None]):
                raise ValueError("a sentence is none")
            known = found.setdefault(key, Sentence(original if original is None else tuple(original)))
            tokens = guess if guess is None else tuple(guess)
            adaptive = content["attacker"] == Attacker.ADAPTIVE
            found[key] = replace(known, adaptive=tokens) if adaptive else replace(known, guess=tokens)

    return found, read_each(folder.glob(SENTENCE_FILES), read)


def read_small(path: Path, most: int) -> Any:
    """Load JSON of at most ``most`` bytes; ``ValueError`` if it is larger or damaged."""
    if path.stat().st_size > most:
        raise ValueError("it is too large")
    return json.loads(path.read_text(encoding="utf-8"))


FRAMES_AT_MOST = 64
"""Most frames of a victim in an untrusted file."""


_MOST_BYTES_OF_FILM = 1 << 24
"""Largest untrusted file of text films."""


@dataclass(frozen=True)
class TextFilm:
    """Frames of an attack on one text.

    Attributes:
        member: sub-attack of the frames; empty for a single attack.
        at: index of each frame in the history of losses.
        frames: tokens of each frame.
    """

    id: str
    image: int
    member: str
    at: tuple[int, ...]
    frames: tuple[Pieces, ...]


@dataclass(frozen=True, eq=False)
class Film:
    """Frames of an attack on one image.

    Attributes:
        member: sub-attack of the frames; empty for a single attack.
        at: index of each frame in the history of losses.
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
    """Return the film of ``found`` with its matched image or text; ``None`` if nothing was filmed."""
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
    """Write the films of one round, one file for each modality."""
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
    number = 1
    while (path := folder / f"film-{number:04d}-{rest}").exists():
        number += 1
    return path


def read_films(folder: Path) -> tuple[Mapping[Attacker, Sequence[Film | TextFilm]], list[str]]:
    """Return films of all files in ``folder`` by attacker, and a line on each unreadable file."""
    found: dict[Attacker, list[Film | TextFilm]] = {}

    def read(path: Path) -> None:
        attacker, films = (_read_texts if path.suffix == ".json" else _read_film)(path)
        found.setdefault(attacker, []).extend(films)

    return found, read_each([*folder.glob("film-*.safetensors"), *folder.glob("film-*.json")], read)


def _read_film(path: Path) -> tuple[Attacker, Sequence[Film | TextFilm]]:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size >> 20} MiB")
    with safe_open(path, framework="np") as file:
        told = json.loads((file.metadata() or {})["told"])
        rows, names = told["films"], file.keys()
        if not fits(rows, list[Mapping[str, str | int | list[int]]]) or len(rows) != len(names):
            raise ValueError("it does not say whose films it holds")
        tensors = [file.get_tensor(_name(k)) for k in range(len(rows))]
    films = []
    for row, frames in zip(rows, tensors, strict=True):
        usual = frames.dtype == np.uint8 and frames.ndim == 4 and frames.size and len(frames) <= FRAMES_AT_MOST
        if not usual or max(frames.shape[2:]) > LARGEST:
            raise ValueError(f"it holds frames of shape {frames.shape} and type {frames.dtype}")
        films.append(Film(*_whose(row, len(frames)), tuple(frames)))
    return Attacker(told["attacker"]), films


def _read_texts(path: Path) -> tuple[Attacker, Sequence[Film | TextFilm]]:
    told = read_small(path, _MOST_BYTES_OF_FILM)
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
    return f"film-{number:02d}"


def _whose(row: Mapping[str, object], frames: int) -> tuple[str, int, str, tuple[int, ...]]:
    id, image, member, at = row["id"], row["image"], row["member"], row["at"]
    if not (isinstance(id, str) and isinstance(image, int) and isinstance(member, str) and fits(at, list[int])):
        raise ValueError("it does not say whose films it holds")
    places = [place for place in at if isinstance(place, int)] if isinstance(at, list) else []
    if len(places) != frames or any(place < 0 for place in places):
        raise ValueError("it does not say when each frame was")
    return id, image, member, tuple(places)


ROW_FILES = "rows-*.json"


@dataclass(frozen=True)
class RowGuess:
    """A guess at one row of a table.

    Attributes:
        cells: cells as the table writes them.
        right: marks of right cells; empty if the original is not known.
        certain: attacker's certainty of each cell, in [0, 1].
    """

    cells: tuple[str, ...]
    right: tuple[bool, ...]
    certain: tuple[float, ...]


@dataclass(frozen=True)
class RowPair:
    """A row of a table and its guesses.

    Attributes:
        original: original cells; ``None`` if not known.
        guess: plain attacker's guess; ``None`` if its attack failed.
        adaptive: adaptive attacker's guess; ``None`` without one.
    """

    columns: tuple[str, ...]
    original: tuple[str, ...] | None
    guess: RowGuess | None = None
    adaptive: RowGuess | None = None


def write_rows(folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker = Attacker.PLAIN) -> Path:
    """Write the reconstructed rows of ``round``; a second call for a round adds a file."""
    found: list[dict[str, Any]] = []
    columns: Sequence[str] = ()
    for score in scores:
        if (own := score.rows) is None:
            continue
        columns = own.columns
        rows = zip(score.images, own.originals, own.guesses, own.right.tolist(), own.certain.tolist(), strict=True)
        for image, original, guess, right, certain in rows:
            found.append(
                {
                    "id": str(score.id),
                    "image": image.image,
                    "original": None if original is None else list(original),
                    "guess": None if guess is None else list(guess),
                    "right": [] if original is None else right,
                    "certain": [float(f"{share:.2f}") for share in certain],
                }
            )
    path = new_file(folder, f"rows-{round:04d}", attacker, ".json")
    content = {"attacker": attacker, "columns": list(columns), "rows": found}
    write_private(path, json.dumps(content, ensure_ascii=False))
    return path


def read_rows(folder: Path) -> tuple[Mapping[tuple[str, int], RowPair], list[str]]:
    """Return the rows of all files in ``folder`` by (victim id, number), and a line on each unreadable one."""
    found: dict[tuple[str, int], RowPair] = {}

    def read(path: Path) -> None:
        content = read_small(path, _MOST_BYTES)
        columns, adaptive = content["columns"], content["attacker"] == Attacker.ADAPTIVE
        if not fits(columns, list[str]):
            raise ValueError("its columns are none")
        for row in content["rows"]:
            key = (row["id"], row["image"])
            original, guess = _read_row(row, columns)
            known = found.setdefault(key, RowPair(tuple(columns), original))
            found[key] = replace(known, adaptive=guess) if adaptive else replace(known, guess=guess)

    return found, read_each(folder.glob(ROW_FILES), read)


def _read_row(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[tuple[str, ...] | None, RowGuess | None]:
    original, guess, right, certain = (row[name] for name in ("original", "guess", "right", "certain"))
    sound = fits([row["id"], row["image"]], list[str | int]) and fits(right, list[bool])
    sound = sound and all(fits(cells, list[str] | None) for cells in (original, guess))
    sound = sound and fits(certain, list[float])
    sizes = {len(cells) for cells in (original, guess, right or None, certain) if cells is not None}
    if not sound or sizes != {len(columns)}:
        raise ValueError("a row is none")
    read = None if guess is None else RowGuess(tuple(guess), tuple(right), tuple(map(float, certain)))
    return None if original is None else tuple(original), read
