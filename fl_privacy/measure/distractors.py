"""Comparison of guesses with originals, with distractors, and with controls made without the update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Tensor

from fl_privacy.measure import texts as text_metrics
from fl_privacy.measure.identification import PublicImages, all_aligned, control, identify, near_lead
from fl_privacy.measure.intervals import Coincidences, chance_of_upload, chance_of_words, either
from fl_privacy.measure.matching import Match
from fl_privacy.measure.outcome import LEAD, MARGIN_PSNR, PROVEN_PSNR, ROUNDING, SAME, GuessComparison
from fl_privacy.measure.tables import control_cells, exact_rows, misfit
from fl_privacy.measure.texts import Language, widened, without
from fl_privacy.types import Batch, Reconstruction, VictimId
from fl_privacy.types.schema import Schema

_DIGITS = 4  # recorded decimals; further decimals depend on the number of images compared at once


Controls = Mapping[VictimId, Tensor]  # victim -> guesses (K, C, H, W) that never saw its update
NEARLY = 0.03  # root mean squared difference up to which two images are nearly the same, 30 dB
CLOSER = 10 ** (-MARGIN_PSNR / 10)  # largest ratio of the variance unexplained by a guess to that by a near image
TWIN = 6.0  # least lead at which the nearest public image shows the same scene as an original
OTHER_UPDATES, MOST_CONTROLS = 3, 8  # most other updates whose guesses are controls, and most such guesses
MOST_COMPARED = 256  # most victims whose latest figures are kept


@dataclass(frozen=True, kw_only=True, eq=False)
class Distractors:
    """Public examples (distractors) and guesses made without the update (controls) to compare guesses with."""

    candidates: PublicImages | None = None  # distractor images; ``None`` without any, or for texts
    texts: Tensor | None = None  # tokens (N, L) of public texts, padded with -1, for controls of texts
    rows: Tensor | None = None  # cells (M, C) of public rows, for controls of rows
    labels: Tensor | None = None  # classes (M,) of the public rows, if any
    # guesses that never saw the update, such as the same attack's on another client
    controls: Controls = field(default_factory=dict)
    # function from a client's number to its distractors, if they differ between clients
    of_client: Callable[[int], PublicImages | None] | None = None

    def of(self, victim: VictimId) -> "Distractors":
        return self if self.of_client is None else replace(self, candidates=self.of_client(victim.client))


def other_updates(victims: Sequence[VictimId], guesses: Sequence[Tensor | None], truths: Sequence[Tensor]) -> Controls:
    """Return, for each victim, guesses made from other clients' updates, which serve as controls.

    The other updates share no image with the victim. If all victims are of one client, its other updates are taken.
    ``guesses`` (``None`` for a failure) and ``truths``: (B, C, H, W); those of other shapes or not finite are left out.
    """
    found, flat = {}, [truth.flatten(1).float() for truth in truths]
    usable = [
        guess[guess.isfinite().flatten(1).all(1)].detach().cpu().clamp(0, 1)
        if guess is not None and guess.shape[1:] == truth.shape[1:]
        else truth[:0]
        for guess, truth in zip(guesses, truths, strict=True)
    ]
    for place, victim in enumerate(victims):
        following = [(place + step) % len(victims) for step in range(1, len(victims))]
        distances = {other: torch.cdist(flat[other], flat[place]) / flat[other].shape[1] ** 0.5 for other in following}
        apart = [other for other in following if not bool((distances[other] <= NEARLY).any())]
        foreign = [other for other in apart if victims[other].client != victim.client]
        apart = foreign or (apart if len({each.client for each in victims}) == 1 else [])
        made = [usable[other] for other in apart if len(usable[other])][:OTHER_UPDATES]
        if made:
            found[victim] = torch.cat(made)[:MOST_CONTROLS]
    return found


def compare_images(
    match: Match, others: Distractors, victim: VictimId, fed: Tensor | None = None
) -> list[GuessComparison]:
    """Compare each guessed image with its original, with distractors and with controls; return one result for each.

    Distractors are images that a guess could also show, controls are guesses made without the update. ``fed``: images
    (B, C, H, W) that entered the network, such as crops, to compare with instead of the originals. A guess that equals
    its original or its ``fed`` image counts as exact.
    """
    found = match.found
    if not len(found):
        return []
    others = others.of(victim)
    originals = (match.originals if fed is None else fed.detach().cpu())[found].float()
    extra = others.controls.get(victim, torch.empty(0)).float()
    given = match.guesses[found].float(), originals, match.originals[found].float(), match.labels[found], extra
    if others.candidates is None:
        return _compared(given, None)
    kept, key = others.candidates.compared, tuple((one.shape, blake2b(one.numpy().tobytes()).digest()) for one in given)
    if key not in kept:
        if len(kept) == MOST_COMPARED:
            del kept[next(iter(kept))]
        kept[key] = _compared(given, others.candidates)
    return list(kept[key])


def _compared(given: Sequence[Tensor], candidates: PublicImages | None) -> list[GuessComparison]:
    guesses, originals, unchanged, labels, controls = given
    exact, extra = _is_exact(guesses, originals) | _is_exact(guesses, unchanged), list(controls)
    undecided: dict[int, GuessComparison] = {}
    figures, nearest = [GuessComparison(exact=same) for same in exact.tolist()], torch.arange(len(guesses))
    if (rest := (~exact).nonzero().flatten()).numel():
        seen = identify(guesses[rest], originals[rest], candidates)
        nearest[rest] = rest[seen.guess]
        for number, place in enumerate(rest.tolist()):
            own = replace(figures[place], likeness=_round(seen.likeness[number]), candidates=seen.candidates)
            if seen.rank is not None and seen.lead is not None and seen.foreign is not None:
                own = replace(own, best_rank=int(seen.rank[number]), lead=_round(seen.lead[number]))
            if own.best_rank == 1:
                own = replace(own, foreign=_round(seen.foreign[number]) if seen.foreign is not None else None)
            figures[place] = own
    if bool(exact.any()):
        same = GuessComparison(exact=True, likeness=1.0, candidates=0)
        if candidates is not None:
            same = replace(same, candidates=int((~candidates.equal(originals)).sum()), best_rank=1)
        figures = [same if own.exact else own for own in figures]
    tries = [sorted({place, near}) for place, near in enumerate(nearest.tolist())]
    own_aligned = all_aligned([[guesses[guess] for guess in own] for own in tries], originals)
    for place, (truth, label, own_best) in enumerate(zip(originals, labels.tolist(), own_aligned, strict=True)):
        top_psnr, top_ssim = control(truth, label, candidates, extra)
        figures[place] = own = replace(
            figures[place],
            control_psnr=_round(top_psnr),
            control_ssim=_round(top_ssim),
            aligned_psnr=_round(own_best[0]),
            aligned_ssim=_round(own_best[1]),
        )
        if own.likeness is not None and own.aligned_psnr is not None and own.aligned_psnr >= PROVEN_PSNR:
            alike = max(correlation(guesses[one], truth) for one in tries[place])  # candidates are compared coarsely
            figures[place] = replace(own, likeness=_round(max(own.likeness, alike)))
        if figures[place].depends_on_control_lead:
            undecided[place] = own
    if candidates is not None and undecided:
        leads = _control_leads(originals[[*undecided]], [*undecided.values()], extra, candidates)
        for place, lead in zip(undecided, leads, strict=True):
            figures[place] = replace(figures[place], control_lead=_round(lead) if lead > -math.inf else None)
    return figures


def correlation(one: Tensor, other: Tensor) -> float:
    """Return the correlation, in [-1, 1], of two images of one shape; 0 if one is constant."""
    found = float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]).double())[0, 1])
    return found if math.isfinite(found) else 0.0


MOST_OTHERS = 10_000, 2000  # most public examples that are compared for a single attacked example, and for a batch


def _stand_ins(others: Tensor, number: int) -> Tensor:
    most = MOST_OTHERS[number > 1]
    return others[torch.linspace(0, len(others) - 1, most).long()] if len(others) > most else others


def compare_texts(match: Match, others: Distractors, language: Language | None = None) -> list[GuessComparison]:
    """Compare each guessed text with its original and with public texts; return one result for each.

    ``control_f1`` is the F1 score of guessing the most frequent public tokens. ``chance`` is the probability that
    unrelated public texts fit the guesses as well. Special tokens of ``language`` are excluded.
    """
    truths = match.originals[match.found]
    if others.texts is None or not len(truths):
        return [GuessComparison() for _ in truths]
    special = language.special if language else frozenset[int]()
    truths, guesses = without(truths, special), without(match.guesses[match.found], special)
    public = without(others.texts.long(), special)
    usual = text_metrics.most_frequent(public, (truths >= 0).sum(1))
    pool = torch.cat(widened([truths, _stand_ins(public, len(truths))]))
    exact = int((torch.eq(*widened([guesses, truths]))).all(1).sum())
    chance = _chance(text_metrics.shared_tokens(guesses, pool), len(truths), exact, public)
    shares = text_metrics.token_f1(*widened([usual, truths])).tolist()
    return [GuessComparison(control_f1=_round(value), chance=chance) for value in shares]


def _chance(fits: Tensor, number: int, exact: int, public: Tensor, classes: Sequence[int] | None = None) -> float:
    # fits: of each guess with each original, then with each public example, whose classes are ``classes``
    chance, equal = chance_of_upload(fits.numpy(), number, classes=classes), 1.0
    if exact:
        _, of, times = torch.unique(public, dim=0, return_inverse=True, return_counts=True)
        equal = Coincidences.counted((times[of] - 1).numpy()).chance(exact, number)
    return round(either(chance, equal), _DIGITS_OF_CHANCE)


def compare_rows(match: Match, others: Distractors, schema: Schema) -> list[GuessComparison]:
    """Compare each guessed table row with its original and with public rows; return one result for each.

    ``control_cells`` is the share of cells that are right without the update. ``chance`` is the probability that
    unrelated public rows fit the guesses as well.
    """
    found = match.found
    truths, guesses = schema.cells(match.originals), schema.cells(match.guesses)
    exact = exact_rows(schema, guesses, truths)[found].tolist()
    if others.rows is None or not len(others.rows) or not exact:
        return [GuessComparison(exact=each) for each in exact]
    control = control_cells(others.rows, truths, schema)[found].tolist()
    pool, classes = torch.cat([truths[found], _stand_ins(others.rows, len(found))]), None
    if others.labels is not None:
        classes = torch.cat([match.labels[found].long(), _stand_ins(others.labels, len(found)).long()]).tolist()
    chance = _chance(-misfit(schema, guesses[found], pool).T, len(found), sum(exact), others.rows, classes)
    pairs = zip(exact, control, strict=True)
    return [GuessComparison(exact=each, control_cells=_round(own), chance=chance) for each, own in pairs]


def _is_exact(guesses: Tensor, originals: Tensor) -> Tensor:
    return (guesses - originals).abs().flatten(1).amax(1) <= ROUNDING + 1e-6


def _control_leads(
    originals: Tensor, figures: Sequence[GuessComparison], extra: Sequence[Tensor], candidates: PublicImages
) -> list[float]:
    # controls: guesses at other updates, and public images almost equal to the original
    found = [identify(each[None], originals, candidates).lead for each in extra]
    leads = [[float(each[place]) for each in found if each is not None] for place in range(len(originals))]
    for original, own, highest in zip(originals, figures, leads, strict=True):
        lead, near = near_lead(original, candidates)
        if (near >= SAME or lead >= TWIN) and 1 - (own.likeness or 0.0) ** 2 > CLOSER * (1 - near**2):
            highest.append(own.lead or 0.0 if lead >= TWIN else lead - LEAD)
    return [max(each, default=-math.inf) for each in leads]


def _round(value: float | Tensor) -> float:
    return round(float(value), _DIGITS)


_DIGITS_OF_F1 = 6
_DIGITS_OF_CHANCE = 9


def compare_words(
    reconstruction: Reconstruction, truth: Batch, others: Distractors | None, language: Language | None
) -> tuple[dict[str, float], GuessComparison]:
    """Compare the words guessed for one victim with those of its texts; return metrics and a comparison.

    Both are empty if no words were guessed. Special tokens are excluded. The control guesses as many words as the texts
    have, the most frequent public ones. ``word_chance`` is the probability that unrelated texts fit the guess as well.
    """
    if reconstruction.words is None:
        return {}, GuessComparison()
    special = language.special if language else frozenset[int]()
    read, there = (without(t.reshape(1, -1).cpu().long(), special) for t in (reconstruction.words, truth.inputs))
    kinds: list[Tensor] = [torch.unique(tokens[tokens >= 0])[None] for tokens in (read, there)]
    guesses, truths = widened(kinds)
    common = int(torch.isin(*kinds).sum())
    number, total = (len(words[0]) for words in kinds)
    values = {
        "word_f1": float(text_metrics.token_f1(guesses, truths)),
        "word_precision": float(text_metrics.token_precision(guesses, truths)),
        "word_recall": float(text_metrics.token_recall(guesses, truths)),
        "count_f1": float(text_metrics.token_f1(*widened([read, there]))),
    }
    figures = GuessComparison(words_there=total, words_read=common, words_false=number - common, words_of=len(truth))
    if others is None or others.texts is None:
        return values, figures
    public = without(others.texts.long(), special)
    counts = public[public >= 0].bincount()
    control = counts.argsort(descending=True, stable=True)[None, : min(total, int((counts > 0).sum()))]
    texts = [set(text[text >= 0].tolist()) for text in _stand_ins(public, len(truth))]
    own = [set(text[text >= 0].tolist()) for text in without(truth.inputs.cpu().long(), special)]
    return values, replace(
        figures,
        word_control_f1=round(float(text_metrics.token_f1(*widened([control, kinds[1]]))), _DIGITS_OF_F1),
        word_chance=round(chance_of_words(set(kinds[0][0].tolist()), own, texts, few=True), _DIGITS_OF_CHANCE),
    )
