"""Comparison of a guess with images when it is turned, mirrored, cropped, enlarged, rotated or cut into tiles."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from fl_privacy.measure.descriptors import (
    LEAST_CONTRAST,
    Descriptors,
    DescriptorScale,
    Latest,
    Once,
    ShiftedDescriptors,
    grays,
    small,
    unit,
    with_detail,
)

FAR, NEAR, CLOSE = 8, 16, 32  # pixels of the longer side at which all, chosen, and the last candidates are compared
NEAREST = 60  # number of candidates nearest at low resolution that are compared at a higher one
ANGLES = (5.0, 10.0, 15.0)  # degrees by which a guess is rotated to either side
CUTS = ((0.9, 1 / 16), (0.8, 1 / 8), (0.7, 3 / 16))  # shares shown by a crop, and shifts as shares of the side
FRAMES = (1.12, 1.25)  # factors by which a guess with a frame is enlarged
SLID = 1 / 8  # shift of other guesses, as a share of the side
GRIDS = (3, 4)  # number of tiles per side, for images with shuffled tiles
HOPELESS = 0.1  # share of rivals nearer at low resolution, above which a guess is not compared at a higher one
LEAST_SIDE = 8  # least pixels of the shorter side of images that are compared in poses


@dataclass(frozen=True, eq=False)
class Poses(Once):
    """Poses of a guess, P in number: mirror images, rotations, scales and shifts."""

    flip: Tensor  # (P, 2, 2) matrix of a mirror image or quarter turn
    place: Tensor  # (P, 4) scale factor, rotation in degrees, and shifts right and down as shares of the side
    slack: Tensor  # (P,) margin around the compared middle, as a share of the side

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, which: Tensor) -> "Poses":
        return Poses(self.flip[which], self.place[which], self.slack[which])

    def around(self, steps: Tensor) -> "Poses":
        number = len(steps)
        place = (self.place[:, None] + steps).flatten(0, 1)
        return Poses(self.flip.repeat_interleave(number, 0), place, self.slack.repeat_interleave(number))

    def drawn(self, gray: Tensor) -> Tensor:
        """Render a gray image (1, 1, H, W) in all poses, or P images (P, 1, H, W) in one pose each, as (P, 1, H, W)."""
        size = gray.shape[-2], gray.shape[-1]
        grid = self.once(size, lambda: self._grid(*size))
        return functional.grid_sample(
            gray.expand(len(self), 1, *size), grid, padding_mode="border", align_corners=False
        )

    def _grid(self, height: int, width: int) -> Tensor:
        scale, angle, right, down = self.place.unbind(1)
        cosine, sine = angle.deg2rad().cos() / scale, angle.deg2rad().sin() / scale
        rows = torch.stack([cosine, -sine * height / width, sine * width / height, cosine], 1).view(-1, 2, 2)
        turned, moved = self.flip @ rows, -2 * torch.stack([right, down], 1)[..., None]
        maps = torch.cat([turned, turned @ moved], 2)
        return functional.affine_grid(maps, [len(maps), 1, height, width], align_corners=False)


_THREE = torch.tensor([-1.0, 0.0, 1.0])
_NOT = torch.zeros(9, 2)
_SHIFTS = torch.cat([_NOT, torch.cartesian_prod(_THREE, _THREE) / 40], 1)
_TURNS = torch.cat([torch.cartesian_prod(_THREE, _THREE) * torch.tensor([0.05, 2.5]), _NOT], 1)
ROUNDS = {NEAR: (_SHIFTS, _TURNS, _SHIFTS / 2), CLOSE: (_SHIFTS / 2, _TURNS / 2, _SHIFTS / 4)}
"""Resolution -> changes (9, 4) of the best pose that are tried one set after the other."""

USUAL_CLOSELY = 40  # number of usual candidates that are compared at ``CLOSE``
REFINED = 10  # number of nearest candidates whose pose is refined
AMONG = 8  # rank of the original from which on poses are not refined


@lru_cache(maxsize=2)
def poses(*, few: bool) -> Poses:
    """Return the poses of all combinations of mirror images, quarter turns, scales and angles; a subset if ``few``."""
    ones = [(1.0, 0.0, SLID), *((cut, 0.0, slack) for cut, slack in CUTS), *((frame, 0.0, SLID) for frame in FRAMES)]
    ones += [(1.0, sign * angle, SLID) for angle in (ANGLES[1:2] if few else ANGLES) for sign in (-1, 1)]
    ones += [(scale, sign * ANGLES[1], SLID) for scale in (CUTS[0][0], FRAMES[0]) for sign in (-1, 1)]
    ones = ones if not few else [one for one in ones if one[0] in (1.0, 0.8, 1.25)]
    plain = [torch.diag(torch.tensor([x, y])) for x in (1.0, -1.0) for y in (1.0, -1.0)]
    flips = torch.stack([*plain, *(each.flip(0) for each in plain)])
    scale, angle, slack = torch.tensor(ones).repeat(len(flips), 1).unbind(1)
    none = torch.zeros_like(scale)
    return Poses(flips.repeat_interleave(len(ones), 0), torch.stack([scale, angle, none, none], 1), slack)


def _looks(gray: Tensor, side: int) -> Tensor:
    seen = small(gray, side)
    return seen if side == FAR else with_detail(seen)


@dataclass(frozen=True, eq=False)
class Gallery(Once):
    """Images (N, C, H, W) in [0, 1], with cached smaller copies, crops (windows) and tiles to compare with guesses."""

    images: Tensor

    def standing(self, sight: DescriptorScale) -> Descriptors:
        return self.once(sight, lambda: Descriptors(self.images, sight))

    @cached_property
    def _gray(self) -> Tensor:
        return self.images.float().mean(1, keepdim=True)

    def at(self, side: int) -> Tensor:
        return self.once(side, lambda: _looks(self._gray, side))

    def windows(self, side: int, slack: float) -> Tensor:
        return self.once((side, slack), lambda: _windows(self.at(side), slack))

    def tiles(self, grid: int) -> Tensor:
        return self.once(("tiles", grid), lambda: _tiles(self._gray, grid))


gallery_of = Latest(Gallery, 16)  # cache, since originals are compared with a guess and with each of its controls


def _tiles(gray: Tensor, grid: int) -> Tensor:
    height, width = (side // grid for side in gray.shape[-2:])
    cut = gray[..., : grid * height, : grid * width]
    down, right = (max(1, min(side, NEAR // grid)) for side in (height, width))
    cut = unit(functional.adaptive_avg_pool2d(cut, (grid * down, grid * right)))
    return cut.view(-1, grid, down, grid, right).transpose(2, 3).flatten(1, 2).flatten(2)


def _edges(looks: Tensor, slack: float) -> tuple[int, int]:
    height, width = looks.shape[-2:]
    return max(1, round(height * slack)), max(1, round(width * slack))


def _middle(looks: Tensor, slack: float) -> Tensor:
    down, right = _edges(looks, slack)
    return unit(looks[..., down:-down, right:-right])


def _windows(images: Tensor, slack: float) -> Tensor:
    # (N, V, D) of images (N, L, H, W): crops at V positions, smaller by the share slack, with norm 1
    down, right = _edges(images, slack)
    height, width = images.shape[-2] - 2 * down, images.shape[-1] - 2 * right
    images = images - images.mean((-2, -1), keepdim=True)
    windows = images.unfold(-2, height, 1).unfold(-2, width, 1).permute(0, 2, 3, 1, 4, 5)
    lengths = _lengths(images, height, width).permute(0, 2, 3, 1)[..., None, None]
    return torch.div(windows, lengths, out=torch.empty(windows.shape)).flatten(3).flatten(1, 2)


def _lengths(images: Tensor, height: int, width: int) -> Tensor:  # norms (N, L, down, right) of all windows
    parts = zip(images.shape[-2:], (height, width), strict=True)
    down, right = (torch.ones(n - k + 1, n, dtype=torch.float64).triu().tril(k - 1) / k for n, k in parts)
    mean, square = (down @ each @ right.T for each in (images.double(), images.double().square()))
    least = float(LEAST_CONTRAST * (height * width) ** 0.5)
    return (((square - mean.square()).clamp_min(0) * height * width).sqrt() + least).to(images.dtype)


def _slid(middles: Tensor, images: Tensor) -> Tensor:
    # (K, V): middles (K, L, h, w) with all windows of one image (K, L, H, W) each
    images = images - images.mean((-2, -1), keepdim=True)
    flat, sides = images.flatten(0, 1), middles.shape[-2:]
    products = functional.conv2d(flat[None], middles.flatten(0, 1)[:, None], groups=len(flat))[0]
    return (products.view(*images.shape[:2], -1) / _lengths(images, *sides).flatten(2)).mean(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Way(ABC):
    """Comparison of a guess, changed in one way such as rotation, with B originals and K rivals (other images)."""

    own: Tensor  # (B,) correlations with the originals
    rest: Tensor  # (K,) correlations with the rivals
    rivals: Tensor  # (K,) indices of the rivals among all candidates
    usual: Tensor  # (U,) positions, among the rivals, of those that define the usual correlation
    turning: "Turning"
    originals: Gallery

    def closer(self) -> "Way | None":
        """Return this comparison of guess and originals at higher resolution; ``None`` if there is none."""
        return None

    @abstractmethod
    def rows(self, original: int, rivals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return vectors with norm 1 of the guess (D,), an original (D,), and K rivals (K, D), as they are compared.

        ``original``: index of the original; ``rivals``: indices (K,) of the rivals.
        """


@dataclass(frozen=True, eq=False)
class _Placed:
    values: Tensor  # (K,) largest correlation of each image with the guess
    poses: Poses  # poses of the guess with these correlations
    gray: Tensor  # (K, 1, H, W) gray guess for each image

    def refined(self, images: Tensor, side: int, which: Tensor) -> "_Placed":
        values, taken, gray = self.values[which], self.poses[which], self.gray[which]
        windows = [(own, slack, _windows(images[which][own], slack)) for own, slack in _slacks(taken)]
        for steps in ROUNDS[side]:
            tried = taken.around(steps)
            value, step = _tried(tried, gray.repeat_interleave(len(steps), 0), windows, side).max(1)
            values = torch.maximum(values, value)
            taken = tried[torch.arange(len(values)) * len(steps) + step]
        moved = replace(self.poses, place=self.poses.place.index_copy(0, which, taken.place))
        return _Placed(self.values.index_copy(0, which, values), moved, self.gray)

    def closer(self, images: Tensor, which: Tensor, number: int) -> "_Placed":
        poses, gray = self.poses[which], self.gray[which]
        looks, values = _looks(poses.drawn(gray), CLOSE), torch.empty(len(images))
        for own, slack in _slacks(poses):
            values[own] = _slid(_middle(looks[own], slack), images[own]).abs().amax(1)
        return _Placed(values, poses, gray).refined(images, CLOSE, torch.arange(number))


@dataclass(frozen=True, eq=False)
class Turning(Once):
    """Guess to compare with images after a turn, mirroring or scaling (a pose), or in tiles; caches poses and tiles."""

    others: Gallery
    guess: Tensor  # (1, C, H, W) in [0, 1]
    rivals: Tensor  # (R,) sorted indices of the candidates that are compared
    usual: Tensor  # (U,) indices of the candidates that define the usual correlation

    def shifted(self, sight: DescriptorScale) -> ShiftedDescriptors:
        return self.once(sight, lambda: ShiftedDescriptors(self.guess, sight))

    def ways(self, originals: Gallery) -> list[Way]:
        """Return comparisons of ``originals`` with the guess in tiles and in other poses (turned, mirrored or scaled).

        Poses are left out if, at low resolution, too many other images are closer to the guess than the originals.
        """
        usual = torch.searchsorted(self.rivals, self.usual)
        way = partial(_Tiled, rivals=self.rivals, usual=usual, turning=self, originals=originals)
        tiled = [
            way(own=_arranged(pieces, originals.tiles(grid)).amax(0), rest=rest, grid=grid, pieces=pieces)
            for grid, pieces, rest in self._pieces
        ]
        return [*self._posed(originals), *tiled]

    def _posed(self, originals: Gallery) -> list[Way]:
        own = self._search(partial(originals.windows, FAR), FAR).amax(0)
        if bool(((self._far >= own[:, None]).sum(1) > HOPELESS * len(self._far)).all()):
            return []
        placed, (chosen, rest, first) = self._placed(partial(originals.windows, NEAR)), self._near
        if refines := bool((placed.values >= rest.values[first[:AMONG][-1]]).any()):
            placed, rest = placed.refined(originals.at(NEAR), NEAR, torch.arange(len(own))), self._refined
        usual = torch.searchsorted(chosen, self.usual)
        way = partial(_Posed, rivals=chosen, usual=usual, turning=self, originals=originals)
        return [way(own=placed.values, rest=rest.values, side=NEAR, placed=placed, refines=refines)]

    @cached_property
    def _gray(self) -> Tensor:
        return grays(small(self.guess.float(), CLOSE))[0]

    @cached_property
    def _pieces(self) -> list[tuple[int, Tensor, Tensor]]:
        every = [(grid, _tiles(grays(self.guess.float())[0], grid)) for grid in GRIDS]
        return [(grid, own, _arranged(own, self.others.tiles(grid)).amax(0)[self.rivals]) for grid, own in every]

    @cached_property
    def _far(self) -> Tensor:
        return self._search(partial(self.others.windows, FAR), FAR).amax(0)[self.rivals]

    @cached_property
    def _near(self) -> tuple[Tensor, _Placed, Tensor]:  # the chosen rivals, and the positions of the nearest of them
        nearest = self.rivals[self._far.topk(min(NEAREST, len(self._far))).indices]
        chosen = torch.tensor(sorted({*self.usual.tolist(), *nearest.tolist()}))
        placed = self._placed(partial(_windows, self.others.at(NEAR)[chosen]))
        return chosen, placed, placed.values.topk(min(REFINED, len(chosen))).indices

    @cached_property
    def _refined(self) -> _Placed:
        chosen, placed, first = self._near
        return placed.refined(self.others.at(NEAR)[chosen], NEAR, first)

    @cached_property
    def close(self) -> tuple[Tensor, Tensor, Tensor]:  # ``rest``, ``rivals`` and ``usual`` at this side
        chosen, _, first = self._near
        usual = torch.searchsorted(chosen, self.usual)
        kept = torch.cat([first, usual[:: max(1, len(usual) // USUAL_CLOSELY)]])
        placed = self._refined.closer(self.others.at(CLOSE)[chosen[kept]], kept, len(first))
        return placed.values, chosen[kept], torch.arange(len(first), len(kept))

    def _placed(self, windows: Callable[[float], Tensor]) -> _Placed:
        every = poses(few=False)
        found, best = self._search(windows, NEAR).max(0)
        return _Placed(found, every[best % len(every)], self._gray[best // len(every)])

    def _middles(self, side: int) -> list[tuple[Tensor, float, Tensor]]:
        every = poses(few=side == FAR)
        drawn = torch.cat([_looks(every.drawn(gray[None]), side) for gray in self._gray])
        slacks = every.slack.repeat(len(self._gray))
        return [
            (which := slacks == slack, slack, _middle(drawn[which], slack).flatten(1).T / drawn.shape[1])
            for slack in sorted(set(slacks.tolist()))
        ]

    def _search(self, windows_at: Callable[[float], Tensor], side: int) -> Tensor:
        # (P, N): the largest absolute correlation of the guess in P poses with N images of this side, over shifts
        found = torch.empty(0)
        for which, slack, middles in self.once(side, lambda: self._middles(side)):
            slid = windows_at(slack) @ middles
            found = found if len(found) else torch.empty(len(which), len(slid))
            found[which] = slid.abs_().amax(1).T
        return found


def _arranged(pieces: Tensor, tiles: Tensor) -> Tensor:
    # likeness (V, N) 2ab / (aa + bb) of guesses a (V, T, D) to images b (N, T, D), whose T tiles are rearranged
    sizes = tiles.square().sum(-1)
    found = []
    for guess in pieces:
        dots = 2 * (guess @ tiles.flatten(0, 1).T).view(len(guess), *sizes.shape)
        either = []
        for signed in (dots, -dots):
            gain, which = (signed - sizes).max(-1)
            size = sizes.gather(1, which.T).sum(1)
            either.append((gain.sum(0) + size) / (guess.square().sum() + size + TINY))
        found.append(torch.maximum(*either))
    return torch.stack(found)


TINY = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class _Posed(Way):
    """Comparison of each image with the guess mirrored, rotated, scaled and shifted so that it fits the image best."""

    side: int
    placed: _Placed  # best poses of the guess for the originals
    refines: bool  # ``False`` if a comparison at higher resolution is useless

    def closer(self) -> Way | None:
        if not self.refines:
            return None
        images, (rest, rivals, usual) = self.originals.at(CLOSE), self.turning.close
        placed = self.placed.closer(images, torch.arange(len(images)), len(images))
        close = replace(self, own=placed.values, rest=rest, rivals=rivals, usual=usual)
        return replace(close, side=CLOSE, placed=placed, refines=False)

    def rows(self, original: int, rivals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pose = self.placed.poses[torch.tensor([original])]
        slack = float(pose.slack)
        middle = _middle(_looks(pose.drawn(self.placed.gray[original][None]), self.side), slack)
        truth = self.originals.at(self.side)[original][None]
        height, width = middle.shape[-2:]
        down, right = divmod(int(_slid(middle, truth).abs().argmax()), truth.shape[-1] - width + 1)
        images = torch.cat([truth, self.turning.others.at(self.side)[rivals]])
        rows = torch.cat([middle, unit(images[..., down : down + height, right : right + width])]).flatten(1) / 2**0.5
        return rows[0], rows[1], rows[2:]


_Windows = list[tuple[Tensor, float, Tensor]]  # mask (K,) of images, their slack, and their windows


def _slacks(poses: Poses) -> list[tuple[Tensor, float]]:
    return [(poses.slack == slack, slack) for slack in sorted(set(poses.slack.tolist()))]


def _tried(tried: Poses, gray: Tensor, windows: _Windows, side: int) -> Tensor:
    # (K, S): the largest absolute correlation of K images with the guess in S poses each, over shifts
    looks = _looks(tried.drawn(gray), side)
    looks = looks.view(len(windows[0][0]), -1, *looks.shape[1:])
    found = torch.empty(looks.shape[:2])
    for which, slack, own in windows:
        middles = _middle(looks[which], slack).flatten(2) / looks.shape[2]
        found[which] = (middles @ own.mT).abs_().amax(-1)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tiled(Way):
    """Comparison that ignores the order of tiles: each tile of the guess is matched to the image's nearest tile."""

    grid: int
    pieces: Tensor

    def rows(self, original: int, rivals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        truth = self.originals.tiles(self.grid)[original][None]
        guess = self.pieces[int(_arranged(self.pieces, truth)[:, 0].argmax())]
        sizes = truth[0].square().sum(-1)
        signed = max((guess, -guess), key=lambda each: float((2 * each @ truth[0].T - sizes).amax(-1).sum()))
        images = torch.cat([truth, self.turning.others.tiles(self.grid)[rivals]])
        nearest = (2 * signed @ images.flatten(0, 1).T).view(len(guess), *images.shape[:2]) - images.square().sum(-1)
        laid = images.gather(1, nearest.argmax(-1).T[..., None].expand(-1, -1, images.shape[-1])).flatten(1)
        laid = functional.normalize(laid - laid.mean(1, keepdim=True), dim=1)
        return signed.flatten(), laid[0], laid[1:]
