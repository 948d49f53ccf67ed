"""Policies: sequences of operations, written ``3-43-15``, drawn at random for each image."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import torch
from torch import Tensor

from fl_privacy.checks import one_of
from fl_privacy.data.transformations.operations import OPERATIONS, TABLES, Operation, Table
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import expanded, read_text


@dataclass(frozen=True)
class Policy:
    """Operations applied in sequence: ``indices`` into the table; none leave the image unchanged."""

    indices: tuple[int, ...]
    table: Table = "paper"

    @classmethod
    def parse(cls, text: str | int, table: Table = "paper") -> "Policy":
        parts = str(text).split("-")
        if not all(part.isdecimal() and int(part) < len(OPERATIONS) for part in parts):
            raise UserError(
                f"A policy is expected as numbers of operations 0 to {len(OPERATIONS) - 1}, like 3-43-15,"
                f" but got {text!r}."
            )
        return cls(tuple(map(int, parts)), table)

    def __str__(self) -> str:
        return "-".join(map(str, self.indices)) or "none"

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(TABLES[self.table][index] for index in self.indices)


UNTRANSFORMED = Policy(())
"""Baseline of policies."""


def transform(
    images: Tensor, policies: Sequence[Policy], rng: torch.Generator, *, by_probability: bool = False
) -> Tensor:
    """Transform each image (N, C, H, W) in [0, 1] by a policy and signs drawn uniformly.

    Images are rounded to 256 levels first, like image files. The number of draws per image is constant. With
    ``by_probability`` each operation is applied with AutoAugment's probability. ``UserError`` for images that are
    neither gray nor RGB.
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
    """Transform all ``images`` (..., C, H, W) by ``policy``, its operations with ``signs`` 1 or -1."""
    for operation, sign in zip(policy.operations, signs, strict=True):
        images = operation(images, sign)
    return images


def read_policies(source: str | int | Sequence[str | int], table: Table | None = None) -> tuple[Policy, ...]:
    """Read policies from a name, a list of names, or the file that ``fl-privacy search-policies`` wrote.

    A ``table`` of ``None`` is that of the file, and the paper's for names. ``UserError`` if it is none of these, or the
    file was searched with another table.
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
            f"The policies in {path} are numbers of the table {searched!r}, but table is {table!r}; leave it null."
        )
    return tuple(Policy.parse(name, cast(Table, searched)) for name in names)


POLICY_FILE = "policies.json"
"""File of the policies in the folder of a search."""


def random_policies(number: int, rng: torch.Generator, *, longest: int = 3, table: Table = "paper") -> list[Policy]:
    """Draw ``number`` different policies, uniform among all of up to ``longest`` operations; ``UserError`` if fewer."""
    sizes = [len(OPERATIONS) ** length for length in range(1, longest + 1)]
    if not 1 <= number <= sum(sizes):
        raise UserError(f"1 to {sum(sizes)} policies of {longest} operations are expected, but got {number}.")
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
    """Choose the first ``number`` of ``policies`` that share no operation with an earlier policy.

    Operations of the same kind and magnitude are equal, whatever their indices.
    """
    found: list[Policy] = []
    used: set[tuple[str, float]] = set()
    for policy in policies:
        own = {(operation.name, operation.magnitude) for operation in policy.operations}
        if len(found) < number and not used & own:
            found.append(policy)
            used |= own
    return found
