"""Save and load ``reconstructions/``: images, texts, table rows and films, readable only by their owner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
"""Errors that loading an untrusted file may raise; a type that NumPy lacks raises ``AttributeError``."""

MOST_BYTES, _MOST_BYTES_OF_TEXTS, _MOST_BYTES_OF_FILM = 1 << 30, 1 << 28, 1 << 24
"""Maximum size in bytes of a file of pictures or films, of texts or rows, and of films of texts."""

Pixels = NDArray[np.uint8]  # images of (C, H, W), grey or color
Pieces = tuple[str, ...]  # tokens as the tokenizer writes them, or cells as the table writes them
Original = TypeVar("Original")
Guess = TypeVar("Guess")


@dataclass(frozen=True)
class Guessed(Generic[Original, Guess]):
    """An original and its reconstructions."""

    original: Original | None
    guess: Guess | None = None  # plain attacker's guess; ``None`` if its attack failed
    adaptive: Guess | None = None  # adaptive attacker's guess; ``None`` without one
    transformed: Original | None = None  # defense's substitute for the original, if any
    columns: Pieces = ()  # names of the table's columns, for rows


@dataclass(frozen=True)
class RowGuess:
    """A reconstruction of one row of a table."""

    cells: Pieces  # cells as the table writes them
    right: tuple[bool, ...]  # marks of right cells; empty if the original is not known
    certain: tuple[float, ...]  # attacker's certainty of each cell, in [0, 1]


Pair = Guessed[Pixels, Pixels]
Sentence = Guessed[Pieces, Pieces]
RowPair = Guessed[Pieces, RowGuess]


class _Found(dict[tuple[str, int], Guessed[Original, Guess]]):
    def add(self, id: str, number: int, pair: Guessed[Original, Guess], guess: Guess | None, attacker: str) -> None:
        known = self.setdefault((id, number), pair)
        is_adaptive = attacker == Attacker.ADAPTIVE
        self[id, number] = replace(known, adaptive=guess) if is_adaptive else replace(known, guess=guess)


def _first_free(folder: Path, names: Iterable[str]) -> Path:
    make_private_folder(folder, folder)
    return next(path for name in names if not (path := folder / name).exists())


def new_file(folder: Path, name: str, attacker: Attacker, suffix: str) -> Path:
    """Make ``folder`` private and return an unused path in it, such as ``NAME-adaptive-1.json``."""
    name = name if attacker == Attacker.PLAIN else f"{name}-{attacker}"
    return _first_free(folder, (f"{each}{suffix}" for each in chain([name], (f"{name}-{k}" for k in count(1)))))


def read_each(paths: Iterable[Path], read: Callable[[Path], None]) -> list[str]:
    """Call ``read`` on each file, sorted by name; return one line for each file that can't be read."""
    problems = []
    for path in sorted(paths):
        try:
            read(path)
        except UNREADABLE as error:
            problems.append(f"{path.name} can't be read ({' '.join(str(error).split())[:200]}); attack again")
    return problems


def write_pairs(folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker) -> None:
    """Write a file of the images reconstructed in ``round`` and their originals; each call adds a file."""
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
    header = {"round": round, "attacker": attacker, "ids": ids}
    # one entry, since the order of several varies: equal runs write equal bytes
    content = save(tensors, metadata={"told": json.dumps(header)})
    write_private(new_file(folder, f"round-{round:04d}", attacker, ".safetensors"), content)


def read_pairs(folder: Path) -> tuple[Mapping[tuple[str, int], Pair], list[str]]:
    """Return (victim id, image number) -> original and guesses in ``folder``, and a line on each unreadable file."""
    pairs = _Found[Pixels, Pixels]()

    def read(path: Path) -> None:
        _expect_at_most(MOST_BYTES, path)
        with safe_open(path, framework="np") as file:
            header = json.loads(file.metadata()["told"])
            originals, guesses, found = (file.get_tensor(n) for n in ("originals", "reconstructions", "found"))
            transformed = file.get_tensor("transformed") if "transformed" in file.keys() else None  # noqa: SIM118
            known = file.get_tensor("known") if "known" in file.keys() else np.ones_like(found)  # noqa: SIM118
        ids, attacker = header["ids"], header["attacker"]
        if not isinstance(ids, list) or not isinstance(attacker, str):
            raise ValueError("its ids are not victims with numbers of images")
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
            raise ValueError("its ids are not victims with numbers of images")
        for k, (victim, image) in enumerate(ids):
            shown = None if transformed is None else transformed[k]
            pair = Pair(originals[k] if known[k] else None, transformed=shown)
            pairs.add(victim, image, pair, guesses[k] if found[k] else None, attacker)

    return pairs, read_each(folder.glob("round-*.safetensors"), read)


def _expect_at_most(most: int, path: Path) -> None:
    if path.stat().st_size > most:
        raise ValueError(f"it has {path.stat().st_size >> 20} MiB")


def _bytes(images: Tensor) -> Pixels:
    shown: Pixels = (images.clamp(0, 1) * 255).round().byte().numpy()
    return shown


SENTENCE_FILES, ROW_FILES = "sentences-*.json", "rows-*.json"


def write_sentences(folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker) -> None:
    """Write the reconstructed texts of ``round``; see :func:`write_pairs`."""
    rows = [
        {"id": str(score.id), "image": image.image, "original": original, "guess": guess}
        for score in scores
        for image, (original, guess) in zip(score.images, score.sentences, strict=True)
    ]
    content = json.dumps({"attacker": attacker, "sentences": rows}, ensure_ascii=False)
    write_private(new_file(folder, f"sentences-{round:04d}", attacker, ".json"), content)


def read_sentences(folder: Path) -> tuple[Mapping[tuple[str, int], Sentence], list[str]]:
    """Return (victim id, text number) -> original and guesses, and warnings on files of ``folder`` left out."""
    found = _Found[Pieces, Pieces]()

    def read(path: Path) -> None:
        content = read_small(path, _MOST_BYTES_OF_TEXTS)
        for row in content["sentences"]:
            id, number, original, guess = (row[name] for name in ("id", "image", "original", "guess"))
            if not fits([id, number], list[str | int]) or not fits([original, guess], list[list[str] | None]):
                raise ValueError("a sentence is not an id, a number and two lists of tokens")
            text, guessed = (None if tokens is None else tuple(tokens) for tokens in (original, guess))
            found.add(id, number, Sentence(text), guessed, content["attacker"])

    return found, read_each(folder.glob(SENTENCE_FILES), read)


def read_small(path: Path, most: int) -> Any:
    """Load JSON of at most ``most`` bytes; ``ValueError`` if it is larger or damaged."""
    _expect_at_most(most, path)
    return json.loads(path.read_text(encoding="utf-8"))


def write_rows(folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker) -> None:
    """Write the table rows reconstructed in ``round`` to a file; see :func:`write_pairs`."""
    found: list[dict[str, Any]] = []
    columns: Sequence[str] = ()
    for score in scores:
        if (own := score.rows) is None:
            continue
        columns = own.columns
        rows = zip(score.images, own.originals, own.guesses, own.right.tolist(), own.certain.tolist(), strict=True)
        for image, original, guess, right, certain in rows:
            shares = [float(f"{share:.2f}") for share in certain]
            row = {"id": str(score.id), "image": image.image, "original": original, "guess": guess}
            found.append({**row, "right": [] if original is None else right, "certain": shares})
    content = json.dumps({"attacker": attacker, "columns": columns, "rows": found}, ensure_ascii=False)
    write_private(new_file(folder, f"rows-{round:04d}", attacker, ".json"), content)


def read_rows(folder: Path) -> tuple[Mapping[tuple[str, int], RowPair], list[str]]:
    """Return (victim id, row number) -> original and guessed rows, and a line on each unreadable file."""
    found = _Found[Pieces, RowGuess]()

    def read(path: Path) -> None:
        content = read_small(path, _MOST_BYTES_OF_TEXTS)
        columns, attacker = content["columns"], content["attacker"]
        if not fits(columns, list[str]):
            raise ValueError("its columns are not names")
        for row in content["rows"]:
            original, guess, right, certain = (row[name] for name in ("original", "guess", "right", "certain"))
            sound = fits([row["id"], row["image"]], list[str | int]) and fits(right, list[bool])
            sound = sound and all(fits(cells, list[str] | None) for cells in (original, guess))
            sound = sound and fits(certain, list[float])
            sizes = {len(cells) for cells in (original, guess, right or None, certain) if cells is not None}
            if not sound or sizes != {len(columns)}:
                raise ValueError("a row does not have a cell for each column")
            pair = RowPair(None if original is None else tuple(original), columns=tuple(columns))
            guessed = None if guess is None else RowGuess(tuple(guess), tuple(right), tuple(map(float, certain)))
            found.add(row["id"], row["image"], pair, guessed, attacker)

    return found, read_each(folder.glob(ROW_FILES), read)


FRAMES_AT_MOST = 64  # most frames of a victim in an untrusted file


@dataclass(frozen=True)
class Film:
    """Guesses of one example recorded while an attack ran, to show as an animation."""

    id: str
    image: int
    member: str  # sub-attack of the frames; empty for a single attack
    at: tuple[int, ...]  # index of each frame in the history of losses
    frames: tuple[Any, ...]  # images (C, H, W), perhaps smaller than the original; tokens of each frame for a text

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "frames"}


class TextFilm(Film):
    """Guesses of one text recorded while an attack ran."""


def film_of(found: Reconstruction, score: VictimScore, pieces: Callable[[Tensor], Sequence[str]]) -> Film | None:
    """Return the guesses recorded during the attack, if any; ``pieces`` converts token ids (L,) to strings."""
    image = next((image.image for image in score.images if image.guess == 0), None)
    if not found.film or found.batch is None or image is None:
        return None
    texts = tuple(tuple(pieces(each.tokens)) for each in found.film if isinstance(each, TextFrame))
    return (TextFilm if texts else Film)(
        id=str(found.id),
        image=image,
        member=found.member,
        at=tuple(each.at for each in found.film),
        frames=texts or tuple(each.image.numpy() for each in found.film if isinstance(each, Frame)),
    )


def write_films(folder: Path, films: Sequence[Film], attacker: Attacker = Attacker.PLAIN) -> list[Path]:
    """Write an attack's films (recorded guesses), one file for each modality; return the files."""
    texts = [vars(film) for film in films if isinstance(film, TextFilm)]
    images = [film for film in films if not isinstance(film, TextFilm)]
    contents: dict[str, bytes | str] = {}
    if images:
        header = {"attacker": attacker, "films": [film.facts() for film in images]}
        tensors = {f"film-{k:02d}": np.stack(film.frames) for k, film in enumerate(images)}
        contents["safetensors"] = save(tensors, metadata={"told": json.dumps(header)})
    if texts:
        contents["json"] = json.dumps({"attacker": attacker, "films": texts}, ensure_ascii=False)
    written = []
    for suffix, content in contents.items():
        written.append(_first_free(folder, (f"film-{k:04d}-{attacker}.{suffix}" for k in count(1))))
        write_private(written[-1], content)
    return written


def read_films(folder: Path) -> tuple[Mapping[Attacker, Sequence[Film]], list[str]]:
    """Return each attacker's films (recorded guesses of an attack), and one message for each unreadable file."""
    found: dict[Attacker, list[Film]] = {}

    def read(path: Path) -> None:
        attacker, films = _read_films(path)
        found.setdefault(attacker, []).extend(films)

    return found, read_each([*folder.glob("film-*.safetensors"), *folder.glob("film-*.json")], read)


def _read_films(path: Path) -> tuple[Attacker, list[Film]]:
    is_text = path.suffix == ".json"
    if is_text:
        header = read_small(path, _MOST_BYTES_OF_FILM)
        shots = [row["frames"] for row in header["films"]]
    else:
        _expect_at_most(MOST_BYTES, path)
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {})["told"])
            shots = [file.get_tensor(f"film-{k:02d}") for k in range(len(file.keys()))]
    kind, films, rows = TextFilm if is_text else Film, list[Film](), header["films"]
    if not isinstance(rows, list) or len(rows) != len(shots):
        raise ValueError(f"its header is not a list with one entry for each of {len(shots)} films")
    for row, frames in zip(rows, shots, strict=True):
        if is_text:
            if not fits(frames, list[list[str]]) or not 0 < len(frames) <= FRAMES_AT_MOST:
                raise ValueError("it holds frames that are no texts")
        elif frames.dtype != np.uint8 or frames.ndim != 4 or not frames.size or max(frames.shape[2:]) > LARGEST:
            raise ValueError(f"it holds frames of shape {frames.shape} and type {frames.dtype}")
        id, image, member, at = (row[name] for name in ("id", "image", "member", "at"))
        if not fits([id, member], list[str]) or not fits(image, int) or not fits(at, list[int]):
            raise ValueError("a film's header has no id, image, member and numbers of frames")
        film = kind(id, image, member, tuple(at), tuple(map(tuple, frames) if is_text else frames))
        if len(at) != len(film.frames) or len(at) > FRAMES_AT_MOST or min(at, default=0) < 0:
            raise ValueError("it does not say when each frame was")
        films.append(film)
    return Attacker(header["attacker"]), films
