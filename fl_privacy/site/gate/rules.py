"""Rules of a site's policy for single values, and the bits of information that such a value can carry."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.files import shipped
from fl_privacy.site.gate.plain_yaml import table

REASONS: Mapping[str, str] = shipped(__file__, "reasons.json")
"""Reason of a refusal -> sentence for the coordinator, without values and names, which stay in the site's log."""

SMALLEST = 1e-6  # magnitude below which rounded numbers leave as zero
LARGEST = 1e6  # magnitude above which rounded numbers are refused, unless a rule has bounds

LARGEST_BYTES = 1 << 30

LONGEST = 10_000  # most values of a list

DIGITS = 3
MOST_DIGITS = 15
_EXACT_BITS = 65


class RefusedError(UserError):
    """Raised if a message is refused; only ``reason``, a key of ``REASONS``, may leave the site."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule for the value of one key.

    Attributes:
        at_least, at_most: bounds of a number; by default, those of a rounded number are -+``LARGEST``.
        digits: number of significant digits of a number; ``None`` takes ``DIGITS``.
        round_to: unit to whose multiples a number is rounded, instead of ``digits``.
        value: number that replaces the app's.
        one_of: texts or finite numbers that are allowed.
        most_bytes: most bytes of a value of bytes, which passes unchanged.
        most_letters: most letters of a received text, which passes unchanged.
        length: length of a list, to whose entries the rule applies; ``None`` for a single value.
        shorter: ``True`` also allows shorter lists.
    """

    integer: bool = False
    at_least: float | None = None
    at_most: float | None = None
    digits: int | None = None
    round_to: float | None = None
    exact: bool = False
    value: float | None = None
    one_of: tuple[Any, ...] | None = None
    most_bytes: int | None = None
    most_letters: int | None = None
    length: int | None = None
    shorter: bool = False

    def __post_init__(self) -> None:
        for name in ("integer", "exact", "shorter"):
            checks.one_of(name, getattr(self, name), (True, False))
        for name in ("at_least", "at_most", "value"):
            if (number := getattr(self, name)) is not None:
                checks.number(name, number, example=32)
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise UserError(f"at_least is expected below at_most, but {self.at_least:g} > {self.at_most:g}; swap them.")
        wholes = [("digits", MOST_DIGITS, DIGITS), ("length", LONGEST, 1), ("most_bytes", LARGEST_BYTES, 256)]
        wholes += [("most_letters", LARGEST_BYTES, 100)]
        for name, most, example in wholes:
            if (number := getattr(self, name)) is not None:
                checks.whole(name, number, at_least=1, at_most=most, example=example)
        unit = self.round_to
        if unit is not None and math.isinf(checks.number("round_to", unit, above=0, example=32) and self.bits):
            raise UserError(f"round_to is expected to be larger between these bounds, but is {unit:g}; try 1.")
        if self.one_of is not None:
            numbers = [one for one in self.one_of if type(one) is not str]
            if not self.one_of or any(type(one) not in {int, float} or not math.isfinite(one) for one in numbers):
                got = f"{list(self.one_of)!r:.200}"
                raise UserError(f"one_of is expected to list texts or finite numbers, but got {got}; try [yes, 'no'].")
        if self.length is not None and self.value is not None:
            raise UserError("A rule is expected to have one of value and length, but has both; drop one.")
        if self.shorter and self.length is None:
            raise UserError("shorter is expected with length, but got none; try length: 3.")
        several = ("value", "one_of", "most_bytes", "most_letters", "round_to", "digits")
        if self.exact + sum(getattr(self, name) is not None for name in several) > 1:
            raise UserError(f"One of exact, {', '.join(several)} is expected, but got several; keep one.")

    @classmethod
    def read(cls, where: str, given: object, usual: "Rule | None" = None) -> "Rule":
        if given is None or given is True:
            return usual or cls()
        section = dict(table(where, given, *(field.name for field in fields(cls))))
        if "one_of" in section:
            listed = section["one_of"]
            section["one_of"] = tuple(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else ()
        try:
            return cls(**section)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def apply(self, where: str, value: object) -> "int | float | str | bytes | list[int | float | str | bytes]":
        """Return ``value``, rounded by the rule; ``RefusedError`` if it breaks the rule. ``where``: for the log."""
        if self.length is None:
            return self._one(where, value)
        if not isinstance(value, list | tuple) or not (0 if self.shorter else self.length) <= len(value) <= self.length:
            most = "at most " * self.shorter
            raise RefusedError("type", f"{where} is {_short(value)}; send a list of {most}{self.length}")
        found = [self._one(where, each) for each in value]
        wholes = [one for one in found if type(one) is int]
        if wholes and min(wholes) < 0 and max(wholes) >= 1 << 63:
            raise RefusedError("range", f"{where} is below 0 and above 2^63 - 1, and no message holds both; split it")
        return found

    def _one(self, where: str, value: Any) -> int | float | str | bytes:
        if self.one_of is not None:
            if same := [one for one in self.one_of if type(one) is type(value) and one == value]:
                return same[0]  # the policy's own: 0.0 equals -0.0
            reason = "text" if isinstance(value, str | bytes) else "range"
            raise RefusedError(reason, f"{where} is {_short(value)}; send one of {_short(self.one_of)}")
        flags = self.exact and not self.integer and self.at_least is None and self.at_most is None
        most = self.most_bytes if type(value) is bytes else self.most_letters if type(value) is str else None
        if (isinstance(value, bool) and flags) or (most is not None and len(value) <= most):
            return value
        if self.most_bytes or self.most_letters:
            raise RefusedError("size" if most else "type", f"{where} is {_short(value)}; send it {self.in_words()}")
        if isinstance(value, str | bytes):
            raise RefusedError("text", f"{where} is text of {len(value)} letters, and no rule lists it; use one_of")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedError("type", f"{where} is a {type(value).__name__}, and one number is expected; send that")
        whole = isinstance(value, int)
        if not whole and not math.isfinite(value):
            raise RefusedError("finite", f"{where} is {value}, and a finite number is expected; send that")
        if self.integer and not whole and value != int(value):
            raise RefusedError("type", f"{where} is {value}, and a whole number is expected; round it")
        low, high = self.bounds
        most = (1 << (63 if value < 1 << 63 else 64)) - 1  # of Flower's sint64, or of its uint64
        low, high = (max(low, -(1 << 63)), min(high, most)) if whole or self.integer else (low, high)
        if not low <= value <= high:
            raise RefusedError("range", f"{where} is {_short(value)}, and {low:g} to {high:g} is expected; clamp it")
        if not self.exact:
            if self.round_to is not None:
                value = round(value / self.round_to) * self.round_to
            else:
                value = 0 if abs(value) < SMALLEST else float(f"{value:.{(self.digits or DIGITS) - 1}e}")
            value = min(max(value, low), high)
        return int(value) if whole or self.integer else float(value) + 0.0

    @property
    def fixed(self) -> int | float | None:
        if self.value is None or not -(1 << 63) <= self.value < 1 << 64:
            return self.value and float(self.value)  # no message holds a larger whole number
        return int(self.value) if self.value == int(self.value) else self.value

    @property
    def bounds(self) -> tuple[float, float]:
        usual = math.inf if self.exact else LARGEST
        low = -usual if self.at_least is None else self.at_least
        return low, max(low, usual) if self.at_most is None else self.at_most

    @property
    def bits(self) -> float:
        """Return the most bits that an app can encode in the value."""
        lengths = 1 + (self.length or 0) if self.shorter else 1
        return self._bits_of_one * (self.length or 1) + math.log2(lengths)

    @property
    def _bits_of_one(self) -> float:
        if self.value is not None:
            return 0.0
        if self.one_of is not None:
            return math.log2(len(self.one_of))
        if self.most_bytes is not None:
            return 8 * self.most_bytes + 1  # with its size
        low, high = self.bounds
        kinds = 0 if self.integer else 1  # 1 and 1.0 are two values of a message
        if self.exact:
            whole = self.integer and math.isfinite(low) and math.isfinite(high)
            return min(math.log2(high - low + 1), _EXACT_BITS) if whole else _EXACT_BITS + kinds
        if self.round_to is not None:
            return math.log2((high - low) / self.round_to + 2) + kinds
        sides = [side for side in (high, -low) if side > 0]
        decades = [max(0.0, math.log10(side / SMALLEST)) + 1 for side in sides]
        return math.log2(sum(9 * 10 ** ((self.digits or DIGITS) - 1) * each for each in decades) + 1) + kinds

    def in_words(self) -> str:
        if self.length is not None:
            one, most = replace(self, length=None, shorter=False), "at most " if self.shorter else ""
            return f"as a list of {most}{self.length}, each {one.in_words()}"
        if self.value is not None:
            return f"always as {self.value:g}, whatever the app says"
        if self.one_of is not None:
            return f"as one of {', '.join(map(str, self.one_of))}"
        if size := self.most_bytes or self.most_letters:
            return f"as at most {size} {'bytes' if self.most_bytes else 'letters'}, whatever they hold"
        low, high = self.bounds
        kind = "a whole number" if self.integer else "a number"
        within = f" from {low:g} to {high:g}"
        if math.isinf(high):
            within = f" of at least {low:g}" if math.isfinite(low) else "" if self.integer else ", true or false"
        elif math.isinf(low):
            within = f" of at most {high:g}"
        if self.exact:
            return f"as {kind}{within}, exact to the last digit"
        rounded = f"{self.digits or DIGITS} digits" if self.round_to is None else f"multiples of {self.round_to:g}"
        return f"as {kind}{within}, rounded to {rounded}"


def _short(value: object) -> str:
    return f"{value!r:.400}"
