"""Format figures for pages, and explain technical words."""

import math
import re
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from fl_privacy.files import shipped
from fl_privacy.measure import METRICS, Statistic, decimals
from fl_privacy.measure.intervals import LEAST_SPLIT
from fl_privacy.measure.registry import IMAGE_METRIC, LARGEST_PSNR

MARK = "<!-- words -->"  # place of a page's folded glossary
_ERROR = re.compile(r":? \(?[\w.]*(?:Error|Exception|Exit)(?=:)")
_MARKUP = re.compile(r"<(style|script|svg)\b.*?</\1>|<[^>]*>", re.DOTALL)


def glossary_of(texts: Iterable[str]) -> list[tuple[str, str]]:
    """List (title, meaning) of each term in ``terms.json`` with a pattern that occurs in ``texts``."""
    said, terms = "\n".join(texts), shipped(__file__, "terms.json")
    return [(title, term["meaning"]) for title, term in terms.items() if re.search(term["pattern"], said)]


def with_words(page: str) -> str:
    """Insert a folded glossary of the terms on ``page`` in place of ``MARK``, if there is one."""
    if MARK not in page:
        return page
    words = glossary_of([_MARKUP.sub(" ", page)])
    shown = Markup("").join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(*term) for term in words)
    opening = '<section><details><summary>Words on this page</summary><dl class="glossary inside">'
    return page.replace(MARK, f"{opening}{shown}</dl></details></section>" if words else "")


MISSING = "\N{EN DASH}"


def percent(value: float | None) -> str:
    """Format a share: 0.613 -> 61.3 %; a missing one is a dash."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """Format a number of percent: 97.31 -> 97.3 %; ``None`` becomes a dash."""
    return MISSING if value is None else f"{value:.1f} %"


def seconds(value: float | None) -> str:
    """Format a time, given in seconds, in ms, s, min or h; ``None`` gives a dash."""
    if value is None:
        return MISSING
    if 0 < value < 0.1:
        return f"{1000 * value:.3g} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def span(numbers: Sequence[int]) -> str:
    """Format the range of ``numbers``, such as ``3 to 5``."""
    low, high = min(numbers), max(numbers)
    return str(high) if low == high else f"{low} to {high}"


def size(count: float | None) -> str:
    """Format a number of bytes in decimal units."""
    if count is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ratio(value: float | None) -> str:
    """Format ``value`` with three significant digits; ``None`` becomes a dash."""
    return MISSING if value is None else "∞" if math.isinf(value) else f"{value:.3g}"


def metric(value: float | None, name: str) -> str:
    """Format ``value`` of the metric ``name`` with its unit; PSNR is capped at 100 dB."""
    return MISSING if value is None else METRICS[name].in_words(value) if name in METRICS else decimals(value)


def below(upper: float, mean: float, name: str) -> str:
    """Return ``(95 % sure: below UPPER)``; empty if ``upper`` rounds to the mean or to the metric's largest value."""
    largest = LARGEST_PSNR if name == IMAGE_METRIC else METRICS[name].range[1] if name in METRICS else math.inf
    shown = metric(upper, name)
    if not math.isfinite(upper) or upper >= largest or shown in (metric(largest, name), metric(mean, name)):
        return ""
    return f" (95 % sure: below {shown})"


def interval(statistic: Statistic, name: str) -> str:
    """Format a mean's 95 % interval in brackets; if unknown, the median, or a dash if there are too few uploads."""
    show: Callable[[float], str] = METRICS[name].digits if name in METRICS else decimals
    if statistic.ci95 is None:
        return MISSING if statistic.groups < LEAST_SPLIT else f"median {show(statistic.median)}"
    return "[{}, {}]".format(*map(show, statistic.ci95))


def without_error(text: str) -> str:
    """Cut ``text`` before the name of an exception."""
    return _ERROR.split(text, maxsplit=1)[0]


def uncapital(text: str) -> str:
    """Lower the first letter of ``text``."""
    return f"{text[:1].lower()}{text[1:]}"


def share_interval(ends: tuple[float, float]) -> str:
    """Format the 95 % interval of a share, such as ``7 to 60 %``."""
    return f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f}\N{NO-BREAK SPACE}%"


def title(name: str) -> str:
    """Return the title of the metric ``name`` in tables."""
    return METRICS[name].title if name in METRICS else name.replace("_", " ")


def title_within(name: str) -> str:
    """Return the title of the metric ``name`` as written within a sentence."""
    return METRICS[name].name_within if name in METRICS else name.replace("_", " ")


def papers_bound(name: str) -> str:
    """Return a label for the metric's threshold from which papers count an example as reconstructed; empty if none."""
    threshold = METRICS[name].threshold
    return "" if threshold is None else f"{threshold.source}'s bound"
