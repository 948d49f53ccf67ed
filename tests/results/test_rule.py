"""No page is red by chance: random guesses in batches of one size each (``make fuzz``: of 1 to 64)."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fl_privacy.auditing.scenario_scores import count_rows, score
from fl_privacy.auditing.scenario_words import scored_words
from fl_privacy.measure import evaluate_all
from fl_privacy.measure.answer import Answer
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.identification import PublicImages
from fl_privacy.measure.roc import Estimate
from fl_privacy.measure.rule import LEVEL, above_chance
from fl_privacy.runs.folder.leakage import AttackFacts
from fl_privacy.runs.folder.summary import summarize
from fl_privacy.runs.folder.verdict import judged
from fl_privacy.types import Batch, Reconstruction, VictimId
from tests.results.runs import counts_of
from tests.selection import few
from tests.tables.tables import dataset

UPLOADS = {1: 6}


def guessed(inputs: Tensor, place: int = 0, **more: object) -> Reconstruction:
    batch = Batch(inputs, torch.zeros(len(inputs)).long())
    return Reconstruction(id=VictimId(place, 1, 0), batch=batch, **more)  # type: ignore[arg-type]


def is_red(found: list[Reconstruction], truths: list[Batch], **given: object) -> bool:
    """Judge as a run does, from scores over records to the verdict."""
    scores = evaluate_all(found, truths, **given)  # type: ignore[arg-type]
    records = [
        {
            **{"kind": "image", "attacker": "plain", "id": str(one.id), "round": 1, "client": 0, "member": ""},
            **{
                "image": image.image,
                **image.values,
                **image.compared.as_record(),
                "certainty": image.certainty,
                "failure": None,
            },
        }
        for one in scores
        for image in one.images
    ]
    summary = summarize(records, finished=True, undefended_accuracy=None, total_seconds=None)
    return judged(summary, AttackFacts()).tone == "leak"


def rows_page(size: int, rng: torch.Generator, *, read: bool = False) -> bool:
    data = DATA
    others = Distractors(rows=data.train.schema.cells(data.test.inputs))
    found, truths = [], []
    for place in range(UPLOADS.get(size, 1)):
        truths.append(data.train.batch(torch.randperm(len(data.train), generator=rng)[:size]))
        public = data.test.inputs[torch.randint(len(data.test), (size,), generator=rng)]
        found.append(guessed(truths[-1].inputs.flip(0) if read else public, place))
    return is_red(found, truths, schema=data.train.schema, others=others)


def texts_page(size: int, rng: torch.Generator, *, read: bool = False) -> bool:
    def texts(number: int) -> Tensor:
        return torch.rand(number, 6, generator=rng).pow(3).mul(60).long() + 1  # frequent and seldom words

    others, found, truths = Distractors(texts=texts(300)), [], []
    for place in range(UPLOADS.get(size, 1)):
        own, public = texts(size), texts(size)
        tokens = own.flip(0) if read else public
        found.append(guessed(tokens, place, words=tokens.unique()))
        truths.append(Batch(own, torch.zeros(size).long()))
    return is_red(found, truths, others=others)


def images_page(size: int, rng: torch.Generator, *, read: bool = False) -> bool:
    found, truths = [], []
    for place in range(UPLOADS.get(size, 1)):
        own, public = (torch.rand(size, 1, 8, 8, generator=rng) for _ in range(2))
        found.append(guessed(own.flip(0) if read else public, place))
        truths.append(Batch(own, torch.zeros(size).long()))
    return is_red(found, truths, others=IMAGES)


DATA = dataset()
IMAGES = Distractors(
    candidates=PublicImages(images=torch.rand(120, 1, 8, 8, generator=torch.Generator().manual_seed(9)), name="noise")
)


@pytest.mark.parametrize(
    ("page", "size", "pages"),
    [
        *few([(rows_page, size, pages) for size, pages in ((4, 40), (1, 40), (16, 20), (64, 8))], 0, all_but_fuzz=1),
        *few([(texts_page, size, pages) for size, pages in ((16, 20), (1, 40), (4, 40), (64, 4))], 0, all_but_fuzz=1),
        *few([(images_page, size, pages) for size, pages in ((1, 8), (4, 8), (16, 1), (64, 1))], 0, all_but_fuzz=1),
    ],
)
def test_pages_of_random_guesses_are_not_red_and_of_originals_they_are(page: object, size: int, pages: int) -> None:
    rng = torch.Generator().manual_seed(size)
    assert callable(page)
    assert sum(page(size, rng) for _ in range(pages)) <= (1 if pages >= 20 else 0)
    assert page(size, rng, read=True)


@pytest.mark.parametrize(
    ("size", "others", "width"), [(1, 150, 4), (8, 60, 2), (32, 60, 30), (64, 288, 30), (64, 288, 3)]
)
def test_rows_of_an_app_are_not_read_by_random_guesses(size: int, others: int, width: int) -> None:
    read = red = 0
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        truth, guess, public = (torch.rand(n, width, generator=rng) for n in (size, size, others))
        counts, _ = count_rows([guessed(guess)], [Batch(truth, torch.zeros(size))], public)
        read += counts.read
        red += Answer(kind="row", counts=counts).above_chance
    assert red == 0 and read <= 0.002 * 20 * size + 1
    counts, shown = count_rows([guessed(truth.flip(0))], [Batch(truth, torch.zeros(size))], public)
    assert counts.exact == size == sum(one.reconstructed for one in shown)
    assert Answer(kind="row", counts=counts).above_chance is (size > 1 or counts.by_chance < LEVEL / 6)
    near = truth + 0.05 * torch.randn(truth.shape, generator=rng)
    counts, _ = count_rows([guessed(near.flip(0))], [Batch(truth, torch.zeros(size))], public)
    assert width < 30 or others < 100 or counts.identified == size


def test_rows_that_are_nearest_among_few_others_count_in_several_uploads() -> None:
    read = red = 0
    for seed in range(40):
        rng = torch.Generator().manual_seed(seed)
        truth, guess, public = (torch.rand(n, 30, generator=rng) for n in (3, 3, 85))
        batches = [Batch(one[None], torch.zeros(1)) for one in truth]
        counts, _ = count_rows([guessed(one[None], n) for n, one in enumerate(guess)], batches, public)
        read, red = read + counts.read, red + Answer(kind="row", counts=counts).above_chance
    assert read <= 1 and red == 0
    near = [guessed(one[None] * 0.8 + 0.1, n) for n, one in enumerate(truth)]
    counts, shown = count_rows(near, batches, public)
    assert counts.identified == 3 and Answer(kind="row", counts=counts).above_chance
    assert all(one.reconstructed for one in shown) and counts.candidates == 85
    counts, _ = count_rows(near[:1], batches[:1], public)
    assert counts.read == 0, "one upload alone may be nearest by chance"
    certain = [guessed(truth[:1], 0), near[1]]
    counts, _ = count_rows(certain, batches[:2], public)
    assert (counts.exact, counts.identified) == (1, 0), "an exact row does not prove another one"
    failed = Reconstruction(id=near[0].id, batch=None, failure="no guess")
    counts, _ = count_rows([near[0], failed, failed], batches, public)
    assert counts.failures == 2 and counts.groups == 1 == counts.judged, "uploads without a guess are not judged"


def test_uploads_without_a_guess_of_rows_are_no_scored_ones() -> None:
    truth, public = torch.rand(2, 5), torch.rand(9, 5)
    none = Reconstruction(id=VictimId(1, 1, 0), batch=None, failure="it failed")
    counts, _ = count_rows([guessed(truth[:1]), none], [Batch(one[None], torch.zeros(1)) for one in truth], public)
    assert (counts.judged, counts.failures, counts.groups) == (1, 1, 1)
    counts, _ = count_rows([none], [Batch(truth[1:], torch.zeros(1))], public)
    assert (counts.judged, counts.failures, counts.groups) == (0, 1, 0)


def test_rows_of_few_values_are_equal_by_chance() -> None:
    red = 0
    for seed in range(10):
        rng = torch.Generator().manual_seed(seed)
        truth, guess, public = (torch.rand(n, 4, generator=rng).round() for n in (16, 16, 200))
        counts, _ = count_rows([guessed(guess)], [Batch(truth, torch.zeros(16))], public)
        assert counts.read == 0, "chance has as many equal"
        red += Answer(kind="row", counts=counts).above_chance
    assert red == 0


def test_without_a_control_nothing_is_more_than_chance() -> None:
    truth = torch.rand(4, 5)
    counts, _ = count_rows([guessed(truth)], [Batch(truth, torch.zeros(4))], torch.empty(0, 5))
    assert counts.exact == 4 and not Answer(kind="row", counts=counts).above_chance
    alone = scored_words([({1, 2, 3, 4}, {1, 2, 3, 4})], 1)
    assert alone.counts.read == 1 and alone.control is None
    assert not Answer(kind="text", counts=alone.counts, control=alone.control).above_chance
    other = [{k, k + 1, k + 2, k + 3} for k in range(10, 2000, 3)]
    beside = scored_words([({1, 2, 3, 4}, {1, 2, 3, 4})], 1, other)
    assert Answer(kind="text", counts=beside.counts).above_chance
    everybodys = scored_words([({1, 2, 3, 4}, {1, 2, 3, 4})], 1, [{1, 2, 3, 4, k} for k in range(10, 600)])
    assert not Answer(kind="text", counts=everybodys.counts).above_chance


def problem(kind: str, truth: Tensor) -> SimpleNamespace:
    shape = tuple(truth.shape[1:])
    model = SimpleNamespace(looked_for=lambda x: x, shapes=[shape])
    return SimpleNamespace(kind=kind, truth=truth, labels=None, whole=False, model=model, input_shape=shape)


@pytest.mark.parametrize(("kind", "shape"), [("image", (1, 8, 8)), ("row", (9,))])
@pytest.mark.parametrize("shift", [0.0, 0.004])
def test_uploads_of_the_same_example_are_no_control(kind: str, shape: tuple[int, ...], shift: float) -> None:
    data = torch.rand(60, *shape, generator=torch.Generator().manual_seed(0)).mul(0.9)
    truths = [data[:1] + shift * k / 4 for k in range(4)] + [data[5:6]]
    found = [guessed(truth.clone(), place) for place, truth in enumerate(truths)]
    scored = score([problem(kind, truth) for truth in truths], found, [data], 0)  # type: ignore[arg-type]
    assert scored.counts.read == 5 and scored.control is not None
    assert (scored.control.read, scored.control.judged) == (0, 5), "beside the only other one"
    assert Answer(kind=kind, counts=scored.counts, control=scored.control).above_chance  # type: ignore[arg-type]
    alike = score([problem(kind, truth) for truth in truths[:4]], found[:4], [data], 0)  # type: ignore[arg-type]
    assert alike.counts.read == 4 and alike.control is None
    assert Answer(kind=kind, counts=alike.counts).above_chance  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: 0.9 - x, lambda x: x.mT],
    ids=["mirror", "upside down", "negative", "transposed"],
)
def test_uploads_of_the_same_image_that_was_mirrored_are_no_control(change: Callable[[Tensor], Tensor]) -> None:
    data = torch.rand(60, 1, 16, 16, generator=torch.Generator().manual_seed(0)).mul(0.9)
    truths = [data[:1], change(data[:1]), data[5:6]]
    found = [guessed(truth.clone(), place) for place, truth in enumerate(truths)]
    scored = score([problem("image", truth) for truth in truths], found, [data], 0)  # type: ignore[arg-type]
    assert scored.counts.read == 3 and scored.control is not None
    assert (scored.control.read, scored.control.judged) == (0, 3)


def test_rows_of_an_app_that_are_all_those_of_a_batch_are_near_to_none() -> None:
    kinds = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    counts, _ = count_rows([guessed(kinds + 0.1)], [Batch(kinds, torch.zeros(4))], kinds.repeat(40, 1))
    assert (counts.read, counts.judged) == (0, 4)


def test_texts_of_the_same_words_are_no_control() -> None:
    own, other = {1, 2, 3, 4, 5}, {11, 12, 13, 14, 15}
    found = scored_words([(own, own), (own | {6}, own), (own, own), (other, other)], 4)
    assert found.counts.read == 4 and found.control is not None and found.control.read == 0
    assert scored_words([(own, own)] * 3, 3).control is None


def test_one_rule_takes_the_control_and_the_number_of_questions() -> None:
    six, control = Counts(exact=6, groups=6), Counts(exact=1, nothing=5, groups=6)
    assert above_chance(six) and above_chance(six, control=control, among=6)
    assert not above_chance(six, control=six)
    assert not above_chance(Counts(exact=2, nothing=4, groups=6), control=control)
    assert not above_chance(Counts(nothing=6, groups=6)) and not above_chance(Counts(exact=6, chance=1.0))
    lucky = Counts(identified=1, nothing=5, candidates=1000, groups=6)
    assert above_chance(lucky) and not above_chance(lucky, among=6)


@pytest.mark.parametrize(("low", "above"), [(0.515, False), (0.517, True)])
def test_an_interval_has_to_clear_chance_at_the_level_of_the_page(low: float, above: bool) -> None:
    """At one percent the end of a 95 % interval moves out by a factor of 1.187: from 0.6, to 0.499 and to 0.501."""
    found = Estimate(value=0.6, low=low, high=1.2 - low, chance=0.5)
    assert above_chance(found) == above
    assert not above_chance(found, among=100) and not above_chance(found, control=replace(found, value=0.55))


def test_older_records_of_rows_are_judged_by_their_band() -> None:
    row = {"id": "a", "cells_right": 0.9, "row_right": 0.0, "control_cells": 0.5, "certainty": "approximate"}
    assert counts_of([row]).recognizable == 1 and counts_of([row]).chance is None
    assert counts_of([row | {"chance": 0.2}]).recognizable == 0
    known = counts_of([row | {"chance": 0.001}, row | {"chance": 0.001, "image": 1}])
    assert known.recognizable == 2 and known.by_chance == pytest.approx(0.001), "one upload"
    assert counts_of([row | {"exact": True, "certainty": "proven", "row_right": 1.0, "chance": 0.5}]).by_chance == 0.0


@pytest.mark.parametrize(
    ("lead", "psnr", "number", "red"),
    [
        (0.1, 20.0, 1, False),
        (0.1, 20.0, 4, True),
        (3.0, 20.0, 1, True),
        (0.1, 26.0, 1, True),
        (-2.0, 20.0, 2, False),
        (-1e9, 20.0, 6, False),
    ],
)
def test_recognizable_images_have_a_chance_by_their_lead(lead: float, psnr: float, number: int, red: bool) -> None:
    """Guesses without the update pass a control now and then: one alone, hardly nearest, is no finding."""
    row = {"psnr": psnr, "aligned_psnr": psnr, "control_psnr": 15.0, "aligned_ssim": 0.1, "control_ssim": 0.1}
    row |= {"likeness": 0.7, "best_rank": 1, "candidates": 1000, "lead": lead, "foreign": 0.0}
    unread = row | {"aligned_psnr": 9.0, "best_rank": 7}
    rows = [row | {"id": f"v{k}", "image": 0} for k in range(number)]
    counts = counts_of([*rows, *(unread | {"id": f"u{k}", "image": 0} for k in range(6 - number))])
    assert counts.recognizable + counts.identified == number
    assert above_chance(counts) == red
