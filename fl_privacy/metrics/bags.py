"""How much of the words of an upload's texts was read, in no order, beside what their frequency alone tells."""

import torch
from torch import Tensor

from fl_privacy.metrics.beyond import Figures, Others
from fl_privacy.metrics.texts import Language, token_f1, token_precision, token_recall, widened, without
from fl_privacy.types import Batch, Reconstruction

_DIGITS = 6


def bag_figures(
    reconstruction: Reconstruction, truth: Batch, others: Others | None, language: Language | None
) -> tuple[dict[str, float], Figures]:
    """Metrics by name, and figures beside them, of the words read of all texts of one victim together.

    Special tokens, which every text has, count as none. Beside the metrics: ``words_there`` different words of the
    texts, of which ``words_read`` were read, ``words_false`` read and in none of them, ``words_of`` how many texts they
    are of, and ``word_control_f1`` of as many of the most frequent public words as the texts have.

    Returns:
        Two empty ones where nobody looked for words.
    """
    if reconstruction.words is None:
        return {}, {}
    special = language.special if language else frozenset[int]()
    read, there = (without(t.reshape(1, -1).cpu().long(), special) for t in (reconstruction.words, truth.inputs))
    kinds = [_different(t) for t in (read, there)]
    guesses, truths = widened(kinds)
    common = int(torch.isin(kinds[0][kinds[0] >= 0], kinds[1][kinds[1] >= 0]).sum())
    number, total = (int((t >= 0).sum()) for t in kinds)
    values = {
        "word_f1": float(token_f1(guesses, truths)),
        "word_precision": float(token_precision(guesses, truths)),
        "word_recall": float(token_recall(guesses, truths)),
        "count_f1": float(token_f1(*widened([read, there]))),
    }
    figures: Figures = {
        "words_there": total, "words_read": common, "words_false": number - common, "words_of": len(truth)
    }  # fmt: skip
    if others is not None and others.texts is not None:
        control = _frequent_kinds(without(others.texts.long(), special), total)
        figures["word_control_f1"] = round(float(token_f1(*widened([control, kinds[1]]))), _DIGITS)
    return values, figures


def _different(tokens: Tensor) -> Tensor:
    """(1, k) the different ones of (1, n), which may have -1 for none."""
    different: Tensor = torch.unique(tokens[tokens >= 0])
    return different[None]


def _frequent_kinds(public: Tensor, number: int) -> Tensor:
    """(1, number) the most frequent different tokens of ``public``."""
    counts = public[public >= 0].bincount()
    return counts.argsort(descending=True, stable=True)[None, : min(number, int((counts > 0).sum()))]
