"""Which tokens are in the texts, by their rows: beside exact zeros, and beside noise with few false ones."""

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
_MIXED, _MOST_ODDS = 1e-6, 0.5
"""Least and largest probability of a token to be in a text: no word is read by its frequency alone."""
FALSE_PER_TEXT = 1.0
"""Words for each text that noise alone may be taken for, on average, at most."""
FALSE_SHARE = 0.1
"""Share of the words found that noise alone may be taken for, on average, at most."""
_TIMES, _DRAWN = 8, 1 << 25
"""Rows of noise for each token that are compared with, and their elements at most."""


@dataclass(frozen=True, eq=False)
class Found:
    """What is known of the words of one victim.

    Attributes:
        tokens: (k,) those in the texts, the surest first.
        energy: (V,) squared length of each row, without that of the noise, at least 0.
        exact: whether words are rows that no other token can have: there is no noise.
        noise: standard deviation of the noise on each element.
    """

    tokens: Tensor
    energy: Tensor
    exact: bool
    noise: float


def found_words(
    rows: WordRows,
    *,
    odds: Tensor,
    most: int,
    texts: int,
    expected: Expected | None,
    told_noise: float | None,
    rng: torch.Generator,
) -> Found:
    """What the ``rows`` of a single victim say.

    Args:
        rows: n = 1.
        odds: (V,) prior probability of each token to be in the texts.
        most: tokens that the texts have at most.
        texts: how many there are.
        expected: of the rows of words; ``None`` where rows are exact.
        told_noise: standard deviation of each element's noise, where the defense is known; ``None``: estimated.
        rng: draws the rows of noise that are compared with.
    """
    values, untouched = rows.values[0], rows.untouched[0]
    energy = values.square().sum(1)
    if expected is None or is_exact(rows, most, told_noise):
        return _exactly(untouched, energy)
    variance = _variance(energy, values.shape[1], ~untouched)
    if told_noise:
        variance = min(variance, told_noise**2)
    if variance == 0:
        return _exactly(untouched, energy)
    evidence = _likeliest(values, expected, odds, variance, heavy=rows.where != "embeddings")
    prior = torch.logit(odds.clamp(_MIXED, _MOST_ODDS))
    chosen = significant(
        evidence.of(values) + prior, evidence.of(noise_rows(values, energy, most, rng)), prior, texts=texts, most=most
    )
    return Found(chosen, (energy - values.shape[1] * variance).clamp_min(0), False, variance**0.5)


def _exactly(untouched: Tensor, energy: Tensor) -> Found:
    words = (~untouched).nonzero().flatten()
    return Found(words[energy[words].argsort(descending=True, stable=True)], energy, True, 0.0)


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


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Of a row to be a word's: by one distribution of such rows and one scale, beside noise alone.

    Attributes:
        model: the distribution.
        scale: factor from what was simulated to what was uploaded.
        variance: of the noise on an element.
        heavy: whether other rows may be noise of a larger variance.
    """

    model: WordModel
    scale: Tensor
    variance: float
    heavy: bool

    def of(self, values: Tensor) -> Tensor:
        """(n,) log likelihood ratio of each of ``values`` (n, d)."""
        ratios = _ratios(values, self.model, self.scale[None], self.variance)[:, 0]
        return ratios - _heavier(values, self.variance) if self.heavy else ratios


def _likeliest(values: Tensor, expected: Expected, odds: Tensor, variance: float, *, heavy: bool) -> _Evidence:
    """By the distribution and scale under which all rows (V, d) together are likeliest."""
    scales = _unit(values, expected, variance) * 2.0 ** torch.arange(
        2 - _SCALES, 2, dtype=torch.float64, device=values.device
    )
    best, most = None, -torch.inf
    for model in expected.models:
        ratios = _ratios(values, model, scales, variance)
        total = torch.log1p(odds[:, None] * ratios.clamp_max(_SURE).expm1()).sum(0)
        at = int(total.argmax())
        if best is None or float(total[at]) > most:
            best, most = _Evidence(model, scales[at], variance, heavy), float(total[at])
    assert best is not None, "there is always one without any direction"
    return best


def _unit(values: Tensor, expected: Expected, variance: float) -> float:
    """Factor from what was simulated to the strongest row."""
    strongest = float(values.square().sum(1).max())
    return float((max(strongest, variance) / max(expected.energy, 1e-30)) ** 0.5)


def _ratios(values: Tensor, model: WordModel, scales: Tensor, variance: float) -> Tensor:
    """(V, S) log of N(s mean, s^2 spread + variance) over N(0, variance) for each s of ``scales`` (S,)."""
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


def noise_rows(values: Tensor, energy: Tensor, most: int, rng: torch.Generator) -> Tensor:
    """(m, d) rows that are noise for sure, distributed as that in ``values`` (V, d), whatever its distribution.

    Each element is that of another row at the same place, of all rows but the ``most`` longest, which may be words';
    hence no row of them is a word's. As those left out have more than their share of the noise, all are scaled to the
    median length of ``values``.
    """
    kept = values[energy.argsort()[: max(len(values) - most, len(values) // 2)]]
    number = max(1, min(_TIMES * len(values), _DRAWN // values.shape[1]))
    drawn = torch.empty(number, values.shape[1], dtype=values.dtype, device=values.device)
    for column in range(values.shape[1]):
        drawn[:, column] = kept[torch.randint(len(kept), (number,), generator=rng).to(kept.device), column]
    usual, own = float(energy.median()), float(drawn.square().sum(1).median())
    return drawn * (usual / own) ** 0.5 if usual and own else drawn


def significant(score: Tensor, noise: Tensor, prior: Tensor, *, texts: int, most: int) -> Tensor:
    """(k,) the tokens of so large a ``score``, the surest first, that few are expected to be noise.

    Rows of noise alone, for all tokens, would bring :data:`FALSE_PER_TEXT` tokens for each text there, and
    :data:`FALSE_SHARE` of those that are there (Benjamini and Hochberg 1995, with weights by Genovese et al. 2006).

    Args:
        score: (V,) evidence of each token, with its prior.
        noise: (m,) evidence of rows that are noise, without any prior.
        prior: (V,) log odds of each token, which is in its score.
        texts: how many there are.
        most: tokens that the texts have at most.
    """
    order = score.argsort(descending=True)[:most]
    noise, (kinds, tokens) = noise.sort().values, torch.unique(prior, return_counts=True)
    above = len(noise) - torch.searchsorted(noise, score[order, None] - kinds)  # (most, kinds)
    expected = (above.double() @ tokens.double()) / len(noise)
    numbers = torch.arange(1, len(order) + 1, device=score.device)
    held = (expected <= (FALSE_SHARE * numbers).clamp_max(FALSE_PER_TEXT * texts)).nonzero()
    return order[: int(held[-1]) + 1 if len(held) else 0]
