"""Find the tokens that may be at each position, by the row space of the first transformer block's gradient."""

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.models import TextModel, adapter_of, down_projection
from fl_privacy.models.gradients.hooks import entering, replaced_input
from fl_privacy.types import Observation, Tensors

_ABOVE_NOISE = 8.0  # multiple of the smallest singular values above which values are not noise
_ROUNDING = 1e-7  # share of the largest singular value below which values are rounding in single precision


@dataclass(frozen=True, eq=False)
class Span:
    """Row space of linear layers' gradients, which contains the layers' inputs (DAGER, theorem 3.1)."""

    basis: Tensor  # (r, d) orthonormal rows, float64
    width: int  # d
    through: Tensor | None = None  # (d, n) projection before the layers, such as an adapter's A

    @property
    def rank(self) -> int:
        return len(self.basis)

    @property
    def scale(self) -> float:
        return math.sqrt(max(0.0, 1 - self.rank / self.width))

    def distance(self, vectors: Tensor) -> Tensor:
        """Return the distance of ``vectors`` (..., d) from the span, relative to their length: about 1 if random."""
        if self.through is not None:
            vectors = vectors @ self.through.to(vectors).T
        basis = self.basis.to(vectors)
        rest = vectors - (vectors @ basis.T) @ basis
        return cast(Tensor, rest.norm(dim=-1) / vectors.norm(dim=-1).clamp_min(1e-12) / max(self.scale, 1e-12))


def span_of(model: TextModel, gradient: Tensors, block: int, *, queries: bool = False, least: float = 0.0) -> Span:
    """Return the span (row space) of the gradient of ``block``'s attention layers, which contains their inputs.

    Directions whose singular values are close to the smallest (noise) or below ``least`` (rounding) are left out. For a
    LoRA adapter B A, the gradient of A is used, or that of B while B and therefore A's gradient are zero. ``queries``:
    ``True`` uses only the first layer, that of the queries. ``NotAttackableError`` if no such gradient was uploaded.
    """
    names = model.attention_weights[block][: 1 if queries else None]
    adapters = [found for name in names if (found := adapter_of(model, name)) is not None]
    there = [gradient[a].double() for a, _ in adapters if a in gradient and bool(gradient[a].any())]
    there += [(gradient[name].T if model.transposed else gradient[name]).double() for name in names if name in gradient]
    if there:
        return Span(*_row_space(torch.cat(there), least))
    spans = [(_row_space(gradient[b].double()), down_projection(model, b)) for _, b in adapters if b in gradient]
    if not spans:
        raise NotAttackableError(f"A gradient of {names[0]} is expected, but was withheld; use attack=tag.")
    (basis, width), through = max(spans, key=lambda pair: len(pair[0][0]))
    return Span(basis, width, through)


def _row_space(rows: Tensor, least: float = 0.0) -> tuple[Tensor, int]:
    """Return an orthonormal basis (r, d) of the row space of ``rows``, without small singular values, and d."""
    values, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
    width = rows.shape[1]
    noise = float(values[-max(1, width // 8) :].median()) if len(values) == width else 0.0
    return directions[values > max(_ABOVE_NOISE * noise, _ROUNDING * float(values[0]), least)], width


class _EnteredError(Exception):
    """Ends a forward pass as soon as the wanted layer is entered."""


def entering_block(model: TextModel, inputs: Tensor, block: int) -> Tensor:
    """Return the hidden states (B, L, d) that enter the attention of ``block``, for ``inputs``."""
    return entering_layers(model, inputs, [name.rpartition(".")[0] for name in model.attention_weights[block]])


@torch.no_grad()
def entering_layers(model: TextModel, inputs: Tensor, names: Sequence[str]) -> Tensor:
    """Return the hidden states (B, L, d) that enter the first called layer of ``names``, for ``inputs``."""

    def stop(states: Tensor) -> Tensor:
        if states.shape[1] == inputs.shape[1]:  # in a last block the first token alone may have a query
            raise _EnteredError
        return states

    with ExitStack() as stack:
        calls = stack.enter_context(entering({name: model.get_submodule(name) for name in names}))
        for name in names:
            stack.enter_context(replaced_input(model.get_submodule(name), stop))
        with suppress(_EnteredError):
            model(inputs)
    return calls[-1].inputs


def readable_model(model: nn.Module) -> TextModel:
    """Return ``model`` if it is a text model, else raise ``NotAttackableError``."""
    if not isinstance(model, TextModel):
        raise NotAttackableError(f"A text model is expected, but got {type(model).__name__}; use attack=auto.")
    return model


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of ``number`` texts, at most ``longest``; ``known``: numbers of tokens, the shortest first, if given."""

    number: int
    longest: int
    known: tuple[int, ...] | None = None

    @classmethod
    def of(cls, observation: Observation, model: TextModel) -> Self:
        """Return known lengths, or infer an upper bound; a language model's last tokens, never inputs, do not count."""
        number, longest = observation.upload.num_examples, observation.input_shape[0]
        if observation.knowledge.lengths is not None:
            lengths = sorted((observation.knowledge.lengths - int(model.next_token)).tolist())
            return cls(number=number, longest=lengths[-1], known=tuple(lengths))
        rows = None if model.position_weight is None else observation.update().get(model.position_weight)
        if rows is not None:
            seen = (rows[model.first_position :].abs().amax(1) > 0).nonzero().flatten()
            longest = min(longest, int(seen[-1]) + 1) if len(seen) else longest
        return cls(number=number, longest=longest)

    @property
    def possible(self) -> list[int]:
        return list(range(1, self.longest + 1)) if self.known is None else sorted(set(self.known))

    def reaching(self, position: int) -> int:
        return self.number if self.known is None else sum(length > position for length in self.known)

    def within(self, longest: int) -> Self:
        return self if self.known is not None else replace(self, longest=min(self.longest, longest))

    def hold(self, length: int) -> bool:
        return self.number > 0 and length in self.possible

    def without(self, length: int) -> Self:
        if self.known is None:
            return replace(self, number=self.number - 1)
        left = list(self.known)
        left.remove(length)
        return replace(self, number=self.number - 1, longest=left[-1] if left else 0, known=tuple(left))


_AT_ONCE = 1 << 24  # elements of embeddings compared at a time
CLEAR = 10.0  # least ratio of other tokens' distance to that of chosen tokens for these to be certain


@dataclass(frozen=True, eq=False)
class Candidates:
    """The possible tokens at each position."""

    tokens: Sequence[Tensor]  # (n,) tokens for each position, the nearest first; empty or missing beyond all texts
    distances: Sequence[Tensor]  # (n,) their distances from the span
    clear: bool  # ``True`` if all are certainly in the span, and no other token is near
    left_out: float = 1.0  # distance of the nearest other token

    @property
    def length(self) -> int:
        return max((p + 1 for p, found in enumerate(self.tokens) if len(found)), default=0)

    @property
    def whole(self) -> bool:
        return self.length > 0 and all(map(len, self.tokens[: self.length]))

    def hold(self, texts: Sequence[Tensor]) -> bool:
        """Return whether ``texts`` (L,) consist of candidates, and all other tokens are much farther from the span."""
        farthest = 0.0
        for text in texts:
            if len(text) > len(self.tokens):
                return False
            for token, tokens, distances in zip(text, self.tokens, self.distances, strict=False):
                apart = distances[tokens == token]
                if not len(apart):
                    return False
                farthest = max(farthest, float(apart.max()))
        return bool(texts) and self.left_out > CLEAR * farthest


def rows_of_words(model: TextModel, gradient: Tensors) -> Tensor:
    """Return the tokens (n,) whose embeddings have a gradient; all tokens if it was withheld."""
    found = gradient.get(model.word_weight)
    if found is None:
        return torch.arange(model.words.num_embeddings, device=model.words.weight.device)
    return (found.abs().amax(1) > 0).nonzero().flatten()


def find_candidates(model: TextModel, span: Span, *, tokens: Tensor, lengths: Lengths, tolerance: float) -> Candidates:
    """Find the possible tokens at each position: those whose input of the first block lies in ``span``.

    With several texts, some false pairs of token and position lie there, too: if v and w fit at one position, and v
    fits at another, then w also seems to fit there. Texts of unknown length end before the first position without
    candidates. For texts of known length, such positions get the nearest tokens. ``tokens``: (n,) possible tokens.
    ``tolerance``: largest distance of a pair from the span, relative to a random vector's.
    """
    few = torch.split(tokens, max(1, _AT_ONCE // (lengths.longest * span.width)))
    each = (entering_block(model, some[:, None].expand(-1, lengths.longest), 0) for some in few)
    table = torch.cat([span.distance(states) for states in each])
    found, distances, nearest_other, doubt = [], [], 1.0, False
    for position in range(lengths.longest):
        reached = lengths.reaching(position)
        order = table[:, position].argsort()
        count = int((table[:, position] < tolerance).sum())
        if lengths.number == 1:
            doubt |= count > 1 or (lengths.known is not None and count != reached)
            count = min(count, 1)
        if lengths.known is not None and reached:
            count = max(count, reached if count == 0 else 1)
        found.append(tokens[order[:count]])
        distances.append(table[order[:count], position])
        if count < len(tokens):
            nearest_other = min(nearest_other, float(table[order[count], position]))
    if lengths.known is None and lengths.number > 1:
        end = next((position for position, some in enumerate(found) if not len(some)), len(found))
        nearest_other = min([nearest_other, *[float(some[0]) for some in distances[end:] if len(some)]])
        found, distances = found[:end], distances[:end]
    farthest = max((float(d.max()) for d in distances if len(d)), default=1.0)
    return Candidates(found, distances, not doubt and nearest_other > CLEAR * farthest, nearest_other)
