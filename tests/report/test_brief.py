"""One page for people who decide: the verdict in plain words, what it rests on, and what stays open."""

import html
import math
import re

import pytest

from fl_privacy.report import write_brief, write_report
from fl_privacy.runs.folder import Finding, RunFolder
from fl_privacy.types import Certainty
from tests.report import kinds
from tests.report.test_inferred import finding
from tests.results.runs import config, defended, record, round_report, score

SECTIONS = [
    "What was attacked", "Assumptions", "What was not tested", "What risk remains",
    "Which documents need this page", "Glossary", "Records and signature",
]  # fmt: skip

SAID = {
    "leak": (kinds.attack, "can reconstruct clients' images"),
    "unread": (lambda out: record(out, noise=0.9, victims=20), "describes the attack, not a protection"),
    "few": (lambda out: record(out, noise=0.9, victims=2), "describes the attack, not a protection"),
    "failed": (lambda out: kinds.attack(out, failures=6), "no clearance"),
    "nothing": (kinds.nothing, "Nothing was attacked"),
    "truth unknown": (lambda out: kinds.audit(out, known=False), "most originals are not known here"),
    "proven": (
        lambda out: kinds.audit(out, known=False, certainty=Certainty.PROVEN, rehearsed=False),
        "can reconstruct clients' images",
    ),
    "rehearsed": (
        lambda out: kinds.audit(out, known=False, certainty=Certainty.PROVEN),
        "No client's upload was attacked, so nothing is known about what clients leak.",
    ),
    "text": (kinds.texts, "can reconstruct clients' texts"),
    "told": (kinds.inference, "can infer who took part and which client holds an example from clients' uploads"),
    "malicious": (kinds.malicious, "can reconstruct clients' images"),
}


def words_of(page):
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", page.read_text()).split()))


@pytest.mark.parametrize("case", SAID)
def test_the_verdict_is_plain_and_nothing_of_clients_is_shown(tmp_path, case):
    make, said = SAID[case]
    folder = make(tmp_path)
    page = write_brief(folder)
    text, words = page.read_text(), words_of(page)
    assert page == folder / "brief.html" and said in words
    assert re.findall(r"<h2>([^<]*)</h2>", text) == SECTIONS
    assert "<img" not in text and str(tmp_path) not in text and "base64" not in text
    assert not [word for word in kinds.WORDS if "##" in word and word in words], "no text of a client's"
    assert "There is no guarantee" in words
    assert re.search(r"brief · \S+ · \d{1,2} [A-Z][a-z]+ \d{4}", words)


def test_what_was_left_out_is_told(tmp_path):
    words = words_of(write_brief(record(tmp_path, changes=defended(scale=0.1), noise=0.3)))
    assert "An attacker that knows the defense (threat_model=adaptive)." in words
    assert "Servers that break the protocol" in words, "where the threat model says nothing of servers"
    assert "10 of 12 rounds (attacked: 1, 12)." in words
    asked = "who took part, which client holds an example, attributes of the examples, properties of a client's data."
    assert asked in words
    words = words_of(write_brief(kinds.inference(tmp_path)))
    assert "Malicious parameters, malicious architecture" in words and "Whether images can be reconstructed." in words
    assert "reveal: attributes of the examples, properties of a client's data." in words


def test_inference_that_found_nothing_was_an_attack_and_one_that_failed_was_none(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "finding", lambda *_, **__: finding(0.011))
    words = words_of(write_brief(kinds.inference(tmp_path / "nothing")))
    assert "The figures prove no anonymity" in words and "Nothing was attacked" not in words
    failed = Finding(about="membership", method="a", title="a", failure="ValueError: x")
    monkeypatch.setattr(kinds, "finding", lambda *_, **__: failed)
    words = words_of(write_brief(kinds.inference(tmp_path / "failed")))
    assert "Nothing was attacked: no support for anonymity" in words and "no more than chance" not in words
    assert "What else the uploads reveal: who took part" in words


def test_terms_are_explained_where_they_are_used(tmp_path):
    words = words_of(write_brief(kinds.texts(tmp_path)))
    glossary = words[words.index("Glossary") :]
    assert "Token F1" in glossary and "PSNR" not in glossary and "LPIPS" not in glossary


def test_figures_are_of_the_round_and_of_the_image_that_leaked_most(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        for round, noises in ((1, [0.05] * 6), (6, [0.01, *[0.9] * 5]), (12, [0.9] * 6)):
            for victim, noise in enumerate(noises):
                folder.add_victim(score(round, victim, noise=noise))
        best = folder.finish().attacked[1].metrics["psnr"].max
    words = words_of(write_brief(folder.path))
    assert "Reconstructed 6 of 6 0 exactly, 6 identified, 0 recognizable; round 1" in words
    assert f"The best reconstruction has PSNR {best:.1f} dB." in words


def test_the_page_of_an_interrupted_run_says_so(tmp_path):
    assert "This run was interrupted." in words_of(write_brief(record(tmp_path, finish=False)))


@pytest.mark.parametrize(
    ("epsilon", "delta", "said"),
    [
        (
            1.0,
            1e-5,
            "bounds every attacker: epsilon 1 at delta 1e-05 by the end of the training. At most 73",
        ),
        (3.3e5, 1e-5, "There is no meaningful guarantee: epsilon 3.3e+05"),
        (math.inf, 1e-5, "There is no meaningful guarantee: epsilon ∞"),
        (1.0, 0.5, "There is no meaningful guarantee: epsilon 1 at delta 0.5"),
        (None, 1e-5, "There is no guarantee: without an epsilon"),
    ],
)
def test_an_epsilon_that_bounds_nothing_is_no_protection(tmp_path, epsilon, delta, said):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        folder.add_privacy(delta=delta, accountant="rdp", missing=None)
        folder.add_round(round_report(1), epsilon=epsilon)
        folder.add_victim(score(1, 0, noise=0.9))
        folder.finish()
    words = words_of(write_brief(folder.path))
    page = write_report([folder.path]).read_text()
    little = "no meaningful" in said
    assert said in words and ("bounds every attacker" in words) == (epsilon == 1.0 and not little)
    assert ("promises little" in words) == ("promises little" in page) == little
