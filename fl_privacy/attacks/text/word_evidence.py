"""Which tokens are in the texts, by their rows: beside exact zeros, and beside noise with few false ones.

The rows of an upload that belong to tokens: which of them are those of a token that is in no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fl_privacy.attacks.text.expected_words import Expected, WordModel
from fl_privacy.attacks.text.explanation import head_of
from fl_privacy.models import TextModel
from fl_privacy.models.gradients.choose_method import decayed, step_slices
from fl_privacy.types import Observation, Tensors

Where = Literal["embeddings", "head", "tied"]
"""Whose rows: the embeddings', those of a language model's head, or those of one matrix that is both."""

_ULPS = 4.0
"""Roundings of a weight in single precision that a row may be off by, in each local step, and still be untouched."""


@dataclass(frozen=True, eq=False)
class WordRows:
    """Rows of updates that belong to tokens.

    Attributes:
        values: (n, V, d) the row of each token of n victims, without what one that is in no text has, with the sign of
            a gradient, in the units of the upload.
        untouched: (n, V) whether it is exactly, but for rounding, that of a token which is in no text.
        where: whose rows they are.
    """

    values: Tensor
    untouched: Tensor
    where: Where

    def of(self, number: int) -> "WordRows":
        """Select the rows of one victim, as n = 1."""
        return replace(self, values=self.values[number, None], untouched=self.untouched[number, None])


def where_words_are(model: TextModel, uploaded: Tensors) -> tuple[str, Where] | None:
    """Find the uploaded tensor that has a row for each token: its name and what it is; ``None`` if there is none."""
    head = head_of(model) if model.next_token else None
    if model.word_weight in uploaded:
        return model.word_weight, "tied" if head is not None and head[0] == model.word_weight else "embeddings"
    if head is not None and head[0] in uploaded:
        return head[0], "head"
    return None


@torch.no_grad()
def word_rows(observations: Sequence[Observation], name: str, where: Where) -> WordRows:
    """Return the rows of the tensor ``name`` in updates with one plan and one model.

    Weight decay moves every row, of a token that is in no text by nothing else: that is computed and taken off. One
    matrix that is both embeddings and head, or a head, also has what the model expects of each token; for most tokens
    it is the same and next to nothing, hence the median row is taken off. So it is where all rows that do not count
    are rounded to the same one that is not zero.
    """
    first = observations[0]
    sent, plan = first.sent.parameters[name].float(), first.plan
    updates = torch.stack([observation.update()[name].to(sent.device).float() for observation in observations])
    rounding = torch.zeros_like(sent)
    if plan.shares != "gradient":
        steps = len(step_slices(first.upload.num_examples, plan))
        idle = decayed(sent, plan, steps) - sent
        updates = idle - updates
        rounding = _ULPS * steps * torch.finfo(torch.float32).eps * (sent.abs() + idle.abs())
        if not plan.weight_decay and plan.shares == "delta":
            rounding = torch.zeros_like(sent)
    usual = updates.median(1, keepdim=True).values
    untouched = ((updates - usual).abs() <= rounding).all(2)
    mostly = untouched.float().mean(1) > 0.5
    off = usual if where != "embeddings" else usual * mostly[:, None, None]
    return WordRows(updates - off, untouched & mostly[:, None], where)


def is_text_with_words(observation: Observation) -> bool:
    """Say whether ``observation`` is of texts, and a tensor with a row for each token was uploaded."""
    model: nn.Module = observation.model
    return isinstance(model, TextModel) and where_words_are(model, observation.upload.tensors) is not None


_SCALES = 25
"""Factors between what was simulated and what was uploaded that are tried, each twice the one before."""
_STANDS_OUT = 3.0
"""Times the next longest row of a head that those of words are long."""
_EXPECTED_OF_MODEL = 0.3
"""Cosine with what the model expects of all other tokens from which on a row of a head holds nothing else."""
_AT_ONCE = 1 << 24
_SURE = 30.0
"""Log likelihood ratio from which on a row tells no more of the distribution: a single long one, such as that of the
token which is classified, would outweigh all others."""
_MIXED, _MOST_ODDS = 1e-6, 0.5
"""Least and largest probability of a token to be in a text: no word is read by its frequency alone."""
FALSE_PER_TEXT = 0.5
"""Words for each text that noise alone may be taken for, on average: half of the one that is promised at most."""
FALSE_SHARE = 0.1
"""Share of the words found that noise alone may be taken for, on average, at most."""
_PASSES = 2
_TIED = 1e-4
"""Log likelihood ratios that are as far apart are the same but for rounding."""
_TIMES, _DRAWN = 8, 1 << 25
"""Rows of noise for each token that are compared with, and their elements at most."""


@dataclass(frozen=True, eq=False)
class Found:
    """Words that were found in the update of one victim.

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
    """Find the words that the ``rows`` of a single victim show.

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
    evidence = _likeliest(values, expected, odds, variance)
    prior = torch.logit(odds.clamp(_MIXED, _MOST_ODDS))
    score = evidence.of(values) + prior
    chosen = energy.topk(min(most, len(values) // 2)).indices
    for _ in range(_PASSES):  # the first one leaves out more than words, and with it what tails the noise has
        noise = evidence.of(noise_rows(values, energy, chosen, rng))
        chosen = significant(score, noise, prior, texts=texts, most=most)
    return Found(chosen, (energy - values.shape[1] * variance).clamp_min(0), False, variance**0.5)


def words_of_head(rows: WordRows, most: int) -> Found:
    """Find the words that a language model's head shows in its ``rows``, n = 1; see ``found_words``.

    The gradient of the head is the sum over all places of (p - y) h^T, with p what the model expects, y the word that
    is there, and h what enters the head. So every token has a row, but for most the model expects next to nothing, and
    a word's, which has -h, is many times as long, unless noise or a sure model hide it: then none is named. A token
    that the model expects often, and that is not there, has a row along what all others have in common.
    """
    values = rows.values[0]
    lengths = torch.linalg.vector_norm(values, dim=1)
    order = lengths.argsort(descending=True, stable=True)
    longest = lengths[order[: min(most, len(order) - 1) + 1]]
    ratios = longest[:-1] / longest[1:].clamp_min(torch.finfo(longest.dtype).tiny)
    last = int(ratios.argmax())
    if not bool(longest[0] > 0) or float(ratios[last]) < _STANDS_OUT:
        return Found(order[:0], lengths.square(), False, 0.0)
    apart, common = order[: last + 1], values[order[last + 1 :]].sum(0)
    alike = torch.nn.functional.cosine_similarity(values[apart], common[None], dim=1)
    return Found(apart[alike < _EXPECTED_OF_MODEL], lengths.square(), False, 0.0)


def _exactly(untouched: Tensor, energy: Tensor) -> Found:
    words = (~untouched).nonzero().flatten()
    return Found(words[energy[words].argsort(descending=True, stable=True)], energy, True, 0.0)


def is_exact(rows: WordRows, most: int, told_noise: float | None) -> bool:
    """Say whether most of the first victim's rows are of tokens in no text, and few enough are touched."""
    touched = int((~rows.untouched[0]).sum())
    return 2 * touched < rows.untouched.shape[1] and touched <= most and not told_noise


def _variance(energy: Tensor, width: int, touched: Tensor) -> float:
    """Estimate the variance of an element of the noise by the median of rows, most of which are noise alone."""
    typical = float(energy.median())
    if typical == 0:  # most were dropped; those kept are mostly noise
        return float(energy[touched].median()) / width if bool(touched.any()) else 0.0
    return typical / width / (1 - 2 / (9 * width)) ** 3


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Evidence that a row is a word's: one distribution of such rows and one scale, against noise alone.

    Attributes:
        model: the distribution.
        scale: factor from what was simulated to what was uploaded.
        variance: of the noise on an element.
    """

    model: WordModel
    scale: Tensor
    variance: float

    def of(self, values: Tensor) -> Tensor:
        """Return the log likelihood ratio (n,) of each of ``values`` (n, d)."""
        return _ratios(values, self.model, self.scale[None], self.variance)[:, 0]


def _likeliest(values: Tensor, expected: Expected, odds: Tensor, variance: float) -> _Evidence:
    """Choose the distribution and scale under which all rows (V, d) together are likeliest."""
    strongest = float(values.square().sum(1).max())
    scales = float((max(strongest, variance) / max(expected.energy, 1e-30)) ** 0.5) * 2.0 ** torch.arange(
        2 - _SCALES, 2, dtype=torch.float64, device=values.device
    )
    best, most = None, -torch.inf
    for model in expected.models:
        ratios = _ratios(values, model, scales, variance)
        total = torch.log1p(odds[:, None] * ratios.clamp_max(_SURE).expm1()).sum(0)
        at = int(total.argmax())
        if best is None or float(total[at]) > most:
            best, most = _Evidence(model, scales[at], variance), float(total[at])
    assert best is not None, "there is always one without any direction"
    return best


def _ratios(values: Tensor, model: WordModel, scales: Tensor, variance: float) -> Tensor:
    """Return the log (V, S) of N(s mean, s^2 spread + variance) over N(0, variance) for each s of ``scales`` (S,)."""
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


def noise_rows(values: Tensor, energy: Tensor, words: Tensor, rng: torch.Generator) -> Tensor:
    """Draw rows (m, d) that are noise for sure, distributed as that in ``values`` (V, d), whatever its distribution.

    Each element is that of another row at the same place, of all rows but those of ``words`` (k,), which may be words';
    hence no row of them is a word's. As those left out may have more than their share of the noise, all are scaled to
    the median length of ``values``, whose squares ``energy`` (V,) is.
    """
    others = torch.ones(len(values), dtype=torch.bool, device=values.device)
    others[words] = False
    kept = values[others]
    number = max(1, min(_TIMES * len(values), _DRAWN // values.shape[1]))
    drawn = torch.empty(number, values.shape[1], dtype=values.dtype, device=values.device)
    for column in range(values.shape[1]):
        drawn[:, column] = kept[torch.randint(len(kept), (number,), generator=rng).to(kept.device), column]
    usual, own = float(energy.median()), float(drawn.square().sum(1).median())
    return drawn * (usual / own) ** 0.5 if usual and own else drawn


def significant(score: Tensor, noise: Tensor, prior: Tensor, *, texts: int, most: int) -> Tensor:
    """Return the tokens (k,) whose ``score`` is so large that few are expected to be noise, the surest first.

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
    above = len(noise) - torch.searchsorted(noise, score[order, None] - kinds - _TIED)  # (most, kinds)
    expected = (above.double() @ tokens.double()) / len(noise)
    numbers = torch.arange(1, len(order) + 1, device=score.device)
    held = (expected <= (FALSE_SHARE * numbers).clamp_max(FALSE_PER_TEXT * texts)).nonzero()
    return order[: int(held[-1]) + 1 if len(held) else 0]
