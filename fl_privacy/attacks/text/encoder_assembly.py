"""Assemble texts of an encoder from the tokens that fit the second block's span together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from torch import Tensor

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.text.spans import Span, entering_block
from fl_privacy.attacks.text.token_candidates import CLEAR, Candidates, Lengths
from fl_privacy.models import TextModel

Enough = Callable[[Sequence[Tensor]], bool]
"""Check that some texts (L,), possibly with copies, are all of a batch."""

_AT_ONCE = 512
_SWEEPS = 8
_NARROWINGS, _TRIED, _SPARE = 4, 6, 2
_STARTS = 3
_RANDOM = 64
_STUCK, _PAIRS = 3, 1 << 12
"""Texts of a search in which pairs of tokens are exchanged, and the largest number of these."""
_DECIDABLE = 1e-6
"""Distances below this are rounding in single precision."""


@dataclass(frozen=True, eq=False)
class Assembled:
    """One text, assembled from its tokens.

    Attributes:
        tokens: (L,).
        clear: ``True`` if every other candidate at any position is ``CLEAR`` times farther.
    """

    tokens: Tensor
    residual: float
    clear: bool


@dataclass(frozen=True, eq=False)
class Assembly:
    """The search that assembles texts from candidate tokens.

    Attributes:
        classified: position of the only token whose state is in the span; ``None`` if all are.
        unit: distance of texts of random candidates, which are far nearer to the span than random vectors.
    """

    model: TextModel
    span: Span
    classified: int | None
    candidates: Candidates
    any_length: bool = False
    unit: float = 1.0

    def residuals(self, texts: Tensor) -> Tensor:
        """Return the root mean square distances (n,) of texts (n, L) from the span, in :attr:`unit`."""
        found = []
        for part in torch.split(texts, _AT_ONCE):
            apart = self.span.distance(entering_block(self.model, part, 1))
            found.append(apart.square().mean(1).sqrt() if self.classified is None else apart[:, self.classified])
        return torch.cat(found) / self.unit

    def in_units(self, rng: torch.Generator) -> "Assembly":
        """Set the :attr:`unit` by texts of random candidates."""
        at = self.candidates.tokens[: self.candidates.length]
        if all(len(choices) < 2 for choices in at):
            return self
        picked = [choices[torch.randint(len(choices), (_RANDOM,), generator=rng)] for choices in at]
        farthest = float(self.residuals(torch.stack(picked, 1)).max())
        return replace(self, unit=self.unit * farthest) if farthest > _DECIDABLE else self

    def descend(self, texts: Tensor, fixed: int | None = None) -> list[Assembled]:
        """Descend from each of ``texts`` (n, L), position by position except ``fixed``."""
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
        return [
            Assembled(text, residual, other > CLEAR * residual)
            for text, residual, other in zip(texts, best.tolist(), least.tolist(), strict=True)
        ]

    def judged(self, text: Assembled) -> Assembled:
        """Judge ``text`` by every other candidate at each position, and at unknown length by one token less or more."""
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
    """Keep the candidates at each position that come nearest to the span among random others.

    A token's state depends mostly on itself, so random texts distinguish right tokens from wrong ones.
    """
    if assembly.classified is not None:
        return assembly
    tokens = list(assembly.candidates.tokens[: lengths.longest])
    reached = [max(1, lengths.reaching(p)) for p in range(len(tokens))]
    for _ in range(_NARROWINGS):
        drawn = _TRIED * max(len(at) for at in tokens)
        picked = [_dealt(len(at), drawn, rng) for at in tokens]
        texts = torch.stack([at[chosen] for at, chosen in zip(tokens, picked, strict=True)], 1)
        parts = [
            assembly.span.distance(entering_block(assembly.model, part, 1)) for part in torch.split(texts, _AT_ONCE)
        ]
        apart = torch.cat(parts)
        for position, (at, chosen) in enumerate(zip(tokens, picked, strict=True)):
            best = apart.new_full((len(at),), torch.inf).scatter_reduce(
                0, chosen.to(apart.device), apart[:, position], "amin"
            )
            kept = max(_SPARE * reached[position], (len(at) + 1) // 2)
            tokens[position] = at[best.argsort()[:kept]]
    return replace(assembly, candidates=replace(assembly.candidates, tokens=tokens))


def _dealt(number: int, drawn: int, rng: torch.Generator) -> Tensor:
    """Draw indices (drawn,) below ``number``, each equally often up to one."""
    passes = -(-drawn // number)
    return torch.cat([torch.randperm(number, generator=rng) for _ in range(passes)])[:drawn]


def assemble(
    assembly: Assembly, *, lengths: Lengths, tolerance: float, rng: torch.Generator, rounds: int, enough: Enough
) -> list[Assembled]:
    """Assemble as many texts as ``lengths`` holds, the nearest to the span if not all are well within ``tolerance``.

    Every token in no text yet starts a search. Texts are fewer if ``enough`` accepts these, with copies.
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
    assembly: Assembly,
    length: int,
    sure: Sequence[Assembled],
    *,
    each: int,
    tolerance: float,
    rng: torch.Generator,
) -> list[Assembled]:
    explained = {pair for text in sure for pair in enumerate(text.tokens.tolist())}
    likely = _likely(assembly.candidates, length, explained)
    position = max(range(length), key=lambda p: len(likely[p]))
    starts = torch.stack([_start(likely, position, t, rng) for t in likely[position] for _ in range(each)])
    descended = assembly.descend(starts, position)
    nearest = sorted(descended, key=lambda text: text.residual)
    stuck = list({tuple(text.tokens.tolist()): text.tokens for text in nearest}.values())[:_STUCK]
    if each > 1 and all(text.residual >= tolerance / CLEAR for text in descended):
        descended += assembly.descend(assembly.exchanged(torch.stack(stuck)), position)
    return descended


def _likely(candidates: Candidates, length: int, explained: set[tuple[int, int]]) -> list[Tensor]:
    """Return the tokens at each position that are in no text yet, or all."""
    found = []
    for position, at in enumerate(candidates.tokens[:length]):
        left = [token for token in at.tolist() if (position, token) not in explained]
        found.append(at.new_tensor(left) if left else at)
    return found


def _start(likely: list[Tensor], position: int, token: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a text (L,) of random tokens, with ``token`` at ``position``."""
    drawn = [at[int(torch.randint(len(at), (1,), generator=rng))] for at in likely]
    drawn[position] = token
    return torch.stack(drawn)


def _chosen(texts: list[Assembled], lengths: Lengths, *, repeated: bool = True) -> list[Assembled]:
    """Choose a text for each of ``lengths``, the nearest first; none if ``repeated`` ones are needed."""
    left = sorted(texts, key=lambda text: text.residual)
    if lengths.told is None:
        return left[: lengths.number]
    chosen: list[Assembled] = []
    for length in lengths.told:
        fitting = next((text for text in left if len(text.tokens) == length), None)
        if fitting is not None:
            left.remove(fitting)
        elif not repeated:
            return []
        else:  # equal texts of one length are one
            fitting = next((text for text in chosen if len(text.tokens) == length), None)
        if fitting is not None:
            chosen.append(fitting)
    return chosen
