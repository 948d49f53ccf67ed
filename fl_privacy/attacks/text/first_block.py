"""Reconstruct words from the layers that see single tokens, if no tensor has a row for each token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.text.entrances import entrances_of, views_of
from fl_privacy.attacks.text.token_candidates import Lengths
from fl_privacy.attacks.text.token_evidence import EvidenceCandidates, Pairs, found_pairs
from fl_privacy.models import TextModel
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation

_NEAR = 0.5
"""Share of a token's strongest evidence above which it may have stood at another position as well."""


@dataclass(frozen=True, eq=False)
class Placed:
    """Tokens found, with their positions.

    Attributes:
        tokens: (k,) different ones, the surest first.
        times: (k,) number of occurrences.
        ordered: (L,) text, if there is one and positions make a difference.
        note: sentence on the comparisons and the expected number of false tokens.
    """

    tokens: Tensor
    times: Tensor
    ordered: Tensor | None
    note: str


def tokens_of_first_block(model: TextModel, observations: Sequence[Observation], seed: int) -> list[Placed | str]:
    """Find the tokens of victims of one model and plan, or a sentence that says why there are none."""
    model, first = model.eval(), observations[0]
    entrances = entrances_of(model, first.upload.tensors)
    if not entrances:
        return [_NO_ENTRANCE] * len(observations)
    lengths = [Lengths.of(observation, model) for observation in observations]
    positioned = any(entrance.positioned for entrance in entrances)
    candidates = EvidenceCandidates(
        model,
        max(own.longest for own in lengths),
        positioned=positioned,
        rng=derive_generator(seed, "first block"),
    )
    found = found_pairs(
        [views_of(observation, entrances) for observation in observations],
        candidates,
        texts=first.upload.num_examples,
        most=first.upload.num_examples * first.input_shape[0],
    )
    return [_placed(pairs, own) for pairs, own in zip(found, lengths, strict=True)]


_NO_ENTRANCE = "No uploaded layer sees a token and its position alone."
_FULL = "What the uploaded layers say of tokens has as many directions as there are: too many tokens, or noise."


def _placed(pairs: Pairs | None, lengths: Lengths) -> Placed | str:
    if pairs is None:
        return _FULL
    if not len(pairs.tokens):
        if not any(pairs.directions):
            return _FULL
        views = " and ".join(f"{k} of {n}" for k, n in zip(pairs.directions, pairs.widths, strict=True))
        return (
            f"None of {pairs.candidates:,} pairs of token and position has more of itself in {views} directions than"
            " chance gives."
        )
    note = (
        f"{pairs.candidates:,} pairs of token and position were compared; {_in_words(pairs.expected_false)} of the"
        f" {len(pairs.tokens)} tokens named are expected to be false by chance"
        f"{f', and {pairs.alike} may be named for no more than being like others of them' * bool(pairs.alike)}."
    )
    evidence = pairs.evidence
    if evidence.shape[1] == 1:
        return Placed(pairs.tokens, torch.ones_like(pairs.tokens), None, note)
    strongest = evidence.amax(1, keepdim=True)
    if lengths.number > 1:
        own_place = (evidence >= evidence.amax(0)) & (evidence >= _NEAR * strongest)
        return Placed(pairs.tokens, own_place.sum(1).clamp_min(1), None, note)
    length = _length(evidence, lengths)
    ordered = pairs.tokens[evidence[:, :length].argmax(0)]
    times = (ordered[:, None] == pairs.tokens).sum(0)
    return Placed(pairs.tokens, times.clamp_min(1), ordered, note)


def _length(evidence: Tensor, lengths: Lengths) -> int:
    """Return the given length, else the last position that is some token's own."""
    if lengths.told is not None:
        return lengths.longest
    own = (evidence >= _NEAR * evidence.amax(1, keepdim=True)) & (evidence >= evidence.amax(0))
    places = own.any(0).nonzero().flatten()
    return int(places[-1]) + 1 if len(places) else evidence.shape[1]


def _in_words(expected: float) -> str:
    return "fewer than 0.01" if expected < 0.01 else f"up to {expected:.2g}"
