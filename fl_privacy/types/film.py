"""How a guess came about: snapshots of it while it was looked for, for a page to play. No number depends on them.

Each snapshot is shown to whoever looks on when it is taken, as :mod:`fl_privacy.progress` tells of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 12
"""In a film, at most."""

LARGEST = 64
"""Pixels of a frame's longer side; larger images are scaled down."""


@dataclass(frozen=True, eq=False)
class Frame:
    """The first image of a guess, at one moment of the attack.

    Attributes:
        at: index into the history of losses.
        image: (C, H, W) bytes on the CPU, at most ``LARGEST`` high and wide.
    """

    at: int
    image: Tensor


@dataclass(frozen=True, eq=False)
class TextFrame:
    """The first text of a guess, at one moment of the attack.

    Attributes:
        at: index into the history of losses.
        tokens: (L,) on the CPU, -1 where there is none.
    """

    at: int
    tokens: Tensor


Snapshot = Frame | TextFrame


def shots(moments: int) -> frozenset[int]:
    """Choose which moments, 0 to ``moments - 1``, are kept: close together first, when most changes.

    >>> sorted(shots(101))
    [0, 1, 3, 7, 13, 21, 30, 40, 53, 67, 83, 100]
    """
    last = FRAMES - 1
    return frozenset(round((moments - 1) * (k / last) ** 2) for k in range(last + 1))


def frame(at: int, images: Tensor) -> Frame:
    """Make a frame of a guess (B, C, H, W) in [0, 1] or near, from its first image."""
    from torch.nn.functional import interpolate  # noqa: PLC0415  (pages go without)

    image = images[:1].detach().clamp(0, 1).float().cpu()
    scale = LARGEST / max(image.shape[2:])
    if scale < 1:
        size = [max(1, round(scale * length)) for length in image.shape[2:]]
        image = interpolate(image, size=size, mode="area")
    return Frame(at, (image[0] * 255).round().byte())


Viewer = Callable[[Sequence[Snapshot]], None]
"""Shown a snapshot of each attempt that is filmed."""

_viewer: ContextVar[Viewer | None] = ContextVar("viewer", default=None)


@contextmanager
def viewed_by(viewer: Viewer) -> Iterator[None]:
    """Show ``viewer`` what is filmed while the context lasts; another thread or process shows it nothing."""
    before = _viewer.set(viewer)
    try:
        yield
    finally:
        _viewer.reset(before)


def show_frames(take: Callable[[], Sequence[Snapshot]]) -> None:
    """Show the frames that ``take`` collects, where there is a viewer."""
    if (viewer := _viewer.get()) is not None:
        viewer(take())


def joined(first: Sequence[Snapshot], moments: int, then: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Join two films, of which the first had a history of ``moments`` moments."""
    return (*first, *(replace(each, at=each.at + moments) for each in then))


def shortened(film: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Shorten a film to at most ``FRAMES``, spaced like :func:`shots`; the first and the last frame stay."""
    film = list({each.at: each for each in film}.values())
    if len(film) <= FRAMES:
        return tuple(film)
    end, places = film[-1].at, [each.at for each in film]
    wanted = [end * (k / (FRAMES - 1)) ** 2 for k in range(FRAMES)]
    kept = {min(range(len(film)), key=lambda number: abs(places[number] - at)) for at in wanted}
    return tuple(film[number] for number in sorted(kept))
