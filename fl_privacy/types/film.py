"""Films: snapshots of a reconstruction during the attack, kept for pages and passed to the context's viewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 12  # most frames in a film
LARGEST = 64  # most pixels of a frame's longer side


@dataclass(frozen=True, eq=False)
class Frame:
    """Snapshot of a reconstruction's first image, (C, H, W) uint8 on the CPU, after ``at`` iterations."""

    at: int
    image: Tensor


@dataclass(frozen=True, eq=False)
class TextFrame:
    """Snapshot of a reconstruction's first text, (L,) tokens on the CPU padded with -1, after ``at`` iterations."""

    at: int
    tokens: Tensor


Snapshot = Frame | TextFrame


def shots(moments: int) -> frozenset[int]:
    """Return the iterations, of 0 to ``moments - 1``, at which an attack keeps a snapshot; denser at the beginning.

    >>> sorted(shots(101))
    [0, 1, 3, 7, 13, 21, 30, 40, 53, 67, 83, 100]
    """
    last = FRAMES - 1
    return frozenset(round((moments - 1) * (k / last) ** 2) for k in range(last + 1))


def frame(at: int, images: Tensor) -> Frame:
    """Return a snapshot of the first of ``images`` (B, C, H, W) after ``at`` iterations, at most 64 pixels a side."""
    from torch.nn.functional import interpolate  # noqa: PLC0415  (pages go without)

    image = images[:1].detach().clamp(0, 1).float().cpu()
    scale = LARGEST / max(image.shape[2:])
    if scale < 1:
        size = [max(1, round(scale * length)) for length in image.shape[2:]]
        image = interpolate(image, size=size, mode="area")
    return Frame(at, (image[0] * 255).round().byte())


Viewer = Callable[[Sequence[Snapshot]], None]
"""Callback that receives the current snapshot of each filmed attempt."""

_viewer: ContextVar[Viewer | None] = ContextVar("viewer", default=None)


@contextmanager
def viewed_by(viewer: Viewer) -> Iterator[None]:
    """Call ``viewer`` with the snapshots that attacks pass to :func:`show_frames` within the context."""
    before = _viewer.set(viewer)
    try:
        yield
    finally:
        _viewer.reset(before)


def show_frames(take: Callable[[], Sequence[Snapshot]]) -> None:
    """Show snapshots of a running attack in the context's viewer; if there is none, ``take`` is not called."""
    if (viewer := _viewer.get()) is not None:
        viewer(take())


def joined(first: Sequence[Snapshot], moments: int, then: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Join two films (snapshots of an attack); iterations of ``then`` are counted on from ``moments``."""
    return (*first, *(replace(each, at=each.at + moments) for each in then))


def shortened(film: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Return at most ``FRAMES`` snapshots of a film, denser at the beginning, with the first and the last."""
    film = list({each.at: each for each in film}.values())
    if len(film) <= FRAMES:
        return tuple(film)
    end, places = film[-1].at, [each.at for each in film]
    wanted = [end * (k / (FRAMES - 1)) ** 2 for k in range(FRAMES)]
    kept = {min(range(len(film)), key=lambda number: abs(places[number] - at)) for at in wanted}
    return tuple(film[number] for number in sorted(kept))
