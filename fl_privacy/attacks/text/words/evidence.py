"""How likely each token is to be in the texts, by its row: beside exact zeros, and beside noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.text.words.expected import Expected, WordModel
from fl_privacy.attacks.text.words.rows import WordRows

_SCALES = 25
"""Factors between what was simulated and what was uploaded that are tried, each twice the one before."""
_HEAVY = 11
"""Powers of two by which the variance of a head's rows of other tokens may be larger than usual."""
_AT_ONCE = 1 << 24
_SURE = 30.0
"""Log likelihood ratio from which on a row tells no more of the distribution: a single long one, such as that of the
token which is classified, would outweigh all others."""
_MIXED = 1e-6
"""Least probability of a token to be in a text."""


@dataclass(frozen=True, eq=False)
class Found:
    """What is known of the words of one victim.

    Attributes:
        probability: (V,) of each token to be in the texts.
        energy: (V,) squared length of its row, without that of the noise, at least 0.
        exact: whether words are rows that no other token can have: there is no noise.
        noise: standard deviation of the noise on each element.
    """

    probability: Tensor
    energy: Tensor
    exact: bool
    noise: float


def found_words(
    rows: WordRows, *, odds: Tensor, most: int, expected: Expected | None, told_noise: float | None
) -> Found:
    """What the ``rows`` of a single victim say.

    Args:
        rows: n = 1.
        odds: (V,) prior probability of each token to be in the texts.
        most: tokens that the texts have at most.
        expected: of the rows of words; ``None`` where rows are exact.
        told_noise: standard deviation of each element's noise, where the defense is known; ``None``: estimated.
    """
    values, untouched = rows.values[0], rows.untouched[0]
    energy = values.square().sum(1)
    if expected is None or is_exact(rows, most, told_noise):
        return Found((~untouched).to(values.dtype), energy, True, 0.0)
    variance = _variance(energy, values.shape[1], ~untouched)
    if told_noise:
        variance = min(variance, told_noise**2)
    if variance == 0:
        return Found((~untouched).to(values.dtype), energy, True, 0.0)
    gain = _gain(values, expected, odds, variance, heavy=rows.where != "embeddings")
    probability = torch.sigmoid(gain + torch.logit(odds.clamp(_MIXED, 1 - _MIXED)))
    return Found(probability, (energy - values.shape[1] * variance).clamp_min(0), False, variance**0.5)


def is_exact(rows: WordRows, most: int, told_noise: float | None) -> bool:
    """Whether most rows of the first victim are those of tokens in no text, and no more are not than the texts have."""
    touched = int((~rows.untouched[0]).sum())
    return 2 * touched < rows.untouched.shape[1] and touched <= most and not told_noise


def _variance(energy: Tensor, width: int, touched: Tensor) -> float:
    """Of an element of the noise: by the median of rows, most of which hold nothing else."""
    typical = float(energy.median())
    if typical == 0:  # most were dropped; those kept are mostly noise
        return float(energy[touched].median()) / width if bool(touched.any()) else 0.0
    return typical / width / (1 - 2 / (9 * width)) ** 3


def _gain(values: Tensor, expected: Expected, odds: Tensor, variance: float, *, heavy: bool) -> Tensor:
    """(V,) log likelihood ratio of each row, of a word's beside that of noise alone, by the distribution and scale
    under which all rows together are likeliest."""
    unit = _unit(values, expected, variance)
    best, most = values.new_zeros(len(values)), -torch.inf
    for model in expected.models:
        ratios = _ratios(values, model, unit, variance)
        total = torch.log1p(odds[:, None] * ratios.clamp_max(_SURE).expm1()).sum(0)
        at = int(total.argmax())
        if float(total[at]) > most:
            best, most = ratios[:, at], float(total[at])
    if heavy:
        best = best - _heavier(values, variance)
    return best


def _unit(values: Tensor, expected: Expected, variance: float) -> float:
    """Factor from what was simulated to the strongest row."""
    strongest = float(values.square().sum(1).max())
    return float((max(strongest, variance) / max(expected.energy, 1e-30)) ** 0.5)


def _ratios(values: Tensor, model: WordModel, unit: float, variance: float) -> Tensor:
    """(V, S) log of N(s mean, s^2 spread + variance) over N(0, variance) for each scale s."""
    scales = unit * 2.0 ** torch.arange(2 - _SCALES, 2, dtype=torch.float64, device=values.device)
    spread, mean = (t.double() for t in (model.spread, model.mean))
    wide = scales[:, None] ** 2 * spread + variance
    middle = scales[:, None] * mean
    squares = 0.5 * (1 / variance - 1 / wide)
    lines = middle / wide
    offset = -0.5 * (middle.square() / wide + (wide / variance).log()).sum(1)
    found = []
    for part in torch.split(values, max(1, _AT_ONCE // values.shape[1])):
        along = (part @ model.directions).double()
        found.append(along.square() @ squares.T + along @ lines.T + offset)
    return torch.cat(found)


def _heavier(values: Tensor, variance: float) -> Tensor:
    """(V,) by how much likelier noise of a larger variance is than that of ``variance``, for each row."""
    width = values.shape[1]
    energy = values.double().square().sum(1, keepdim=True) / variance
    factors = 2.0 ** torch.arange(_HEAVY, dtype=torch.float64, device=values.device)
    return (0.5 * (energy * (1 - 1 / factors) - width * factors.log())).max(1).values.clamp_min(0)


def likely(found: Found, most: int) -> Tensor:
    """(k,) the tokens, likeliest first, for which precision and recall are expected to have the largest mean (F1)."""
    if found.exact:
        words = found.probability.nonzero().flatten()
        return words[found.energy[words].argsort(descending=True, stable=True)]
    order = (found.probability + 1e-12 * found.energy / found.energy.max().clamp_min(1e-30)).argsort(descending=True)
    sure = found.probability[order].double()
    numbers = torch.arange(1, len(sure) + 1, dtype=torch.float64, device=sure.device)
    score = (2 * sure.cumsum(0) / (numbers + sure.sum()))[:most]
    return order[: int(score.argmax()) + 1] if float(sure.sum()) > 0.5 else order[:0]
