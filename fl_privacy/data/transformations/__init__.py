"""The fifty image operations of ATS policies, on batches, following the Python Imaging Library."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from fl_privacy.checks import one_of
from fl_privacy.errors import UserError
from fl_privacy.files import shipped
from fl_privacy.files.foreign import expanded, read_text

_FIXED = 1 << 16  # fixed-point unit of the library's nearest-neighbor sampling: 65,536ths of a pixel
_BLACK, _GREY = 0, 128  # levels of 255 that fill vacated pixels


def translate(images: Tensor, shift: tuple[int, int]) -> Tensor:
    """Shift images (..., H, W), uint8 or float: pixel (x, y) gets the value at (x, y) + ``shift``, black outside."""
    x, y = _grid(images)
    return _gather(images, x + shift[0], y + shift[1], _BLACK)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate counterclockwise about the center by nearest pixels, like ``PIL.Image.rotate``; gray fills the corners."""
    height, width = images.shape[-2:]
    angle = -math.radians(degrees)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    from_x = (cosine, sine, width / 2 - cosine * width / 2 - sine * height / 2)
    from_y = (-sine, cosine, height / 2 + sine * width / 2 - cosine * height / 2)
    x, y = _grid(images)
    return _gather(images, _fixed_point(from_x, x, y), _fixed_point(from_y, x, y), _GREY)


def shear_vertically(images: Tensor, slope: float) -> Tensor:
    """Move column x up by ``slope`` (x + 1/2) pixels, bicubic like PIL's ``transform``; vacated pixels are black."""
    height = images.shape[-2]
    x, y = _grid(images)
    at = y.double() + 0.5 + slope * (x.double() + 0.5)
    below = (at - 0.5).floor()
    part = (at - 0.5 - below).to(images.dtype if images.is_floating_point() else torch.float64)
    rows = [(below.long() + k).clamp(0, height - 1) for k in (-1, 0, 1, 2)]
    v1, v2, v3, v4 = (_take(images, x, row).to(part.dtype) for row in rows)
    # cubic convolution, a = -1, between v2 and v3, in the library's order
    values = v2 + part * (v3 - v1 + part * (2 * (v1 - v2) + v3 - v4 + part * (v2 - v1 + v4 - v3)))
    if not images.is_floating_point():  # floats keep the overshoot of the interpolation
        values = values.clamp(0, 255).to(images.dtype)
    return torch.where((at >= 0) & (at < height), values, _filling(images, _BLACK))


def _fixed_point(row: Sequence[float], x: Tensor, y: Tensor) -> Tensor:
    by_x, by_y, offset = row

    def fixed(value: float) -> int:
        return math.floor(value * _FIXED + 0.5)

    return (fixed(offset + by_x * 0.5 + by_y * 0.5) + fixed(by_x) * x + fixed(by_y) * y) >> 16


def _grid(images: Tensor) -> tuple[Tensor, Tensor]:
    height, width = images.shape[-2:]
    y, x = torch.meshgrid(*(torch.arange(side, device=images.device) for side in (height, width)), indexing="ij")
    return x, y


def _gather(images: Tensor, x: Tensor, y: Tensor, filling: int) -> Tensor:
    height, width = images.shape[-2:]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(inside, _take(images, x.clamp(0, width - 1), y.clamp(0, height - 1)), _filling(images, filling))


def _take(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return images.flatten(-2).index_select(-1, (y * images.shape[-1] + x).flatten()).reshape(images.shape)


def _filling(images: Tensor, level: int) -> Tensor:
    return images.new_full((), level / 255 if images.is_floating_point() else level)


LEVELS = 10  # number of equally spaced magnitudes of a kind of operation


def _torchvision(name: str) -> Callable[..., Any]:
    def apply(*arguments: Any) -> Any:
        return getattr(import_module("torchvision.transforms.v2.functional"), name)(*arguments)

    return apply


_invert = _torchvision("invert")


@dataclass(frozen=True)
class Kind:
    """Kind of image operation, with a range of magnitudes."""

    apply: Callable[[Tensor, float], Tensor]  # (images (..., C, H, W), signed magnitude) -> images of the same shape
    low: float = 0.0  # magnitude of level 0
    high: float = 0.0  # magnitude of level 9
    signed: bool = False  # ``True`` if the magnitude gets a random sign

    def magnitude(self, level: int) -> float:
        return self.low + (self.high - self.low) * level / (LEVELS - 1)


@dataclass(frozen=True)
class Operation:
    """One of the fifty image operations of the defense ATS (automatic transformation search)."""

    name: str  # key of ``KINDS``
    level: int  # 0 to 9
    probability: float  # probability in AutoAugment; ignored unless asked for

    @property
    def signed(self) -> bool:
        return KINDS[self.name].signed

    @property
    def magnitude(self) -> float:
        return KINDS[self.name].magnitude(self.level)

    def __call__(self, images: Tensor, sign: int = 1) -> Tensor:
        """Transform ``images`` (..., C, H, W); a ``signed`` operation's magnitude is multiplied by ``sign``, 1 or -1.

        On uint8 the result equals Pillow's within rounding; on float in [0, 1] it is differentiable.
        """
        return KINDS[self.name].apply(images, self.magnitude * (sign if self.signed else 1))


def _straight_through(exact: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Extend ``exact``, an operation on uint8, to float images: values are those of ``exact``, the gradient is 1."""

    def apply(images: Tensor) -> Tensor:
        if not images.is_floating_point():
            return exact(images)
        steps = exact((images.detach().clamp(0, 1) * 255).round().to(torch.uint8))
        return images + (steps.to(images.dtype) / 255 - images).detach()

    return apply


def _enhancement(
    exact: Callable[[Tensor, float], Tensor], away_from: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, float], Tensor]:
    """Build an operation (images, change) that multiplies the difference of images from a base by 1 + change.

    The base is ``away_from(images)``, such as gray images. For uint8, ``exact(images, 1 + change)`` is computed.
    """

    def apply(images: Tensor, change: float) -> Tensor:
        if not images.is_floating_point():
            return exact(images, 1 + change)
        moved = images + change * (images - away_from(images))
        # clamped to [0, 1] with slope 1, so that an attacker's guess does not get stuck outside
        return moved + (moved.clamp(0, 1) - moved).detach()

    return apply


def _smooth(images: Tensor) -> Tensor:
    kernel = images.new_tensor([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    inner = conv2d(images.reshape(-1, 1, *images.shape[-2:]), kernel[None, None])
    inner = inner.reshape(*images.shape[:-2], *inner.shape[-2:])
    return images + pad(inner - images[..., 1:-1, 1:-1], (1, 1, 1, 1))


_grey = _torchvision("rgb_to_grayscale")


def _solarize(images: Tensor, threshold: float) -> Tensor:
    levels = images * 255 if images.is_floating_point() else images.short()
    inverted: Tensor = _invert(images)
    return torch.where(levels < threshold, images, inverted)


def _autocontrast(images: Tensor) -> Tensor:
    if not images.is_floating_point():
        return cast(Tensor, _torchvision("autocontrast")(images))
    low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    varies = high > low
    return torch.where(varies, (images - low) / torch.where(varies, high - low, 1), images)


KINDS: Mapping[str, Kind] = {
    "shear_y": Kind(shear_vertically, high=0.3, signed=True),
    "translate_x": Kind(
        lambda images, share: translate(images, (math.floor(share * images.shape[-1] + 0.5), 0)),
        high=150 / 331,
        signed=True,
    ),
    "translate_y": Kind(
        lambda images, share: translate(images, (0, math.floor(share * images.shape[-2] + 0.5))),
        high=150 / 331,
        signed=True,
    ),
    "rotate": Kind(rotate, high=30.0),
    "color": Kind(_enhancement(_torchvision("adjust_saturation"), _grey), high=0.5, signed=True),
    "contrast": Kind(
        _enhancement(_torchvision("adjust_contrast"), lambda x: _grey(x).mean((-3, -2, -1), keepdim=True)),
        high=0.5,
        signed=True,
    ),
    "sharpness": Kind(_enhancement(_torchvision("adjust_sharpness"), _smooth), high=0.5, signed=True),
    "brightness": Kind(_enhancement(_torchvision("adjust_brightness"), torch.zeros_like), high=0.5, signed=True),
    "posterize": Kind(
        lambda images, bits: _straight_through(lambda levels: _torchvision("posterize")(levels, round(bits)))(images),
        low=8.0,
        high=4.0,
    ),
    "solarize": Kind(_solarize, low=256.0, high=0.0),
    "invert": Kind(lambda images, _: _invert(images)),
    "equalize": Kind(lambda images, _: _straight_through(_torchvision("equalize"))(images)),
    "autocontrast": Kind(lambda images, _: _autocontrast(images)),
}
"""Name -> kind of operation. Magnitudes: slope, share of the side, degrees, change of a factor, bits, or level."""


OPERATIONS: tuple[Operation, ...] = tuple(Operation(*row) for row in shipped(__file__, "operations.json"))
"""Operations of Table 1 (Gao et al. 2023); probabilities of AutoAugment's CIFAR-10 policies (Cubuk et al. 2019)."""

_IN_THE_CODE = {16: ("equalize", 5), 43: ("translate_y", 3), 47: ("invert", 0)}

Table = Literal["paper", "code"]
"""``paper``: Table 1. ``code``: the authors' program, which differs at 16 (equalize 5, not translateX 4), at 43
(translateY 3, not 4; Section 5.8 has 5) and at 47 (invert 0, not 1, which is the same)."""

TABLES: Mapping[Table, tuple[Operation, ...]] = {
    "paper": OPERATIONS,
    "code": tuple(
        Operation(*_IN_THE_CODE.get(index, (operation.name, operation.level)), operation.probability)
        for index, operation in enumerate(OPERATIONS)
    ),
}


@dataclass(frozen=True)
class Policy:
    """Sequence of image operations that the ATS defense applies; an empty one leaves images unchanged."""

    indices: tuple[int, ...]  # numbers of the operations in ``table``
    table: Table = "paper"

    @classmethod
    def parse(cls, text: str | int, table: Table = "paper") -> "Policy":
        parts = str(text).split("-")
        if not all(part.isdecimal() and int(part) < len(OPERATIONS) for part in parts):
            most = len(OPERATIONS) - 1
            raise UserError(f"A policy is expected as operations from 0 to {most}, but got {text!r}; try 3-43-15.")
        return cls(tuple(map(int, parts)), table)

    def __str__(self) -> str:
        return "-".join(map(str, self.indices)) or "none"

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(TABLES[self.table][index] for index in self.indices)


UNTRANSFORMED = Policy(())  # baseline of policies


def transform(
    images: Tensor, policies: Sequence[Policy], rng: torch.Generator, *, by_probability: bool = False
) -> Tensor:
    """Transform each of ``images`` (N, C, H, W) in [0, 1] by one of ``policies``, drawn at random.

    Operations with a direction, such as rotations, get a random one. Images, gray or RGB, are rounded to 256 levels
    first. If ``by_probability``, each operation is applied with AutoAugment's probability.
    """
    check_shape(images.shape[1:])
    longest = max(len(policy.indices) for policy in policies)
    chosen = torch.randint(len(policies), (len(images),), generator=rng, device=rng.device)
    positive = torch.rand(len(images), longest, generator=rng, device=rng.device) < 0.5
    chance = torch.rand(len(images), longest, generator=rng, device=rng.device)
    levels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    for number, policy in enumerate(policies):
        rows = (chosen == number).nonzero().flatten()
        for place, operation in enumerate(policy.operations):
            some = rows[chance[rows, place] < operation.probability] if by_probability else rows
            plus, some = positive[some, place].to(images.device), some.to(images.device)
            signed = ((1, some[plus]), (-1, some[~plus])) if operation.signed else ((1, some),)
            for sign, own in signed:
                if len(own):
                    levels = levels.index_copy(0, own, operation(levels[own], sign))
    return levels.to(images.dtype) / 255


def check_shape(input_shape: Sequence[int]) -> None:
    """Raise ``UserError`` unless ``input_shape`` is (1 or 3, H, W)."""
    if len(input_shape) != 3 or input_shape[0] not in (1, 3):
        raise UserError(
            f"Transformations expect images (1 or 3, H, W), but got {tuple(input_shape)}; set data.channels=3."
        )


def apply_policy(images: Tensor, policy: Policy, signs: Sequence[int]) -> Tensor:
    """Apply ``policy``'s operations in order to ``images`` (..., C, H, W), in the directions ``signs`` (1 or -1)."""
    for operation, sign in zip(policy.operations, signs, strict=True):
        images = operation(images, sign)
    return images


def read_policies(source: str | int | Sequence[str | int], table: Table | None = None) -> tuple[Policy, ...]:
    """Return policies (sequences of image operations, for the ATS defense) from names or from a file.

    ``source``: a name such as ``3-43-15``, a list of names, or the file that ``fl-privacy search-policies`` wrote; else
    ``UserError``. ``table``: list of operations that the numbers refer to; ``None`` takes ``paper`` or the file's.
    """
    if table is not None:
        one_of("table", table, get_args(Table))
    if not isinstance(source, str | int):
        if not source:
            raise UserError("At least one policy is expected, but got an empty list; give names like 3-43-15.")
        return tuple(Policy.parse(name, table or "paper") for name in source)
    if isinstance(source, int) or source.replace("-", "").isdecimal():
        return (Policy.parse(source, table or "paper"),)
    path = expanded(source)
    return _from_file(path / POLICY_FILE if path.is_dir() else path, source, table)


def _from_file(path: Path, source: str, table: Table | None) -> tuple[Policy, ...]:
    remedy = "make one by `fl-privacy search-policies`"
    if not path.is_file():
        raise UserError(
            f"Policies are expected as 3-43-15, a list of such, or a file, but there is no file {source}; {remedy}."
        )
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"Policies are expected in {path}, but it is no JSON; {remedy}.") from error
    names = content.get("policies") if isinstance(content, dict) else None
    searched = content.get("table") if isinstance(content, dict) else None
    if not isinstance(names, list) or not names or searched not in get_args(Table):
        raise UserError(
            f'Policies are expected in {path} as {{"table": "paper", "policies": ["3-43-15", ...]}}; {remedy}.'
        )
    if table not in (None, searched):
        raise UserError(
            f"Policies of the table {table!r} are expected, but {path} has some of {searched!r}; leave table null."
        )
    return tuple(Policy.parse(name, cast(Table, searched)) for name in names)


POLICY_FILE = "policies.json"  # file of the policies in the folder of a search


def random_policies(number: int, rng: torch.Generator, *, longest: int = 3, table: Table = "paper") -> list[Policy]:
    """Draw ``number`` different policies: sequences of at most ``longest`` image operations, for the ATS defense.

    ``table``: list of operations, see :data:`Table`. ``UserError`` if there are fewer such policies.
    """
    sizes = [len(OPERATIONS) ** length for length in range(1, longest + 1)]
    if not 1 <= number <= sum(sizes):
        raise UserError(f"1 to {sum(sizes)} policies of {longest} operations are expected, but got {number}; try 100.")
    codes: dict[int, None] = {}
    while len(codes) < number:
        codes.update(dict.fromkeys(torch.randint(sum(sizes), (number,), generator=rng).tolist()))
    return [Policy(_decode(code, sizes), table) for code in list(codes)[:number]]


def _decode(code: int, sizes: Sequence[int]) -> tuple[int, ...]:
    length = 1
    for size in sizes:
        if code < size:
            break
        code, length = code - size, length + 1
    return tuple(code // len(OPERATIONS) ** place % len(OPERATIONS) for place in reversed(range(length)))


def disjoint(policies: Sequence[Policy], number: int) -> list[Policy]:
    """Return the first ``number`` policies that share no operation (same kind and magnitude) with an earlier one."""
    found: list[Policy] = []
    used: set[tuple[str, float]] = set()
    for policy in policies:
        own = {(operation.name, operation.magnitude) for operation in policy.operations}
        if len(found) < number and not used & own:
            found.append(policy)
            used |= own
    return found
