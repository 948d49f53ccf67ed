"""Infer the tokens of texts from rows of the embeddings' gradient, with few false tokens under noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.text.explanation import head_of
from fl_privacy.attacks.text.token_evidence import few_false
from fl_privacy.models import TextModel
from fl_privacy.models.gradients.choose_method import decayed, step_slices
from fl_privacy.types import Observation, Tensors

_TEXTS = 24  # simulated texts of each class
_MOST_CLASSES = 8
_UNUSUAL = 16.0  # multiple of the usual energy above which a position is classified
_DIRECTIONS = 48  # leading directions of a word's row that are modeled one by one


@dataclass(frozen=True, eq=False)
class WordModel:
    """Normal distribution of what one occurrence of a token adds to its row of the gradient, up to a common factor."""

    mean: Tensor  # (r,) along ``directions``
    spread: Tensor  # (r,) variance along each of them
    directions: Tensor  # (d, r) orthonormal columns


@dataclass(frozen=True, eq=False)
class Expected:
    """Simulated statistics of what a token adds to its row of the embeddings' gradient."""

    models: tuple[WordModel, ...]  # one model for each class of a text, then an isotropic one
    energy: float  # mean squared length of a token's contribution
    common: float  # mean product of two tokens' contributions, as a share of ``energy``


def simulated(
    model: TextModel, *, length: int, public: Tensor | None, labels: Tensor | None, texts: int, rng: torch.Generator
) -> Expected:
    """Simulate what tokens add to their rows of the embeddings' gradient, for texts drawn from ``public`` if given.

    ``length``: number L of tokens of a text, at least 2. ``public``: (N, L) token ids of N texts of the domain, -1 for
    no token; ``None`` draws tokens evenly. ``labels``: (B,) known classes, if any. ``texts``: number B of texts; for
    several, one distribution is simulated for all classes, instead of one for each.
    """
    classes = _classes(model, labels)
    tokens = _drawn_texts(model, length, public, _TEXTS * len(classes), rng).to(model.words.weight.device)
    slopes = _slopes(model, tokens, classes.repeat_interleave(_TEXTS))
    each = slopes.square().sum(-1).mean(0)
    slopes = slopes[:, (each <= _UNUSUAL * each.median()).nonzero().flatten()]  # without a classified position
    energy, number = float(slopes.square().sum(-1).mean()), slopes.shape[1]
    together = float(slopes.sum(1).square().sum(-1).mean()) / number
    common = (together / energy - 1) / (number - 1) if energy and number > 1 else 0.0
    each = slopes.reshape(len(classes), -1, slopes.shape[-1])
    parts = each if texts == 1 else each.reshape(1, -1, slopes.shape[-1])
    # an isotropic model, for optimizers that keep signs alone and for wrong simulations
    width = parts.shape[-1]
    eye = torch.eye(width, dtype=parts.dtype, device=parts.device)
    isotropic = WordModel(parts.new_zeros(width), parts.new_full((width,), energy / width), eye)
    return Expected((*map(_fitted_normal, parts), isotropic), energy, min(1.0, max(0.0, common)))


def _classes(model: TextModel, labels: Tensor | None) -> Tensor:
    if model.next_token:
        return torch.zeros(1, dtype=torch.long)
    if labels is not None and labels.dim() == 1:
        known: Tensor = torch.unique(labels)
        return known.cpu()
    return torch.arange(min(_MOST_CLASSES, model(torch.zeros(1, 1, dtype=torch.long)).shape[1]))


def _drawn_texts(model: TextModel, length: int, public: Tensor | None, number: int, rng: torch.Generator) -> Tensor:
    """Draw token ids (``number``, ``length``) from ``public`` texts, or evenly if there are none."""
    if public is None:
        return torch.randint(model.words.num_embeddings, (number, length), generator=rng)
    pool = public[public >= 0].cpu().long()
    begins = torch.randint(max(1, len(pool) - length), (number,), generator=rng)
    return pool[(begins[:, None] + torch.arange(length)).clamp_max(len(pool) - 1)]


@torch.enable_grad()
def _slopes(model: TextModel, tokens: Tensor, classes: Tensor) -> Tensor:
    embedded = model.words(tokens).detach().requires_grad_()
    logits = model(torch.cat([embedded, torch.ones_like(embedded[..., :1])], -1))
    if model.next_token:
        loss = F.cross_entropy(logits[..., :-1], tokens[:, 1:])
        loss = loss * len(tokens)
    else:
        loss = F.cross_entropy(logits, classes.to(logits.device), reduction="sum")
    slopes: Tensor = torch.autograd.grad(loss, embedded)[0]
    return slopes.detach()


def _fitted_normal(rows: Tensor) -> WordModel:
    """Fit a normal distribution to ``rows`` (m, d), along their leading singular directions."""
    center = rows.mean(0)
    values, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
    kept = directions[: min(_DIRECTIONS, int((values > 1e-4 * values[0]).sum()) or 1)].T
    spread = ((rows - center) @ kept).square().mean(0)
    return WordModel(center @ kept, spread.clamp_min(1e-12 * float(values[0]) ** 2 / len(rows)), kept)


_MOST = 8  # largest number of times that a word occurs


def repeated(energy: Tensor, *, common: float, total: int | None) -> Tensor:
    """Estimate each word's number of occurrences (k,), at least 1, from the squared norm of its row of the gradient.

    ``energy``: (k,) squared norms, minus the noise's; for c occurrences, c + c * (c - 1) * ``common`` times that for
    one. ``common``: mean inner product of two occurrences over the squared norm of one, in [0, 1]. ``total``: number of
    tokens, to which the counts add up; ``None``: a word counts as repeated above twice the median.
    """
    times = torch.arange(1, _MOST + 1, dtype=energy.dtype, device=energy.device)
    growth = times + times * (times - 1) * common
    reached = energy[:, None] / (growth[1:] * growth[:-1]).sqrt()
    if total is None:
        once = energy.median() if len(energy) else energy.sum()
        return 1 + (reached > 2 * once).long().cumprod(1).sum(1)
    spare = min(max(0, total - len(energy)), reached.numel())
    found = torch.ones_like(energy, dtype=torch.long)
    if spare:
        chosen = reached.flatten().topk(spare).indices // reached.shape[1]
        found += chosen.bincount(minlength=len(energy))
    return found


_SWEEPS = 20


def placed(words: Tensor, positions: Tensor) -> Tensor:
    """Find the word at each of L positions; return indices (L,) into the k ``words``.

    ``words`` (k, d) and ``positions`` (L, d) are rows of the gradients of the word and the position embedding. A word's
    row is the sum of the rows of its positions. Positions exchange words until these sums have the least squared error;
    there is no exchange if ``positions`` has zeros, as after pruning.
    """
    words, positions = words.double(), positions.double()
    found = _paired(words, positions)
    return found if bool((positions == 0).any()) else _exchanged(found, words, positions)


def _paired(words: Tensor, positions: Tensor) -> Tensor:
    """Return for each of L ``positions`` the index (L,) of a near word; each of k ``words`` is used if k <= L."""
    number, length = len(words), len(positions)
    found = torch.full((length,), -1, dtype=torch.long, device=words.device)
    left = _apart(words, positions)
    for _ in range(min(number, length)):
        word, position = divmod(int(left.argmin()), length)
        found[position] = word
        left[word], left[:, position] = torch.inf, torch.inf
    free = (found < 0).nonzero().flatten()
    if len(free):
        taken = found >= 0
        rest = words.index_add(0, found[taken], -positions[taken])
        found[free] = (
            _apart(rest, positions[free]) - _apart(rest, torch.zeros_like(positions[free]), positions[free])
        ).argmin(0)
    return found


def _apart(words: Tensor, positions: Tensor, kept: Tensor | None = None) -> Tensor:
    there = ((positions if kept is None else kept) != 0).to(words.dtype)
    return words.square() @ there.T - 2 * words @ positions.T + positions.square().sum(1)


def _exchanged(found: Tensor, words: Tensor, positions: Tensor) -> Tensor:
    number, length = len(words), len(found)
    own = torch.arange(length, device=found.device)
    products = positions @ positions.T
    squares = products.diagonal()
    for _ in range(_SWEEPS * length):
        rest = words - torch.zeros_like(words).index_add_(0, found, positions)
        fits = rest @ positions.T  # (k, L)
        now = fits[found, own]
        moved = 2 * (now + squares) - 2 * fits  # change where position j goes from its word to v
        moved[:, found.bincount(minlength=number)[found] < 2] = torch.inf  # every word that was found stands somewhere
        moved[found, own] = 0.0
        other = fits[found].T  # (L, L): residual of the word at i, along position j, at [j, i]
        swapped = 2 * ((now + squares)[:, None] + (now + squares)[None] - other - other.T - 2 * products)
        swapped[found[:, None] == found] = 0.0
        best_move, best_swap = float(moved.min()), float(swapped.min())
        tolerance = -1e-9 * float(words.square().sum())
        if min(best_move, best_swap) >= tolerance:
            break
        if best_move <= best_swap:
            word, position = divmod(int(moved.argmin()), length)
            found[position] = word
        else:
            one, two = divmod(int(swapped.argmin()), length)
            found[[one, two]] = found[[two, one]]
    return found


Where = Literal["embeddings", "head", "tied"]
"""Tensor of the rows: embeddings, a language model's head, or one matrix for both."""

_ULPS = 4.0  # roundings in single precision, in each local step, by which an untouched row may change


@dataclass(frozen=True, eq=False)
class WordRows:
    """Gradient rows of the vocabulary's V tokens, in embeddings or head, minus the row that absent tokens have."""

    values: Tensor  # (n, V, d) rows of n victims, with the sign of a gradient and the scale of the upload
    untouched: Tensor  # (n, V) ``True`` if the row equals an absent token's, up to rounding
    where: Where

    def of(self, number: int) -> "WordRows":
        return replace(self, values=self.values[number, None], untouched=self.untouched[number, None])


def where_words_are(model: TextModel, uploaded: Tensors) -> tuple[str, Where] | None:
    """Return the name of the uploaded tensor with a row for each token, and its layer (:data:`Where`), or ``None``."""
    head = head_of(model) if model.next_token else None
    if model.word_weight in uploaded:
        return model.word_weight, "tied" if head is not None and head[0] == model.word_weight else "embeddings"
    if head is not None and head[0] in uploaded:
        return head[0], "head"
    return None


@torch.no_grad()
def word_rows(observations: Sequence[Observation], name: str, where: Where) -> WordRows:
    """Return each token's row of the uploaded tensor ``name``, for updates with one training plan and sent model.

    ``where``: layer of the tensor. Weight decay is subtracted. The median row is subtracted, too: always for an output
    layer, whose rows are nearly equal; for embeddings, only if most rows equal the median.
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


_SCALES = 25  # number of factors between simulation and upload that are tried, each twice the one before
_STANDS_OUT = 3.0  # least ratio of words' rows to the next longest row of a head
_EXPECTED_OF_MODEL = 0.3  # cosine of a head's row with the other rows' sum above which the row shows no word
_AT_ONCE = 1 << 24
_SURE = 30.0  # largest log likelihood ratio that counts in choosing the distribution, so that no long row dominates
_MIXED, _MOST_ODDS = 1e-6, 0.5  # least and largest prior probability of a token, so that frequency alone names no word
_PASSES = 2
_TIED = 1e-4  # difference of log likelihood ratios that counts as rounding
_TIMES, _DRAWN = 8, 1 << 25  # number of noise rows for each token, and their largest number of elements


@dataclass(frozen=True, eq=False)
class FoundWords:
    """Words found in one victim's update."""

    tokens: Tensor  # (k,) tokens in the texts, the surest first
    energy: Tensor  # (V,) squared length of each row, without the noise's, at least 0
    exact: bool  # ``True`` without noise, if no other token can have such a row
    noise: float  # standard deviation of the noise on each element


def found_words(
    rows: WordRows,
    *,
    odds: Tensor,
    most: int,
    texts: int,
    expected: Expected | None,
    stated_noise: float | None,
    rng: torch.Generator,
) -> FoundWords:
    """Find the words in one victim's texts by the ``rows`` of its embeddings' gradient.

    ``odds``: prior probability of each token. ``most``: largest number of tokens in the texts. ``expected``: simulated
    statistics of the rows of words that occur; ``None`` if rows are exact. ``stated_noise``: standard deviation of an
    element's noise, if the defense is known; ``None`` to estimate it.
    """
    values, untouched = rows.values[0], rows.untouched[0]
    energy = values.square().sum(1)
    if expected is None or is_exact(rows, most, stated_noise):
        return _exactly(untouched, energy)
    width, typical = values.shape[1], float(energy.median())
    variance = typical / width / (1 - 2 / (9 * width)) ** 3
    if typical == 0:  # most were dropped; those kept are mostly noise
        variance = 0.0 if bool(untouched.all()) else float(energy[~untouched].median()) / width
    if stated_noise:
        variance = min(variance, stated_noise**2)
    if variance == 0:
        return _exactly(untouched, energy)
    likeliest = _likeliest(values, expected, odds, variance)
    prior = torch.logit(odds.clamp(_MIXED, _MOST_ODDS))
    score = _ratios(values, *likeliest, variance)[:, 0] + prior
    chosen = energy.topk(min(most, len(values) // 2)).indices
    for _ in range(_PASSES):  # the first pass leaves out more than words, including tails of the noise
        noise = _ratios(noise_rows(values, energy, chosen, rng), *likeliest, variance)[:, 0]
        chosen = significant(score, noise, prior, texts=texts, most=most)
    return FoundWords(chosen, (energy - values.shape[1] * variance).clamp_min(0), False, variance**0.5)


def words_of_head(rows: WordRows, most: int) -> FoundWords:
    """Find at most ``most`` words in the ``rows`` of a language model's output layer, for one victim.

    The gradient sums (p - y) h^T over all positions, with prediction p, label y and hidden state h. A word's row is
    many times as long as others; under noise or for a confident model, none is found. Rows with nearly the direction of
    most rows are left out: the model only expected their tokens.
    """
    values = rows.values[0]
    lengths = torch.linalg.vector_norm(values, dim=1)
    order = lengths.argsort(descending=True, stable=True)
    longest = lengths[order[: min(most, len(order) - 1) + 1]]
    ratios = longest[:-1] / longest[1:].clamp_min(torch.finfo(longest.dtype).tiny)
    last = int(ratios.argmax())
    if not bool(longest[0] > 0) or float(ratios[last]) < _STANDS_OUT:
        return FoundWords(order[:0], lengths.square(), False, 0.0)
    apart, common = order[: last + 1], values[order[last + 1 :]].sum(0)
    alike = torch.nn.functional.cosine_similarity(values[apart], common[None], dim=1)
    return FoundWords(apart[alike < _EXPECTED_OF_MODEL], lengths.square(), False, 0.0)


def _exactly(untouched: Tensor, energy: Tensor) -> FoundWords:
    words = (~untouched).nonzero().flatten()
    return FoundWords(words[energy[words].argsort(descending=True, stable=True)], energy, True, 0.0)


def is_exact(rows: WordRows, most: int, stated_noise: float | None) -> bool:
    """Return whether the changed rows are exactly the first victim's words: at most ``most``, and no noise stated."""
    touched = int((~rows.untouched[0]).sum())
    return 2 * touched < rows.untouched.shape[1] and touched <= most and not stated_noise


def _likeliest(values: Tensor, expected: Expected, probability: Tensor, variance: float) -> tuple[WordModel, Tensor]:
    """Choose the distribution in ``expected``, and its scale (1,), that make the rows ``values`` likeliest.

    ``probability``: (V,) of each token to occur. ``variance``: noise's variance in an element.
    """
    strongest = float(values.square().sum(1).max())
    scales = float((max(strongest, variance) / max(expected.energy, 1e-30)) ** 0.5) * 2.0 ** torch.arange(
        2 - _SCALES, 2, dtype=torch.float64, device=values.device
    )
    best, most = None, -torch.inf
    for model in expected.models:
        total = torch.log1p(
            probability[:, None] * _ratios(values, model, scales, variance).clamp_max(_SURE).expm1()
        ).sum(0)
        at = int(total.argmax())
        if best is None or float(total[at]) > most:
            best, most = (model, scales[at, None]), float(total[at])
    assert best is not None, "there is always one without any direction"
    return best


def _ratios(values: Tensor, model: WordModel, scales: Tensor, variance: float) -> Tensor:
    """Return log likelihood ratios (V, S) of V rows: a word's row at each of S ``scales``, against noise alone.

    At scale s, a word's row is N(s mean, s^2 spread + variance) for ``model``; noise is N(0, variance).
    """
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
    """Draw rows (m, d) of pure noise like the noise in V rows, ``values`` (V, d); m is chosen here.

    Each element is drawn from the same column of ``values``, but not from the rows of possible ``words`` (k,). All rows
    are then scaled to the median squared length of ``values``. ``energy``: (V,) squared lengths of ``values``.
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
    """Return tokens (k,) whose ``score`` is too large for noise, the surest first.

    :func:`few_false` bounds the expected number of false ones (Benjamini and Hochberg 1995, with weights by Genovese et
    al. 2006). ``score``: evidence plus ``prior`` of each token. ``noise``: (m,) evidence of noise rows, without a
    prior. ``prior``: log odds of each token. ``texts``: number of texts. ``most``: largest k.
    """
    order = score.argsort(descending=True)[:most]
    noise, (kinds, tokens) = noise.sort().values, torch.unique(prior, return_counts=True)
    above = len(noise) - torch.searchsorted(noise, score[order, None] - kinds - _TIED)  # (most, kinds)
    return order[: few_false((above.double() @ tokens.double()) / len(noise), texts)]
