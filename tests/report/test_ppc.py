"""CAP of a sweep and of any runs, from the figures in their summaries."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_privacy.errors import UserError
from fl_privacy.measure import Statistic
from fl_privacy.report import write_report
from fl_privacy.report.ppc import caps, ppc_view_of, samples_of_rows, samples_of_runs
from fl_privacy.runs.config.study import AttackCell
from fl_privacy.runs.folder import LeakageResult, Traced, read_run
from fl_privacy.runs.folder.study import StudyRow, Versus
from fl_privacy.runs.folder.summary import summarize
from tests.experiment.runs import run
from tests.results.runs import defended, record, study_entry

PLAIN, ADAPTIVE, WORST = (Versus("DLG", attacker) for attacker in ("plain", "adaptive", "worst"))


NOTHING = summarize([], finished=True, undefended_accuracy=None, total_seconds=None)


def statistic(mean: float) -> Statistic:
    return Statistic(mean=mean, ci95=None, n=1, groups=1, median=mean, min=mean, max=mean)


def leakage(rmse: float, labels: float, tracing: float | None) -> LeakageResult:
    rest = {"attacked": 0.0, "queries": 1, "participants": 2, "chance": 0.5}
    return LeakageResult(
        metrics={"rmse": statistic(rmse), "label_correct": statistic(labels)},
        tracing=None if tracing is None else Traced(**asdict(statistic(tracing)), **rest),
    )


def row(
    family: str, strength: str, accuracy: float | None, ratio: float, found: dict[Versus, LeakageResult]
) -> StudyRow:
    cell, summary = (
        AttackCell(attack="DLG"),
        replace(NOTHING, update_distortion={"signal_to_distortion": statistic(ratio)}),
    )
    attacked: Any = SimpleNamespace(summary=summary)
    return StudyRow(
        entry=study_entry(family, strength, Path(f"{family}{strength}")),
        trainings={} if accuracy is None else {"": replace(NOTHING, final_accuracy=accuracy)},
        undefended={},
        readings={cell: tuple(replace(own, attack="DLG", attacker=v.attacker) for v, own in found.items())},
        attacks={cell: attacked},
    )


ROWS = [
    row("Undefended", "", 0.9, 5.0, {PLAIN: leakage(0.0, 1.0, 0.0)}),
    row("DP", "scale 1", 0.5, 0.3, {PLAIN: leakage(1.2, 0.4, 0.8), ADAPTIVE: leakage(1.0, 0.5, 0.6)}),
    row("DP", "scale 0.1", 0.8, 3.0, {PLAIN: leakage(0.3, 1.0, 0.1), ADAPTIVE: leakage(0.1, 1.0, 0.0)}),
    row("SPN", "alpha2 1", 0.85, 0.9, {PLAIN: leakage(0.9, 0.8, None)}),
    row("SPN", "alpha2 2", None, 0.9, {PLAIN: leakage(0.9, 0.8, None)}),
    row("SPN", "alpha2 0", 0.9, float("inf"), {PLAIN: leakage(0.3, 0.8, None)}),
]


def test_cap_is_the_mean_of_accuracy_times_distance():
    found = {(c.mechanism, c.distance, c.versus): c for c in caps(samples_of_rows(ROWS))}
    expected = {
        ("DP", "reconstruction", PLAIN): (0.5 * 1.2 + 0.8 * 0.3) / 2,
        ("DP", "label", PLAIN): 0.5 * 0.6 / 2,
        ("DP", "tracing", PLAIN): (0.5 * 0.8 + 0.8 * 0.1) / 2,
        ("DP", "reconstruction", ADAPTIVE): (0.5 * 1.0 + 0.8 * 0.1) / 2,
        ("DP", "label", ADAPTIVE): 0.5 * 0.5 / 2,
        ("DP", "tracing", ADAPTIVE): 0.5 * 0.6 / 2,
        ("DP", "reconstruction", WORST): (0.5 * 1.0 + 0.8 * 0.1) / 2,
        ("DP", "label", WORST): 0.5 * 0.5 / 2,
        ("DP", "tracing", WORST): 0.5 * 0.6 / 2,
        ("SPN", "reconstruction", PLAIN): (0.85 * 0.9 + 0.9 * 0.3) / 2,
        ("SPN", "label", PLAIN): (0.85 * 0.2 + 0.9 * 0.2) / 2,
    }
    assert {key: entry.value for key, entry in found.items()} == pytest.approx(expected)
    assert found["DP", "label", ADAPTIVE].points == 2 and found["SPN", "label", PLAIN].points == 2


def test_a_defense_at_one_strength_is_a_mechanism_and_what_is_undefended_none():
    rows = [ROWS[0], row("ATS", "", 0.6, 0.9, {PLAIN: leakage(0.5, 1.0, None)})]
    assert [(s.mechanism, s.strength) for s in samples_of_rows(rows)] == [("ATS", "")]


def test_the_adaptive_attacker_meets_the_same_perturbation():
    ratios = {(s.strength, s.versus.attacker): s.ratio for s in samples_of_rows(ROWS) if s.mechanism == "DP"}
    assert ratios["scale 1", "adaptive"] == ratios["scale 1", "plain"] == 0.3


def test_the_worst_attacker_is_the_nearest_strength_by_strength():
    rows = [
        row("DP", "scale 1", 0.5, 0.3, {PLAIN: leakage(0.4, 1.0, None), ADAPTIVE: leakage(1.0, 1.0, None)}),
        row("DP", "scale 2", 0.5, 0.3, {PLAIN: leakage(1.0, 1.0, None), ADAPTIVE: leakage(0.2, 1.0, None)}),
    ]
    found = {c.versus: c.value for c in caps(samples_of_rows(rows)) if c.distance == "reconstruction"}
    assert found == pytest.approx({PLAIN: 0.5 * 0.7, ADAPTIVE: 0.5 * 0.6, WORST: 0.5 * 0.3})
    label = str(ppc_view_of(samples_of_rows(rows)).bars["DLG"])
    assert "attacker that came nearest: DP, reconstruction 0.15" in label


def test_a_strength_that_changes_nothing_counts_but_has_no_place_in_the_chart():
    samples = [s for s in samples_of_rows(ROWS) if s.mechanism == "SPN"]
    assert [s.ratio for s in samples] == [0.9, float("inf")]
    curve, alone = (ppc_view_of(some).curves["DLG"]["SPN · Reconstruction"] for some in (samples, samples[1:]))
    assert str(curve).startswith("<svg") and str(alone).startswith("<svg")


def runs_of(tmp_path: Path, *changes):
    found = []
    for change in changes:
        run = read_run(record(tmp_path, changes=change, undefended=False))
        found.append(
            replace(run, summary=replace(run.summary, update_distortion={"signal_to_distortion": statistic(2.0)}))
        )
    return found


def test_of_settings_with_as_many_values_the_strength_is_that_of_the_noise(tmp_path: Path):
    runs = runs_of(tmp_path, *(defended(at=at, scale=s) for at in ("gradient", "upload") for s in (0.1, 0.2)))
    found = samples_of_runs(runs)
    assert {(s.mechanism, s.strength) for s in found} == {
        (f"dp_noise (at {at})", f"scale {s}") for at in ("gradient", "upload") for s in (0.1, 0.2)
    }


def test_runs_in_other_circumstances_make_curves_of_their_own(tmp_path: Path):
    few = {"federation": {"clients": 4, "rounds": 3, "lr": 0.1}}
    short = {"attack": {"name": "inverting_gradients", "iterations": 7, "total_variation": 1e-4}}
    changes = [defended(scale=s) | other for s in (0.1, 0.2) for other in ({}, few, short, {"seed": 1})]
    found = samples_of_runs(runs_of(tmp_path, *changes))
    assert {s.versus.attack for s in found} == {
        f"inverting_gradients · federation.rounds {rounds} · attack.iterations {iterations}"
        for rounds, iterations in ((12, 4800), (3, 4800), (12, 7))
    }


def test_a_chart_for_each_mechanism_and_distance():
    view = ppc_view_of(samples_of_rows(ROWS))
    assert view is not None and view.mechanisms == ["DP", "SPN"]
    assert list(view.curves["DLG"]) == [
        "DP · Reconstruction", "SPN · Reconstruction", "DP · Label", "SPN · Label", "DP · Tracing",
    ]  # fmt: skip
    assert all(str(svg).startswith("<svg") for svg in [*view.curves["DLG"].values(), view.bars["DLG"]])
    assert ppc_view_of([]) is None


@pytest.mark.long
def test_runs_are_sorted_into_mechanisms(tmp_path: Path):
    common = ("federation.clients=2", "federation.rounds=1", "victims=3", "attack=inverting_gradients",
              "attack.iterations=1", "intercept.rounds=first", "baseline=false", "attack.start=pattern",
              "threat_model=adaptive")  # fmt: skip
    done = run("run", "-m", *common, "defense=ppdl", "defense.share=0.05,0.3", "defense.scale=1,0.1", out=tmp_path)
    assert done.status == 0
    folders = sorted(path for path in tmp_path.glob("[!.]*") if path.is_dir())
    page = write_report(folders, cap=True)
    text = page.read_text()
    assert "Privacy-preserving characteristics" in text
    found = json.loads(page.with_name("comparison_cap.json").read_text())
    assert {(c["mechanism"], c["points"]) for c in found} == {("ppdl (share 0.05)", 2), ("ppdl (share 0.3)", 2)}
    assert {c["distance"] for c in found} == {"reconstruction", "label", "tracing"}
    assert {c["attacker"] for c in found} == {"plain", "adaptive", "worst"}
    assert "Privacy-preserving" not in write_report(folders).read_text()


def test_runs_without_a_perturbation_have_no_cap(tmp_path: Path):
    paths = [record(tmp_path, changes=defended(scale=scale), undefended=False) for scale in (0.1, 0.2)]
    with pytest.raises(UserError, match="CAP is expected to be of runs that defended"):
        write_report(paths, cap=True)
