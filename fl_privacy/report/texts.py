"""Show the attacked texts of a run token by token: right, misplaced or wrong."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_privacy.report.gallery import SHOWN, ExampleView, described, extremes, place_of, rank_by
from fl_privacy.runs.folder import Run, Sentence
from fl_privacy.types.modality import as_shown
from fl_privacy.types.victim_ids import Attacker

CAPTION = ("token_f1", "rouge_l", "exact_match")

Kind = Literal["plain", "right", "misplaced", "wrong"]


@dataclass(frozen=True)
class Piece:
    """A token for display, ``True`` if it continues the word before it, and its kind."""

    text: str
    glued: bool
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class SentenceView(ExampleView):
    """One attacked text as tokens; ``original`` is empty if not known, ``adaptive`` is ``None`` without one."""

    original: Sequence[Piece]
    guess: Sequence[Piece]
    adaptive: Sequence[Piece] | None


def all_sentences(run: Run, found: Mapping[tuple[str, int], Sentence]) -> list[SentenceView]:
    """View the first ``SHOWN`` attacked texts."""
    return [_view(record, found) for record in run.of_kind("image")[:SHOWN]]


def extreme_sentences(run: Run, found: Mapping[tuple[str, int], Sentence], by: str) -> list[SentenceView]:
    """View the best, median and worst text by the metric ``by``; any three if all are equal."""
    ranked = rank_by(run, by)
    if len({record.get(by) for record in ranked}) == 1 and not run.of_kind("image", Attacker.ADAPTIVE):
        different = {place_of(record, "text"): record for record in reversed(ranked)}
        return [_view(record, found) for record in list(different.values())[::-1][:3]]
    return [_view(record, found, rank) for rank, record in extremes(ranked)]


def colored(guess: Sequence[str], original: Sequence[str] | None) -> list[Piece]:
    """Mark each token of ``guess`` as right in place, misplaced, or wrong; each original token counts once."""
    if original is None:
        return uncolored(guess)
    right = [at < len(original) and token == original[at] for at, token in enumerate(guess)]
    left = Counter(original) - Counter(token for token, is_right in zip(guess, right, strict=True) if is_right)
    pieces = []
    for token, is_right in zip(guess, right, strict=True):
        kind: Kind = "right" if is_right else "misplaced" if left[token] > 0 else "wrong"
        if kind == "misplaced":
            left[token] -= 1
        pieces.append(Piece(*as_shown(token), kind))
    return pieces


def uncolored(tokens: Sequence[str]) -> list[Piece]:
    """Return ``tokens`` for display, without marks."""
    return [Piece(*as_shown(token), "plain") for token in tokens]


def _view(record: Mapping[str, Any], found: Mapping[tuple[str, int], Sentence], rank: str = "") -> SentenceView:
    sentence = found.get((record["id"], record["image"]), Sentence(None))
    original = sentence.original
    return SentenceView(
        **described(record, "text", CAPTION),
        rank=rank,
        original=uncolored(original or ()),
        guess=colored(sentence.guess or (), original),
        adaptive=None if sentence.adaptive is None else colored(sentence.adaptive, original),
    )
