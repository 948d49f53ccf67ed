"""What an attack read of one image, text or row: all of it, which one it is, something recognizable, or nothing.

The one rule of the package, and the only home of its constants; it reads the records of ``metrics.jsonl`` and imports
no PyTorch. The constants were fixed on the training splits; ``experiments/verdict_pairs.py`` measures them on others.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from fl_privacy.measure.chance import BAND
from fl_privacy.measure.intervals import binomial_tail
from fl_privacy.measure.registry import METRICS, TABLE_METRIC, TEXT_METRIC
from fl_privacy.types.victim_ids import Certainty

LIKENESS = 0.5
"""Least likeness of a guess to the original that it is nearest to; nearest by chance is not identified."""

LEAD = 0.6
"""Standard deviations of the candidates by which the original is nearer than the nearest of them, at least."""

CHANCE, CHANCE_FALLS = 0.02, 0.6
"""Probability with which an image of the original's class, that never saw the update, is identified, and the lead by
which it is e times less.

Both are chosen, cautiously: ``experiments/verdict_chance.py`` counts how often such images are identified, and pictures
of the same person taken together are so more often.
"""

LEAST_CANDIDATES = 100
"""Other images that the original has to be nearer than, at least: with fewer, chance alone finds too many."""

SURE = 3.0
"""Lead from which on no closer look is needed, and neither likeness nor what else a guess shows matters."""

FOREIGN = 0.25
"""Largest correlation with others of what a guess shows beyond the original: what is made of the original alone has
noise there, or traces of how it was changed; another picture of the same person, or the mean of a class, has others."""

SAME = 0.97
"""Likeness from which on there is hardly anything else that a guess shows."""

MARGIN_PSNR = 3.5
"""Decibel above what a control that never saw the update reaches."""

FAR_PSNR = 5.0
"""Decibel above the control's from which on it does not matter what else a guess shows."""

MUCH_PSNR = 10.0
"""The same, from which on it does not matter how far guesses without the update lead: they are not as close."""

MARGIN_SSIM = 0.25
"""Structural similarity above the control's."""

WORDS_METRIC = "word_f1"

MARGIN_F1 = 0.2
"""Token F1 above what the frequency of words alone reaches."""

FEW_WORDS = 3
"""Words named rightly from which on a text is not unread, however few of its words they are."""

BY_FREQUENCY = 0.02
"""Probability with which as many of the words named would be right by their frequency, at most."""

ROUNDED = 1e-4
"""By how much shares of cells are more than a control that is recorded with four decimals."""

ROUNDING = 0.5 / 255
"""Largest error of a pixel that vanishes when pixels are stored in 8 bits."""

ROUNDING_PSNR = -20 * math.log10(ROUNDING)
"""Decibel of an image whose pixels are all that far off, 54.2."""


PROVEN_PSNR = 40.0
"""Decibel below which what is called proven is not the original: single precision leaves far less error than that."""


class Outcome(StrEnum):
    """Outcome for one image or text, the most leaked first."""

    EXACT = "exact"
    """Certified, or equal up to the rounding of 8-bit pixels where no control is; a text token by token, a row digit by
    digit."""

    IDENTIFIED = "identified"
    """The original is nearer to the guess than any of the candidates, up to harmless changes."""

    RECOGNIZABLE = "recognizable"
    """Past a published threshold, and better than what a control reaches that never saw the update; of a row more
    cells right than 95 percent of such controls reach, and than the table's usual row."""

    NOTHING = "nothing"
    """None of these, or no guess."""


READ = frozenset({Outcome.EXACT, Outcome.IDENTIFIED, Outcome.RECOGNIZABLE})
"""Outcomes that count as a leak."""

OUTCOME_COLUMNS = (
    "exact",
    "likeness",
    "best_rank",
    "rank",
    "lead",
    "candidates",
    "aligned_psnr",
    "aligned_ssim",
    "control_psnr",
    "control_ssim",
    "control_lead",
    "foreign",
    "control_f1",
    "control_cells",
    "words_read",
    "words_there",
    "words_false",
    "words_of",
    "word_control_f1",
    "chance",
    "word_chance",
)
"""Figures of a record that only this rule needs.

``best_rank`` is the original's place among itself and the candidates, by the best of several ways of comparing: that of
an empty guess is 1 more often than once in as many candidates. Older versions called it ``rank``.
"""


def outcome_of(record: Mapping[str, Any]) -> Outcome | None:
    """Judge one image or text by its record of ``metrics.jsonl``, kind ``image``.

    Returns:
        What was read; ``None`` where it cannot be said: nobody knows the original, or the record is of an older version
        that did not measure it. A guess that is called proven is exact, unless the original, where known, denies it.
    """
    if record.get("failure") is not None:
        return Outcome.NOTHING
    proven = record.get("certainty") == Certainty.PROVEN and not _is_denied(record)
    if proven or (record.get("exact") is True and not _is_plain(record)):
        return Outcome.EXACT
    if TEXT_METRIC in record or TABLE_METRIC in record:
        return _of_text(record) if TEXT_METRIC in record else _of_row(record)
    if _number(record, "likeness") is None:
        return None
    if _is_identified(record):
        return Outcome.IDENTIFIED
    return Outcome.RECOGNIZABLE if _is_recognizable(record) else Outcome.NOTHING


def _is_plain(record: Mapping[str, Any]) -> bool:
    """Say whether an image is one that a control shows as exactly, as one of a single color."""
    control = _number(record, "control_psnr")
    return control is not None and control >= ROUNDING_PSNR


def _is_denied(record: Mapping[str, Any]) -> bool:
    """Say whether a guess that is called proven is far from the original."""
    psnr = _number(record, "psnr")
    if record.get(TABLE_METRIC) is not None:
        return record.get("row_right") == 0
    return record.get("exact_match") == 0 or (psnr is not None and psnr < PROVEN_PSNR)


def _of_text(record: Mapping[str, Any]) -> Outcome | None:
    if record.get("exact_match") == 1:
        return Outcome.EXACT
    if words_are_read(record):
        return Outcome.RECOGNIZABLE
    if _number(record, "control_f1") is None:
        return None
    return Outcome.RECOGNIZABLE if _beats_frequency(record) else Outcome.NOTHING


def _beats_frequency(record: Mapping[str, Any]) -> bool:
    """Say whether tokens, or words in no order, were read by a margin over what their frequency gives away."""
    pairs = ((TEXT_METRIC, "control_f1", "chance"), (WORDS_METRIC, "word_control_f1", "word_chance"))
    read = [
        (METRICS[name], _number(record, name), _number(record, control))
        for name, control, chance in pairs
        if not _is_chance(record, chance)
    ]
    return any(
        found is not None and control is not None and metric.is_leak(found) and found >= control + MARGIN_F1
        for metric, found, control in read
    )


def _of_row(record: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome of a row: recognizable where more cells are right than without the update."""
    found, control = _number(record, TABLE_METRIC), _number(record, "control_cells")
    if found is None or control is None:
        return None
    beyond = found > control + ROUNDED and not _is_chance(record, "chance")
    return Outcome.RECOGNIZABLE if beyond else Outcome.NOTHING


def _is_chance(record: Mapping[str, Any], name: str) -> bool:
    """Say whether one guess in twenty without the update comes to as much of the upload, where that was measured."""
    chance = _number(record, name)
    return chance is not None and chance > 1 - BAND


def words_are_read(record: Mapping[str, Any]) -> bool:
    """Say whether the words found in an upload's texts, in no order, are more than their frequency gives away."""
    found, control = _number(record, WORDS_METRIC), _number(record, "word_control_f1")
    if found is None or control is None or _is_chance(record, "word_chance"):
        return False
    return (METRICS[WORDS_METRIC].is_leak(found) and found >= control + MARGIN_F1) or _few_are_sure(record, control)


def chance_of(record: Mapping[str, Any]) -> float:
    """Return the probability with which a guess without the update is read as far as this example.

    Of an image it is that of a lead as large, and 0 if it is recognizable far above its control. Of rows it is what the
    band leaves, of few words that of so many right, and 0 where words beat their control by a margin.
    """
    if TABLE_METRIC in record:
        return 1 - BAND
    if TEXT_METRIC not in record:
        if _is_recognizable(record) and _beats(record, "psnr", MUCH_PSNR):
            return 0.0
        lead = _number(record, "lead")
        return CHANCE * math.exp(-((LEAD if lead is None else lead) - LEAD) / CHANCE_FALLS)
    if _beats_frequency(record):
        return 0.0
    right, wrong = (int(_number(record, name) or 0) for name in ("words_read", "words_false"))
    return binomial_tail(right, right + wrong, _number(record, "word_control_f1") or 0.0)


def _few_are_sure(record: Mapping[str, Any], control: float) -> bool:
    """Say whether few words were named, but more of them rightly than frequent words would be."""
    right, wrong = (int(_number(record, name) or 0) for name in ("words_read", "words_false"))
    return right >= FEW_WORDS and binomial_tail(right, right + wrong, control) < BY_FREQUENCY


def _is_identified(record: Mapping[str, Any]) -> bool:
    enough, lead = _number(record, "candidates") or 0.0, _number(record, "lead") or 0.0
    return enough >= LEAST_CANDIDATES and lead >= LEAD and _is_nearest(record) and _leads_controls(record, lead)


def _is_nearest(record: Mapping[str, Any]) -> bool:
    """Say whether the original is nearer to a guess than all candidates, and not for what they share."""
    sure = (_number(record, "lead") or 0.0) >= SURE
    alike = (_number(record, "likeness") or 0.0) >= LIKENESS and not _is_of_others(record)
    return record.get("best_rank", record.get("rank")) == 1 and (sure or alike)


def _leads_controls(record: Mapping[str, Any], lead: float) -> bool:
    """Say whether a guess leads by more than guesses that never saw the update do, where these were compared."""
    control = _number(record, "control_lead")
    return control is None or lead >= control + LEAD or _beats(record, "psnr", MUCH_PSNR)


def _is_of_others(record: Mapping[str, Any]) -> bool:
    """Say whether a guess is nearest to the original only for what it has in common with others."""
    foreign, same = _number(record, "foreign"), (_number(record, "likeness") or 0.0) >= SAME
    return foreign is not None and foreign > FOREIGN and not same and not _beats(record, "psnr", FAR_PSNR)


def _is_recognizable(record: Mapping[str, Any]) -> bool:
    if (_number(record, "candidates") or 0.0) >= LEAST_CANDIDATES and not _is_nearest(record):
        return False
    if not _leads_controls(record, _number(record, "lead") or 0.0):
        return False
    beats = {name: _beats(record, name, margin) for name, margin in (("psnr", MARGIN_PSNR), ("ssim", MARGIN_SSIM))}
    lpips = _number(record, "lpips")
    perceived = lpips is not None and METRICS["lpips"].is_leak(lpips)
    return any(beats[name] and _passes(record, name) for name in beats) or (perceived and any(beats.values()))


def _passes(record: Mapping[str, Any], name: str) -> bool:
    value = _number(record, f"aligned_{name}")
    return value is not None and METRICS[name].is_leak(value)


def _beats(record: Mapping[str, Any], name: str, margin: float) -> bool:
    value, control = _number(record, f"aligned_{name}"), _number(record, f"control_{name}")
    # Nothing beats a control that is the image itself: both are infinite then.
    return value is not None and control is not None and control < math.inf and value >= control + margin


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
