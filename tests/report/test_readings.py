"""Every page judges a run by the attack that read most, and names it."""

import json
import re
from dataclasses import replace

import pytest

from fl_privacy.federation import Evaluation
from fl_privacy.metrics import Statistic
from fl_privacy.report import write_report, write_trade_off
from fl_privacy.report.brief import write_brief
from fl_privacy.report.headline import verdict
from fl_privacy.report.measured_tables import measured_rows
from fl_privacy.report.recommendation import answer, candidate_of
from fl_privacy.report.trade_off import SweepEntry, read_rows
from fl_privacy.results import Attacker, Recognized, RunFolder, read_run
from fl_privacy.results.readings import few, most_recognized, readings_of, tone, tone_of, worst_by
from tests.results.runs import config, defended, record, round_report, score

BOUND = Recognized(metric="psnr", value=15.0, leaks="above", source="Refiner", recognizable=0, n=8)


def statistic_of(mean, ci95, groups=8):
    return Statistic(mean=mean, ci95=ci95, n=8, groups=groups, median=mean, min=mean, max=mean)


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    """A run that looks private to the plain attacker, and is read by the adaptive one."""
    out = tmp_path_factory.mktemp("runs")
    return record(out, label="guarded", changes=defended(scale=0.1), noise=0.9, adaptive=0.02)


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return record(out, label="silent", changes=defended(scale=0.9), noise=0.9, accuracy=0.3)


def test_run_page_comparison_scatter_and_answer_agree(adaptive, silent):
    summary = read_run(adaptive).summary
    worst = worst_by("psnr", readings_of(summary))
    mean = worst.statistic("psnr").mean
    assert worst.attacker == "adaptive" and mean > BOUND.value > summary.plain.metrics["psnr"].mean
    assert verdict(summary).tone == "leak"
    text = write_report([adaptive, silent]).read_text()
    tags = re.findall(r'<span class="tag (\w+)">(\d+ of \d+)</span>', text)
    assert tags == [("leak", "6 of 6"), ("private", "0 of 6")]
    assert f"PSNR against accuracy: A at 100.0 %, {mean:.1f} dB" in re.sub(r"at [\d.]+ %, ", "at 100.0 %, ", text)
    assert "Of 2, only B, silent" in text and "Least leaks from B" in text
    assert text.count("adaptive attacker, round") >= 4, "it is named wherever its figure stands"
    assert "B was attacked by the plain one alone" in text


@pytest.mark.parametrize("read, tone, told", [(0, "private", ""), (5, "open", "but 5 of the 6 images that")])
def test_what_stands_in_place_of_the_original_was_read(silent, read, tone, told):
    summary = read_run(silent).summary
    seen = replace(BOUND, metric="transformed_psnr", recognizable=read, n=6)

    def exposed(leakage):
        return replace(leakage, thresholds=(*leakage.thresholds, seen))

    rounds = [replace(r, by={who: exposed(found) for who, found in r.by.items()}) for r in summary.attacked]
    said = verdict(replace(summary, attacked=rounds))
    assert "none of the 6 attacked images is recognizable" in said.text and told in said.text
    assert said.tone == tone and ("look at the pictures" in said.basis) == bool(told)
    found = readings_of(replace(summary, attacked=rounds))
    advised = answer([candidate_of(found, name="silent", accuracy=0.9, pmm=None)], psnr_below=15.0)
    assert (f"0 of 6 images recognizable, and {read} as what the defense put" in advised) == bool(told)
    assert advised.startswith("None is sure") == bool(told)


def test_what_another_metric_calls_recognizable_is_not_private(tmp_path, silent):
    plain = record(tmp_path, label="plain", noise=0.02, undefended=True)
    blurred = record(tmp_path, label="blurred", changes=defended(scale=0.1), noise=0.5, adaptive=0.225)
    summary = read_run(blurred).summary
    found = {bound.metric: bound.recognizable for bound in summary.adaptive.thresholds}
    assert found["psnr"] == 0 and found["mse"] == 6 and summary.adaptive.metrics["psnr"].ci95[1] < BOUND.value
    said = verdict(summary)
    assert said.tone == "open" and said.text.endswith(", but by MSE 6 of 6 are")
    assert "MSE < 0.050 counts as recognizable as well (FDL-PP)." in said.basis
    text = write_report([blurred]).read_text()
    assert 'class="tone-private"' not in text and 'class="tag private"' not in text
    assert "another some did" in write_brief(blurred).read_text()
    compared = write_report([plain, blurred]).read_text()
    assert re.findall(r'<span class="tag (\w+)">0 of 6</span>', compared) == ["open"]
    assert "6 of 6 by MSE" in compared and "By MSE, 6 of 6 of its images are recognizable all the same." in compared
    outcomes = [
        SweepEntry(family=name, strength=strength, training=path, attacks={"DLG": path})
        for name, strength, path in (("Undefended", "", plain), ("blur", "1", blurred))
    ]
    traded = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "though by another metric some are recognizable<" in traded and 'class="chosen few"' in traded


def test_no_metric_is_private_where_an_image_was_read(tmp_path):
    text = write_report([record(tmp_path, label="one read", changes=defended(scale=0.1), noise=0.3)]).read_text()
    assert "in round 1, 1 of 6" in text and "LPIPS" in text
    assert 'class="tag private"' not in text


def test_an_attacker_is_named_where_it_alone_read_so_much(tmp_path, adaptive):
    assert "6 of 6 attacked images are recognizable to an attacker that knows the defense" in (
        verdict(read_run(adaptive).summary).text
    )
    both = record(tmp_path, label="both", changes=defended(scale=0.1), noise=0.03, adaptive=0.02)
    assert verdict(read_run(both).summary).text == (
        "In round 12, 6 of 6 attacked images are recognizable; in round 1, 6 of 6"
    )


def test_nothing_is_green_where_the_undefended_was_not_read(silent, tmp_path):
    deaf = record(tmp_path, label="plain", noise=0.9, undefended=True)
    text = write_report([deaf, silent]).read_text()
    assert re.findall(r'<span class="tag (\w+)">0 of 6</span>', text) == ["open", "open"]
    assert "below 15.0 dB is not told: none was read undefended either" in text
    outcomes = [
        SweepEntry(family="Undefended", strength="", training=deaf, attacks={"DLG": deaf}),
        SweepEntry(family="noise", strength="1", training=silent, attacks={"DLG": silent}),
    ]
    traded = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "The attacks read nothing undefended either" in traded and 'class="chosen"' not in traded


def test_a_defense_at_one_strength_is_none_the_less_a_defense(silent, tmp_path):
    plain = record(tmp_path, label="plain", noise=0.02, undefended=True)
    outcomes = [
        SweepEntry(family=name, strength="", training=path, attacks={"DLG": path})
        for name, path in (("ATS", silent), ("Undefended", plain))
    ]
    text = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "trade-off of 1 family of defenses" in text and "ATS keeps every attacked image below" in text
    defense, undefended = read_rows(outcomes)
    assert undefended.pmm == 100 and defense.pmm == 100 * defense.accuracy / undefended.accuracy
    (other, known), _ = measured_rows([undefended, defense], [["defense=none"], ["defense=ats"]])
    assert set(known.by_threat) == {"honest"} and set(other.by_threat) == {"honest", "adaptive"}


def test_the_trade_off_judges_likewise(adaptive, silent, tmp_path):
    outcomes = [
        SweepEntry(family=name, strength="1", training=path, attacks={"DLG": path})
        for name, path in (("read", adaptive), ("silent", silent))
    ]
    text = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "silent (1) keeps every attacked image below 15.0 dB at the highest accuracy" in text
    assert 'class="chosen"' in text
    few = record(tmp_path, label="few", changes=defended(scale=0.9), noise=0.9, victims=3)
    outcomes[1] = SweepEntry(family="few", strength="1", training=few, attacks={"DLG": few})
    text = write_trade_off(outcomes, tmp_path / "trade_off.html").read_text()
    assert "at the highest accuracy, as far as so few tell<" in text and 'class="chosen few"' in text
    alone = write_trade_off(outcomes[:1], tmp_path / "trade_off.html").read_text()
    assert "No defense is sure to keep every attacked image below 15.0 dB" in alone


def test_an_early_round_that_leaks_is_not_forgotten(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        for round, noise in ((1, 0.02), (12, 0.9)):
            for victim in range(6):
                folder.add_victim(score(round, victim, noise=noise))
        folder.finish()
    found = verdict(read_run(folder.path).summary)
    assert found.text == "In round 12, none of the 6 attacked images is recognizable; in round 1, 6 of 6"
    assert found.tone == "leak"
    assert '<span class="tag leak">6 of 6</span>' in write_report([folder.path, record(tmp_path)]).read_text()


def test_images_are_counted_once_and_rounds_kept_apart(adaptive):
    summary = read_run(adaptive).summary
    assert [entry.round for entry in summary.attacked] == [1, 12]
    for entry in summary.attacked:
        assert entry.by.keys() == set(Attacker)
        for leakage in entry.by.values():
            assert leakage.images == leakage.metrics["psnr"].groups == 6
    assert summary.plain == summary.attacked[-1].by[Attacker.PLAIN]


def test_the_json_tells_who_read_most(adaptive, silent, tmp_path):
    told = json.loads((adaptive / "summary.json").read_text())["most"]
    most = most_recognized(readings_of(read_run(adaptive).summary))
    assert (told["attacker"], told["round"]) == ("adaptive", most.round)
    assert told["metrics"]["psnr"]["mean"] == pytest.approx(most.statistic("psnr").mean)
    assert {bound["metric"]: bound["recognizable"] for bound in told["thresholds"]}["psnr"] == 6
    failed = json.loads((record(tmp_path, failures=6) / "summary.json").read_text())
    assert failed["most"] is None and failed["failures"] == 6


def test_the_images_of_one_upload_are_one_group(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        for victim in range(3):
            first = score(1, victim, noise=0.3)
            batch = tuple(replace(first.images[0], image=k) for k in range(4))
            folder.add_victim(replace(first, images=batch))
        psnr = folder.finish().plain.metrics["psnr"]
    assert (psnr.n, psnr.groups) == (12, 3)
    assert few(psnr) == "only 3 uploads"
    assert "3 uploads" in write_report([folder.path]).read_text()


@pytest.mark.parametrize(
    ("ci95", "groups", "recognizable", "expected"),
    [
        ([8.0, 12.0], 8, 0, "private"),
        ([8.0, 12.0], 8, 1, "leak"),
        ([8.0, 15.0], 8, 0, "open"),
        ([8.0, 12.0], 4, 0, "open"),
        (None, 8, 0, "open"),
    ],
)
def test_private_takes_more_than_a_low_mean(ci95, groups, recognizable, expected):
    statistic = statistic_of(10.0, ci95, groups)
    assert tone(statistic, replace(BOUND, recognizable=recognizable), unjudged=0) == expected
    # What an attack failed on may be readable all the same.
    assert tone(statistic, replace(BOUND, recognizable=recognizable), unjudged=1) == (
        "leak" if recognizable else "open"
    )


def test_images_without_an_original_leave_it_open(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        for victim in range(8):
            one = score(1, victim, noise=0.9)
            unknown = replace(one, originals=None, images=(replace(one.images[0], values={}),))
            folder.add_victim(unknown if victim == 7 else one)
        found = verdict(folder.finish())
    assert found.tone == "open" and "Of 1 more nobody here has the originals" in found.basis
    assert 'class="tone-private"' not in write_report([folder.path]).read_text()


def test_private_where_low_values_leak():
    statistic = statistic_of(0.3, (0.06, 0.5))
    bound = replace(BOUND, metric="lpips", value=0.05, leaks="below")
    assert tone(statistic, bound, unjudged=0) == "private"
    assert tone(replace(statistic, ci95=(0.04, 0.5)), bound, unjudged=0) == "open"


def test_an_attack_that_failed_leaves_it_open(tmp_path):
    failed = read_run(record(tmp_path, failures=6, noise=0.9))
    assert most_recognized(readings_of(failed.summary)) is None and tone_of(readings_of(failed.summary)) == "open"
    assert candidate_of(readings_of(failed.summary), name="a", accuracy=0.5, pmm=None) is None
    assert verdict(failed.summary).text == "The attack failed on all 6 images"


def test_a_mean_of_what_did_not_fail_is_no_answer(tmp_path):
    """The attack failed on one of seven images, and read little of the others."""
    partly = record(tmp_path, label="partly", changes=defended(scale=0.5), noise=0.9, victims=7, failures=1)
    assert tone_of(readings_of(read_run(partly).summary)) == "open"
    silent = record(tmp_path, label="silent", changes=defended(scale=0.9), noise=0.9, accuracy=0.3)
    text = write_report([partly, silent]).read_text()
    assert "Of 2, only B, silent" in text and "Least leaks from B" in text
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
    assert "Least leaks from B" in write_report(rows).read_text()


def test_an_exact_reconstruction_stays_in_the_charts(tmp_path):
    runs = [record(tmp_path, label="a")]
    with RunFolder.open_or_create(tmp_path, label="b", config=config(**defended(scale=1)), config_text="") as folder:
        folder.add_round(round_report(), Evaluation(accuracy=0.5, loss=1.0, num_examples=1))
        folder.add_victim(score(1, 0, noise=0.1, exact=True))
        folder.finish()
    text = write_report([*runs, folder.path]).read_text()
    assert "(exact)" in text and "B at 50.0 %, &gt; 100 dB" in text
