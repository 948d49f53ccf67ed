"""Which victims are filmed, and their films from the snapshots of a descent."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.standings import Minimum
from fl_privacy.film import Snapshot, TextFrame, frame
from fl_privacy.types import Observation


class Pictured(Protocol):
    """Whose variables (V, N) are images, or texts that can be read."""

    def images(self, variables: Tensor) -> Tensor:
        """(V, B, C, H, W), or of texts (V, B, L, d + 1)."""
        ...


def filmed_rows(observations: Iterable[Observation]) -> list[int]:
    """Rows of those that are to be filmed."""
    return [row for row, o in enumerate(observations) if o.filmed]


@torch.no_grad()
def films_of(problem: Pictured, minimum: Minimum) -> dict[int, tuple[Snapshot, ...]]:
    """Row -> the snapshots of that victim in the order of its losses, and what was found in the end."""
    films = {}
    for row, snapshots in minimum.snapshots.items():
        number = minimum.history[:, row].isfinite().cumsum(0)
        moments = [*snapshots, len(number) - 1]
        rows = torch.full((len(moments),), row, device=minimum.variables.device)
        images = _of_rows(problem, rows).images(torch.stack([*snapshots.values(), minimum.variables[row]]))
        places = [max(0, int(number[moment]) - 1) for moment in moments]
        films[row] = tuple(_snapshot(problem, at, image) for at, image in zip(places, images, strict=True))
    return films


@torch.no_grad()
def frames_of(problem: Pictured, variables: Tensor, rows: Sequence[int]) -> list[Snapshot]:
    """Of some ``rows`` of the ``variables`` (V, N) of ``problem``."""
    chosen = torch.tensor(rows, device=variables.device)
    return [_snapshot(problem, 0, image) for image in _of_rows(problem, chosen).images(variables[chosen])]


def _snapshot(problem: Pictured, at: int, guess: Tensor) -> Snapshot:
    """Of images (B, C, H, W), or of the texts (B, L, d + 1) of a source of words."""
    source = problem.settings.source if isinstance(problem, Problem) else None
    if isinstance(source, WordEmbeddings):
        return TextFrame(at, source.read(guess[:1])[0].cpu())
    return frame(at, guess)


def _of_rows(problem: Pictured, rows: Tensor) -> Pictured:
    """``problem`` as far as images depend on victims: not on what was observed of them, which is large."""
    if not isinstance(problem, Problem):
        return problem
    labels, held = problem.labels, problem.held
    return replace(problem, labels=None if labels is None else labels[rows], held=None if held is None else held[rows])
