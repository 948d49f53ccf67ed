import html
import math
import re
from dataclasses import replace

import pytest

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.report import write_report, write_trade_off
from fl_privacy.report.advice import answer
from fl_privacy.report.settings import FIGURES, figures_of
from fl_privacy.report.words import below
from fl_privacy.report.write import _headline
from fl_privacy.runs.folder import Candidate
from fl_privacy.runs.folder.defense_choice import best_unread
from fl_privacy.runs.folder.summary import summarize
from tests.report.kinds import texts
from tests.results import runs
from tests.results.runs import study_entry

pytestmark = pytest.mark.usefixtures("undrawn_charts")


def candidate(name, accuracy, pmm, psnr, *, upper=None, largest=None, read=0, groups=20, by=""):
    return Candidate(
        name=name,
        accuracy=accuracy,
        pmm=pmm,
        psnr=psnr,
        upper=psnr + 0.5 if upper is None else upper,
        largest=psnr + 1 if largest is None else largest,
        read=read,
        exact=0,
        identified=read,
        images=20,
        unjudged=0,
        groups=groups,
        by=by,
    )


OPEN = candidate("open", 0.6, 100.0, 30.0, read=20)
GOOD = candidate("good", 0.5, 83.3, 12.9, by="adaptive attacker")
QUIET = candidate("quiet", 0.5, 83.3, 9.0)
USELESS = candidate("useless", 0.1, 16.7, 5.0)


def test_the_most_accurate_below_the_bound_and_of_equals_the_quieter():
    assert best_unread([OPEN, GOOD, USELESS]) == GOOD
    assert best_unread([OPEN, GOOD, QUIET, USELESS]) == QUIET
    assert best_unread([OPEN, GOOD, USELESS], 12.9) == USELESS, "what is asked for in decibels counts as well"
    assert best_unread([OPEN]) is None


def test_who_reads_nothing_undefended_tells_nothing_of_defenses():
    deaf = replace(QUIET, name="plain", undefended=True)
    assert best_unread([deaf, GOOD, USELESS], 15) is None
    text = answer([deaf, GOOD, USELESS], 15)
    assert text.startswith("No defense can be recommended: without one, no image was reconstructed either")
    assert (
        "(plain, none of 20 images reconstructed, though up to 17 % of such images may leak)" in text
        and "attack=auto" in text
    )
    heard = replace(OPEN, undefended=True)
    assert best_unread([heard, GOOD, USELESS], 15) == GOOD
    assert best_unread([deaf, heard, GOOD, USELESS], 15) == GOOD, "it was read where it was trained otherwise"
    assert best_unread([deaf, heard], 15) is None, "what is undefended is no defense"


def test_what_failed_or_was_read_in_place_of_the_images_does_not_come_closest():
    exposed = replace(GOOD, name="exposed", psnr=5.0, upper=6.0, exposed=20)
    failing = replace(GOOD, name="failing", psnr=5.0, upper=6.0, failures=3)
    wide = replace(GOOD, name="wide", upper=16.0)
    text = answer([exposed, failing, wide, replace(OPEN, undefended=True)], 15)
    assert "; wide comes closest" in text
    assert answer([exposed, failing, wide, replace(OPEN, undefended=True)]).startswith(
        "Only 1 of 4 meets the goal (no attacked image reconstructed): wide, "
    )


def test_what_was_read_is_no_choice_whatever_its_mean() -> None:
    one_read = candidate("one read", 0.55, None, 8.0, upper=9.0, largest=25.0, read=1)
    negatives = candidate("negatives", 0.55, None, 0.9, upper=1.0, largest=1.2, read=20)
    unknown = replace(candidate("unknown", 0.55, None, 5.0), unjudged=3)
    for tempting in (one_read, negatives, unknown):
        assert best_unread([OPEN, tempting, USELESS]) == USELESS
    assert answer([OPEN, one_read, USELESS]).startswith(
        "Only 1 of 3 meets the goal (no attacked image reconstructed): useless, "
    )
    assert answer([OPEN, one_read]).startswith(
        "None of 2 meets the goal (no attacked image reconstructed); one read comes closest (1 of 20 images"
    )
    assert "while 3 have no known original" in answer([replace(OPEN, read=20), unknown])
    assert "Only 3 separate uploads were attacked" in answer([OPEN, replace(USELESS, groups=3)])


@pytest.mark.parametrize(
    ("over_control", "end"), [(1.0, "up to 17 % may leak"), (-1.0, "the attack may have failed"), (None, "have failed")]
)
def test_a_headline_says_what_may_leak_unless_the_attack_may_have_failed(over_control, end):
    best = replace(GOOD, over_control=over_control)
    said = _headline([OPEN, best], best, None)
    assert said.startswith("With good, none of 20 images was reconstructed; ") and said.endswith(end)


def test_the_answer_names_it_with_its_price():
    text = answer([OPEN, GOOD, USELESS])
    assert text.startswith("2 of 3 meet the goal (no attacked image reconstructed)")
    assert (
        "the most accurate is good (accuracy 50.0 %, 83.3 % of the undefended; none of 20 images reconstructed, though"
        " up to 17 % of such images may leak in the worst case (adaptive attacker), mean PSNR 12.9 dB (95 % sure: below"
        " 13.4 dB), 13.9 dB for the best reconstruction)" in text
    )
    assert "open comes closest (20 of 20 images reconstructed, mean PSNR 30.0 dB" in answer([OPEN])
    assert answer([OPEN, USELESS]).startswith("Only 1 of 2 meets the goal (no attacked image reconstructed): useless, ")
    assert answer([]) == ""


def test_figures_are_of_one_client_in_one_round():
    rounds = [
        {
            "kind": "round",
            "round": r,
            "clients": [0, 1],
            "upload_bytes": 2000 * r,
            "defense_seconds": 0.02,
            "seconds": 1.0,
        }
        for r in (1, 2, 3)
    ]
    changed = [
        {"kind": "update_distortion", "id": f"round-{r}/client-0/victim-{k}", "round": r, "client": 0}
        | {"signal_to_distortion": ratio, "zeros": 0.5}
        for r in (1, 3)
        for k, ratio in enumerate((2.0, 4.0))
    ]
    summary = summarize([*rounds, *changed], finished=True, undefended_accuracy=None, total_seconds=None)
    shown = {figure.name: (figure.mean(summary), figure.number(summary)) for figure in figures_of(summary)}
    assert shown == {
        "signal_to_distortion": ("3", 4),
        "zeros": ("50.0 %", 4),
        "upload_bytes": ("2.0 kB", 3),
        "defense_seconds": ("10 ms", 3),
    }
    assert FIGURES[0].interval(summary) == "[0, 15.7]", "of two batches in two rounds; a ratio of norms is not negative"
    assert FIGURES[0].few(summary) == "only 2"
    assert FIGURES[1].mean(summary) == "\N{EN DASH}"


@pytest.mark.parametrize("epsilon", [None, 2.5])
def test_the_summary_ends_with_the_epsilon_of_the_last_round(epsilon):
    records = [
        {"kind": "privacy", "delta": 1e-5, "accountant": "rdp", "missing": None if epsilon else "nothing is clipped"},
        *(
            {"kind": "round", "round": r, "clients": [0], "accuracy": 0.5, "epsilon": epsilon and epsilon * r}
            for r in (1, 2)
        ),
    ]
    for record in records[1:]:
        record |= {"upload_bytes": 1, "seconds": 1.0, "defense_seconds": 0.0}
    summary = summarize(records, finished=True, undefended_accuracy=None, total_seconds=None)
    assert summary.privacy.epsilon == (epsilon and 5.0)
    assert (summary.privacy.missing is None) == (epsilon is not None)
    assert [r.epsilon for r in summary.tested] == [epsilon, epsilon and 5.0]


def test_texts_are_ranked_by_what_is_said_of_texts(tmp_path):
    """Not by a PSNR that they do not have."""
    open_, guarded = texts(tmp_path, label="none", right=9, accuracy=0.9), texts(tmp_path, right=0, accuracy=0.8)
    page = write_report([open_, guarded]).read_text()
    lede = html.unescape(re.search(r'<p class="lede">(.*?)</p>', page, re.DOTALL)[1])
    assert (
        "B leaks least (none of 6 (up to 46 %) reconstructed, mean token F1 " in lede
        and "meets the goal (no attacked text reconstructed)" in lede
    )
    assert "Token F1 and accuracy" in page and "ROUGE-L and accuracy" in page and "PSNR" not in lede
    outcomes = [
        study_entry("Undefended", "", open_, {"dager": open_}),
        study_entry("Pruning", "rate 0.9", guarded, {"dager": guarded}),
    ]
    page = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "With Pruning (rate 0.9), none of 6 texts was reconstructed; the attack may have failed" in page
    assert "Token F1 under dager" in page and "PSNR" not in page


def test_images_and_texts_are_not_compared(tmp_path):
    mixed = [runs.record(tmp_path, undefended=True), texts(tmp_path, accuracy=0.9)]
    lede = re.search(r'<p class="lede">(.*?)</p>', write_report(mixed).read_text(), re.DOTALL)[1]
    assert "no figure compares them" in lede and "leaks least" not in lede


def test_a_defense_that_was_never_asked_of_members_is_not_among_those_that_were_read():
    asked, silent = replace(OPEN, inferred={About.MEMBERSHIP: None}), replace(QUIET, inferred={About.MEMBERSHIP: None})
    assert "With quiet, no image was reconstructed; the rest is unknown." in answer([asked, silent])
    assert "not known." not in answer([asked])


@pytest.mark.parametrize(
    ("name", "mean", "upper", "said"),
    [
        ("psnr", 12.9, 13.4, " (95 % sure: below 13.4 dB)"),
        ("psnr", math.inf, math.inf, ""),
        ("psnr", 99.0, 120.0, ""),
        ("token_f1", 0.995, 1.0, ""),
        ("cells_right", 1.0, 1.0, ""),
        ("token_f1", 0.99, 0.997, ""),
        ("token_f1", 0.0, 0.001, ""),
        ("cells_right", 0.28, 0.36, " (95 % sure: below 36 %)"),
    ],
)
def test_an_upper_end_is_said_where_it_bounds_anything(name, mean, upper, said):
    """That a share is below 100 % is no news, and may be wrong."""
    assert below(upper, mean, name) == said


def test_a_text_is_recommended_no_defense_however_well_it_hides():
    quiet = replace(QUIET, judged_by="token_f1", psnr=0.1, upper=0.2, largest=0.2)
    said = answer([replace(quiet, name="none", undefended=True, read=20, identified=0), quiet])
    assert "meets the goal (no attacked text reconstructed)" in said
    assert "No defense is recommended for texts for now" in said
    assert "is not recommended: it was not compared with the best guess" in answer(
        [replace(OPEN, undefended=True), GOOD]
    )
    assert "not recommended" not in answer([replace(OPEN, undefended=True), replace(GOOD, over_control=1.0)])
