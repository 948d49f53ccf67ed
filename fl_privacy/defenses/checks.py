"""Checks of a defense's options, with one wording."""

from collections.abc import Iterable

from fl_privacy.errors import UserError


def expect_one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ``UserError`` unless ``value`` is one of ``allowed``."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise UserError(f"{name} is expected to be one of {', '.join(map(str, allowed))}, but got {value!r}.")


def expect_number(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    example: float,
) -> None:
    """Raise ``UserError`` unless ``value`` is a number within the bounds given; NaN and infinity are in none."""
    low = f"[{at_least}" if at_least is not None else f"({above if above is not None else '-inf'}"
    high = f"{at_most}]" if at_most is not None else f"{below if below is not None else 'inf'})"
    inside = isinstance(value, int | float) and not isinstance(value, bool)
    inside = inside and value - value == 0  # neither NaN nor infinite
    inside = inside and (at_least is None or value >= at_least) and (above is None or value > above)
    inside = inside and (at_most is None or value <= at_most) and (below is None or value < below)
    if not inside:
        raise UserError(f"{name} is expected in {low}, {high}, but got {value!r}; try {example}.")


def expect_whole(name: str, value: int, *, at_least: int, example: int) -> None:
    """Raise ``UserError`` unless ``value`` is a whole number of at least ``at_least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UserError(
            f"{name} is expected to be a whole number of at least {at_least}, but got {value!r}; try {example}."
        )
