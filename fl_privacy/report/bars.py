"""Compute the bars at the head of an audit's page, one for each scenario."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fl_privacy.measure.answer import QUESTIONS, Answer, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.words import share_interval, without_error

MOST_BEST = 3  # reconstructions next to the bar of the headline

SHORT = {
    "evaluation": "Gradient of one example, evaluation mode",
    "gradient": "Gradient of one example",
    "one": "Upload of one example, one step",
    "batch": "Upload of one batch, one step",
    "later": "Upload of one example, last round",
    "all": "The app's own upload",
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a chart: a share in [0, 1], its 95 % interval, and ``control``, the share that guesses reach."""

    title: str
    figure: str = "not attacked"  # the share in words, for people who see no picture too
    aside: str = ""  # words on the figure, or why there is none
    red: bool = False
    share: float | None = None
    interval: tuple[float, float] | None = None
    control: float | None = None
    kind: str = "other"
    best: Sequence[Mapping[str, Any]] = ()  # views of the best reconstructions
    leaves: bool = True  # ``False`` for what never leaves a client
    asked: bool = False  # ``True`` for uploads that only the audit asked for
    said: str = ""  # interval and control in words, unless they are shares

    @property
    def numbers(self) -> str:
        if self.said:
            return self.said
        interval = share_interval(self.interval) if self.interval else ""
        control = "" if self.control is None else f"control {100 * self.control:.0f}\N{NO-BREAK SPACE}%"
        return "; ".join(filter(None, [interval, control]))


def bars_of(answers: Sequence[Answer]) -> list[Bar]:
    """Return a bar for each scenario (way of uploading) with attacked examples, in the order of ``by_reality``."""
    return [_of_examples(step) for step in by_reality(answers) if step.question == "examples"]


def by_reality(answers: Sequence[Answer]) -> list[Answer]:
    """Sort answers: the app's own uploads first, then uploads asked for."""
    return sorted(answers, key=lambda one: (one.scenario.asked, not one.scenario.leaves))


def bars_of_questions(answers: Sequence[Answer]) -> list[Bar]:
    """Return a bar for each inferred property, such as membership, for which an attack gave an estimate."""
    return [_of_question(one, one.estimate) for one in answers if one.question != "examples" and one.estimate]


def paired(after: Sequence[Bar], before: Sequence[Bar], defense: str) -> list[Bar]:
    """Return each bar ``before`` a defense, followed by its bar ``after``; only ``after`` if ``defense`` is empty."""
    if not defense:
        return list(after)
    found, old = list[Bar](), {bar.title: bar for bar in before}
    for bar in (bar for bar in after if bar.leaves and (bar.share, old.get(bar.title, bar).share) != (None, None)):
        without = old.get(bar.title, Bar(title=bar.title, asked=bar.asked))
        found += [without, replace(bar, title=f"with {defense}", aside=bar.aside * (bar.aside != without.aside))]
    return found


def bar_of_counts(title: str, counts: Counts, *, red: bool, control: Counts | None = None, aside: str = "") -> Bar:
    """Return a bar for the share of attacked examples that were reconstructed.

    ``counts``: numbers of attacked and reconstructed examples. ``control``: the same for guesses without the upload.
    ``red``: ``True`` if the share counts as a leak. ``aside``: words next to the bar.
    """
    failed = f"the attack failed on {counts.failures}" * bool(counts.failures)
    unknown = f"the originals of {counts.unknown} are not known" * bool(counts.unknown)
    bounded = counts.interval != (0.0, 1.0)
    several = {0: "", 1: "one upload: others may differ" + ", so the interval is wide" * bounded}
    uploads = several.get(counts.groups, f"{counts.groups} uploads, which the interval counts")
    aside = "; ".join(filter(None, [aside, uploads * (counts.groups < counts.judged), failed, unknown]))
    if counts.share is None:
        return Bar(title=title, figure="not known", aside=aside)
    return Bar(
        title=title,
        figure=f"{counts.read} of {counts.judged}",
        aside=aside,
        red=red,
        share=counts.share,
        interval=counts.interval if bounded else None,
        control=None if control is None else control.share,
    )


def _of_examples(step: Answer) -> Bar:
    title = SHORT.get(step.scenario.name, step.scenario.title)
    own = step.scenario.uploads.rpartition(", of ")[2] if step.scenario.name == "all" else ""
    if step.counts is None:
        why = without_error(step.reason).partition(";")[0].partition(". ")[0]
        return Bar(title=title, asked=step.scenario.asked, leaves=step.scenario.leaves, aside=own or why)
    own += f", {step.counts.judged} checked" * step.sampled
    aside = own if step.scenario.leaves else "never leaves the client"
    aside = f"{step.scenario.examples} examples" if step.scenario.name == "batch" else aside
    if step.scenario.leaves and step.counts.read and not step.leaks:
        aside = f"{aside}; no more than chance allows".removeprefix("; ")
    control = step.control if isinstance(step.control, Counts) else None
    made = bar_of_counts(title, step.counts, red=step.leaks, control=control, aside=aside)
    return replace(made, leaves=step.scenario.leaves, asked=step.scenario.asked)


def _of_question(answer: Answer, found: Estimate) -> Bar:
    question, control = QUESTIONS[answer.question], answer.control
    low, share, high = (min(1.0, max(0.0, value)) for value in (found.low, found.value, found.high))
    compared = f"; control {control.value:.2f}" if isinstance(control, Estimate) else ""
    near = not answer.leaks and isinstance(control, Estimate) and found.low > max(found.chance, control.value)
    why = "; not counted as a leak: chance alone gives such a difference in over 1 % of audits" if near else ""
    return Bar(
        title=question.title,
        figure=f"{found.value:.2f}",
        aside=question.measure.partition(";")[0] + why,
        red=answer.leaks,
        share=share,
        interval=(low, high),
        control=min(1.0, max(0.0, control.value)) if isinstance(control, Estimate) else None,
        said=f"{found.low:.2f} to {found.high:.2f}{compared}",
    )


def best_of(step: Answer, *, in_words: bool = False) -> list[Shown]:
    """Return an attack's best ``MOST_BEST`` reconstructions, by squared error or, ``in_words``, by right words."""

    def distance(one: Shown) -> float:
        if in_words:
            truth = set(one.original or ())
            return len(truth ^ set(one.guess or ())) / max(1, len(truth))
        original, guess = np.asarray(one.original, float), np.asarray(one.guess, float)
        return float(np.square(original - guess).mean()) if original.shape == guess.shape else np.inf

    return sorted((one for one in step.shown if one.reconstructed), key=distance)[:MOST_BEST]
