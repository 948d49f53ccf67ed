"""``reconstructions/sentences-*.json``: tokens of originals and guesses, a file a round, for their owner alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fl_privacy.checks import fits
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.victim_ids import Attacker

if TYPE_CHECKING:
    from fl_privacy.metrics import VictimScore

Pieces = tuple[str, ...]
"""Tokens as the tokenizer writes them."""

SENTENCE_FILES = "sentences-*.json"

_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Sentence:
    """A text and what was read of it.

    Attributes:
        original: ``None`` where nobody knows it.
        guess: of the plain attacker; ``None`` where its attack failed.
        adaptive: of the adaptive attacker; ``None`` where there was none, or its attack failed.
    """

    original: Pieces | None
    guess: Pieces | None = None
    adaptive: Pieces | None = None


def write_sentences(
    folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker = Attacker.PLAIN
) -> Path:
    """Write what ``attacker`` read in ``round`` into ``folder``; a second call for a round adds a file."""
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
    make_private_folder(folder, folder)
    name = f"sentences-{round:04d}" + ("" if attacker == Attacker.PLAIN else f"-{attacker}")
    path, number = folder / f"{name}.json", 1
    while path.exists():
        path, number = folder / f"{name}-{number}.json", number + 1
    write_private(path, json.dumps({"attacker": attacker, "sentences": rows}, ensure_ascii=False))
    return path


def read_sentences(folder: Path) -> tuple[Mapping[tuple[str, int], Sentence], list[str]]:
    """(victim id, number in its batch) -> sentence of all files in ``folder``, and a line on each unreadable one."""
    found: dict[tuple[str, int], Sentence] = {}
    problems = []
    for path in sorted(folder.glob(SENTENCE_FILES)):
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is too large")
            content = json.loads(path.read_text(encoding="utf-8"))
            for row in content["sentences"]:
                key, original, guess = (row["id"], row["image"]), row["original"], row["guess"]
                if not fits(list(key), list[str | int]) or not all(
                    fits(t, list[str] | None) for t in (original, guess)
                ):
                    raise ValueError("a sentence is none")
                known = found.setdefault(key, Sentence(original if original is None else tuple(original)))
                read = guess if guess is None else tuple(guess)
                adaptive = content["attacker"] == Attacker.ADAPTIVE
                found[key] = replace(known, adaptive=read) if adaptive else replace(known, guess=read)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"{path.name} can't be read ({' '.join(str(error).split())[:200]})")
    return found, problems
