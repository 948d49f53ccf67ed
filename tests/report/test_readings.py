"""Every page repeats one verdict, by the attack that leaks most, and names it."""

import ast
import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import fl_privacy.report
from fl_privacy.federation import Evaluation
from fl_privacy.measure.answer import Answer
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.report import write_report, write_trade_off
from fl_privacy.report.bars import bar_of_counts, bars_of_questions
from fl_privacy.report.brief import write_brief
from fl_privacy.report.headline import headline_of, read_in_words
from fl_privacy.runs.folder import Attacker, Recognized, RunFolder, read_run, verdict_of
from fl_privacy.runs.folder.defense_choice import candidate_of
from fl_privacy.runs.folder.leakage import facts_of, few, leaks_most, worst_by
from fl_privacy.runs.folder.study import measured_rows, read_study
from fl_privacy.runs.folder.summary import LeakageResult
from fl_privacy.runs.folder.verdict import judged
from tests.report.kinds import every_kind
from tests.results.runs import config, defended, record, round_report, score, study_entry

REPORT = Path(fl_privacy.report.__file__).parent


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    """Record a run whose plain attacker reconstructed nothing, and whose adaptive one all."""
    out = tmp_path_factory.mktemp("runs")
    return record(out, label="guarded", changes=defended(scale=0.1), noise=0.9, adaptive=0.02)


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return record(out, label="silent", changes=defended(scale=0.9), noise=0.9, accuracy=0.3)


def said_of(path):
    return headline_of(verdict_of(read_run(path)))


def tags(text):
    return re.findall(r'<span class="tag (\w+)">(\d+ of \d+)</span>', text)


def test_run_page_comparison_scatter_and_answer_agree(adaptive, silent):
    summary = read_run(adaptive).summary
    worst = worst_by("psnr", summary.attacked)
    mean = worst.statistic("psnr").mean
    assert worst.attacker == "adaptive" and mean > summary.plain.metrics["psnr"].mean
    assert said_of(adaptive).tone == "leak" and said_of(silent).tone == "open"
    text = write_report([adaptive, silent]).read_text()
    assert (
        tags(text) == [("leak", "6 of 6"), ("open", "0 of 6")] and "<small>0 to 46\N{NO-BREAK SPACE}%</small>" in text
    )
    assert "Clients&#39; data were reconstructed in 1 of 2 attacked runs" in text
    assert f"PSNR against accuracy: A at 100.0 %, {mean:.1f} dB" in re.sub(r"at [\d.]+ %, ", "at 100.0 %, ", text)
    assert (
        "Only 1 of 2 meets the goal (no attacked image reconstructed): B, silent, " in text and "B leaks least" in text
    )
    assert text.count("adaptive attacker, round") >= 4, "it is named wherever its figure stands"
    assert "B was attacked by the plain attacker alone" in text


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Kind -> folder of its run, and the text of its page and of its brief."""
    made = every_kind(tmp_path_factory.mktemp("kinds"))
    return {
        name: (path, [write_report([path]).read_text(), write_brief(path).read_text()]) for name, path in made.items()
    }


def test_every_page_begins_with_the_verdict(kinds):
    for name, (path, pages) in kinds.items():
        said = said_of(path)
        assert len(said.first) < 110, "is read in five seconds"
        words = re.findall(r"\w+", f"{said.lead} {said.scope}".lower())
        assert sorted(words) == sorted(re.findall(r"\w+", said.text.lower())), "nothing is left out"
        for text in (page.replace("&#39;", "'") for page in pages):
            assert re.search(r"<h1[^>]*>(.*?)</h1>", text, re.DOTALL)[1] == said.first, name
            scope = re.search(r'</h1>\s*<p class="lede scope">(.*?)</p>', text, re.DOTALL)
            assert (scope[1] if scope else "") == said.scope, name
        assert json.loads((path / "summary.json").read_text())["verdict"]["tone"] == said_of(path).tone


@pytest.mark.parametrize("read, told", [(0, ""), (5, "but 5 of the 6 images that")])
def test_what_stands_in_place_of_the_original_was_read(silent, read, told):
    run = read_run(silent)
    seen = Recognized(metric="transformed_psnr", value=15.0, leaks="above", source="x", recognizable=read, n=6)
    rounds = [replace(found, thresholds=(*found.thresholds, seen)) for found in run.summary.attacked]
    summary = replace(run.summary, attacked=tuple(rounds))
    said = headline_of(judged(summary, facts_of(run)))
    assert "reconstructed none of 6 attacked images" in said.text and told in said.text
    assert said.tone == "open" and ("look at the pictures" in said.basis) == bool(told)
    candidate = candidate_of(summary.attacked, name="silent", accuracy=0.9, pmm=None)
    assert candidate.unread() == (not told)


def test_what_stands_in_place_of_more_originals_than_were_read_is_said_in_the_first_line(silent):
    run = read_run(silent)
    seen = Recognized(metric="transformed_psnr", value=15.0, leaks="above", source="x", recognizable=4, n=6)
    for read, said in ((1, "1 of 6 attacked images"), (4, "4 of 6"), (6, "6 of 6")):
        counts = Counts(identified=read, nothing=6 - read, candidates=1000, groups=6)
        one = LeakageResult(round=1, counts=counts, thresholds=(seen,), images=6)
        summary = replace(run.summary, attacked=(one,))
        text = headline_of(judged(summary, facts_of(run))).text
        assert text.startswith(f"The server reconstructed {said}") and (
            "but 4 of the 6 images that the defense substituted were reconstructed" in text
        ) == (read < 4)


def test_a_papers_own_count_stands_in_its_row_and_decides_nothing(tmp_path):
    """Of six images none was read; by the MSE of a paper all six count."""
    blurred = record(tmp_path, label="blurred", changes=defended(scale=0.1), noise=0.9, adaptive=0.225)
    records = (blurred / "metrics.jsonl").read_text().splitlines()
    nothing = [json.loads(line) for line in records]
    for one in nothing:
        if one["kind"] == "image":
            one |= {
                "best_rank": 40,
                "aligned_psnr": 13.0,
                "aligned_ssim": 0.2,
                "control_psnr": 16.0,
                "control_ssim": 0.5,
            }
    (blurred / "metrics.jsonl").write_text("\n".join(map(json.dumps, nothing)) + "\n")
    assert said_of(blurred).tone == "open" and "reconstructed none of 6" in said_of(blurred).text
    text = write_report([blurred]).read_text()
    assert "FDL-PP: 6 of 6<small>MSE &lt; 0.050</small>" in text
    assert "tag leak" not in text and "tag bounded" not in text


def test_an_attacker_is_named_where_it_alone_read_so_much(tmp_path, adaptive):
    knowing = "The server, knowing the defense, reconstructed 6 of 6 attacked images, from uploads"
    assert said_of(adaptive).text.startswith(knowing)
    both = record(tmp_path, label="both", changes=defended(scale=0.1), noise=0.03, adaptive=0.02)
    assert said_of(both).text == (
        "The server reconstructed 6 of 6 attacked images, from uploads of one image each that were made for the attack,"
        " not from training batches: 6 of 6 in round 1, 6 of 6 in round 12"
    )


def test_nothing_is_chosen_where_the_undefended_was_not_read(silent, tmp_path):
    deaf = record(tmp_path, label="plain", noise=0.9, undefended=True)
    text = write_report([deaf, silent]).read_text()
    assert tags(text) == [("open", "0 of 6"), ("open", "0 of 6")]
    assert "without one, no image was reconstructed either" in text
    outcomes = [
        study_entry("Undefended", "", deaf, {"DLG": deaf}),
        study_entry("noise", "1", silent, {"DLG": silent}),
    ]
    traded = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "The attacks reconstructed nothing undefended either" in traded and 'class="chosen"' not in traded


def test_a_defense_at_one_strength_is_none_the_less_a_defense(silent, tmp_path):
    plain = record(tmp_path, label="plain", noise=0.02, undefended=True)
    outcomes = [
        study_entry(name, "", path, {"DLG": path}, [f"defense={name.lower()}"])
        for name, path in (("ATS", silent), ("Undefended", plain))
    ]
    text = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "trade-off of 1 family of defenses" in text and "With ATS, none of 6 images was reconstructed; " in text
    defense, undefended = read_study(outcomes)
    assert undefended.pmm == 100 and defense.pmm == 100 * defense.accuracy / undefended.accuracy
    (other, known), _ = measured_rows([undefended, defense], is_whole=lambda row: row.complete)
    assert set(known.by_threat) == {"honest"} and set(other.by_threat) == {"honest", "adaptive"}


def test_the_trade_off_judges_by_the_same_rule(adaptive, silent, tmp_path):
    outcomes = [study_entry(name, "1", path, {"DLG": path}) for name, path in (("read", adaptive), ("silent", silent))]
    text = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "With silent (1), none of 6 images was reconstructed; the attack may have failed" in text
    assert 'class="chosen"' in text
    few = record(tmp_path, label="few", changes=defended(scale=0.9), noise=0.9, victims=3)
    outcomes[1] = study_entry("few", "1", few, {"DLG": few})
    text = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "Only 3 separate uploads were attacked" in text and 'class="chosen few"' in text
    alone = write_trade_off(outcomes[:1], tmp_path / "trade_off.html").read_text()
    assert "Clients&#39; images were reconstructed with the one defense that was tried" in alone


def test_an_early_round_that_leaks_is_not_forgotten(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        for round, noise in ((1, 0.02), (12, 0.9)):
            for victim in range(6):
                folder.add_victim(score(round, victim, noise=noise))
        folder.finish()
    found = said_of(folder.path)
    assert "6 of 6 attacked images" in found.text
    assert found.text.endswith(": 6 of 6 in round 1, none of 6 (up to 46 %) in round 12")
    assert found.tone == "leak"
    assert ("leak", "6 of 6") in tags(write_report([folder.path, record(tmp_path)]).read_text())


def test_images_are_counted_once_and_rounds_kept_apart(adaptive):
    summary = read_run(adaptive).summary
    assert [(found.round, found.attacker) for found in summary.attacked] == [*product((1, 12), Attacker)]
    for found in summary.attacked:
        assert found.images == found.counts.images == found.metrics["psnr"].groups == 6
    assert summary.plain == summary.attacked[-2]


def test_the_json_says_what_the_page_says(adaptive, tmp_path):
    told = json.loads((adaptive / "summary.json").read_text())["verdict"]
    most = leaks_most(read_run(adaptive).summary.attacked)
    assert (told["tone"], told["ground"]) == ("leak", "read")
    assert (told["most"]["attacker"], told["most"]["round"]) == ("adaptive", most.round)
    assert (told["most"]["read"], told["most"]["judged"]) == (6, 6) and told["most"]["interval95"][1] == 1
    failed = json.loads((record(tmp_path, failures=6) / "summary.json").read_text())
    assert failed["verdict"]["most"] is None and failed["failures"] == 6


def test_the_images_of_one_upload_are_one_group(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        for victim in range(3):
            first = score(1, victim, noise=0.3)
            batch = tuple(replace(first.images[0], image=k) for k in range(4))
            folder.add_victim(replace(first, images=batch))
        found = folder.finish().plain
    psnr = found.metrics["psnr"]
    assert (psnr.n, psnr.groups) == (12, 3) and (found.counts.judged, found.counts.groups) == (12, 3)
    assert few(psnr) == few(replace(psnr, n=3)) == "only 3 uploads"  # of texts and rows, too
    assert "3 uploads" in write_report([folder.path]).read_text()
    assert "from uploads of 4 images each" in said_of(folder.path).text


def test_an_attack_that_failed_leaves_it_open(tmp_path):
    failed = read_run(record(tmp_path, failures=6, noise=0.9))
    assert leaks_most(failed.summary.attacked) is None and verdict_of(failed).tone == "open"
    assert candidate_of(failed.summary.attacked, name="a", accuracy=0.5, pmm=None) is None
    assert said_of(failed.path).text == "The attack failed on all 6 images: nothing is known"


def test_a_mean_of_what_did_not_fail_is_no_answer(tmp_path):
    """The attack failed on one of seven images, and read little of the others."""
    partly = record(tmp_path, label="partly", changes=defended(scale=0.5), noise=0.9, victims=7, failures=1)
    assert said_of(partly).tone == "open"
    silent = record(tmp_path, label="silent", changes=defended(scale=0.9), noise=0.9, accuracy=0.3)
    text = write_report([partly, silent]).read_text()
    assert (
        "Only 1 of 2 meets the goal (no attacked image reconstructed): B, silent, " in text and "B leaks least" in text
    )
    alone = write_report([partly, record(tmp_path, label="read", undefended=True)]).read_text()
    assert re.search(r"A, [^;(]* comes closest", alone) and "while an attack failed on 1" in alone


def test_few_read_well_leak_more_than_many_read_a_little_better_than_noise(tmp_path):
    rows = []
    for label, noises in (("one", [0.9] * 11 + [0.1]), ("none", [0.5] * 12)):
        with RunFolder.open_or_create(tmp_path, label=label, config=config(name=label), config_text="") as folder:
            for victim, noise in enumerate(noises):
                folder.add_victim(score(1, victim, noise=noise))
            folder.finish()
        rows.append(folder.path)
    means = [read_run(path).summary.plain.metrics["psnr"].mean for path in rows]
    assert means[0] < means[1]
    assert "B leaks least" in write_report(rows).read_text()


def test_an_exact_reconstruction_stays_in_the_charts(tmp_path):
    runs = [record(tmp_path, label="a")]
    with RunFolder.open_or_create(tmp_path, label="b", config=config(**defended(scale=1)), config_text="") as folder:
        folder.add_round(round_report(), Evaluation(accuracy=0.5, loss=1.0, num_examples=1))
        folder.add_victim(score(1, 0, noise=0.1, exact=True))
        folder.finish()
    text = write_report([*runs, folder.path]).read_text()
    assert "(exact)" in text and "B at 50.0 %, &gt; 100 dB" in text


TONES = ("leak", "bounded", "open")

DECIDING = {"is_leak", "threshold", "bound_of", "promises_little", "outcome_of", "by_chance"}
"""Names by which a module would decide what was read, or whether it is bounded."""

SHOWN = {
    "words.py": {"threshold"},
    "brief.py": {"promises_little"},
    "advice.py": {"promises_little"},
    "policy_search.py": {"threshold"},
}
"""Modules that say in words what another one decided -> by which of them."""


def deciding(module: ast.Module) -> set[str]:
    """Find what a module uses of ``DECIDING``, and colors that it gives by itself."""
    names = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    tones = {
        n.value for n in ast.walk(module) if isinstance(n, ast.Constant) and n.value in ("leak", "bounded", "open")
    }
    return (names & DECIDING) | tones


def test_pages_decide_nothing():
    found = {path.name: deciding(ast.parse(path.read_text())) for path in REPORT.glob("*.py")}
    assert {name: used for name, used in found.items() if used - SHOWN.get(name, set())} == {}
    assert deciding(ast.parse("tone = 'leak' if METRICS[name].is_leak(x) else y")) == {"leak", "is_leak"}


def test_private_is_no_word_of_a_page(kinds):
    pages = [page for _, pages in kinds.values() for page in pages]
    pages.append(write_report([path for path, _ in kinds.values()]).read_text())
    for page in pages:
        shown = re.sub(r"<[^>]*>", " ", re.sub(r"<(style|pre)>.*?</\1>", "", page, flags=re.DOTALL))
        assert not re.search(r"\b[Pp]rivate\b(?! layers)", shown), page


def test_a_bar_of_a_correlation_states_its_interval_in_the_unit_of_its_figure():
    found = Estimate(value=0.86, low=0.66, high=0.94, chance=0.0)
    control = Estimate(value=-0.52, low=-0.8, high=0.1, chance=0.0)
    (bar,) = bars_of_questions([Answer(question="classes", estimate=found, control=control)])
    assert (bar.figure, bar.numbers, bar.control) == ("0.86", "0.66 to 0.94; control -0.52", 0.0)


@pytest.mark.parametrize(("read", "said"), [(0, "0 to 60 %"), (1, "1 to 81 %"), (4, "40 to 100 %")])
def test_bars_state_the_bound_that_the_headline_states(read, said):
    counts = Counts(exact=read, nothing=4 - read, groups=4)
    bar = bar_of_counts("Round 1", counts, red=False)
    assert bar.numbers == said.replace(" %", "\N{NO-BREAK SPACE}%")
    assert read or said.replace("0 to", "up to") in read_in_words(counts)
