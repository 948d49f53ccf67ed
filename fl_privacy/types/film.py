"""Snapshots of a reconstruction during the attack, for playback; they do not affect results.

Each is also shown to the viewer of the context, like :mod:`fl_privacy.progress`.
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
"""Most frames in a film."""

LARGEST = 64
"""Most pixels of a frame's longer side; larger images are scaled down."""


@dataclass(frozen=True, eq=False)
class Frame:
    """One snapshot of a reconstruction's first image: (C, H, W) bytes on the CPU, at most ``LARGEST`` high and wide."""

    at: int
    image: Tensor


@dataclass(frozen=True, eq=False)
class TextFrame:
    """One snapshot of a reconstruction's first text: (L,) tokens on the CPU, padded with -1."""

    at: int
    tokens: Tensor


Snapshot = Frame | TextFrame


def shots(moments: int) -> frozenset[int]:
    """Choose which of the moments 0 to ``moments - 1`` to keep: dense at first, when most changes.

    >>> sorted(shots(101))
    [0, 1, 3, 7, 13, 21, 30, 40, 53, 67, 83, 100]
    """
    last = FRAMES - 1
    return frozenset(round((moments - 1) * (k / last) ** 2) for k in range(last + 1))


def frame(at: int, images: Tensor) -> Frame:
    """Make a frame of the first of ``images`` (B, C, H, W), about in [0, 1]."""
    from torch.nn.functional import interpolate  # noqa: PLC0415  (pages go without)

    image = images[:1].detach().clamp(0, 1).float().cpu()
    scale = LARGEST / max(image.shape[2:])
    if scale < 1:
        size = [max(1, round(scale * length)) for length in image.shape[2:]]
        image = interpolate(image, size=size, mode="area")
    return Frame(at, (image[0] * 255).round().byte())


Viewer = Callable[[Sequence[Snapshot]], None]
"""Callback with a snapshot of each filmed attempt."""

_viewer: ContextVar[Viewer | None] = ContextVar("viewer", default=None)


@contextmanager
def viewed_by(viewer: Viewer) -> Iterator[None]:
    """Pass snapshots to ``viewer`` within the context, in this thread."""
    before = _viewer.set(viewer)
    try:
        yield
    finally:
        _viewer.reset(before)


def show_frames(take: Callable[[], Sequence[Snapshot]]) -> None:
    """Show the frames of ``take`` to the viewer, if any."""
    if (viewer := _viewer.get()) is not None:
        viewer(take())


def joined(first: Sequence[Snapshot], moments: int, then: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Join two films, the first with a history of ``moments`` moments."""
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
