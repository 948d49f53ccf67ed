"""Whether what we measured is what a paper published: a rule for each table, applied to figures, and why.

A table's *ordering* is reproduced where most pairs of figures that the paper holds apart stand in the same order with
us, beyond our intervals, and none the other way; it is *reproduced* where, besides, all figures agree with the
published ones; and *not reproduced* else. What agrees is said in the table's rule: within a distance, within a factor,
or on the same side of a bound. Where the paper prints no figures but says that pairs are alike, the table is reproduced
where ours differ by no more than its rule says. A verdict on some of a table's figures says on how many, and what is
reproduced of them alone is counted apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from typing import Any

from kept_rows import Measured


class Outcome(StrEnum):
    """Of a table or figure of a paper."""

    REPRODUCED = "reproduced"
    ORDERING = "ordering reproduced"
    NOT = "not reproduced"
    NOT_RUN = "not run"

    @property
    def as_far_as_measured(self) -> str:
        """Return the outcome as it counts where some figures are missing."""
        return f"{self}, in part measured" if self in (Outcome.REPRODUCED, Outcome.ORDERING) else str(self)


COUNTED = tuple(dict.fromkeys(told for outcome in Outcome for told in (str(outcome), outcome.as_far_as_measured)))
"""What a table can count as."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What counts as agreement with the published figures; one of the first four, ``above`` alone, or ``alike``.

    Attributes:
        within: they differ by at most so much.
        factor: one is at most so many times the other.
        side: both are above it, or both are below.
        least: ours is the published one at least, or more.
        apart: figures that the paper holds less apart, or by a smaller factor, have no order.
        above: pairs of lines of which the paper has the first above the second, where it prints no figures.
        alike: pairs of lines that the paper has alike, where it prints none; ours are ``within`` so much of each other.
    """

    within: float | None = None
    factor: float | None = None
    side: float | None = None
    least: bool = False
    apart: float = 0.0
    above: Sequence[Sequence[str]] = ()
    alike: Sequence[Sequence[str]] = ()

    def agree(self, published: float, ours: float) -> bool:
        """Say whether our figure is close enough to the published one."""
        if self.within is not None:
            return abs(ours - published) <= self.within
        if self.factor is not None:
            return abs(math.log(ours / published)) <= math.log(self.factor)
        if self.least:
            return ours >= published
        return self.side is not None and (ours > self.side) == (published > self.side)

    @property
    def in_words(self) -> str:
        """Say in words what the rule asks for."""
        if self.within is not None:
            return f"within {self.within:.3g} of the published ones"
        if self.factor is not None:
            return f"within a factor of {self.factor:.3g} of the published ones"
        if self.least:
            return "the published ones or more"
        return f"on the published side of {self.side:g}"

    def within_half_of(self, published: Sequence[float]) -> "Rule":
        """Cut the tolerance to half of the effect that the published figures show."""
        if not published:
            return self
        least, most = min(published), max(published)
        if self.within is not None:
            return replace(self, within=min(self.within, ((most - least) or abs(most)) / 2))
        if self.factor is not None and 0 < least < most:
            return replace(self, factor=min(self.factor, math.sqrt(most / least)))
        return self

    def held_apart(self, one: float, other: float) -> bool:
        """Say whether two published figures are far enough apart to have an order."""
        if self.factor is not None:
            return abs(math.log(one / other)) > math.log(max(self.apart, 1.0))
        return abs(one - other) > self.apart


@dataclass(frozen=True, kw_only=True)
class Line:
    """A published figure and ours, if it was measured."""

    name: str
    published: float | None
    ours: Measured | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """Lines that have an order among each other, and what counts as agreement in them."""

    lines: Sequence[Line]
    rule: Rule

    @property
    def tolerance(self) -> Rule:
        """Return the rule with a tolerance of at most half of the effect that the column shows."""
        return self.rule.within_half_of([line.published for line in self.lines if line.published is not None])

    @property
    def there(self) -> list[Line]:
        """Return the lines that are both published and measured."""
        return [line for line in self.lines if line.published is not None and line.ours is not None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """With its reason in words, and how many of the figures that it is on are measured."""

    outcome: Outcome
    reason: str
    measured: int
    total: int

    @property
    def told(self) -> str:
        """Say the outcome in words, with the share of the table that it rests on."""
        if self.measured == self.total or self.outcome is Outcome.NOT_RUN:
            return str(self.outcome)
        return f"{self.outcome}, {self.measured} of {self.total} measured"

    @property
    def counts_as(self) -> str:
        """Return the entry of ``COUNTED`` that the verdict counts as."""
        return str(self.outcome) if self.measured == self.total else self.outcome.as_far_as_measured


def judge(columns: Sequence[Column], figure: str) -> Verdict:
    """Judge a table by its columns; ``figure`` names what it measures in the reason."""
    lines = [line for column in columns for line in column.lines]
    if above := columns[0].rule.above:
        claimed = {name for pair in above for name in pair}
        asked = [line for line in lines if line.name in claimed]
        outcome, reason = _ordered(*_claimed(lines, above), total=len(above))
        measured = sum(line.ours is not None for line in asked)
        return Verdict(outcome=outcome, reason=reason, measured=measured, total=len(asked))
    if alike := columns[0].rule.alike:
        return _alike(lines, alike, columns[0].rule.within or 0.0)
    published = sum(line.published is not None for line in lines)
    there = [(line, column.tolerance) for column in columns for line in column.there]
    if not there:
        return Verdict(outcome=Outcome.NOT_RUN, reason="", measured=0, total=published)
    agreeing = sum(rule.agree(line.published, line.ours.mean) for line, rule in there)
    wanted = " or ".join(dict.fromkeys(column.tolerance.in_words for column in columns))
    reason = f"{agreeing} of {len(there)} measured figures ({figure}) are {wanted}"
    if len(there) < published:
        reason += f", {published - len(there)} more are not measured"
    pairs = [pair for column in columns for pair in _apart(column)]
    order, held = _ordered(
        [_compare(a.ours, b.ours) for a, b in pairs], [_named(*pair) for pair in pairs], total=len(pairs)
    )
    in_order = order is Outcome.ORDERING
    whole, sides = agreeing == len(there), any(rule.side is not None for _, rule in there)
    if whole and (in_order or not pairs):
        outcome = Outcome.ORDERING if sides else Outcome.REPRODUCED
    else:
        outcome = Outcome.ORDERING if in_order and not sides else Outcome.NOT
    reason = f"{reason}; {held}" if pairs else f"{reason}."
    return Verdict(outcome=outcome, reason=reason, measured=len(there), total=published)


def _apart(column: Column) -> list[tuple[Line, Line]]:
    """List the measured pairs that the paper holds apart, the larger published figure first."""
    return [
        (a, b) if a.published > b.published else (b, a)
        for a, b in combinations(column.there, 2)
        if column.rule.held_apart(a.published, b.published)
    ]


def _ordered(signs: Sequence[int], names: Sequence[str], *, total: int) -> tuple[Outcome, str]:
    """Judge the order of pairs by their signs: 1 as published, 0 undecided, -1 the other way around."""
    if not signs:
        return Outcome.NOT_RUN, ""
    right, open_ = signs.count(1), signs.count(0)
    against = [name for name, sign in zip(names, signs, strict=True) if sign < 0]
    reason = f"of {total} {_pairs(total)} that the paper holds apart {right} in its order"
    reason += f", {open_} within our intervals" if open_ else ""
    reason += f", {total - len(signs)} not measured" if total > len(signs) else ""
    reason += f", {len(against)} the other way (first {against[0]})" if against else ""
    held = not against and 2 * right > len(signs)
    return Outcome.ORDERING if held else Outcome.NOT, reason + "."


def _claimed(lines: Sequence[Line], above: Sequence[Sequence[str]]) -> tuple[list[int], list[str]]:
    ours = {line.name: line.ours for line in lines}
    there = [(a, b) for a, b in above if ours[a] is not None and ours[b] is not None]
    return [_compare(ours[a], ours[b]) for a, b in there], [f"{a} below {b}" for a, b in there]


def _alike(lines: Sequence[Line], alike: Sequence[Sequence[str]], within: float) -> Verdict:
    """Judge pairs that the paper has alike."""
    ours = {line.name: line.ours for line in lines}
    names = {name for pair in alike for name in pair}
    measured, total = sum(ours[name] is not None for name in names), len(names)
    there = [(one, other) for a, b in alike if (one := ours[a]) is not None and (other := ours[b]) is not None]
    if not there:
        return Verdict(outcome=Outcome.NOT_RUN, reason="", measured=measured, total=total)
    held = sum(abs(one.mean - other.mean) <= within for one, other in there)
    reason = f"of {len(alike)} {_pairs(len(alike))} that the paper has alike {held} differ by at most {within:g}."
    outcome = Outcome.REPRODUCED if held == len(there) else Outcome.NOT
    return Verdict(outcome=outcome, reason=reason, measured=measured, total=total)


def _compare(high: Measured, low: Measured) -> int:
    """Return 1 if ``high`` is above ``low``, -1 if below, 0 if an interval covers the other's mean."""
    sign = (high.mean > low.mean) - (high.mean < low.mean)
    upper, lower = (high, low) if sign > 0 else (low, high)
    bottom = upper.mean if upper.low is None else upper.low
    top = lower.mean if lower.high is None else lower.high
    return sign if bottom > top else 0


def _named(above: Line, below: Line) -> str:
    return f"{above.name} below {below.name}"


def rule_of(told: Mapping[str, Any], figure: str) -> Rule:
    """Build a rule from a file of tables, where a value may differ by figure."""
    rule = {name: value for name, value in told.items() if name not in ("figure", "across")}
    return Rule(**{name: v[figure] if isinstance(v, Mapping) else v for name, v in rule.items()})


def _pairs(number: int) -> str:
    return "pair" if number == 1 else "pairs"
