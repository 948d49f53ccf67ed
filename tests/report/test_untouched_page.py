"""The page of an audited app opens what its headline is of, and says why nothing was attacked, or interrupted."""

import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.auditing.app import audit
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.errors import UserError
from fl_privacy.measure.answer import Answer, Scenario, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.audit_file import PAGE
from fl_privacy.report.audit_page import AuditRecord, render_audit
from fl_privacy.report.audit_parts import CountedLeak, Line
from fl_privacy.report.bars import bar_of_counts, bars_of_questions, best_of, paired
from tests.flower.untouched_apps import PLAIN, write

LATE = "no time was left of 30 seconds; --seconds gives more"
UNKNOWN = "what is uploaded was not understood: by values, names and places none of its arrays is a parameter"
LINE = Line(
    direction="client to server", kind="train", record="arrays", key="w", what="array 3 float32",
    size=12.0, messages=2, rounds=[1],
)  # fmt: skip


def step(title: str, read: int | None, *, uploaded: bool = True, kind: str = "image", reason: str = "") -> Answer:
    """Make an answer by which ``read`` of two were reconstructed; ``None`` where nothing was attacked."""
    shape = (1, 8, 8) if kind == "image" else (8,)
    pair = Shown(original=np.zeros(shape), guess=np.ones(shape), reconstructed=bool(read))
    counts = None if read is None else Counts(exact=read, nothing=2 - read, groups=2, candidates=39)
    name = "all" if title.startswith("All its examples") else "one"
    return Answer(
        scenario=Scenario(name=name, title=title, uploads="2 uploads", leaves=uploaded), kind=kind, counts=counts,
        reason=reason, seconds=1.0, shown=[] if counts is None else [pair],  # type: ignore[arg-type]
    )  # fmt: skip


GRADIENT = step("The gradient", 0, uploaded=False)


def opened(page: AuditRecord) -> list[str]:
    return re.findall(r"<details open><summary>(.*?): originals and", render_audit(page))


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([GRADIENT, step("One", 2), step("Batch", 1)], "One"),
        ([GRADIENT, step("One", 1), step("Batch", 2)], "Batch"),
        ([step("The gradient", 2, uploaded=False), step("One", 0)], "One"),
        ([step("The gradient", 2, uploaded=False), step("One", None)], "The gradient"),
    ],
)
def test_the_pictures_that_are_open_are_those_of_the_headline(steps: list[Answer], wanted: str) -> None:
    assert opened(AuditRecord(app="a", lede="", answers=steps, lines=[LINE])) == [wanted]


def test_a_headline_keeps_names_that_end_like_errors() -> None:
    what = "the array MeanSquaredError"
    clear = CountedLeak(severity="data", what=what, where="m/n", why="y", kind="train", times=1, of=2)
    page = AuditRecord(app="a", findings=[clear], lines=[LINE])
    assert re.search(f"<h1.*>{page.headline}</h1>", render_audit(page)) and what in page.headline


@pytest.mark.parametrize("reason", [LATE, UNKNOWN, "its code makes no step on a single example"])
def test_a_headline_says_why_no_upload_was_attacked(reason: str) -> None:
    rest = step("All its examples in all its steps", None, reason="this is what the training uploads")
    missed = [step("One", None, reason=reason), step("Batch", None, reason=LATE), rest]
    page = AuditRecord(app="a", lede="", answers=[step("The gradient", 2, uploaded=False), *missed], lines=[LINE])
    assert (
        page.headline.startswith(f"No upload was attacked: {reason}. From gradients") and "could" not in page.headline
    )
    alone = replace(page, answers=missed)
    assert alone.headline == f"Not attacked: {reason}; everything that is sent is listed below"
    none = replace(page, answers=[])
    said = "Not attacked: no attack here fits what this app uploads; everything that is sent is listed below"
    assert none.headline == said


def test_an_audit_of_which_nothing_came_has_no_empty_sections() -> None:
    missed = step("One", None, reason="no client answered")
    page = AuditRecord(
        app="a", lede="", problems=["The app's server ended with an error"],
        answers=[missed, Answer(question="members", reason="no step was seen")],
    )  # fmt: skip
    heads = re.findall(r"<h2>(.*?)</h2>", render_audit(page))
    assert heads == ["What clients send in the clear"]
    full = re.findall(r"<h2>(.*?)</h2>", render_audit(replace(page, lines=[LINE])))
    assert {"What can be reconstructed from updates", "Everything that is sent"} < set(full)


def test_a_row_and_its_guess_are_cards_on_a_phone() -> None:
    shown = render_audit(AuditRecord(app="a", lede="", answers=[step("One", 2, kind="row")], lines=[LINE]))
    assert 'class="cards rows-read"' in shown
    assert re.search(
        r'<td data-label="Row">0.00 .*?<td data-label="Guess">1.00 .*?<td data-label="Reconstructed">yes', shown
    )


class Stopped(BaseException):
    """What a signal raises."""


def test_an_interrupted_audit_says_so_on_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: Any) -> None:
        page = (run.folder / PAGE).read_text()
        assert 'http-equiv="refresh"' in page and re.search(r"Written 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC", page)
        raise Stopped

    monkeypatch.setattr(audit.AppAudit, "attack_all", interrupted)
    asked = audit.AppAuditRequest(nodes=2, clients=1, victims=2, out=tmp_path / "out", seconds=0.0)
    with pytest.raises(Stopped):
        audit.audit_app(read_app(write(tmp_path / "app", "stopped", PLAIN)), asked)
    page = next(tmp_path.rglob(PAGE)).read_text()
    assert "It was interrupted" in page and "Not finished when" not in page and "refresh" not in page
    assert "The audit did not end: the result is not known" in page


def test_an_app_that_cannot_be_loaded_leaves_no_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "app", "broken", "raise RuntimeError('x')")
    with pytest.raises(UserError):
        audit.audit_app(read_app(folder), audit.AppAuditRequest(out=tmp_path / "out"))
    assert not list((tmp_path / "out").rglob(PAGE))


def pictured(page: AuditRecord) -> list[str]:
    found = re.findall(r'<li class="bar">(.*?)</li>', render_audit(page), re.DOTALL)
    return [re.sub(r"\s+", " ", one) for one in found]


def test_the_first_screen_has_a_bar_for_each_scenario_with_the_apps_own_uploads_first() -> None:
    own = step("All its examples", None, reason="too many steps; this is no protection")
    own = replace(own, scenario=replace(own.scenario, uploads="the training's own upload, of 9 examples in 3 steps"))
    red = replace(step("One", 2), control=Counts(nothing=2), shown=[*step("One", 2).shown] * 5)
    first, red, open_, gray = pictured(AuditRecord(app="a", answers=[GRADIENT, red, step("Batch", 0), own]))
    assert "never leaves the client" in gray and 'class="gray"' in gray and 'class="control"' not in gray
    assert 'class="red" y="4" width="100.0%"' in red and "2 of 2" in red and 'class="interval"' in red
    assert 'class="control" x1="0.4%"' in red and red.count('alt="Reconstruction"') == 3
    assert 'class="red"' not in open_ and "<img" not in open_ and "0 of 2" in open_
    assert "9 examples in 3 steps" in first and '<text x="9" y="17">not attacked</text>' in first


def test_a_gradient_is_not_listed_among_uploads_and_an_answer_says_what_was_counted() -> None:
    counts = Counts(nothing=16, groups=1, candidates=124)
    own = replace(step("All its examples", 0), counts=counts)
    own = replace(own, scenario=replace(own.scenario, examples=140, uploads="an upload, of 140 examples in 5 steps"))
    means = replace(step("Means", 0), counts=Counts(identified=4, groups=2, candidates=256))
    page = AuditRecord(app="a", answers=[GRADIENT, step("One", 2), own, means], lines=[LINE])
    asked = render_audit(page).partition("made for this audit</h3>")[2]
    assert "Gradient" not in asked.partition("</ul>")[0] and "never leaves" in asked.partition("</h3>")[2]
    first, _, third, _ = pictured(page)
    assert "140 examples in 5 steps, 16 checked; one upload: others may differ, so the interval is wide" in first
    assert "2 uploads, which the interval counts" in third
    assert page.headline.endswith("; from the app's own upload, 0 of 16 checked")
    assert "a client with little data" in page.officer[1][1]
    missed = replace(GRADIENT, counts=None, shown=(), reason="no gradient")
    header = render_audit(AuditRecord(app="a", answers=[missed, own], lines=[LINE])).partition("</header>")[0]
    assert "made for this audit</h3>" not in header and "Worst case, for comparison" in header
    nodes = AuditRecord(app="a", answers=[replace(own, kind="node", shown=())], lines=[LINE])
    assert "0 of 16 nodes checked, given all edges, from" in nodes.headline
    words = replace(own, kind="text", counts=Counts(nothing=1, groups=1), shown=())
    text = AuditRecord(app="a", answers=[words], lines=[LINE])
    assert "1 checked" not in render_audit(text) and "checked" not in text.headline


def test_an_approval_that_is_refused_names_what_leaks_in_training() -> None:
    found = Estimate(value=0.9, low=0.85, high=0.95, chance=0.5)
    final = Answer(question="participants", observer="outsider", estimate=found, control=replace(found, value=0.5))
    page = AuditRecord(app="a", answers=[step("One", 2), final], lines=[LINE])
    assert page.officer[1][1].startswith("Not as it is: the final model alone is enough for some attacks. Defend")


def test_what_failed_is_not_among_what_was_not_reconstructed() -> None:
    some, none = (replace(step("One", 0), counts=Counts(nothing=n, failures=3, groups=n)) for n in (1, 0))
    page = AuditRecord(app="a", answers=[some])
    (bar,) = pictured(page)
    assert "0 of 1" in bar and "the attack failed on 3" in bar and "0 of 4" not in render_audit(page)
    page = AuditRecord(app="a", answers=[none], lines=[LINE])
    assert page.headline == "All attacks on single examples failed: nothing is known about them"
    assert "No example was scored; the attack failed on 3" in render_audit(page) and "Look at" not in page.next_step
    (bar,) = pictured(page)
    assert ">not known</text>" in bar and "the attack failed on 3" in bar and 'class="gray"' not in bar


def test_one_upload_of_a_batch_has_no_interval() -> None:
    """It shows what leaks of this batch, and says nothing of others."""
    scenario = Scenario(name="batch", title="Batch", examples=32, uploads="1 upload")
    counts = Counts(identified=17, nothing=15, groups=1, candidates=1000)
    page = AuditRecord(app="a", answers=[replace(step("Batch", 1), scenario=scenario, counts=counts)])
    (bar,) = pictured(page)
    assert "32 examples; one upload: others may differ" in bar
    assert 'class="red"' in bar and 'class="interval"' not in bar
    assert page.headline == "The server reconstructed 17 of 32 images from one upload of 32 examples in one step"
    assert "17 of 32 reconstructed; control none: one upload" in render_audit(page)


def test_a_bar_of_a_defended_upload_says_what_its_undefended_one_does_not() -> None:
    counts = Counts(identified=17, nothing=15, groups=1, candidates=1000)
    before = bar_of_counts("Batch", Counts(identified=32, groups=2, candidates=1000), red=True, aside="32 examples")
    with_it = bar_of_counts("Batch", replace(counts, failures=3), red=True, aside="32 examples")
    (_, shown), (_, same) = paired([with_it], [before], "pruning"), paired([before], [before], "pruning")
    assert shown.aside == "32 examples; one upload: others may differ; the attack failed on 3" and not same.aside


def test_the_best_reconstructions_come_first_and_none_is_shown_that_does_not_count() -> None:
    def guess(level: float, *, counts: bool = True) -> Shown:
        return Shown(original=np.ones((1, 8, 8)), guess=np.full((1, 8, 8), level), reconstructed=counts)

    found = best_of(replace(step("One", 2), shown=[guess(0.2), guess(1.0, counts=False), guess(0.9), guess(0.6)]))
    assert [one.guess.max() for one in found] == [0.9, 0.6, 0.2]


def test_a_red_page_says_when_and_what_to_do_and_a_gray_one_promises_nothing() -> None:
    own = step("All its examples", None, reason="too many steps")
    own = replace(own, scenario=replace(own.scenario, uploads="the training's own uploads, of 9 examples in 3 steps"))
    red = AuditRecord(app="a", answers=[step("One", 2), own], lines=[LINE])
    assert "A client with little data may upload" in red.when and red.when in red.further
    assert "Your real training was not attacked: too many steps" in red.also and "defense" in red.next_step
    unbreakable = red.next_step.replace("--with-defense", '<span class="option">--with-defense</span>')
    page = html.unescape(render_audit(red))
    assert f"{unbreakable}." in page and unbreakable != red.next_step and "worst case" not in page
    gray = AuditRecord(app="a", answers=[step("One", 0)], lines=[LINE])
    assert "others may reconstruct more" in gray.officer[1][1] and not gray.when
    assert "guarantee" in gray.next_step
    clear = CountedLeak(severity="data", what="rows", where="data/X", why="y", kind="train", times=1, of=2)
    sent = AuditRecord(app="a", findings=[clear], answers=[step("One", 2)], lines=[LINE])
    fact = replace(clear, severity="facts")
    stated = AuditRecord(app="a", findings=[fact], answers=[step("One", 0)], lines=[LINE])
    assert stated.next_step == "Remove data/X from the app's replies, or decide that it may leave"
    assert sent.next_step == "Remove data/X from the app's replies" and "no attack" in sent.when
    assert 'class="red" y="4" width="50.0%"' in pictured(sent)[0] and "In the clear: rows" in pictured(sent)[0]
    late = AuditRecord(app="a", answers=[step("One", None, reason=LATE)], lines=[LINE])
    assert "--seconds" in late.next_step and late.when == ""


def test_advice_on_trees_keeps_the_model_and_their_rule_names_no_other_rows() -> None:
    fact = CountedLeak(severity="facts", what="trees", where="arrays/0", why="y", kind="train", times=1, of=2)
    tree = step("Rows behind the trees", 0, kind="row")
    counts = Counts(nothing=2, groups=2)
    tree = replace(tree, scenario=replace(tree.scenario, name="trees"), counts=counts)
    page = AuditRecord(app="a", findings=[fact], answers=[tree], lines=[LINE])
    assert page.next_step.startswith("Send fewer trees") and "Remove" not in page.next_step
    assert "nearer to the guess than" not in render_audit(page) and "<li></li>" not in render_audit(page)
    judged = replace(tree, counts=replace(counts, candidates=39))
    assert "nearer to the guess than 39 others" in render_audit(replace(page, answers=[judged]))


def test_a_data_protection_officer_finds_two_answers_on_the_first_screen() -> None:
    def answers(**parts: Any) -> list[str]:
        page = AuditRecord(app="a", lines=[LINE], **parts)
        header = html.unescape(render_audit(page)).split("</header>")[0]
        assert all(
            f"<dt>{question}</dt><dd>{answer.replace('. ', '.</dd><dd>')}.</dd>" in header
            for question, answer in page.officer
        )
        return [answer for _, answer in page.officer]

    guessed = Estimate(value=0.52, low=0.4, high=0.6, chance=0.5)
    members = Answer(question="members", estimate=guessed, control=replace(guessed, value=0.5))
    found = replace(guessed, value=0.9, low=0.85, high=0.95)
    leaking = replace(members, estimate=found, control=guessed)
    assert answers(answers=[step("One", 2)]) == [
        "Yes, from uploads made for this audit: the server reconstructed 2 of 2 images from uploads of one"
        " example in one step",
        "Not as it is: a client with little data may upload what can be reconstructed, and the app does not prevent it."
        " Defend the clients, and audit again",
    ]
    assert answers(answers=[step("One", 0), members]) == [
        "Not shown by reconstruction: the server reconstructed 0 of 2 images from uploads of one example in one step"
        " (95 % interval 0 to 84\N{NO-BREAK SPACE}%). Not shown by membership inference: from the"
        " training's own uploads (AUC 0.52; control 0.50); chance may explain such differences",
        "Not by this page alone: these attacks found no leak, but others may reconstruct more",
    ]
    lucky = replace(step("One", 1), counts=Counts(exact=1, nothing=1, groups=2, chance=0.9))
    said = answers(answers=[lucky])[0]
    assert "reconstructed 1 of 2 images" in said and "in one step, no more than chance allows (95" in said
    own = step("All its examples in all its steps", 0)
    own = replace(own, scenario=replace(own.scenario, source="the app's own upload"))
    said = answers(answers=[step("One", 2), own, members])[0]
    first = "Not shown by reconstruction: the server reconstructed 0 of 2 images from the app's own upload"
    then = "Not shown by membership inference"
    assert said.startswith(first) and said.index(then) < said.index("Yes, from uploads made for this audit")
    both = answers(answers=[step("One", 2), replace(own, counts=step("All", 2).counts)])[0]
    assert both == "Yes: the server reconstructed 2 of 2 images from the app's own upload"
    missed = replace(own, counts=None, reason="too many steps")
    assert answers(answers=[step("One", 2), missed])[0].startswith("Your real training was not attacked: too many")
    assert answers(answers=[step("One", 0), missed])[0].count("was not attacked") == 1
    final = replace(members, question="participants", observer="outsider")
    both = answers(answers=[members, final])[0]
    assert "uploads (AUC 0.52; control 0.50) and from the final model (AUC 0.52; control 0.50)" in both
    continued = replace(leaking, question="continued", control=replace(guessed, value=0.0))
    said = answers(answers=[step("One", 0), members, continued])[0]
    assert said.endswith("Yes: the final model completes texts of clients word for word")
    fact = CountedLeak(severity="facts", what="classes", where="m/n", why="y", kind="train", times=1, of=2)
    assert answers(answers=[step("One", 0)], findings=[fact])[1].startswith("Not before the facts")
    red, gray = (AuditRecord(app="a", answers=[step("One", read)], lines=[LINE]) for read in (2, 0))
    assert answers(answers=[step("One", 0)], defense="dp_noise", before=red)[1].startswith("Not without dp_noise; with")
    assert answers(answers=[step("One", 2)], defense="dp_noise", before=gray)[1].startswith("Not even with dp_noise")
    drawn = AuditRecord(app="a", answers=[step("One", 0), members], lines=[LINE], drawn=True)
    assert "was made up" in drawn.officer[0][1] and "was made up" in drawn.further[0]
    said, approval = answers(answers=[step("One", 0), leaking])
    assert (
        said.startswith(
            "Yes, by membership inference: from the training's own uploads (AUC 0.90; control 0.52). Not shown by"
            " reconstruction"
        )
        and "Not as it" in approval
    )
    assert answers(answers=[step("One", None, reason=LATE)]) == [
        "Not tested", "Not by this page: no attack on single examples has a result",
    ]  # fmt: skip


def test_a_gray_figure_whose_interval_lies_above_its_control_says_why() -> None:
    near = Estimate(value=0.6, low=0.52, high=0.67, chance=0.5)
    one = Answer(question="members", estimate=near, control=replace(near, value=0.48))
    assert not one.leaks and "not counted as a leak: chance alone" in bars_of_questions([one])[0].aside
    for found in (replace(near, low=0.57, high=0.63), replace(near, low=0.49)):
        assert "not counted as a leak" not in bars_of_questions([replace(one, estimate=found)])[0].aside


def test_only_the_scenario_of_the_headline_is_unfolded() -> None:
    page = render_audit(AuditRecord(app="a", answers=[GRADIENT, step("One", 2)], lines=[LINE], facts=[("a", "b")]))
    assert page.count("<details open>") == 1
    assert re.search(r"<details><summary><h2>Everything that is sent</h2></summary>", page)


@pytest.mark.parametrize(
    ("observer", "learns", "needs", "stops"),
    [
        ("server", "Clients' uploads reveal to the server", "training's own uploads", "secure aggregation"),
        ("another_site", "A client learns", "server's messages", "server add noise"),
        ("outsider", "Everybody who gets the final model learns", "final model", "differential privacy"),
    ],
)
def test_each_observer_of_a_leak_has_its_own_need_and_remedy(
    observer: Any, learns: str, needs: str, stops: str
) -> None:
    """Secure aggregation hides nothing that other sites or the model's receivers see."""
    found = Estimate(value=0.9, low=0.85, high=0.95, chance=0.5)
    leak = Answer(question="labels", observer=observer, estimate=found, control=replace(found, value=0.5))
    page = AuditRecord(app="a", answers=[leak], lines=[LINE])
    assert page.headline.startswith(f"{learns} which class each example has (0.90; control 0.50)")
    assert needs in page.when and stops in page.next_step
