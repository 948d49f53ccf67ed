import pytest

from fl_privacy.report.answer import Candidate, answer, best_below
from fl_privacy.report.cost import FIGURES, figures_of
from fl_privacy.results.summary import summarize

OPEN = Candidate(name="open", accuracy=0.6, pmm=100.0, psnr=30.0)
GOOD = Candidate(name="good", accuracy=0.5, pmm=83.3, psnr=14.9)
QUIET = Candidate(name="quiet", accuracy=0.5, pmm=83.3, psnr=9.0)
USELESS = Candidate(name="useless", accuracy=0.1, pmm=16.7, psnr=5.0)


def test_the_most_accurate_below_the_bound_and_of_equals_the_quieter():
    assert best_below([OPEN, GOOD, USELESS], 15) == GOOD
    assert best_below([OPEN, GOOD, QUIET, USELESS], 15) == QUIET
    assert best_below([OPEN, GOOD, USELESS], 14.9) == USELESS
    assert best_below([OPEN], 15) is None


def test_the_answer_names_it_with_its_price():
    text = answer([OPEN, GOOD, USELESS], 15)
    assert text.startswith("2 of 3 keep the mean PSNR below 15.0 dB")
    assert "most accurate of them is good (accuracy 50.0 %, 83.3 % of the undefended; PSNR 14.9 dB)" in text
    assert "open comes closest (30.0 dB)" in answer([OPEN], 15)
    assert answer([OPEN, USELESS], 15).startswith("Of 2, only useless keeps")
    assert answer([], 15) == ""


def test_figures_are_of_one_client_in_one_round():
    rounds = [
        {"kind": "round", "round": r, "clients": [0, 1], "bytes_up": 2000 * r, "defense_seconds": 0.02, "seconds": 1.0}
        for r in (1, 2, 3)
    ]
    changed = [
        {"kind": "perturbation", "id": str(k), "round": 1, "client": 0, "signal_to_perturbation": ratio, "zeros": 0.5}
        for k, ratio in enumerate((2.0, 4.0))
    ]
    summary = summarize([*rounds, *changed], finished=True, undefended_accuracy=None, total_seconds=None)
    shown = {figure.name: (figure.mean(summary), figure.number(summary)) for figure in figures_of(summary)}
    assert shown == {
        "signal_to_perturbation": ("3", 2),
        "zeros": ("50.0 %", 2),
        "bytes": ("2.0 kB", 3),
        "defense_seconds": ("10 ms", 3),
    }
    assert FIGURES[0].interval(summary) == "[-9.71, 15.7]"
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
        record |= {"bytes_up": 1, "seconds": 1.0, "defense_seconds": 0.0}
    summary = summarize(records, finished=True, undefended_accuracy=None, total_seconds=None)
    assert summary["privacy"]["epsilon"] == (epsilon and 5.0)
    assert (summary["privacy"]["missing"] is None) == (epsilon is not None)
    assert [r["epsilon"] for r in summary["rounds"]] == [epsilon, epsilon and 5.0]
