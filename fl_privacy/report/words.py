"""Explain technical words of pages in plain ones."""

import math
import re
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from fl_privacy.measure import METRICS, Statistic, decimals
from fl_privacy.measure.intervals import LEAST_SPLIT
from fl_privacy.measure.registry import IMAGE_METRIC, LARGEST_PSNR

MARK = "<!-- words -->"  # place of a page's folded glossary
_MARKUP = re.compile(r"<(style|script|svg)\b.*?</\1>|<[^>]*>", re.DOTALL)

TERMS = {
    "Adaptive attacker": "one that knows the public description of the defense",
    "AUC": "how well an attack ranks members before others: 0.5 is guessing, 1 is always right",
    "Belief change (BPKI)": "how much the update changes an attacker's belief about pixel values; 0 is not at all",
    "CAP": "accuracy times distance, averaged over the strengths of a defense; high is good (SPN's paper)",
    "Client, server, round": "clients train on their own data; the server averages their uploads; a round is one"
    " such exchange",
    "Confidence, 95 % CI": "a range that holds the true value in 95 of 100 repetitions; wide if little was measured",
    "Defense": "a change of clients' updates so that less can be reconstructed from them",
    "Epsilon, delta": "numbers of differential privacy: the smaller epsilon, the less an upload depends on any one"
    " example, against any attacker; delta is the probability that this fails",
    "Gradient, update, upload": "how a client's examples change the model; it leaves the client instead of the data",
    "Honest but curious": "a server that follows the protocol, and attacks what it receives",
    "Identified": "the original is nearer to the guess than about a thousand others, also after changes that hide"
    " nothing, such as a negative or a mirror image",
    "Label": "the class of an example",
    "LPIPS": "distance of two images as people see it, 0 for equal ones",
    "Malicious server": "one that sends clients models that were made to leak",
    "Membership": "whether an example is among those that a client trains on",
    "MSE, rMSE": "squared error of the pixels, and the error relative to the image; 0 for equal images",
    "Proven": "the attacker can show, without the original, that no other example fits the upload",
    "PSNR": "similarity of two images in decibels: about 8 for unlike ones, over 30 hardly distinguishable; a flat"
    " gray picture can reach 16, so it alone says little",
    "Recognizable": "above a paper's bound for this, and above what a guess without the update reaches",
    "Reconstructed": "equal to the original, or identified among many others, or recognizable above a published bound"
    " and above what a guess without the update shows",
    "Secure aggregation": "the server learns only the sum of all uploads",
    "SSIM": "similarity of two images by their structure, 1 for equal ones",
    "Student's t": "the usual way to get a 95 % range for a mean of few values",
    "Token F1": "share of a text's words, or parts of words, that were reconstructed, in any order",
    "TPR at 1 % FPR": "share of members found if one in a hundred others is mistaken for a member",
}
"""Title -> meaning."""

_PATTERNS = {
    "Adaptive attacker": r"adaptive|knows the defense",
    "AUC": r"\bAUC\b",
    "Belief change (BPKI)": r"BPKI",
    "CAP": r"\bCAP\b",
    "Client, server, round": r"\bclients?\b",
    "Confidence, 95 % CI": r"95 %",
    "Defense": r"\bdefen[sd]",
    "Epsilon, delta": r"[Ee]psilon",
    "Gradient, update, upload": r"gradient|update|upload",
    "Honest but curious": r"honest[ -]but[ -]curious",
    "Identified": r"\b[Ii]dentified",
    "Label": r"[Ll]abel",
    "Malicious server": r"malicious",
    "Membership": r"took part|[Mm]embership",
    "MSE, rMSE": r"\br?MSE\b",
    "Proven": r"[Pp]roven",
    "Recognizable": r"\b[Rr]ecognizable",
    "Reconstructed": r"\b[Rr]econstructed\b",
    "Secure aggregation": r"SecAgg|secure aggregation|CKKS",
    "Token F1": r"Token F1|token F1",
    "TPR at 1 % FPR": r"TPR",
}
"""Title -> pattern that matches it in a text, if it is another."""


def glossary_of(texts: Iterable[str]) -> list[tuple[str, str]]:
    """List (title, meaning) of the terms that occur in ``texts``."""
    said = "\n".join(texts)
    return [(title, meaning) for title, meaning in TERMS.items() if re.search(_PATTERNS.get(title, title), said)]


def with_words(page: str) -> str:
    """Put a folded glossary of the page's terms at its mark, if any."""
    if MARK not in page:
        return page
    words = glossary_of([_MARKUP.sub(" ", page)])
    shown = Markup("").join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(*term) for term in words)
    opening = '<section><details><summary>Words on this page</summary><dl class="glossary inside">'
    return page.replace(MARK, f"{opening}{shown}</dl></details></section>" if words else "")


MISSING = "\N{EN DASH}"


def percent(value: float | None) -> str:
    """Format a share: 0.613 -> 61.3 %."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """Format a percentage: 97.31 -> 97.3 %."""
    return MISSING if value is None else f"{value:.1f} %"


def seconds(value: float | None) -> str:
    """Format a time in milliseconds, seconds, minutes or hours."""
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
    """Format a range: 3 to 5."""
    low, high = min(numbers), max(numbers)
    return str(high) if low == high else f"{low} to {high}"


def size(count: float | None) -> str:
    """Format bytes in decimal units."""
    if count is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ratio(value: float | None) -> str:
    """Format three significant digits."""
    return MISSING if value is None else "∞" if math.isinf(value) else f"{value:.3g}"


def metric(value: float | None, name: str) -> str:
    """Format ``value`` of the metric ``name`` with its unit; PSNR is capped at 100 dB."""
    return MISSING if value is None else METRICS[name].in_words(value) if name in METRICS else decimals(value)


def below(upper: float, mean: float, name: str) -> str:
    """Describe the upper bound of a metric's mean; empty if the mean says as much."""
    largest = LARGEST_PSNR if name == IMAGE_METRIC else METRICS[name].range[1] if name in METRICS else math.inf
    shown = metric(upper, name)
    if not math.isfinite(upper) or upper >= largest or shown in (metric(largest, name), metric(mean, name)):
        return ""
    return f" (95 % sure: below {shown})"


def interval(statistic: Statistic, name: str) -> str:
    """Format the 95 % confidence interval in brackets without unit, or the median if there is none."""
    show: Callable[[float], str] = METRICS[name].digits if name in METRICS else decimals
    if statistic.ci95 is None:
        return MISSING if statistic.groups < LEAST_SPLIT else f"median {show(statistic.median)}"
    return "[{}, {}]".format(*map(show, statistic.ci95))


def title(name: str) -> str:
    """Return the title of the metric ``name`` in tables."""
    return METRICS[name].title if name in METRICS else name.replace("_", " ")


def title_within(name: str) -> str:
    """Return the title of the metric ``name`` in sentences."""
    return METRICS[name].name_within if name in METRICS else name.replace("_", " ")


def papers_bound(name: str) -> str:
    """Return the label of a chart's line at the paper's threshold of the metric ``name``."""
    threshold = METRICS[name].threshold
    return "" if threshold is None else f"{threshold.source}'s bound"
