"""Outcome of an attack on one image, text or row, decided from its score without PyTorch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from fl_privacy.measure.intervals import BAND, binomial_tail
from fl_privacy.measure.registry import METRICS, TABLE_METRIC, TEXT_METRIC
from fl_privacy.types.victim_ids import Certainty

# fixed on training splits; ``experiments/verdict_pairs.py`` measures these constants on other splits
LIKENESS = 0.5  # least likeness of an identified guess to its original
LEAD = 0.6  # least lead of an identified original over the nearest candidate, in the candidates' standard deviations
CHANCE, CHANCE_FALLS = 0.02, 0.6
"""Probability that a guess without the update is identified with the lead ``LEAD``, and the further lead that divides
this probability by e.

Both bound what ``experiments/rows/verdict_chance`` counts on six data sets. Pictures of the same person, taken in the
same minute, exceed them.
"""

LEAST_CANDIDATES = 100  # least number of candidates to call an image identified
SURE = 3.0  # lead above which comparisons at high resolution, likeness and foreign share do not matter
FOREIGN = 0.25
"""Largest foreign share of an identified guess. This share is the correlation of the guess's difference from the
original with candidates; it is large for another picture of the same person or the mean of a class.
"""

SAME = 0.97  # likeness above which the foreign share does not matter
MARGIN_PSNR = 3.5  # least PSNR in dB above that of a control without the update
FAR_PSNR = 5.0  # PSNR in dB above the control's, from which on the foreign share does not matter
MUCH_PSNR = 10.0  # PSNR in dB above the control's, from which on the control's lead does not matter
MARGIN_SSIM = 0.25  # least structural similarity above the control's
WORDS_METRIC = "word_f1"
MARGIN_F1 = 0.2  # least token F1 above that of word frequency alone
FEW_WORDS = 3  # least number of right words of a recognizable text
BY_FREQUENCY = 0.02  # largest probability that as many words are right by their frequency alone
ROUNDED = 1e-4  # least excess of a share of cells over its control, which is recorded with four decimals
ROUNDING = 0.5 / 255  # largest error of a pixel that vanishes by rounding to 8 bits
ROUNDING_PSNR = -20 * math.log10(ROUNDING)  # PSNR in dB of an image with this error in all pixels, 54.2
PROVEN_PSNR = 40.0  # PSNR in dB below which a claimed proof is wrong


class Outcome(StrEnum):
    """Result of an attack on one example, in order from most to least leaked."""

    EXACT = "exact"
    """Proven by the attack, or equal: an image rounded to 8 bits, a text token by token, a row digit by digit."""

    IDENTIFIED = "identified"  # original nearer to the guess than all candidates, up to harmless changes

    RECOGNIZABLE = "recognizable"
    """Beyond a published threshold, and better than a control that never saw the update; for a row, more right cells
    than 95 % of such controls and than the table's usual row."""

    NOTHING = "nothing"  # none of these outcomes, or no guess


READ = frozenset({Outcome.EXACT, Outcome.IDENTIFIED, Outcome.RECOGNIZABLE})  # outcomes that count as reconstructed


@dataclass(frozen=True, kw_only=True)
class GuessComparison:
    """Figures that compare a guess with its original, with candidates and with controls; ``None`` if not measured.

    Candidates are other images that the guess may show. A control is a guess that never saw the update;
    ``control_psnr`` is the largest PSNR of a control, and so on. A lead is the original's margin over the nearest
    candidate, in standard deviations of the candidates. Likeness is the correlation of guess and original. Correlations
    and shares are in [0, 1], PSNRs in dB.
    """

    exact: bool | None = None  # ``True`` if image or row equal the original up to rounding
    control_psnr: float | None = None
    control_ssim: float | None = None
    likeness: float | None = None
    candidates: float | None = None
    # rank of the original among itself and the candidates, by the best of several comparisons; ``rank`` in old records
    best_rank: float | None = None
    lead: float | None = None
    foreign: float | None = None
    control_lead: float | None = None
    aligned_psnr: float | None = None
    aligned_ssim: float | None = None
    control_f1: float | None = None
    control_cells: float | None = None
    chance: float | None = None  # probability that guesses without the update score as well on the upload
    words_there: float | None = None  # number of distinct words in all texts of the upload
    # number of right words, of ``words_there``
    words_read: float | None = None
    words_false: float | None = None  # number of guessed words that are in no text
    words_of: float | None = None  # number of texts of the upload
    word_control_f1: float | None = None
    word_chance: float | None = None  # ``chance`` of the words

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "GuessComparison":
        numbers = {field.name: _number(record.get(field.name)) for field in fields(cls) if field.name != "exact"}
        if numbers["best_rank"] is None:
            numbers["best_rank"] = _number(record.get("rank"))
        return cls(exact=record.get("exact") is True, **numbers)

    def as_record(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def is_above(self, name: str, margin: float) -> bool:
        value, control = getattr(self, f"aligned_{name}"), getattr(self, f"control_{name}")
        # nothing beats a control that equals the image: both are infinite then
        return value is not None and control is not None and control < math.inf and value >= control + margin

    @property
    def depends_on_control_lead(self) -> bool:
        open_still = self.is_nearest or (self.candidates or 0.0) < LEAST_CANDIDATES
        return self.best_rank == 1 and not self.exact and open_still and not self.is_above("psnr", MUCH_PSNR)

    @property
    def leads_controls(self) -> bool:
        lead, control = self.lead or 0.0, self.control_lead
        return control is None or lead >= control + LEAD or self.is_above("psnr", MUCH_PSNR)

    @property
    def is_nearest(self) -> bool:
        """Return whether the original is clearly nearer to the guess than all candidates are.

        This takes a lead of at least ``SURE``, or a likeness of at least ``LIKENESS``; see the class for both.
        """
        likeness, foreign = self.likeness or 0.0, self.foreign
        of_others = foreign is not None and foreign > FOREIGN and likeness < SAME
        alike = likeness >= LIKENESS and not (of_others and not self.is_above("psnr", FAR_PSNR))
        return self.best_rank == 1 and ((self.lead or 0.0) >= SURE or alike)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageScore:
    """Score of one image, text or table row: value of each metric, and the comparison that decides the outcome."""

    image: int
    guess: int | None  # index of the guess; ``None`` without a guess, or if the score is loaded from a record
    values: Mapping[str, float]  # value of each metric in ``METRICS``, NaN if undefined; empty after a failure
    failure: str | None = None  # reason for a missing guess
    certainty: Certainty = Certainty.APPROXIMATE
    compared: GuessComparison = GuessComparison()  # comparison that decides the outcome, empty if not requested

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
        """Return the probability that a guess made without the update scores as well as this guess.

        It is computed from the original's margin over other images (lead), or from the number of a text's right words.
        For a row, it is 5 % (1 - ``BAND``). It is 0 for an image or a text far better than guesses without the update.
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
        """Return whether an upload's guessed words match its texts better than the same number of frequent words."""
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
    """Return the outcome of an ``image`` record of ``metrics.jsonl``; ``None`` if the image was not compared."""
    return ImageScore.of_record(record).outcome


def _is_chance(chance: float | None) -> bool:
    return chance is not None and chance > 1 - BAND


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
