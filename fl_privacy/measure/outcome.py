"""Decide what an attack reconstructed of one image, text or row, by its record in ``metrics.jsonl``, without PyTorch.

The constants were fixed on training splits; ``experiments/verdict_pairs.py`` measures them on others.
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
"""Least likeness of a guess to its nearest original, so that being nearest by chance is not identified."""

LEAD = 0.6
"""Least lead of the original over the nearest candidate, in standard deviations of the candidates."""

CHANCE, CHANCE_FALLS = 0.02, 0.6
"""Probability that an image of the original's class, without the update, is identified, and the lead
that reduces it e times.

Both bound what ``experiments/rows/verdict_chance`` counts on six data sets, of images of the class, generated ones,
icons and noise. Other pictures of the same person, taken in the same minute, exceed them: they are nearly the original.
"""

LEAST_CANDIDATES = 100
"""Least number of candidates: with fewer, chance alone identifies too many."""

SURE = 3.0
"""Lead above which no finer comparison, likeness or foreign share matters."""

FOREIGN = 0.25
"""Largest correlation with others of a guess's part beyond the original: a guess made from the original alone has
noise there, or traces of how it was changed; another picture of the same person, or the mean of a class, has others."""

SAME = 0.97
"""Likeness above which a guess shows hardly anything else."""

MARGIN_PSNR = 3.5
"""Least PSNR in dB above that of a control without the update."""

FAR_PSNR = 5.0
"""PSNR in dB above the control's from which the foreign share does not matter."""

MUCH_PSNR = 10.0
"""The same, from which the lead of guesses without the update does not matter, since they are not as close."""

MARGIN_SSIM = 0.25
"""Least structural similarity above the control's."""

WORDS_METRIC = "word_f1"

MARGIN_F1 = 0.2
"""Least token F1 above that of word frequency alone."""

FEW_WORDS = 3
"""Least number of right words that can count, for a text of any length."""

BY_FREQUENCY = 0.02
"""Largest probability that as many guessed words are right by their frequency."""

ROUNDED = 1e-4
"""Least excess of shares of cells over a control recorded with four decimals."""

ROUNDING = 0.5 / 255
"""Largest error of a pixel that vanishes when pixels are stored in 8 bits."""

ROUNDING_PSNR = -20 * math.log10(ROUNDING)
"""PSNR in dB of an image whose pixels are all that far off, 54.2."""


PROVEN_PSNR = 40.0
"""PSNR in dB below which a claimed proof is wrong: single precision has far smaller errors."""


class Outcome(StrEnum):
    """Outcome for one example, from the most leaked."""

    EXACT = "exact"
    """Certified, or equal up to the rounding of 8-bit pixels if no control is; a text token by token, a row digit by
    digit."""

    IDENTIFIED = "identified"
    """The original is nearer to the guess than any of the candidates, up to harmless changes."""

    RECOGNIZABLE = "recognizable"
    """Past a published threshold, and better than a control that never saw the update; for a row, more
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
    """Decide the outcome of an ``image`` record of ``metrics.jsonl``.

    Returns:
        Outcome; ``None`` if the original is not known, or an older version did not measure it. A guess claimed as
        proven is exact unless a known original contradicts it.
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
    control = _number(record, "control_psnr")
    return control is not None and control >= ROUNDING_PSNR


def _is_denied(record: Mapping[str, Any]) -> bool:
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
    found, control = _number(record, TABLE_METRIC), _number(record, "control_cells")
    if found is None or control is None:
        return None
    beyond = found > control + ROUNDED and not _is_chance(record, "chance")
    return Outcome.RECOGNIZABLE if beyond else Outcome.NOTHING


def _is_chance(record: Mapping[str, Any], name: str) -> bool:
    """Return ``True`` if one guess in twenty without the update scores as well on the upload."""
    chance = _number(record, name)
    return chance is not None and chance > 1 - BAND


def words_are_read(record: Mapping[str, Any]) -> bool:
    """Return ``True`` if the words found in an upload's texts exceed their frequency control."""
    found, control = _number(record, WORDS_METRIC), _number(record, "word_control_f1")
    if found is None or control is None or _is_chance(record, "word_chance"):
        return False
    return (METRICS[WORDS_METRIC].is_leak(found) and found >= control + MARGIN_F1) or _few_are_sure(record, control)


def chance_of(record: Mapping[str, Any]) -> float:
    """Return the probability that a guess without the update scores as well as this example.

    For an image it follows from the lead, and is 0 if recognizable far above its control; for rows it is 1 - ``BAND``;
    for words it is the binomial tail, and 0 above the control by a margin.
    """
    if TABLE_METRIC in record:
        return 1 - BAND
    if TEXT_METRIC not in record:
        if _is_recognizable(record) and _beats(record, "psnr", MUCH_PSNR):
            return 0.0
        lead = _number(record, "lead")
        return min(1.0, CHANCE * math.exp(min(10.0, (LEAD - (LEAD if lead is None else lead)) / CHANCE_FALLS)))
    if _beats_frequency(record):
        return 0.0
    right, wrong = (int(_number(record, name) or 0) for name in ("words_read", "words_false"))
    return binomial_tail(right, right + wrong, _number(record, "word_control_f1") or 0.0)


def _few_are_sure(record: Mapping[str, Any], control: float) -> bool:
    right, wrong = (int(_number(record, name) or 0) for name in ("words_read", "words_false"))
    return right >= FEW_WORDS and binomial_tail(right, right + wrong, control) < BY_FREQUENCY


def _is_identified(record: Mapping[str, Any]) -> bool:
    enough, lead = _number(record, "candidates") or 0.0, _number(record, "lead") or 0.0
    return enough >= LEAST_CANDIDATES and lead >= LEAD and _is_nearest(record) and _leads_controls(record, lead)


def _is_nearest(record: Mapping[str, Any]) -> bool:
    """Return ``True`` if the original is nearer to a guess than all candidates, and not by their common part."""
    sure = (_number(record, "lead") or 0.0) >= SURE
    alike = (_number(record, "likeness") or 0.0) >= LIKENESS and not _is_of_others(record)
    return record.get("best_rank", record.get("rank")) == 1 and (sure or alike)


def _leads_controls(record: Mapping[str, Any], lead: float) -> bool:
    control = _number(record, "control_lead")
    return control is None or lead >= control + LEAD or _beats(record, "psnr", MUCH_PSNR)


def _is_of_others(record: Mapping[str, Any]) -> bool:
    """Return ``True`` if a guess is nearest only by what the original shares with others."""
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
    # nothing beats a control that equals the image: both are infinite then
    return value is not None and control is not None and control < math.inf and value >= control + margin


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
