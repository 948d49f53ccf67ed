"""``reconstructions/``: originals and guesses as bytes, a file a round."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fl_privacy.metrics import VictimScore
from fl_privacy.results.files import write_whole


@dataclass(frozen=True, eq=False)
class Pair:
    """An original and its guess, (C, H, W) uint8 each; the guess is ``None`` where the attack failed."""

    original: Tensor
    guess: Tensor | None


def write_pairs(folder: Path, round: int, scores: Sequence[VictimScore]) -> Path:
    """Write what was attacked in ``round`` into ``folder``; a second call for a round adds a file."""
    images = [image for score in scores for image in score.images]
    tensors = {
        "originals": torch.cat([_bytes(score.originals) for score in scores]),
        "reconstructions": torch.cat([_bytes(score.guesses) for score in scores]),
        "found": torch.tensor([image.failure is None for image in images]),
    }
    ids = [[score.id, image.image] for score in scores for image in score.images]
    folder.mkdir(exist_ok=True)
    path, number = folder / f"round-{round:04d}.safetensors", 1
    while path.exists():
        path, number = folder / f"round-{round:04d}-{number}.safetensors", number + 1
    write_whole(path, save(tensors, metadata={"round": str(round), "ids": json.dumps(ids)}))
    return path


def read_pairs(folder: Path) -> tuple[Mapping[tuple[str, int], Pair], list[str]]:
    """(victim id, image) -> pair of all files in ``folder``, and a line on each file that can't be read."""
    pairs: dict[tuple[str, int], Pair] = {}
    problems = []
    for path in sorted(folder.glob("round-*.safetensors")):
        try:
            pairs.update(_read(path))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path.name} can't be read ({error})")
    return pairs, problems


def _read(path: Path) -> Iterator[tuple[tuple[str, int], Pair]]:
    with safe_open(path, framework="pt") as file:
        ids = json.loads(file.metadata()["ids"])
        originals, guesses, found = (file.get_tensor(n) for n in ("originals", "reconstructions", "found"))
    if not len(originals) == len(guesses) == len(found) == len(ids):
        raise ValueError(f"it names {len(ids)} images and holds {len(originals)}")
    for k, (victim, image) in enumerate(ids):
        yield (victim, image), Pair(originals[k], guesses[k] if found[k] else None)


def _bytes(images: Tensor) -> Tensor:
    """[0, 1] -> uint8, (B, C, H, W)."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)
