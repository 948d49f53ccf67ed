"""Decide what an attack reconstructed of one image, text or row, by its typed record, without PyTorch.

The constants were fixed on training splits; ``experiments/verdict_pairs.py`` measures them on others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from fl_privacy.measure.intervals import BAND, binomial_tail
from fl_privacy.measure.registry import METRICS, TABLE_METRIC, TEXT_METRIC
from fl_privacy.types.victim_ids import Certainty

LIKENESS = 0.5  # least likeness of a guess to its nearest original, so that being nearest by chance is not identified
LEAD = 0.6  # least lead of the original over the nearest candidate, in standard deviations of the candidates
CHANCE, CHANCE_FALLS = 0.02, 0.6
"""Probability that an image of the original's class, without the update, is identified, and the lead
that reduces it e times.

Both bound what ``experiments/rows/verdict_chance`` counts on six data sets, of images of the class, generated ones,
icons and noise. Other pictures of the same person, taken in the same minute, exceed them: they are nearly the original.
"""

LEAST_CANDIDATES = 100  # least number of candidates: with fewer, chance alone identifies too many
SURE = 3.0  # lead above which no finer comparison, likeness or foreign share matters
FOREIGN = 0.25
"""Largest correlation with others of a guess's part beyond the original: a guess made from the original alone has
noise there, or traces of how it was changed; another picture of the same person, or the mean of a class, has others."""

SAME = 0.97  # likeness above which a guess shows hardly anything else
MARGIN_PSNR = 3.5  # least PSNR in dB above that of a control without the update
FAR_PSNR = 5.0  # PSNR in dB above the control's from which the foreign share does not matter
MUCH_PSNR = 10.0  # the same, from which the lead of guesses without the update does not matter: they are farther
MARGIN_SSIM = 0.25  # least structural similarity above the control's
WORDS_METRIC = "word_f1"
MARGIN_F1 = 0.2  # least token F1 above that of word frequency alone
FEW_WORDS = 3  # least number of right words that can count, for a text of any length
BY_FREQUENCY = 0.02  # largest probability that as many guessed words are right by their frequency
ROUNDED = 1e-4  # least excess of shares of cells over a control recorded with four decimals
ROUNDING = 0.5 / 255  # largest error of a pixel that vanishes when pixels are stored in 8 bits
ROUNDING_PSNR = -20 * math.log10(ROUNDING)  # PSNR in dB of an image whose pixels are all that far off, 54.2
PROVEN_PSNR = 40.0  # PSNR in dB below which a claimed proof is wrong: single precision has far smaller errors


class Outcome(StrEnum):
    """Outcome for one example, ordered from most to least leaked."""

    EXACT = "exact"
    """Certified, or equal up to the rounding of 8-bit pixels if no control is; a text token by token, a row digit by
    digit."""

    IDENTIFIED = "identified"  # the original is nearer to the guess than any of the candidates, up to harmless changes

    RECOGNIZABLE = "recognizable"
    """Past a published threshold, and better than a control that never saw the update; for a row, more
    cells right than 95 percent of such controls reach, and than the table's usual row."""

    NOTHING = "nothing"  # none of these, or no guess


READ = frozenset({Outcome.EXACT, Outcome.IDENTIFIED, Outcome.RECOGNIZABLE})  # outcomes that count as a leak


@dataclass(frozen=True, kw_only=True)
class GuessComparison:
    """Figures of a guess next to its original, candidates and controls; ``None`` if not measured.

    Fields are recorded in this order. Correlations and shares are in [0, 1], PSNRs in dB, leads in standard deviations
    of the candidates; a control is the same figure of the best guess that never saw the update.
    """

    exact: bool | None = None  # ``True`` if image or row are equal up to rounding
    control_psnr: float | None = None
    control_ssim: float | None = None
    likeness: float | None = None
    candidates: float | None = None
    # original's place among itself and the candidates, by the best of several ways of comparing: that of an empty
    # guess is 1 more often than once in as many candidates. Older versions called it ``rank``.
    best_rank: float | None = None
    lead: float | None = None
    foreign: float | None = None
    control_lead: float | None = None
    aligned_psnr: float | None = None
    aligned_ssim: float | None = None
    control_f1: float | None = None
    control_cells: float | None = None
    chance: float | None = None  # probability that guesses without the update score as well on the upload
    words_there: float | None = None
    # number of right words in all texts of the upload, of ``words_there`` in ``words_of`` texts
    words_read: float | None = None
    words_false: float | None = None  # number of guessed words that are in no text
    words_of: float | None = None
    word_control_f1: float | None = None
    word_chance: float | None = None  # ``chance`` by words

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "GuessComparison":
        numbers = {field.name: _number(record.get(field.name)) for field in fields(cls) if field.name != "exact"}
        if numbers["best_rank"] is None:
            numbers["best_rank"] = _number(record.get("rank"))
        return cls(exact=record.get("exact") is True, **numbers)

    def as_record(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def is_above(self, name: str, margin: float) -> bool:
        """Return ``True`` if the aligned ``psnr`` or ``ssim`` exceeds its control by ``margin``."""
        value, control = getattr(self, f"aligned_{name}"), getattr(self, f"control_{name}")
        # nothing beats a control that equals the image: both are infinite then
        return value is not None and control is not None and control < math.inf and value >= control + margin

    @property
    def leads_controls(self) -> bool:
        lead, control = self.lead or 0.0, self.control_lead
        return control is None or lead >= control + LEAD or self.is_above("psnr", MUCH_PSNR)

    @property
    def is_nearest(self) -> bool:
        """Return ``True`` if the original is nearest to a guess, and the guess does not rather show a candidate."""
        likeness, foreign = self.likeness or 0.0, self.foreign
        of_others = foreign is not None and foreign > FOREIGN and likeness < SAME
        alike = likeness >= LIKENESS and not (of_others and not self.is_above("psnr", FAR_PSNR))
        return self.best_rank == 1 and ((self.lead or 0.0) >= SURE or alike)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageScore:
    """Score of one image, text or row, by which its outcome is decided.

    Attributes:
        guess: index in the reconstruction's batch; ``None`` without a guess, or if read from a record.
        values: metrics by name in ``METRICS``; NaN if not computable, empty after a failure.
        failure: why nothing can be compared.
        compared: figures of the outcome; without any if not requested.
    """

    image: int
    guess: int | None
    values: Mapping[str, float]
    failure: str | None = None
    certainty: Certainty = Certainty.APPROXIMATE
    compared: GuessComparison = GuessComparison()

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "ImageScore":
        failure, certainty = record.get("failure"), record.get("certainty")
        return cls(
            image=int(record.get("image", 0)),
            guess=None,
            values={name: record[name] for name in METRICS if name in record},
            failure=None if failure is None else str(failure),
            certainty=next((known for known in Certainty if known == certainty), Certainty.APPROXIMATE),
            compared=GuessComparison.of_record(record),
        )

    @cached_property
    def outcome(self) -> Outcome | None:
        """Return the outcome, exact if proven and not contradicted; ``None`` if it was not measured."""
        values, compared = self.values, self.compared
        if self.failure is not None:
            return Outcome.NOTHING
        plain = compared.control_psnr is not None and compared.control_psnr >= ROUNDING_PSNR
        if (self.certainty == Certainty.PROVEN and not self._contradicted) or (compared.exact and not plain):
            return Outcome.EXACT
        if TEXT_METRIC in values or TABLE_METRIC in values:
            return self._outcome_of_text if TEXT_METRIC in values else self._outcome_of_row
        if compared.likeness is None:
            return None
        leads = (compared.lead or 0.0) >= LEAD and compared.is_nearest and compared.leads_controls
        if (compared.candidates or 0.0) >= LEAST_CANDIDATES and leads:
            return Outcome.IDENTIFIED
        return Outcome.RECOGNIZABLE if self._is_recognizable else Outcome.NOTHING

    @property
    def _outcome_of_text(self) -> Outcome | None:
        if self.values.get("exact_match") == 1:
            return Outcome.EXACT
        if self.words_are_read or self._above_frequency:
            return Outcome.RECOGNIZABLE
        return None if self.compared.control_f1 is None else Outcome.NOTHING

    @property
    def _outcome_of_row(self) -> Outcome | None:
        found, control = _number(self.values[TABLE_METRIC]), self.compared.control_cells
        if found is None or control is None:
            return None
        above = found > control + ROUNDED and not _is_chance(self.compared.chance)
        return Outcome.RECOGNIZABLE if above else Outcome.NOTHING

    @property
    def chance(self) -> float:
        """Return the probability that a guess without the update scores as well as this example.

        For an image it follows from the lead, and is 0 if recognizable far above its control; for rows it is 1 -
        ``BAND``; for words it is the binomial tail, and 0 above the control by a margin.
        """
        if TABLE_METRIC in self.values:
            return 1 - BAND
        if TEXT_METRIC in self.values:
            return 0.0 if self._above_frequency else self._chance_of_words(self.compared.word_control_f1 or 0.0)
        if self._is_recognizable and self.compared.is_above("psnr", MUCH_PSNR):
            return 0.0
        lead = LEAD if self.compared.lead is None else self.compared.lead
        return min(1.0, CHANCE * math.exp(min(10.0, (LEAD - lead) / CHANCE_FALLS)))

    @property
    def words_are_read(self) -> bool:
        """Return ``True`` if the words found in an upload's texts exceed their frequency control."""
        control, chance = self.compared.word_control_f1, self.compared.word_chance
        if _number(self.values.get(WORDS_METRIC)) is None or control is None or _is_chance(chance):
            return False
        few_are_sure = int(self.compared.words_read or 0) >= FEW_WORDS and self._chance_of_words(control) < BY_FREQUENCY
        return few_are_sure or self._exceeds(WORDS_METRIC, control, chance)

    @property
    def _contradicted(self) -> bool:
        if self.values.get(TABLE_METRIC) is not None:
            return self.values.get("row_right") == 0
        psnr = _number(self.values.get("psnr"))
        return self.values.get("exact_match") == 0 or (psnr is not None and psnr < PROVEN_PSNR)

    @property
    def _above_frequency(self) -> bool:
        compared = self.compared
        in_order = self._exceeds(TEXT_METRIC, compared.control_f1, compared.chance)
        return in_order or self._exceeds(WORDS_METRIC, compared.word_control_f1, compared.word_chance)

    def _exceeds(self, name: str, control: float | None, chance: float | None) -> bool:
        found = _number(self.values.get(name))
        if found is None or control is None or _is_chance(chance):
            return False
        return METRICS[name].is_leak(found) and found >= control + MARGIN_F1

    @property
    def _is_recognizable(self) -> bool:
        compared = self.compared
        if (compared.candidates or 0.0) >= LEAST_CANDIDATES and not compared.is_nearest:
            return False
        if not compared.leads_controls:
            return False
        margins = {"psnr": MARGIN_PSNR, "ssim": MARGIN_SSIM}
        above = [name for name, margin in margins.items() if compared.is_above(name, margin)]
        lpips = _number(self.values.get("lpips"))
        perceived = bool(above) and lpips is not None and METRICS["lpips"].is_leak(lpips)
        return perceived or any(METRICS[name].is_leak(getattr(compared, f"aligned_{name}")) for name in above)

    def _chance_of_words(self, control: float) -> float:
        right, wrong = int(self.compared.words_read or 0), int(self.compared.words_false or 0)
        return binomial_tail(right, right + wrong, control)


def outcome_of(record: Mapping[str, Any]) -> Outcome | None:
    """Decide the outcome of an ``image`` record of ``metrics.jsonl``; see :class:`ImageScore`."""
    return ImageScore.of_record(record).outcome


def _is_chance(chance: float | None) -> bool:
    return chance is not None and chance > 1 - BAND


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
