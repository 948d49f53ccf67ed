"""What pages say of inference: the strongest attack, chance beside it, and never that nothing can be told."""

from dataclasses import replace

from fl_privacy.measure.roc import finding_of
from fl_privacy.report.advice import answer
from fl_privacy.report.headline import headline_of
from fl_privacy.report.inferred import sentence, views_of
from fl_privacy.runs.folder import Candidate, Finding, Measure
from fl_privacy.runs.folder.defense_choice import answered_above_chance, asked_of, best_unread, strongest
from fl_privacy.runs.folder.leakage import AttackFacts
from fl_privacy.runs.folder.summary import Summary
from fl_privacy.runs.folder.verdict import judged


def finding(
    value: float, *, about: str = "membership", title: str = "A", half: float = 0.01, chance: float = 0.01
) -> Finding:
    name = "tpr_at_1_percent" if about == "membership" else "asr"
    measure = Measure(value=value, low=value - half, high=value + half, chance=chance, bound=0.2)
    return Finding(
        about=about, method=title, title=title, rounds=3, last_round=3, positives=50, negatives=60,
        measures={name: measure}, fpr=(0.0, 0.01, 1.0), tpr=(0.0, value, 1.0), epsilon=1.0, delta=1e-5,
        proven_epsilon=0.5,
    )  # fmt: skip


def candidate(accuracy: float, **inferred: Measure | None) -> Candidate:
    return Candidate(
        name=f"at {accuracy}", accuracy=accuracy, pmm=None, psnr=9, upper=10, largest=12, read=0, exact=0, identified=0,
        images=20, unjudged=0, groups=20, inferred=inferred,
    )  # fmt: skip


def test_the_strongest_attack_is_told_first() -> None:
    weak, strong = finding(0.012, title="Weak"), finding(0.3, title="Strong")
    assert strongest([weak, strong], "membership")[0] is strong
    (view,) = views_of([weak, strong])
    assert [found.title for found in view.findings] == ["Strong", "Weak"]
    said = "Strong: 30.0 % of the members are found (95 % interval 29.0 % to 31.0 %) if one in a hundred others"
    assert said in view.result.replace("\N{NO-BREAK SPACE}", " ")
    assert "guessing gets 1.0 %, and its epsilon allows 20.0 %" in view.result.replace("\N{NO-BREAK SPACE}", " ")
    assert view.chart is not None and "allowed by epsilon 1" in view.chart
    assert [view.tone(*pair) for found in view.findings for pair in found.measures.items()] == ["leak", "open"]
    assert answered_above_chance([weak]) == () and answered_above_chance([weak, strong]) == ("membership",)


def test_the_best_of_many_measures_has_to_be_farther_from_chance() -> None:
    lucky, plain = finding(0.023, title="Lucky"), [finding(0.01, title=str(k)) for k in range(29)]
    lucky, *plain = [replace(each, fpr=(), tpr=()) for each in (lucky, *plain)]
    assert answered_above_chance([lucky]) == ("membership",) and answered_above_chance([lucky, *plain]) == ()
    (view,) = views_of([lucky, *plain])
    assert {view.tone(*pair) for found in view.findings for pair in found.measures.items()} == {"open"}
    assert "no better than chance" in view.result and "no better than chance" not in sentence([lucky], "membership")
    assert answered_above_chance([finding(0.03, title="Strong"), *plain]) == ("membership",)


def test_what_is_near_chance_is_open_and_what_failed_says_so() -> None:
    assert "no better than chance" in sentence([finding(0.011)], "membership")
    failed = Finding(about="source", method="source", title="source", failure="ValueError: x")
    assert sentence([failed], "source") == "The attack failed: ValueError: x."
    (view,) = views_of([failed])
    assert view.findings[0].failure and view.chart is None


def asked(*inferred: Finding) -> Summary:
    return Summary(
        finished=True, attacked=(), countermeasures=(), batch_norm=(), update_distortion={}, upload={}, privacy=None,
        tested=(), final_accuracy=None, undefended_accuracy=None, pmm=None, seconds=None, upload_bytes=0,
        inferred=inferred,
    )  # fmt: skip


def test_the_first_line_says_what_was_asked_by_how_many_attacks_of_how_many() -> None:
    weak, strong = finding(0.012, title="Weak"), finding(0.3, title="Strong")
    known = headline_of(judged(asked(weak, strong), AttackFacts()))
    assert known.tone == "leak" and known.text == (
        "The server can infer who took part, by the best of 2 attacks, asked 110 questions; no image was attacked"
    )
    unknown = headline_of(judged(asked(weak), AttackFacts()))
    assert unknown.tone == "open" and unknown.text == (
        "The server could not infer who took part better than by chance, by one attack, asked 110 questions; no image"
        " was attacked"
    )
    failed = Finding(about="source", method="source", title="source", failure="ValueError: x")
    assert headline_of(judged(asked(weak, failed), AttackFacts())).text == unknown.text, (
        "nothing is known of the source"
    )
    assert headline_of(judged(asked(failed), AttackFacts())).text == "No image was attacked: nothing is known"


def test_records_are_read_back() -> None:
    one = finding(0.3)
    assert finding_of(one.as_record() | {"kind": "inference"}).measures == one.measures
    damaged = one.as_record() | {"measures": {"auc": [0.5]}}
    assert finding_of(damaged).measures == {}


def test_a_defense_that_tells_members_is_not_the_answer() -> None:
    leaky = finding(0.3).measures["tpr_at_1_percent"]
    tight = replace(leaky, value=0.01, low=0.005, high=0.02)
    told = candidate(0.9, membership=leaky)
    kept = candidate(0.5, membership=tight)
    unknown = candidate(0.7, membership=None)
    assert (told.open_questions, kept.open_questions, unknown.open_questions) == (["membership"], [], ["membership"])
    assert best_unread([told, kept, unknown]) is kept
    words = answer([told, kept, unknown])
    assert "at most 5.0 % of the members found at 1 % FPR" in words and "TPR at 1 % FPR 1.0 %, at most 2.0 %" in words
    assert best_unread([candidate(0.9)]) is not None, "nothing was asked"
    wide = replace(tight, high=0.09)
    assert candidate(0.5, membership=wide).open_questions, "an interval that reaches beyond is no proof"


def test_an_attribute_counts_above_guessing() -> None:
    guessed = Measure(value=0.62, low=0.5, high=0.69, chance=0.6)
    assert candidate(0.5, attribute=guessed).open_questions == []
    assert candidate(0.5, attribute=replace(guessed, high=0.75)).open_questions == ["attribute"]
    assert asked_of([finding(0.5, about="attribute"), finding(0.5, about="source")]) == {"attribute"}
