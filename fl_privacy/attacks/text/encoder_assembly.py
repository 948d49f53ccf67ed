"""Assemble an encoder's texts from candidate tokens that together fit the second transformer block's gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import cast

import torch
from torch import Tensor, nn

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.exact.certificate import least_squares
from fl_privacy.attacks.text.token_candidates import CLEAR, Candidates, Lengths, Span, entering_block
from fl_privacy.models import TextModel
from fl_privacy.models.gradients.hooks import entering
from fl_privacy.types import Tensors

Enough = Callable[[Sequence[Tensor]], bool]  # check if texts (L,), possibly with copies, make up the batch
_AT_ONCE = 512
_SWEEPS = 8
_NARROWINGS, _TRIED, _SPARE = 4, 6, 2
_STARTS = 3
_RANDOM = 64
_STUCK, _PAIRS = 3, 1 << 12  # largest numbers of texts in which pairs of tokens are exchanged, and of pairs
_DECIDABLE = 1e-6  # distances below this are rounding in single precision


@dataclass(frozen=True, eq=False)
class Assembled:
    """Text of candidate ``tokens`` (L,); ``residual``: distance of its hidden states from the gradient's row space."""

    tokens: Tensor
    residual: float
    clear: bool  # ``True`` if other candidates at any position are ``CLEAR`` times farther


@dataclass(frozen=True, eq=False)
class Assembly:
    """Search for texts of candidate tokens whose hidden states lie in ``span``, the row space of a gradient."""

    model: TextModel
    span: Span  # row space of the gradient of the second block's attention, which contains the right texts' states
    classified: int | None  # position of the only token whose state is in the span; ``None`` if all are
    candidates: Candidates
    any_length: bool = False
    unit: float = 1.0  # distance of texts of random candidates, which are nearer to the span than random vectors

    def residuals(self, texts: Tensor) -> Tensor:
        apart = self.distances(texts)
        return (apart.square().mean(1).sqrt() if self.classified is None else apart[:, self.classified]) / self.unit

    def distances(self, texts: Tensor) -> Tensor:
        parts = torch.split(texts, _AT_ONCE)
        return torch.cat([self.span.distance(entering_block(self.model, part, 1)) for part in parts])

    def in_units(self, rng: torch.Generator) -> "Assembly":
        at = self.candidates.tokens[: self.candidates.length]
        if all(len(choices) < 2 for choices in at):
            return self
        picked = [choices[torch.randint(len(choices), (_RANDOM,), generator=rng)] for choices in at]
        farthest = float(self.residuals(torch.stack(picked, 1)).max())
        return replace(self, unit=self.unit * farthest) if farthest > _DECIDABLE else self

    def descend(self, texts: Tensor, fixed: int | None = None) -> list[Assembled]:
        """Exchange each token of ``texts`` (n, L), except at ``fixed``, so that the text comes nearest to ``span``."""
        texts = texts.clone()
        best = self.residuals(texts)
        for _ in range(_SWEEPS):
            before, least = best.clone(), torch.full_like(best, torch.inf)
            for position in range(texts.shape[1]):
                choices = self.candidates.tokens[position]
                if len(choices) < 2:
                    continue
                tried = texts.repeat_interleave(len(choices), 0)
                tried[:, position] = choices.repeat(len(texts))
                apart = self.residuals(tried).reshape(len(texts), len(choices))
                least = torch.minimum(least, apart.topk(2, largest=False).values[:, 1])
                if position == fixed:
                    apart = apart.masked_fill(choices != texts[:, position, None], torch.inf)
                best, chosen = apart.min(1)
                texts[:, position] = choices[chosen]
            if bool((best >= before * (1 - 1e-6)).all()):
                break
        each = zip(texts, best.tolist(), least.tolist(), strict=True)
        return [Assembled(text, residual, other > CLEAR * residual) for text, residual, other in each]

    def judged(self, text: Assembled) -> Assembled:
        """Return ``text`` with ``clear`` set: ``True`` if any other token would put it much farther from ``span``."""
        others, length = [], len(text.tokens)
        for position, at in enumerate(self.candidates.tokens[: len(text.tokens)]):
            choices = at[at != text.tokens[position]]
            tried = text.tokens.repeat(len(choices), 1)
            tried[:, position] = choices
            others.append(tried)
        tried = torch.cat(others)
        least = float(self.residuals(tried).min()) if len(tried) else torch.inf
        if self.any_length and length > 1:
            least = min(least, float(self.residuals(text.tokens[None, :-1])))
        if self.any_length and length < len(self.candidates.tokens) and len(self.candidates.tokens[length]):
            further = self.candidates.tokens[length]
            longer = torch.cat([text.tokens.repeat(len(further), 1), further[:, None]], 1)
            least = min(least, float(self.residuals(longer).min()))
        return replace(text, clear=least > CLEAR * text.residual)

    def exchanged(self, texts: Tensor) -> Tensor:
        found, sizes = [], [len(at) for at in self.candidates.tokens[: texts.shape[1]]]
        if sum(one * other for one, other in combinations(sizes, 2)) > _PAIRS:
            return texts
        for text in texts:
            tried = [text[None]]
            for one, other in combinations(range(len(text)), 2):
                pairs = torch.cartesian_prod(self.candidates.tokens[one], self.candidates.tokens[other])
                changed = (pairs[:, 0] != text[one]) & (pairs[:, 1] != text[other])
                several = text.repeat(int(changed.sum()), 1)
                several[:, [one, other]] = pairs[changed]
                tried.append(several)
            choices = torch.cat(tried)
            found.append(choices[self.residuals(choices).argmin()])
        return torch.stack(found)


def narrowed(assembly: Assembly, lengths: Lengths, rng: torch.Generator) -> Assembly:
    """Keep, for each position, the candidate tokens with which random texts are nearest to the gradient's row space."""
    if assembly.classified is not None:
        return assembly
    tokens = list(assembly.candidates.tokens[: lengths.longest])
    reached = [max(1, lengths.reaching(p)) for p in range(len(tokens))]
    for _ in range(_NARROWINGS):
        drawn = _TRIED * max(len(at) for at in tokens)
        picked = []
        for at in tokens:  # each equally often, up to one
            orders = [torch.randperm(len(at), generator=rng) for _ in range(-(-drawn // len(at)))]
            picked.append(torch.cat(orders)[:drawn])
        apart = assembly.distances(torch.stack([at[chosen] for at, chosen in zip(tokens, picked, strict=True)], 1))
        for position, (at, chosen) in enumerate(zip(tokens, picked, strict=True)):
            best = apart.new_full((len(at),), torch.inf)
            best.scatter_reduce_(0, chosen.to(apart.device), apart[:, position], "amin")
            tokens[position] = at[best.argsort()[: max(_SPARE * reached[position], (len(at) + 1) // 2)]]
    return replace(assembly, candidates=replace(assembly.candidates, tokens=tokens))


def assemble(
    assembly: Assembly, *, lengths: Lengths, tolerance: float, rng: torch.Generator, rounds: int, enough: Enough
) -> list[Assembled]:
    """Choose a text for each of ``lengths`` from candidate tokens, with hidden states in the gradient's row space.

    Searches start from each token that is in no text yet, ``rounds`` times. If not all texts are within ``tolerance``
    of the row space, the nearest are returned. ``enough``: function that returns ``True`` if given texts, some of them
    repeated, make up the whole batch; these are then returned.
    """
    whole = assembly.in_units(rng)
    assembly = narrowed(whole, lengths, rng)
    found: dict[tuple[int, ...], Assembled] = {}
    sure: dict[tuple[int, ...], Assembled] = {}
    doubted: set[tuple[int, ...]] = set()
    chosen: list[Assembled] = []
    for each, length in timely(product([1, *[_STARTS] * (rounds - 1)], reversed(lengths.possible))):
        for text in _searched(assembly, length, list(sure.values()), each=each, tolerance=tolerance, rng=rng):
            key = tuple(text.tokens.tolist())
            if key not in found or text.residual < found[key].residual:
                found[key] = text
        before = len(sure)
        for key, text in found.items():
            if key in sure or key in doubted or not text.residual < tolerance / CLEAR:
                continue
            if not whole.any_length or whole.judged(text).clear:
                sure[key] = text
            else:
                doubted.add(key)
        if len(sure) >= lengths.number and (chosen := _chosen(list(sure.values()), lengths, repeated=False)):
            break
        if before < len(sure) < lengths.number and enough([text.tokens for text in sure.values()]):
            return [whole.judged(text) for text in sure.values()]
    chosen = chosen or _chosen(list(found.values()), lengths)
    return [whole.judged(text) if text.clear else text for text in chosen]


def _searched(
    assembly: Assembly, length: int, sure: Sequence[Assembled], *, each: int, tolerance: float, rng: torch.Generator
) -> list[Assembled]:
    explained, likely = {pair for text in sure for pair in enumerate(text.tokens.tolist())}, []
    for place, at in enumerate(assembly.candidates.tokens[:length]):  # the tokens that are in no text yet, or all
        left = [token for token in at.tolist() if (place, token) not in explained]
        likely.append(at.new_tensor(left) if left else at)
    position = max(range(length), key=lambda p: len(likely[p]))
    starts = []
    for token in likely[position].repeat_interleave(each):
        drawn = [at[int(torch.randint(len(at), (1,), generator=rng))] for at in likely]
        starts.append(torch.stack([*drawn[:position], token, *drawn[position + 1 :]]))
    descended = assembly.descend(torch.stack(starts), position)
    nearest = sorted(descended, key=lambda text: text.residual)
    stuck = list({tuple(text.tokens.tolist()): text.tokens for text in nearest}.values())[:_STUCK]
    if each > 1 and all(text.residual >= tolerance / CLEAR for text in descended):
        descended += assembly.descend(assembly.exchanged(torch.stack(stuck)), position)
    return descended


def _chosen(texts: list[Assembled], lengths: Lengths, *, repeated: bool = True) -> list[Assembled]:
    """Choose the text nearest to the gradient's row space for each of ``lengths``, if known, else the nearest texts.

    If no text of a length is left, a chosen one is repeated; with ``repeated=False``, an empty list is returned.
    """
    left = sorted(texts, key=lambda text: text.residual)
    if lengths.known is None:
        return left[: lengths.number]
    chosen: list[Assembled] = []
    for length in lengths.known:
        fitting = next((text for text in [*left, *(chosen if repeated else ())] if len(text.tokens) == length), None)
        if fitting is None and not repeated:
            return []
        if fitting in left:
            left.remove(fitting)
        if fitting is not None:
            chosen.append(fitting)
    return chosen


_STEPS = 400  # steps of the search for the shares of positions
_ALONE, _LEAST = 0.6, 0.02  # share of a position in a word: above, the word stood only there; below, not there
_PASSES, _NOISE = 25, 1e-6  # passes of expectation maximization, and the variance of its noise


@dataclass(frozen=True, eq=False)
class Parts:
    """The gradient of the first transformer block, as a sum over words and as a sum over positions."""

    words: Tensor  # (V, m) summand of each word, float64
    positions: Tensor  # (P, m) summand of each position, with the same sum over all
    attended: Tensor  # (V, 2, d) words' summands of the query and key gradients


@dataclass(frozen=True, eq=False)
class GuessedTexts:
    """Texts assembled from the inferred position of each word; most of their tokens are right."""

    tokens: Sequence[Tensor]  # (n,) possible tokens at each position
    texts: Sequence[Tensor]  # (L,) tokens of each text, the shortest first; at maximum length if lengths are unknown
    held: Sequence[Tensor]  # (L,) ``True`` for words found at one position only, which are reliable


def disaggregated(model: TextModel, gradient: Tensors, words: Tensor, lengths: Lengths) -> GuessedTexts | None:
    """Guess the texts of a batch from the first block's gradient, a sum over all texts.

    ``words``: (V,) ids that may occur. ``None`` if fewer words than texts have a single, clear position.
    """
    number, longest = lengths.number, lengths.longest
    parts = parts_of(model, gradient, words, longest)
    if parts is None:
        return None
    shares = shares_of(parts)
    most, where = shares.max(1)
    alone = (most > _ALONE).nonzero().flatten()
    if len(alone) < number:
        return None
    positions = where[alone]
    possible = shares > _LEAST
    possible[alone] = nn.functional.one_hot(positions, longest).bool()
    standing = possible.nonzero()
    support = supports(model, parts, alone, words[standing[:, 0]], standing[:, 1])
    own = (standing == torch.stack([alone, positions], 1)[:, None]).all(-1).int().argmax(1)
    groups = grouped(support[:, own], positions, number)
    members = [(groups == group).nonzero().flatten() for group in range(number)]
    members.sort(key=lambda group: int(positions[group].max()) if len(group) else 0)
    texts, held = [], []
    likeliest = shares.argmax(0)
    for group, length in zip(members, lengths.known or [longest] * number, strict=True):
        text = words[likeliest]
        text[positions[group]] = words[alone[group]]
        texts.append(text[:length])
        held.append(torch.isin(torch.arange(length, device=text.device), positions[group]))
    possible[most <= _ALONE] = True
    possible[likeliest, torch.arange(longest, device=words.device)] = True  # if no word was alone
    return GuessedTexts([words[at] for at in possible.T], texts, held)


@torch.no_grad()
def parts_of(model: TextModel, gradient: Tensors, words: Tensor, longest: int) -> Parts | None:
    """Split the first block's query, key and value gradients into a summand for each word and each position.

    ``words``: V possible tokens. ``longest``: number of positions. ``None`` if this block or update does not permit it.
    """
    names, norm = model.attention_weights[0], model.entry_norm
    if norm is None or len(names) != 3 or model.transposed or not all(name in gradient for name in names):
        return None
    with entering({"norm": norm}) as calls:
        entering_block(model, words[:, None].expand(-1, longest), 0)
    sums = calls[0].inputs.double()
    sums = (sums - sums.mean(-1, keepdim=True)) * norm.weight.double()
    directions = torch.cat([sums[:, 0], sums[0, 1:] - sums[0, :1], norm.bias.double()[None]])
    if len(directions) > directions.shape[1]:
        return None
    rows = torch.cat([gradient[name].double() for name in names])
    solved = least_squares(directions.T, rows.T)
    of_words, behind = solved[: len(words)], solved[len(words) : -1]
    pairs = [(of_words, torch.cat([of_words.sum(0, keepdim=True) - behind.sum(0, keepdim=True), behind]))]
    if model.word_weight in gradient and model.position_weight in gradient:
        rows_of = gradient[str(model.position_weight)][model.first_position :][:longest]
        pairs.append((gradient[model.word_weight][words].double(), rows_of.double()))
    scales = [1 / one.norm().clamp_min(1e-300) for one, _ in pairs]
    width = rows.shape[1]
    scaled = [(one * scale, other * scale) for (one, other), scale in zip(pairs, scales, strict=True)]
    words_parts, position_parts = (torch.cat(each, 1) for each in zip(*scaled, strict=True))
    return Parts(words_parts, position_parts, of_words[:, : 2 * width].reshape(-1, 2, width))


def shares_of(parts: Parts) -> Tensor:
    """Estimate the share of each of P positions in the gradient of each of V words; return (V, P), rows add up to 1."""
    lengths = parts.words.norm(dim=1, keepdim=True).clamp_min(1e-12)
    atoms = parts.words / lengths
    gram, aim = atoms @ atoms.T, atoms @ parts.positions.T
    rate = 1 / float(torch.linalg.eigvalsh(gram)[-1])
    found: Tensor = _on_simplex(torch.zeros_like(aim), lengths)
    ahead, momentum = found, 1.0
    for _ in range(_STEPS):
        moved = _on_simplex(ahead - rate * (gram @ ahead - aim), lengths)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = moved + (momentum - 1) / following * (moved - found)
        found, momentum = moved, following
    return cast(Tensor, found / lengths)


def _on_simplex(rows: Tensor, sums: Tensor) -> Tensor:
    ordered = rows.sort(1, descending=True).values
    excess = (ordered.cumsum(1) - sums) / torch.arange(1, rows.shape[1] + 1, device=rows.device)
    return (rows - excess.gather(1, (ordered > excess).sum(1, keepdim=True) - 1)).clamp_min(0)


@torch.no_grad()
def supports(model: TextModel, parts: Parts, alone: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """Estimate how much each of n tokens shapes the gradients of T words (T, n); near 0 for tokens of other texts.

    ``parts``: first block's gradient, split by word. ``alone``: indices (T,) of words that are at one position only.
    ``tokens`` (n,) are at ``positions`` (n,). The method is sparse Bayesian learning (Tipping 2001).
    """
    longest = int(positions.max()) + 1
    inputs = entering_block(model, tokens[:, None].expand(-1, longest), 0)[torch.arange(len(tokens)), positions]
    queries, keys = (
        model.get_submodule(name.removesuffix(".weight"))(inputs).double() for name in model.attention_weights[0][:2]
    )
    keys = keys - keys.mean(0)  # the gradient behind a softmax has coefficients whose sum is zero
    heads = (model.heads, -1)
    atoms = torch.cat([of.unflatten(1, heads).permute(1, 2, 0) for of in (keys, queries)])
    atoms = atoms / atoms.square().sum(1).mean(0).sqrt().clamp_min(1e-12)
    behind = parts.attended[alone]
    behind = behind / behind.norm(dim=2, keepdim=True).clamp_min(1e-300)
    return torch.cat([_variances(atoms, some) for some in behind.unflatten(2, heads).flatten(1, 2).split(16)])


def _variances(atoms: Tensor, seen: Tensor) -> Tensor:
    # returns variances (T, n), by EM, of the coefficients with which n ``atoms`` (H, m, n) add up to the
    # gradients ``seen`` (T, H, m) of T words; H counts keys and queries of all heads, which share the variances
    noise = _NOISE * torch.eye(atoms.shape[1], dtype=atoms.dtype, device=atoms.device)
    found = atoms.new_full((len(seen), atoms.shape[2]), 1 / atoms.shape[2])
    for _ in range(_PASSES):
        spread = torch.einsum("hmn,tn,hkn->thmk", atoms, found, atoms) + noise
        solved = torch.linalg.solve(spread, torch.cat([atoms.expand(len(seen), -1, -1, -1), seen[..., None]], -1))
        mean = found[:, None] * torch.einsum("hmn,thm->thn", atoms, solved[..., -1])
        left = found[:, None] - found[:, None].square() * torch.einsum("hmn,thmn->thn", atoms, solved[..., :-1])
        found = (mean.square() + left).mean(1)
    return found


def grouped(support: Tensor, positions: Tensor, number: int) -> Tensor:
    """Return the number (T,) of the text that each of T tokens belongs to, by spectral clustering.

    ``support``: (T, T) affinities, at least 0. ``positions`` (T,): tokens at the same position get affinity 0.
    ``number``: number of texts. The method is by Damle, Minden and Ying (2019).
    """
    affinity = support.masked_fill(positions[:, None] == positions, 0)
    affinity = affinity / affinity.sum(1, keepdim=True).clamp_min(1e-300)
    affinity = affinity + affinity.T
    degree = affinity.sum(1).clamp_min(1e-12).rsqrt()
    leading = torch.linalg.eigh(degree[:, None] * affinity * degree)[1][:, -number:]
    left, picked = leading.clone(), []
    for _ in range(number):
        picked.append(int(left.norm(dim=1).argmax()))
        direction = nn.functional.normalize(left[picked[-1]], dim=0)
        left = left - (left @ direction)[:, None] * direction
    u, _, v = torch.linalg.svd(leading[picked].T)
    return cast(Tensor, (leading @ (u @ v)).abs().argmax(1))
