import html
import math
import re
from dataclasses import replace

import pytest

from fl_privacy.report import write_report, write_trade_off
from fl_privacy.report.cost import FIGURES, figures_of
from fl_privacy.report.recommendation import Candidate, answer, best_below
from fl_privacy.report.trade_off import SweepEntry
from fl_privacy.results.aggregation import summarize
from tests.report.kinds import texts
from tests.results import runs


def candidate(name, accuracy, pmm, psnr, *, upper=None, largest=None, recognizable=0, groups=20, by=""):
    return Candidate(
        name=name,
        accuracy=accuracy,
        pmm=pmm,
        psnr=psnr,
        upper=psnr + 0.5 if upper is None else upper,
        largest=psnr + 1 if largest is None else largest,
        recognizable=recognizable,
        images=20,
        groups=groups,
        by=by,
    )


OPEN = candidate("open", 0.6, 100.0, 30.0, recognizable=20)
GOOD = candidate("good", 0.5, 83.3, 12.9, by="adaptive attacker")
QUIET = candidate("quiet", 0.5, 83.3, 9.0)
USELESS = candidate("useless", 0.1, 16.7, 5.0)


def test_the_most_accurate_below_the_bound_and_of_equals_the_quieter():
    assert best_below([OPEN, GOOD, USELESS], 15) == GOOD
    assert best_below([OPEN, GOOD, QUIET, USELESS], 15) == QUIET
    assert best_below([OPEN, GOOD, USELESS], 12.9) == USELESS
    assert best_below([OPEN], 15) is None


def test_who_reads_nothing_undefended_tells_nothing_of_defenses():
    deaf = replace(QUIET, name="plain", undefended=True)
    assert best_below([deaf, GOOD, USELESS], 15) is None
    text = answer([deaf, GOOD, USELESS], 15)
    assert text.startswith("Which defense keeps every attacked image below 15.0 dB is not told")
    assert "none was read undefended either (plain, the best at 10.0 dB)" in text and "attack=auto" in text
    heard = replace(OPEN, undefended=True)
    assert best_below([heard, GOOD, USELESS], 15) == GOOD
    assert best_below([deaf, heard, GOOD, USELESS], 15) == GOOD, "it was read where it was trained otherwise"
    assert best_below([deaf, heard], 15) is None, "what is undefended is no defense"


def test_what_failed_or_was_read_in_place_of_the_images_does_not_come_closest():
    exposed = replace(GOOD, name="exposed", psnr=5.0, upper=6.0, exposed=20)
    failing = replace(GOOD, name="failing", psnr=5.0, upper=6.0, failures=3)
    wide = replace(GOOD, name="wide", upper=16.0)
    text = answer([exposed, failing, wide, replace(OPEN, undefended=True)], 15)
    assert "; wide comes closest" in text


def test_a_low_mean_alone_is_not_private():
    wide = candidate("wide", 0.55, None, 12.0, upper=16.0, largest=14.0)
    one_read = candidate("one read", 0.55, None, 8.0, upper=9.0, largest=25.0, recognizable=1)
    single = candidate("single", 0.55, None, 8.0, upper=math.inf, largest=8.0, groups=1)
    for tempting in (wide, one_read, single):
        assert best_below([OPEN, tempting, USELESS], 15) == USELESS
    text = answer([OPEN, one_read, USELESS], 15)
    assert text.startswith("Of 3, only useless")
    assert "Only the mean stays below with one read (accuracy 55.0 %" in text and "1 of 20 images" in text
    assert answer([OPEN, one_read], 15).startswith("None is sure to keep every attacked image below 15.0 dB; one read")
    assert "too few to rely on" in answer([OPEN, replace(USELESS, groups=3)], 15)


def test_the_answer_names_it_with_its_price():
    text = answer([OPEN, GOOD, USELESS], 15)
    assert text.startswith("2 of 3 keep every attacked image below 15.0 dB")
    assert (
        "the most accurate is good (accuracy 50.0 %, 83.3 % of the undefended; mean PSNR 12.9 dB, at most 13.4 dB"
        " [adaptive attacker], 0 of 20 images recognizable, the best at 13.9 dB)" in text
    )
    assert "open comes closest (mean PSNR 30.0 dB" in answer([OPEN], 15)
    assert answer([OPEN, USELESS], 15).startswith("Of 2, only useless (")
    assert answer([], 15) == ""


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
    assert "Least leaks from B (mean Token F1 " in lede and "keeps every attacked text below 50 % F1" in lede
    assert "Token F1 beside accuracy" in page and "ROUGE-L beside accuracy" in page and "PSNR" not in lede
    outcomes = [
        SweepEntry(family="Undefended", strength="", training=open_, attacks={"dager": open_}),
        SweepEntry(family="Pruning", strength="rate 0.9", training=guarded, attacks={"dager": guarded}),
    ]
    page = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "Pruning (rate 0.9) keeps every attacked text below 50 % F1" in page
    assert "Token F1 under dager" in page and "PSNR" not in page


def test_images_and_texts_are_not_compared(tmp_path):
    mixed = [runs.record(tmp_path, undefended=True), texts(tmp_path, accuracy=0.9)]
    lede = re.search(r'<p class="lede">(.*?)</p>', write_report(mixed).read_text(), re.DOTALL)[1]
    assert "which no figure compares" in lede and "Least leaks" not in lede
