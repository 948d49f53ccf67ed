"""The words of a text, in no order, from the rows of an embedding that an upload changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.experiment.ladder_problem import uploaded_tensors
from fl_privacy.experiment.ladder_scores import MOST_SHOWN, Scored
from fl_privacy.metrics.outcome import MARGIN_F1
from fl_privacy.results.counts import Counts
from fl_privacy.tapping import Watched
from fl_privacy.tapping.program import tensors_in

LEAST_WORDS = 100
"""Rows of an embedding that holds a vocabulary, at least."""

CHANGED = 1e-3
"""Share of the largest row's change from which on a row has changed."""

STANDS_OUT = 3.0
"""Times the next row's length that the last row of a word has at least, where a head shares the embedding."""

READ_F1 = 0.8
"""F1 of the different words from which on a text counts as read in this way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Words:
    """Numbers of the different words of a text, and those read."""

    original: Sequence[int]
    guess: Sequence[int]
    read: bool


def words_of(found: Sequence[tuple[Watched, Any]], *, uploaded: bool) -> Scored | None:
    """Compare each text's words with those that the change of the embedding shows; ``None`` without texts.

    Args:
        found: what was seen when the client trained, and its answer on one text alone.
        uploaded: look at what it uploads, else at its gradient.
    """
    read: list[tuple[set[int], set[int]] | None] = []
    for _, again in found:
        own = _words(again.watched)
        if own is None:
            return None
        name, truth = own
        rows = _rows(again, name, uploaded=uploaded)
        read.append(None if rows is None else (truth, set(rows)))
    if all(each is None for each in read):
        return None
    return scored_words([each for each in read if each is not None], len(read))


def words_in_training(client: Any) -> tuple[set[int], set[int]] | None:
    """Return the words that a client loaded, and those that its upload shows; ``None`` without any.

    Args:
        client: with ``watched``, ``reply`` and ``matched``.
    """
    seen: Watched = client.watched
    if not seen.batches:
        return None
    for name, table in sorted(_tables(seen), key=lambda pair: -pair[1].num_embeddings):
        rows = _rows(client, name, uploaded=True) if name in seen.before else None
        words = None if rows is None else _loaded(seen, table)
        if rows is not None and words:
            return words, set(rows) - {table.padding_idx or 0}
    return None


def _loaded(seen: Watched, table: nn.Embedding) -> set[int] | None:
    """Collect the words of the batches, or the one category that each example has, that choose rows of ``table``."""
    columns: dict[tuple[int, int], list[Tensor]] = {}
    for batch in seen.batches:
        for place, tensor in enumerate(tensors_in(batch)):
            if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() in (1, 2):
                columns.setdefault((tensor.dim(), place), []).append(tensor.flatten())
    whole = {key: torch.cat(parts) for key, parts in columns.items()}
    fits = {
        key: tokens
        for key, tokens in whole.items()
        if int(tokens.min()) >= 0
        and int(tokens.max()) < table.num_embeddings
        and (key[0] == 2 or _is_wide(tokens, table))
    }
    if not fits:
        return None
    tokens = fits[max(fits, key=lambda key: (key[0], int(fits[key].max())))]
    words = set(tokens.unique().tolist())
    words.discard(table.padding_idx if table.padding_idx is not None else 0)
    return words


def _is_wide(tokens: Tensor, table: nn.Embedding) -> bool:
    """Say whether numbers reach over the table, as labels do not."""
    return 2 * int(tokens.max()) >= table.num_embeddings


def _tables(seen: Watched) -> list[tuple[str, nn.Embedding]]:
    """List names and modules of embeddings that may hold a vocabulary."""
    return [
        (f"parts.{number}.{path}.weight" if path else f"parts.{number}.weight", module)
        for number, part in enumerate(seen.modules)
        for path, module in part.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings >= LEAST_WORDS
    ]


def _words(seen: Watched) -> tuple[str, set[int]] | None:
    """Name of the vocabulary's embedding, and the words that entered."""
    program = seen.program
    if program is None:
        return None
    tables = _tables(seen)
    whole = [t for t in program.constants.values() if t.dtype in (torch.int64, torch.int32) and t.dim() == 2]
    if not tables or not whole:
        return None
    name, table = max(tables, key=lambda pair: pair[1].num_embeddings)
    tokens = max(whole, key=lambda t: int(t.max()))
    if int(tokens.max()) >= table.num_embeddings or int(tokens.min()) < 0:
        return None
    words = set(tokens.unique().tolist())
    words.discard(table.padding_idx if table.padding_idx is not None else 0)
    return name, words


def _rows(again: Any, name: str, *, uploaded: bool) -> list[int] | None:
    seen: Watched = again.watched
    if not uploaded:
        change = seen.gradients.get(name)
    else:
        value = uploaded_tensors(again.reply, again.matched).get(name)
        before = seen.before[name].float()
        change = None if value is None else value if again.matched.shares != "weights" else _moved(value, before, seen)
    if change is None or not change.isfinite().all():
        return None
    if _is_head(seen, name):
        return _standing_out(change.float())
    size = change.float().norm(dim=1)
    least = CHANGED * float(size.max()) if uploaded else 0.0  # a gradient is zero where no word is
    return (size > least).nonzero().flatten().tolist() if float(size.max()) > 0 else []


def _is_head(seen: Watched, name: str) -> bool:
    """Say whether another layer shares the embedding ``name``, as a language model's head does."""
    part = seen.modules[int(name.split(".")[1])]
    table = next(module.weight for own, module in _tables(seen) if own == name)
    return any(
        getattr(module, "weight", None) is table and not isinstance(module, nn.Embedding) for module in part.modules()
    )


def _standing_out(change: Tensor) -> list[int]:
    """Return rows of embeddings that are also a head, which moves every row: those that differ most from the usual one.

    Words end where the next row is ``STANDS_OUT`` times shorter; there are none where no row is.
    """
    size, order = (change - change.median(0).values).norm(dim=1).sort(descending=True)
    half = size[: len(size) // 2 + 1]
    ratios = half[:-1] / half[1:].clamp_min(1e-30)
    if not float(size[0]) or float(ratios.max()) < STANDS_OUT:
        return []
    return sorted(order[: int(ratios.argmax()) + 1].tolist())


def _moved(value: Tensor, before: Tensor, seen: Watched) -> Tensor:
    """Compute the change without what weight decay did to every row."""
    settings = dict(next(iter(seen.optimizers))[1]) if seen.optimizers else {}
    if float((value - before).norm(dim=1).median()) == 0.0:
        return value - before
    decay = float(settings.get("lr", 0.0)) * float(settings.get("weight_decay", 0.0) or 0.0)
    usual = ((value * before).sum(1) / before.square().sum(1).clamp_min(1e-30)).median()
    left = [value - factor * before for factor in ((1 - decay) ** seen.steps, float(usual))]
    return min(left, key=lambda change: float(change.norm(dim=1).median()))


def _f1(truth: set[int], guess: set[int]) -> float:
    common = len(truth & guess)
    return 2 * common / (len(truth) + len(guess)) if truth or guess else 0.0


def scored_words(read: Sequence[tuple[set[int], set[int]]], total: int) -> Scored:
    """Score pairs of a text's words and those read, of ``total`` texts."""

    def counted(pairs: Sequence[tuple[set[int], set[int]]], controls: Sequence[float]) -> Counts:
        good = sum(_f1(*pair) >= max(READ_F1, c + MARGIN_F1) for pair, c in zip(pairs, controls, strict=True))
        return Counts(recognizable=good, nothing=len(pairs) - good, failures=total - len(pairs), groups=len(pairs))

    turned = [(truth, read[(k + 1) % len(read)][1]) for k, (truth, _) in enumerate(read)] if len(read) > 1 else []
    controls = [_f1(*pair) for pair in turned] or [0.0]
    shown = [
        Words(original=sorted(truth), guess=sorted(guess), read=_f1(truth, guess) >= max(READ_F1, c + MARGIN_F1))
        for (truth, guess), c in zip(read, controls, strict=True)
    ]
    control = counted(turned, [0.0] * len(turned)) if turned else None
    return Scored(counts=counted(read, controls), control=control, shown=shown[:MOST_SHOWN])
