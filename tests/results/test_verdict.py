"""The one rule: red takes something that was read, green a guarantee, and all else is gray."""

from dataclasses import replace

import pytest

from fl_privacy.measure.counts import Words
from fl_privacy.measure.outcome import CHANCE
from fl_privacy.measure.roc import identification_bound
from fl_privacy.report.headline import headline_of
from fl_privacy.runs.folder import Counts, Finding, LeakageResult, Measure
from fl_privacy.runs.folder.identity import Identity
from fl_privacy.runs.folder.leakage import (
    REHEARSED,
    WORST,
    AttackedUploads,
    AttackFacts,
    described_facts,
    extent_of,
    leaks_most,
)
from fl_privacy.runs.folder.summary import Spent, summarize
from fl_privacy.runs.folder.verdict import BOUNDED_AT_MOST, Ground, judged
from fl_privacy.types.modality import IMAGES, TEXTS
from tests.results.runs import counts_of

NOTHING = {
    "kind": "image", "round": 1, "client": 0, "image": 0, "failure": None, "certainty": "approximate",
    "psnr": 16.6, "aligned_psnr": 16.6, "aligned_ssim": 0.2, "control_psnr": 16.6, "control_ssim": 0.2,
    "likeness": 0.1, "rank": 70, "candidates": 1000, "lead": 0.0,
}  # fmt: skip
"""A gray square: more than 15 dB, and no more than any gray square has."""

NEGATIVE = NOTHING | {"psnr": 0.9, "likeness": 0.99, "rank": 1, "lead": 6.0}


def images(*records):
    return [record | {"id": f"round-1/client-0/victim-{k}"} for k, record in enumerate(records)]


def verdict_on(*counts, privacy=None, inferred=(), facts=None):
    """On rounds with such counts."""
    summary = summarize([], finished=True, undefended_accuracy=None, total_seconds=None)
    rounds = [LeakageResult(round=number, counts=found, images=found.images) for number, found in enumerate(counts, 1)]
    return judged(
        replace(summary, attacked=tuple(rounds), privacy=privacy, inferred=tuple(inferred)), facts or AttackFacts()
    )


def test_empty_pictures_are_not_read_and_negatives_are():
    found = counts_of(images(*[NOTHING] * 4))
    assert (found.read, found.judged) == (0, 4) and verdict_on(found).tone == "open"
    found = counts_of(images(NOTHING, NEGATIVE, NOTHING))
    assert (found.identified, found.read, found.judged, found.candidates) == (1, 1, 3, 1000)
    assert (verdict_on(found).tone, verdict_on(found).ground) == ("leak", Ground.READ)


def test_each_example_counts_once_and_nobody_is_forgotten():
    proven = {**NOTHING, "certainty": "proven", "psnr": 90.0}
    unknown = {k: v for k, v in NOTHING.items() if k in ("kind", "round", "client", "image", "failure", "certainty")}
    failed = {**unknown, "failure": "it failed"}
    found = counts_of(images(proven, NEGATIVE, NOTHING, unknown, failed))
    assert (found.exact, found.identified, found.nothing, found.unknown, found.failures) == (1, 1, 1, 1, 1)
    assert found.images == 5 and found.unjudged == 2


def test_records_of_older_versions_have_no_color():
    older = {k: v for k, v in NOTHING.items() if k in ("kind", "round", "client", "image", "failure", "psnr")}
    found = counts_of(images(*[older | {"certainty": "proven", "psnr": 90.0}] * 6))
    assert found.older == 6 and not found.judged
    assert (verdict_on(found).tone, verdict_on(found).ground) == ("open", Ground.OLDER)


def test_nothing_read_says_how_little_that_says():
    low, high = Counts(nothing=4, groups=4).interval
    assert low == 0 and high == pytest.approx(0.60, abs=0.005)
    assert Counts(nothing=4, groups=4).interval[1] == pytest.approx(0.6, abs=0.005) and Counts().interval == (0.0, 1.0)
    assert Counts(nothing=8, groups=1).interval[1] > 0.75, "eight images of one upload are one"


def test_what_chance_identifies_is_no_leak():
    few = Counts(identified=1, nothing=59, groups=60, candidates=100)
    assert few.by_chance > 0.4 and verdict_on(few).ground is Ground.BY_CHANCE
    assert verdict_on(few).tone == "open"
    assert verdict_on(replace(few, candidates=10_000)).tone == "leak"
    assert verdict_on(replace(few, recognizable=1)).tone == "leak", "it beats its own control"
    many = [Counts(identified=1, nothing=9, groups=10, candidates=1000)] + [Counts(nothing=10, groups=10)] * 19
    assert verdict_on(*many[:1]).tone == "leak" and verdict_on(*many).ground is Ground.BY_CHANCE


def test_a_small_lead_is_chance_and_a_large_one_is_not():
    near = NEGATIVE | {"lead": 0.6}
    few = counts_of(images(near, *[NOTHING] * 5))
    assert few.identified == 1 and few.by_chance == pytest.approx(1 - (1 - CHANCE) ** 6)
    assert verdict_on(few).ground is Ground.BY_CHANCE
    assert verdict_on(counts_of(images(NEGATIVE, *[NOTHING] * 63))).ground is Ground.READ
    several = counts_of(images(*[near] * 4, *[NOTHING] * 4))
    assert several.by_chance < 1e-4 and verdict_on(several).ground is Ground.READ


def test_what_the_server_made_itself_is_no_leak_of_a_client_and_is_said_first():
    rehearsed = AttackFacts(attack="auto", source=AttackedUploads.SERVER, examples=(1, 1))
    found = verdict_on(counts_of(images(*[NEGATIVE] * 4)), facts=rehearsed)
    assert (found.tone, found.ground) == ("open", Ground.REHEARSED)
    assert found.as_plain()["uploads"] == "server" and found.as_plain()["most"]["read"] == 4
    assert headline_of(found).text == (
        "No client's upload was attacked: the server reconstructed 4 of 4 attacked images, from undefended uploads of"
        " one image each that the server made itself"
    )
    unread = headline_of(verdict_on(counts_of(images(*[NOTHING] * 4)), facts=rehearsed)).text
    assert unread.startswith(
        "No client's upload was attacked: the attack auto reconstructed none of 4 attacked images, from"
    )


def test_what_was_attacked_is_a_field_of_the_record_and_older_runs_are_told_by_their_sentences():
    of = Identity(label="", hash="", training="", repeat="", undefended=False, config={})
    attacked = [{"kind": "attack", "attacker": "plain", "uploads": "server"}, *images(NEGATIVE)]
    assert described_facts(of, attacked).source is AttackedUploads.SERVER
    assert described_facts(of, attacked[1:]).source is AttackedUploads.PROBES
    assert described_facts(of, attacked[1:], threats=[REHEARSED]).source is AttackedUploads.SERVER
    assert described_facts(of, [{**attacked[0], "uploads": ["?"]}, *attacked[1:]]).source is AttackedUploads.PROBES


def test_no_verdict_where_most_originals_are_not_known():
    one = Counts(nothing=1, unknown=15, groups=1)
    assert verdict_on(one).ground is Ground.NO_TRUTH and verdict_on(one).tone == "open"
    assert verdict_on(replace(one, exact=1)).tone == "leak", "what was read is red whatever else is not known"
    assert verdict_on(replace(one, unknown=1)).ground is Ground.UNREAD


SPENT = Spent(epsilon=1.0, delta=1e-5, accountant="rdp", missing=None, unit="example", covered=True, rounds=20)
UNREAD = Counts(nothing=6, groups=6, candidates=1000)


def test_green_takes_a_guarantee_that_bounds_what_is_shown():
    found = verdict_on(UNREAD, privacy=SPENT)
    assert (found.tone, found.ground) == ("bounded", Ground.BOUNDED)
    assert (found.bound.candidates, found.bound.rounds, found.bound.unit) == (1000, 20, "example")
    assert found.bound.at_most == pytest.approx(0.0027, abs=1e-4)
    assert identification_bound(epsilon=4.6, delta=0.0, candidates=1000) < BOUNDED_AT_MOST
    assert identification_bound(epsilon=8.0, delta=0.0, candidates=1000) > 0.6


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 8.0},
        {"epsilon": None},
        {"unit": None},
        {"covered": False},
        {"delta": 0.5},
        {"epsilon": float("inf")},
    ],
)
def test_a_guarantee_that_bounds_nothing_or_may_not_hold_is_gray(changes):
    assert verdict_on(UNREAD, privacy=replace(SPENT, **changes)).tone == "open"


def test_what_contradicts_a_guarantee_takes_the_green():
    disproved = Finding(about="membership", method="m", title="m", proven_epsilon=2.0, epsilon=1.0)
    assert verdict_on(UNREAD, privacy=SPENT, inferred=[disproved]).tone == "open"
    assert verdict_on(UNREAD, privacy=SPENT, inferred=[replace(disproved, proven_epsilon=0.5)]).tone == "bounded"
    told = replace(disproved, proven_epsilon=0.5, measures={"auc": Measure(value=0.9, low=0.8, high=1, chance=0.5)})
    assert verdict_on(UNREAD, privacy=SPENT, inferred=[told]).tone == "leak"
    assert verdict_on(replace(UNREAD, exact=3), privacy=SPENT).tone == "leak"


def test_no_attack_makes_anything_green():
    for found in (UNREAD, Counts(nothing=1000, groups=1000, candidates=1000), Counts(failures=4)):
        assert verdict_on(found).tone == "open"
    assert verdict_on().ground is Ground.NOTHING


def reading(counts, round=1):
    return LeakageResult(counts=counts, round=round)


def test_one_ordering_in_which_what_is_not_known_counts_as_read():
    quiet, failed = reading(UNREAD), reading(Counts(nothing=3, failures=3, groups=3), 2)
    read = reading(Counts(identified=2, nothing=4, groups=6, candidates=1000), 3)
    exact = reading(Counts(exact=2, nothing=4, groups=6), 4)
    ordered = [extent_of([one]) for one in (quiet, read, exact, failed)]
    assert ordered == sorted(ordered) and ordered[-1] < WORST
    assert extent_of([]) == WORST and extent_of([quiet], inferred=1) > extent_of([quiet])
    assert leaks_most([failed, quiet, read]) is read, "an attack that failed is not the one that read"
    assert leaks_most([reading(Counts(failures=2))]) is None


TEXT = {
    "kind": "image", "round": 1, "client": 0, "image": 0, "failure": None, "certainty": "approximate",
    "token_f1": 0.9, "exact_match": 0.0, "control_f1": 0.2, "word_f1": 0.95, "word_control_f1": 0.3,
    "words_read": 10, "words_there": 11, "words_false": 0, "words_of": 2,
}  # fmt: skip
"""One of two texts of an upload, nearly all of whose words were read."""


def test_words_of_an_upload_count_once_and_only_beyond_what_their_frequency_tells():
    pair = [TEXT | {"id": "one"}, TEXT | {"id": "one", "image": 1}]
    common = TEXT | {"id": "two", "words_of": 1, "words_read": 4, "words_false": 9, "word_f1": 0.4, "token_f1": 0.1}
    words = counts_of([*pair, common]).words
    assert (words.read, words.there, words.wrong, words.texts) == (10, 22, 0, 3)
    assert counts_of([common]).words.read == 0 and counts_of([common]).read == 0
    assert counts_of(images(NOTHING)).words == Words()
    assert counts_of([*pair, common]).as_plain()["words"] == {"read": 10, "there": 22, "wrong": 0, "texts": 3}


def test_the_first_line_says_how_many_words_of_how_many_texts_were_read():
    uploads = [
        TEXT | {"id": str(k), "words_of": 1, "words_there": 11, "words_read": 10 + (k < 1), "words_false": int(k == 3)}
        for k in range(4)
    ]
    said = headline_of(replace(verdict_on(counts_of(uploads)), modality=TEXTS))
    assert said.tone == "leak" and said.text.endswith("; 41 of 44 words of 4 texts were reconstructed")
    assert "Wrongly inferred words: 1." in said.basis
    assert "words" not in headline_of(replace(verdict_on(counts_of(images(NEGATIVE))), modality=IMAGES)).text


@pytest.mark.parametrize(
    ("right", "wrong", "read"), [(3, 0, True), (12, 0, True), (2, 0, False), (3, 6, False), (0, 3, False)]
)
def test_few_words_that_are_surely_there_are_read_however_few_of_the_text_they_are(right, wrong, read):
    record = TEXT | {
        "id": "a",
        "words_of": 1,
        "token_f1": 0.1,
        "words_read": right,
        "words_false": wrong,
        "words_there": 60,
        "word_f1": 0.1,
        "word_control_f1": 0.2,
    }
    assert (counts_of([record]).read == 1) is read


ROW = {
    "kind": "image", "round": 1, "client": 0, "image": 0, "failure": None, "certainty": "approximate", "exact": False,
    "cells_right": 0.5, "row_right": 0.0, "control_cells": 0.6,
}  # fmt: skip
"""A row of which no more cells are right than one guess in twenty without the update has right."""


def test_rows_of_which_one_in_twenty_is_beyond_its_band_are_no_leak():
    def verdict_on_rows(beyond, of):
        return verdict_on(counts_of(images(*[ROW | {"cells_right": 0.7}] * beyond, *[ROW] * (of - beyond))))

    assert (verdict_on_rows(5, 100).tone, verdict_on_rows(5, 100).ground) == ("open", Ground.BY_CHANCE)
    assert verdict_on_rows(12, 100).tone == "leak" and verdict_on_rows(3, 5).tone == "leak"
    assert verdict_on(counts_of(images(*[ROW] * 99, ROW | {"exact": True}))).tone == "leak"


def test_few_words_of_one_of_many_uploads_are_no_leak():
    few = TEXT | {"words_of": 1, "token_f1": 0.1, "word_f1": 0.1, "word_control_f1": 0.2, "words_there": 60}
    lucky, unread = few | {"words_read": 3, "words_false": 0}, few | {"words_read": 1, "words_false": 5}
    found = counts_of(images(lucky, *[unread] * 49))
    assert found.read == 1 and verdict_on(found).ground is Ground.BY_CHANCE
    assert verdict_on(counts_of(images(lucky))).tone == "leak"
    assert verdict_on(counts_of(images(few | {"words_read": 20, "words_false": 0}, *[unread] * 49))).tone == "leak"
    assert verdict_on(counts_of(images(TEXT | {"words_of": 1}, *[unread] * 49))).tone == "leak"


def test_an_image_of_a_single_color_is_read_by_nobody_who_guesses_a_color():
    black = NOTHING | {"exact": True, "psnr": float("inf"), "control_psnr": float("inf"), "control_ssim": 1.0}
    black |= {"aligned_psnr": float("inf"), "aligned_ssim": 1.0, "likeness": 1.0, "rank": 1, "lead": None}
    assert counts_of(images(black)).read == 0
    near = black | {"exact": False, "candidates": 0, "rank": None}
    assert counts_of(images(near)).read == 0, "nothing beats a control without any error"
    assert counts_of(images(black | {"control_psnr": 16.6, "control_ssim": 0.2})).exact == 1
    assert counts_of(images(black | {"certainty": "proven"})).exact == 1
