"""Compare a guess with images when it is turned, mirrored, cropped, enlarged, rotated a little, or cut into tiles."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from fl_privacy.measure.descriptors import LEAST_CONTRAST, grays, small, with_detail

FAR, NEAR, CLOSE = 8, 16, 32  # longer side in pixels for all images, chosen ones, and final candidates
NEAREST = 60  # candidates compared in all poses: those nearest to a guess at low resolution
ANGLES = (5.0, 10.0, 15.0)  # degrees by which a guess is rotated to either side
CUTS = ((0.9, 1 / 16), (0.8, 1 / 8), (0.7, 3 / 16))  # shown share, and how far it is slid to each side
FRAMES = (1.12, 1.25)  # factors by which a guess in a frame is enlarged
SLID = 1 / 8  # share of the side that other guesses are slid to each side
GRIDS = (3, 4)  # tiles on a side, for images whose tiles were shuffled; larger tiles are several of these
HOPELESS = 0.1  # share of rivals nearer at low resolution, above which a guess is not compared in all poses
LEAST_SIDE = 8  # pixels of the shorter side below which nothing is turned


@dataclass(frozen=True, eq=False)
class Poses:
    """P poses of a guess: mirrored, rotated, scaled and shifted."""

    flip: Tensor  # (P, 2, 2) a mirror or quarter turn
    place: Tensor  # (P, 4) scale factor, degrees, and shares of the side by which it is moved right and down
    slack: Tensor  # (P,) share of the side by which the middle is smaller than the image, on each side

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, which: Tensor) -> "Poses":
        return Poses(self.flip[which], self.place[which], self.slack[which])

    def around(self, steps: Tensor) -> "Poses":
        """Return S poses around each, (P * S), with ``steps`` (S, 4) added to ``place``."""
        number = len(steps)
        place = (self.place[:, None] + steps).flatten(0, 1)
        return Poses(self.flip.repeat_interleave(number, 0), place, self.slack.repeat_interleave(number))

    def drawn(self, gray: Tensor) -> Tensor:
        """Render images (1, 1, H, W) or (P, 1, H, W), each in its pose, (P, 1, H, W), with repeated edges."""
        height, width = gray.shape[-2:]
        scale, angle, right, down = self.place.unbind(1)
        cosine, sine = angle.deg2rad().cos() / scale, angle.deg2rad().sin() / scale
        rows = torch.stack([cosine, -sine * height / width, sine * width / height, cosine], 1).view(-1, 2, 2)
        turned, moved = self.flip @ rows, -2 * torch.stack([right, down], 1)[..., None]
        maps = torch.cat([turned, turned @ moved], 2)
        grid = functional.affine_grid(maps, [len(maps), 1, height, width], align_corners=False)
        return functional.grid_sample(
            gray.expand(len(maps), 1, height, width), grid, padding_mode="border", align_corners=False
        )


_THREE = torch.tensor([-1.0, 0.0, 1.0])
_NOT = torch.zeros(9, 2)
_SHIFTS = torch.cat([_NOT, torch.cartesian_prod(_THREE, _THREE) / 40], 1)
_TURNS = torch.cat([torch.cartesian_prod(_THREE, _THREE) * torch.tensor([0.05, 2.5]), _NOT], 1)
ROUNDS = {NEAR: (_SHIFTS, _TURNS, _SHIFTS / 2), CLOSE: (_SHIFTS / 2, _TURNS / 2, _SHIFTS / 4)}
"""Steps (9, 4) around the best pose of an image that are tried one after the other, at each side."""

USUAL_CLOSELY = 40  # usual candidates compared at the side ``CLOSE``
REFINED = 10  # number of nearest candidates for which these steps are tried
AMONG = 8  # rank of the original from which on the steps are not tried, since it would stay behind


@lru_cache(maxsize=2)
def poses(*, few: bool) -> Poses:
    """Return all mirrors and quarter turns, each at a few scales or angles; ``few`` for the first comparison."""
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
    """Return gray images at ``side``; above ``FAR``, also their details without coarse brightness."""
    seen = small(gray, side)
    return seen if side == FAR else with_detail(seen)


@dataclass(frozen=True, eq=False)
class Gallery:
    """Images (N, C, H, W) in [0, 1] with their descriptors, computed on first use."""

    images: Tensor
    _looks: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _cut: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _gray(self) -> Tensor:
        return self.images.float().mean(1, keepdim=True)

    def at(self, side: int) -> Tensor:
        """Return descriptors (N, L, h, w) at ``side`` pixels."""
        if side not in self._looks:
            self._looks[side] = _looks(self._gray, side)
        return self._looks[side]

    def tiles(self, grid: int) -> Tensor:
        if grid not in self._cut:
            self._cut[grid] = _tiles(self._gray, grid)
        return self._cut[grid]


def _tiles(gray: Tensor, grid: int) -> Tensor:
    """Cut images (N, 1, H, W) into tiles (N, grid * grid, D); the image has zero mean and unit length."""
    height, width = (side // grid for side in gray.shape[-2:])
    cut = gray[..., : grid * height, : grid * width]
    down, right = (max(1, min(side, NEAR // grid)) for side in (height, width))
    cut = _unit(functional.adaptive_avg_pool2d(cut, (grid * down, grid * right)))
    return cut.view(-1, grid, down, grid, right).transpose(2, 3).flatten(1, 2).flatten(2)


def _edges(looks: Tensor, slack: float) -> tuple[int, int]:
    """Return the pixels between the middle and the edge of images (..., H, W), down and right."""
    height, width = looks.shape[-2:]
    return max(1, round(height * slack)), max(1, round(width * slack))


def _middle(looks: Tensor, slack: float) -> Tensor:
    """Cut the middle (P, L, h, w) out of (P, L, H, W), with zero mean and unit length."""
    down, right = _edges(looks, slack)
    return _unit(looks[..., down:-down, right:-right])


def _unit(rows: Tensor) -> Tensor:
    rows = rows - rows.mean((-2, -1), keepdim=True)
    least = float(LEAST_CONTRAST * (rows.shape[-1] * rows.shape[-2]) ** 0.5)
    return rows / (rows.square().sum((-2, -1), keepdim=True).sqrt() + least)


def _windows(images: Tensor, slack: float) -> tuple[Tensor, Tensor]:
    """Return all windows of images (N, L, H, W) of a middle's size, (L, N, V, D), and their lengths (L, N, V)."""
    down, right = _edges(images, slack)
    height, width = images.shape[-2] - 2 * down, images.shape[-1] - 2 * right
    images = images - images.mean((-2, -1), keepdim=True)
    windows = images.unfold(-2, height, 1).unfold(-2, width, 1).transpose(0, 1)
    mean, square = (functional.avg_pool2d(each, (height, width), 1) for each in (images, images.square()))
    length = ((square - mean.square()).clamp_min(0) * height * width).sqrt() + LEAST_CONTRAST * (height * width) ** 0.5
    return windows.flatten(4).flatten(2, 3), length.transpose(0, 1).flatten(2)


def _slid_each(rows: Tensor, images: Tensor, slack: float) -> Tensor:
    """Return the correlation (K, S, V) of S middles (K, S, L, h, w) of each image (K, L, H, W) with its windows."""
    windows, lengths = _windows(images, slack)
    return ((rows.flatten(3).permute(2, 0, 1, 3) @ windows.transpose(-1, -2)) / lengths[:, :, None]).mean(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Way(ABC):
    """One comparison of a guess: its correlations with B originals (``own``) and with K rivals (``rest``).

    ``usual`` (U,) are positions among the rivals that define the usual correlation.
    """

    own: Tensor
    rest: Tensor
    rivals: Tensor
    usual: Tensor

    def closer(self) -> "Way | None":
        """Repeat the comparison at higher resolution; ``None`` if that changes nothing."""
        return None

    @abstractmethod
    def rows(self, original: int, rivals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit vectors: the aligned guess (D,), the original (D,), and ``rivals`` (K, D) at this place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Turning:
    """A guess, and the images with which it is compared in all poses."""

    guess: Tensor  # (1, C, H, W) in [0, 1]
    originals: Gallery
    others: Gallery
    rivals: Tensor  # (R,) indices of the candidates that count, sorted
    usual: Tensor  # (U,) indices of the candidates that define the usual correlation

    @cached_property
    def _gray(self) -> Tensor:
        return grays(small(self.guess.float(), CLOSE))

    def ways(self) -> Sequence[Way]:
        """Compare the guess in all poses, and in tiles of each grid."""
        posed = self._posed()
        return [*([] if posed is None else [posed]), *(self._in_pieces(grid) for grid in GRIDS)]

    def _posed(self) -> Way | None:
        far = self._search(self.others.at(FAR)[self.rivals], FAR).amax(0)
        own = self._search(self.originals.at(FAR), FAR).amax(0)
        if bool(((far >= own[:, None]).sum(1) > HOPELESS * len(far)).all()):
            return None
        nearest = self.rivals[far.topk(min(NEAREST, len(far))).indices]
        chosen = torch.tensor(sorted({*self.usual.tolist(), *nearest.tolist()}))
        images, number = torch.cat([self.originals.at(NEAR), self.others.at(NEAR)[chosen]]), len(own)
        every = poses(few=False)
        found, best = self._search(images, NEAR).max(0)
        taken, gray = every[best % len(every)], self._gray[best // len(every)]
        first = found[number:].topk(min(REFINED, len(chosen)))
        made = _Posed(
            own=found[:number],
            rest=found[number:],
            rivals=chosen,
            usual=torch.searchsorted(chosen, self.usual),
            turning=self,
            side=NEAR,
            taken=taken,
            gray=gray,
            first=first.indices if bool((found[:number] >= first.values[:AMONG][-1]).any()) else torch.empty(0).long(),
        )
        return made.refined() if len(made.first) else made

    def _search(self, images: Tensor, side: int) -> Tensor:
        """Return the largest absolute correlation (P, N) of each pose, grouped by gray version, with images."""
        every = poses(few=side == FAR)
        found = torch.empty(len(self._gray), len(every), len(images))
        for number, gray in enumerate(self._gray):
            drawn = _looks(every.drawn(gray[None]), side)
            for slack in sorted(set(every.slack.tolist())):
                which = every.slack == slack
                middles, (windows, lengths) = _middle(drawn[which], slack), _windows(images, slack)
                slid = windows.flatten(1, 2) @ middles.flatten(2).permute(1, 2, 0)
                slid = (slid.view(*lengths.shape, -1) / lengths[..., None]).mean(0)
                found[number, which] = slid.abs_().amax(1).T
        return found.flatten(0, 1)

    def _in_pieces(self, grid: int) -> Way:
        pieces = _tiles(grays(self.guess.float()), grid)
        own = _arranged(pieces, self.originals.tiles(grid)).amax(0)
        rest = _arranged(pieces, self.others.tiles(grid)[self.rivals]).amax(0)
        return _Tiled(
            own=own,
            rest=rest,
            rivals=self.rivals,
            usual=torch.searchsorted(self.rivals, self.usual),
            turning=self,
            grid=grid,
            pieces=pieces,
        )


def _arranged(pieces: Tensor, tiles: Tensor) -> Tensor:
    """Return the likeness 2ab / (aa + bb), (V, N), of guesses a (V, T, D), or negatives, to nearest tiles b."""
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
    """The pose and place of greatest likeness to each image."""

    turning: Turning
    side: int
    taken: Poses  # poses for the originals, then for the rivals
    gray: Tensor  # (B + K, 1, H, W) gray guess drawn for each
    first: Tensor  # positions of the rivals whose poses are refined; empty if that is in vain

    def refined(self) -> "_Posed":
        number = len(self.own)
        again = torch.cat([torch.arange(number), number + self.first])
        images = torch.cat(
            [self.turning.originals.at(self.side), self.turning.others.at(self.side)[self.rivals[self.first]]]
        )
        values, taken = torch.cat([self.own, self.rest]), self.taken[again]
        for steps in ROUNDS[self.side]:
            tried = taken.around(steps)
            value, step = _tried(tried, self.gray[again].repeat_interleave(len(steps), 0), images, self.side).max(1)
            values[again] = torch.maximum(values[again], value)
            taken = tried[torch.arange(len(again)) * len(steps) + step]
        moved = replace(self.taken, place=self.taken.place.index_copy(0, again, taken.place))
        return replace(self, own=values[:number], rest=values[number:], taken=moved)

    def closer(self) -> Way | None:
        if self.side == CLOSE or not len(self.first):
            return None
        number, few = len(self.own), self.usual[:: max(1, len(self.usual) // USUAL_CLOSELY)]
        kept = torch.cat([self.first, few])
        which = torch.cat([torch.arange(number), number + kept])
        images = torch.cat([self.turning.originals.at(CLOSE), self.turning.others.at(CLOSE)[self.rivals[kept]]])
        found = _tried(self.taken[which], self.gray[which], images, CLOSE)[:, 0]
        made = _Posed(
            own=found[:number],
            rest=found[number:],
            rivals=self.rivals[kept],
            usual=torch.arange(len(self.first), len(kept)),
            turning=self.turning,
            side=CLOSE,
            taken=self.taken[which],
            gray=self.gray[which],
            first=torch.arange(len(self.first)),
        )
        return made.refined()

    def rows(self, original: int, rivals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pose = self.taken[torch.tensor([original])]
        slack = float(pose.slack)
        middle = _middle(_looks(pose.drawn(self.gray[original][None]), self.side), slack)
        truth = self.turning.originals.at(self.side)[original][None]
        height, width = middle.shape[-2:]
        down, right = divmod(int(_slid_each(middle[None], truth, slack).abs().argmax()), truth.shape[-1] - width + 1)
        images = torch.cat([truth, self.turning.others.at(self.side)[rivals]])
        rows = torch.cat([middle, _unit(images[..., down : down + height, right : right + width])]).flatten(1) / 2**0.5
        return rows[0], rows[1], rows[2:]


def _tried(tried: Poses, gray: Tensor, images: Tensor, side: int) -> Tensor:
    """Return correlations (K, S) of images (K, L, H, W) with gray guesses (K * S, 1, H, W), drawn in S poses each."""
    looks = _looks(tried.drawn(gray), side)
    looks = looks.view(len(images), -1, *looks.shape[1:])
    slacks = tried.slack.view(len(images), -1)[:, 0]
    found = torch.empty(looks.shape[:2])
    for slack in sorted(set(slacks.tolist())):
        which = slacks == slack
        middles = _middle(looks[which].flatten(0, 1), slack)
        middles = middles.view(-1, looks.shape[1], *middles.shape[1:])
        found[which] = _slid_each(middles, images[which], slack).abs().amax(-1)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tiled(Way):
    """Tiles of a grid, each at its place of greatest likeness."""

    turning: Turning
    grid: int
    pieces: Tensor

    def rows(self, original: int, rivals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        truth = self.turning.originals.tiles(self.grid)[original][None]
        guess = self.pieces[int(_arranged(self.pieces, truth)[:, 0].argmax())]
        sizes = truth[0].square().sum(-1)
        signed = max((guess, -guess), key=lambda each: float((2 * each @ truth[0].T - sizes).amax(-1).sum()))
        images = torch.cat([truth, self.turning.others.tiles(self.grid)[rivals]])
        nearest = (2 * signed @ images.flatten(0, 1).T).view(len(guess), *images.shape[:2]) - images.square().sum(-1)
        laid = images.gather(1, nearest.argmax(-1).T[..., None].expand(-1, -1, images.shape[-1])).flatten(1)
        laid = functional.normalize(laid - laid.mean(1, keepdim=True), dim=1)
        return signed.flatten(), laid[0], laid[1:]
