"""Unordered words of a text, from the changed rows of an uploaded embedding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.auditing.instrument.program import tensors_in
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.auditing.scenario_adapters import MOST_TEXTS
from fl_privacy.auditing.scenario_problem import uploaded_tensors
from fl_privacy.auditing.scenario_scores import MOST_SHOWN
from fl_privacy.measure.answer import Answer, Shown
from fl_privacy.measure.chance import BAND, chance_of_words, combined, words_f1
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.outcome import MARGIN_F1

LEAST_WORDS = 100
"""Smallest number of rows of a vocabulary's embedding."""

CHANGED = 1e-3
"""Smallest change of a changed row, relative to the largest."""

STANDS_OUT = 3.0
"""Smallest ratio of lengths between the last word's row and the next one, if a head shares the embedding."""

READ_F1 = 0.8
"""Smallest F1 of the different words of a reconstructed text."""


def words_of(found: Sequence[tuple[Watched, Any]], *, uploaded: bool) -> Answer | None:
    """Compare each text's words with the changed embedding rows; ``None`` without texts.

    Args:
        found: observations of the client's training, and its answer on one text.
        uploaded: ``True`` to attack the upload, else the gradient.
    """
    read: list[tuple[set[int], set[int]]] = []
    texts: list[list[set[int]]] = []
    others: list[set[int]] = []
    for watched, again in found:
        own = _words(again.watched)
        if own is None:
            return None
        table, tokens = own
        rows = _rows(again, table[0], uploaded=uploaded)
        if rows is not None:
            texts.append(each_words(tokens, table[1]))
            read.append((set().union(*texts[-1]), set(rows)))
        others += [
            text
            for batch in watched.batches
            for entry in _texts_in(batch, table[1])
            for text in each_words(entry, table[1])
        ]
    return scored_words(read, len(found), others[:MOST_TEXTS], texts) if read else None


def each_words(tokens: Tensor, table: nn.Embedding) -> list[set[int]]:
    """Return the different words of each of the texts (N, L)."""
    return [set(text) - {table.padding_idx or 0} for text in tokens.tolist()]


def _texts_in(batch: Any, table: nn.Embedding) -> list[Tensor]:
    """Return the texts (N, L) of a batch that index ``table``."""
    whole = [t for t in tensors_in(batch) if t.dtype in (torch.int64, torch.int32) and t.dim() == 2 and t.numel()]
    fitting = [t for t in whole if int(t.min()) >= 0 and int(t.max()) < table.num_embeddings]
    return [max(fitting, key=lambda t: int(t.max()))] if fitting else []


def words_in_training(client: Any) -> tuple[set[int], set[int]] | None:
    """Return a client's loaded words and those reconstructed from its upload, or ``None``."""
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
    """Collect the words, or single categories, that index ``table``."""
    columns: dict[tuple[int, int], list[Tensor]] = {}
    for batch in seen.batches:
        for place, tensor in enumerate(tensors_in(batch)):
            if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() in (1, 2):
                columns.setdefault((tensor.dim(), place), []).append(tensor.flatten())
    whole = {key: torch.cat(parts) for key, parts in columns.items()}
    # numbers must cover the table, as labels do not
    fits = {
        key: tokens
        for key, tokens in whole.items()
        if int(tokens.min()) >= 0
        and int(tokens.max()) < table.num_embeddings
        and (key[0] == 2 or 2 * int(tokens.max()) >= table.num_embeddings)
    }
    if not fits:
        return None
    tokens = fits[max(fits, key=lambda key: (key[0], int(fits[key].max())))]
    words = set(tokens.unique().tolist())
    words.discard(table.padding_idx if table.padding_idx is not None else 0)
    return words


def _tables(seen: Watched) -> list[tuple[str, nn.Embedding]]:
    return [
        (f"parts.{number}.{path}.weight" if path else f"parts.{number}.weight", module)
        for number, part in enumerate(seen.modules)
        for path, module in part.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings >= LEAST_WORDS
    ]


def _words(seen: Watched) -> tuple[tuple[str, nn.Embedding], Tensor] | None:
    """Return the vocabulary's embedding with its name, and the tokens (N, L)."""
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
    return (name, table), tokens


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
    least = CHANGED * float(size.max()) if uploaded else 0.0  # the gradient is zero in rows without a word
    return (size > least).nonzero().flatten().tolist() if float(size.max()) > 0 else []


def _is_head(seen: Watched, name: str) -> bool:
    """Return ``True`` if another layer shares the embedding, as a language model's head does."""
    part = seen.modules[int(name.split(".")[1])]
    table = next(module.weight for own, module in _tables(seen) if own == name)
    return any(
        getattr(module, "weight", None) is table and not isinstance(module, nn.Embedding) for module in part.modules()
    )


def _standing_out(change: Tensor) -> list[int]:
    """Return the rows that differ most from the median one, since a head moves every row."""
    size, order = (change - change.median(0).values).norm(dim=1).sort(descending=True)
    half = size[: len(size) // 2 + 1]
    ratios = half[:-1] / half[1:].clamp_min(1e-30)
    if not float(size[0]) or float(ratios.max()) < STANDS_OUT:
        return []
    return sorted(order[: int(ratios.argmax()) + 1].tolist())


def _moved(value: Tensor, before: Tensor, seen: Watched) -> Tensor:
    settings = dict(next(iter(seen.optimizers))[1]) if seen.optimizers else {}
    if float((value - before).norm(dim=1).median()) == 0.0:
        return value - before
    decay = float(settings.get("lr", 0.0)) * float(settings.get("weight_decay", 0.0) or 0.0)
    usual = ((value * before).sum(1) / before.square().sum(1).clamp_min(1e-30)).median()
    left = [value - factor * before for factor in ((1 - decay) ** seen.steps, float(usual))]
    return min(left, key=lambda change: float(change.norm(dim=1).median()))


def scored_words(
    read: Sequence[tuple[set[int], set[int]]],
    total: int,
    others: Sequence[set[int]] = (),
    texts: Sequence[Sequence[set[int]]] | None = None,
) -> Answer:
    """Score pairs of an upload's words and the reconstructed ones.

    Args:
        others: words of the clients' other texts, used as distractors.
        texts: words of each text by upload; ``None`` for one text each.
    """

    def same(one: set[int], other: set[int]) -> bool:
        return words_f1(one, other) >= READ_F1

    def chance(place: int, guess: set[int]) -> tuple[float, bool]:
        own = [read[place][0]] if texts is None else texts[place]
        foreign = [truth for k, (truth, _) in enumerate(read) if k != place and not same(truth, read[place][0])]
        found = chance_of_words(guess, own, pool := left or foreign)
        return found, bool(pool) and found > max(1 - BAND, 1.5 / (1 + len(pool)))

    def counted(good: Sequence[bool], chances: list[float]) -> Counts:
        return Counts(
            recognizable=sum(good),
            nothing=len(good) - sum(good),
            failures=total - len(good),
            groups=len(good),
            chance=combined(chances),
        )

    left = list(others)
    for text in [truth for truth, _ in read] if texts is None else [text for own in texts for text in own]:
        if text in left:
            left.remove(text)  # further equal texts are equal by chance, or repeated
    turned = [_next_other(read, place, same) for place in range(len(read))]
    pairs = list(zip(read, turned, strict=True))
    controls = [0.0 if guess is None else words_f1(truth, guess) for (truth, _), guess in pairs]
    chances = [chance(place, guess) for place, (_, guess) in enumerate(read)]
    good = [
        words_f1(*pair) >= max(READ_F1, control + MARGIN_F1) and not is_chance
        for pair, control, (_, is_chance) in zip(read, controls, chances, strict=True)
    ]
    shown = [
        Shown(original=sorted(truth), guess=sorted(guess), reconstructed=own)
        for (truth, guess), own in zip(read, good, strict=True)
    ]
    apart = [control >= READ_F1 for control, guess in zip(controls, turned, strict=True) if guess is not None]
    return Answer(
        kind="text",
        counts=counted(good, [found for found, _ in chances]),
        control=counted(apart, []) if apart else None,
        shown=shown[:MOST_SHOWN],
    )


def _next_other(
    read: Sequence[tuple[set[int], set[int]]], place: int, same: Callable[[set[int], set[int]], bool]
) -> set[int] | None:
    own = read[place][0]
    following = (read[(place + step) % len(read)] for step in range(1, len(read)))
    return next((guess for truth, guess in following if not same(truth, own)), None)
