"""Which of the questions beside images were answered better than by chance."""

from collections.abc import Mapping, Sequence

from fl_privacy.results.findings import Finding, Measure

HEADLINE: Mapping[str, str] = {
    "membership": "tpr_at_1_percent",
    "source": "asr",
    "attribute": "asr",
    "property": "error",
}
"""What was asked -> the measure by which methods are compared."""

LOW_LEAKS = frozenset({"error"})
"""Measures of which low values mean that more was inferred."""

TOLD: Mapping[str, str] = {
    "membership": "who took part",
    "source": "whose an example is",
    "attribute": "what the examples are like",
    "property": "what a client has",
}
"""What was asked -> what the server can tell, in a headline."""


def is_above_chance(name: str, measure: Measure) -> bool:
    """Whether chance is outside of the interval of the measure called ``name``, on the side that leaks."""
    return measure.high < measure.chance if name in LOW_LEAKS else measure.low > measure.chance


def told_apart(findings: Sequence[Finding]) -> tuple[str, ...]:
    """What was asked and answered better than by chance, by any measure of any method: keys of ``TOLD``."""
    leaks = {f.about for f in findings if any(is_above_chance(n, m) for n, m in f.measures.items())}
    return tuple(about for about in dict.fromkeys(f.about for f in findings) if about in leaks)


def strongest(findings: Sequence[Finding], about: str) -> tuple[Finding, Measure] | None:
    """The method that came farthest above chance by the measure of the question; ``None`` where none has it."""
    name = HEADLINE.get(about, "")
    known = [(f, f.measures[name]) for f in findings if f.about == about and name in f.measures]
    sign = -1 if name in LOW_LEAKS else 1
    return max(known, key=lambda pair: (sign * pair[1].value, sign * pair[1].low), default=None)


def disproves(findings: Sequence[Finding], *, epsilon: float) -> bool:
    """Whether an attack proved an epsilon beyond the one that is claimed."""
    return any(f.proven_epsilon is not None and f.proven_epsilon > epsilon for f in findings)
