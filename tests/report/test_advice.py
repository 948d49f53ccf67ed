"""The advice is what the measured figures say, and never errs towards safe."""

import json
import math
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from fl_privacy.report.advice import ONCE, SHIPPED, advice_from, noise_to_try
from fl_privacy.runs.folder import Candidate, Measure
from fl_privacy.runs.folder.study import MeasuredDefense, MeasuredTable, read_tables, when_measured, write_tables


def read(largest: float, *, upper: float | None = None, failures: int = 0) -> Candidate:
    """Make a candidate whose best reconstructed image has ``largest`` dB."""
    return Candidate(
        name="x",
        accuracy=0.5,
        pmm=None,
        psnr=largest - 3,
        upper=largest - 1 if upper is None else upper,
        largest=largest,
        read=int(largest >= 15) * 4,
        exact=0,
        identified=int(largest >= 15) * 4,
        images=8,
        unjudged=failures,
        groups=8,
        failures=failures,
        over_control=2.0,
    )


def defense(name: str, accuracy: float, plain: Candidate, adaptive: Candidate, seconds: float) -> MeasuredDefense:
    return MeasuredDefense(
        name=name,
        overrides=(f"defense={name}",),
        accuracy=accuracy,
        by_threat={"honest": plain, "adaptive": adaptive},
        seconds=seconds,
        upload_bytes=1000.0,
        epsilon=None,
    )


TOLD = Measure(value=0.5, low=0.4, high=0.6, chance=0.01)
"""TPR at 1 % FPR of an attack that finds half of the members."""

TABLE = MeasuredTable(
    settings=("data=mnist_mini", "model=lenet"),
    attacks=("auto",),
    weights="initial",
    command="fl-privacy trade-off tiny",
    attackers=("victims=8", "threat_model=strongest"),
    defenses=(
        defense("none", 0.90, read(40), read(40), 0.0),
        defense("weak", 0.90, read(30), read(30), 0.001),
        defense("known", 0.89, read(10), read(20), 0.001),
        defense("slow", 0.885, read(9), read(12), 0.5),
        defense("fast", 0.88, read(11), read(13), 0.02),
        defense("costly", 0.70, read(5), read(6), 0.002),
    ),
)


@pytest.mark.parametrize(
    ("loss", "threat", "below", "taken"),
    [
        (2, "adaptive", 15, "Take fast"),
        (1.6, "adaptive", 15, "Take slow"),
        (2, "honest", 15, "Take known"),
        (30, "adaptive", 15, "Take costly"),
        (30, "adaptive", 10, "Take costly"),
        (1, "adaptive", 15, "None does both"),
    ],
)
def test_the_cheapest_within_both_bounds_is_taken(loss: float, threat: str, below: float, taken: str) -> None:
    said = advice_from(TABLE, accuracy_loss=loss, threat=threat, psnr_below=below)
    assert any(line.startswith(taken) for line in said), said
    assert said[-1].startswith("Not tested: attacks other than auto")
    assert ONCE in said


@pytest.mark.parametrize("attackers", [(), ("threat_model=adaptive",)])
def test_nothing_is_recommended_that_the_strongest_did_not_try(attackers: tuple[str, ...]) -> None:
    table = replace(TABLE, attackers=attackers)
    said = " ".join(advice_from(table, accuracy_loss=30, threat="adaptive", psnr_below=15))
    assert "Take" not in said and "Nothing is recommended" in said and "fl-privacy trade-off tiny" in said
    assert (
        " ".join(attackers) in said
        and "costly leaks least of the defenses tried: none of 8 images reconstructed" in said
    )


@pytest.mark.parametrize(("judged_by", "batch_size"), [("token_f1", 1), ("cells_right", 1), ("cells_right", 4)])
def test_texts_and_rows_are_recommended_as_the_strongest_attacked_them(judged_by: str, batch_size: int) -> None:
    table = of_kind(judged_by)
    tried = replace(table, attackers=(*TABLE.attackers, f"batch_size={batch_size}"))
    said = " ".join(advice_from(tried, accuracy_loss=2, threat="adaptive", batch_size=batch_size))
    assert "Take dp_noise" in said
    for attackers in ((), ("threat_model=adaptive", f"batch_size={batch_size}")):
        weaker = replace(table, attackers=attackers)
        said = " ".join(advice_from(weaker, accuracy_loss=30, threat="adaptive", batch_size=batch_size))
        assert "Take" not in said and "not attack=auto with threat_model=strongest" in said
    said = " ".join(advice_from(tried, accuracy_loss=30, threat="adaptive", batch_size=batch_size + 1))
    assert "Take" not in said and "Nothing is recommended for uploads of" in said


def test_of_texts_only_defenses_are_recommended_behind_which_the_likeliest_is_searched() -> None:
    for overrides in (("defense=prune",), ("model.lora_rank=8",), ("defense=dp_noise", "defense.at=gradient")):
        table = of_kind("token_f1", overrides)
        said = " ".join(advice_from(table, accuracy_loss=30, threat="adaptive", batch_size=1))
        assert "Take" not in said and "its attack did not search for the likeliest text" in said


@pytest.mark.parametrize(
    "setting", ["data.target=next_token", "federation.plan.epochs=2", "federation.plan.optimizer=adam"]
)
def test_of_texts_only_trainings_are_recommended_in_which_the_likeliest_is_searched(setting: str) -> None:
    table = of_kind("token_f1")
    tried = replace(table, settings=(*table.settings, setting))
    said = " ".join(advice_from(tried, accuracy_loss=30, threat="adaptive", batch_size=1))
    assert "Take" not in said and "did not search for the likeliest text" in said


def of_kind(judged_by: str, overrides: tuple[str, ...] = ("defense=dp_noise",)) -> MeasuredTable:
    """Make the table of texts or rows, with an undefended one that was reconstructed."""

    def changed(one: MeasuredDefense) -> MeasuredDefense:
        figures = {"psnr": 0.1, "upper": 0.2, "largest": 0.2, "over_control": 0.1}
        threats = {threat: replace(c, judged_by=judged_by, **figures) for threat, c in one.by_threat.items()}
        return replace(one, name="dp_noise" if one.name == "fast" else one.name, overrides=overrides, by_threat=threats)

    return replace(TABLE, defenses=tuple(map(changed, TABLE.defenses)))


def over(control: float | None) -> MeasuredTable:
    """Make the table whose attacks end so far above the best guess without the update."""
    defenses = [
        replace(one, by_threat={threat: replace(c, over_control=control) for threat, c in one.by_threat.items()})
        for one in TABLE.defenses
    ]
    return replace(TABLE, defenses=tuple(defenses))


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (-1.5, "1.5 dB below the best guess without the update, a sign that the attack failed"),
        (0.0, "no better than the best guess without the update"),
        (None, "it was not compared with the best guess without the update, so the attack may have failed"),
        (0.5, "Take fast"),
    ],
)
def test_nothing_is_recommended_where_the_attack_is_no_better_than_a_guess(control: float | None, said: str) -> None:
    found = " ".join(advice_from(over(control), accuracy_loss=2, threat="adaptive"))
    assert said in found and ("Take" in found) == (said == "Take fast")
    found = " ".join(advice_from(over(control), accuracy_loss=0, threat="adaptive"))
    assert ("At a higher price" in found) == (said == "Take fast")


def test_a_better_attacked_defense_is_taken_in_place_of_one_whose_attack_failed() -> None:
    fast = TABLE.defenses[4]
    failed = {threat: replace(c, over_control=-1.0) for threat, c in fast.by_threat.items()}
    table = replace(TABLE, defenses=(*TABLE.defenses[:4], replace(fast, by_threat=failed)))
    said = advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15)
    assert any(line.startswith("Take slow") for line in said)


@pytest.mark.parametrize(
    ("trained", "attacked", "asked", "taken"),
    [
        ((), (), None, True),
        ((), (), 1, True),
        ((), (), 4, False),
        ((), (4,), 4, True),
        ((), (4,), 1, False),
        ((64,), (1, 8), None, False),
        ((64,), (1, 8), 8, True),
        ((8,), (1, 8), None, True),
        (("null",), (1, 8), None, False),
        (("null",), (1, 8), 8, True),
    ],
)
def test_nothing_is_recommended_for_another_batch_size_than_was_attacked(
    trained: tuple[int | str, ...], attacked: tuple[int, ...], asked: int | None, taken: bool
) -> None:
    table = replace(
        TABLE,
        settings=(*TABLE.settings, *(f"federation.plan.batch_size={size}" for size in trained)),
        attackers=(*TABLE.attackers, *(f"batch_size={size}" for size in attacked)),
    )
    said = " ".join(advice_from(table, accuracy_loss=2, threat="adaptive", batch_size=asked))
    assert ("Take" in said) == taken and ("Nothing is recommended for uploads of" in said) != taken
    assert ("batch_size=8 of" not in said) and ("At a higher price" not in said)


def test_the_version_that_measured_is_said() -> None:
    present = metadata.version("fl-privacy")
    for when, older in ((f"2026-01-02, fl-privacy {present}", False), ("2026-01-02, fl-privacy 0.0.1", True)):
        said = advice_from(replace(TABLE, when=when), accuracy_loss=2, threat="adaptive")
        assert f"({when}):" in said[0]
        assert any("another version than this one" in line for line in said) == older
    assert "by an unknown version):" in advice_from(TABLE, accuracy_loss=2, threat="adaptive")[0]


def test_filters_that_are_private_by_name_alone_are_named() -> None:
    filters = [
        replace(TABLE.defenses[4], name="P 10", overrides=("defense=percentile", "defense.percentile=10")),
        replace(TABLE.defenses[4], name="E", overrides=("defense=exclude_vars",)),
        replace(TABLE.defenses[4], name="S", overrides=("defense=svt", "defense.noise_var=20", "defense.gamma=0.01")),
        replace(TABLE.defenses[4], name="T", overrides=("defense=svt", "defense.noise_var=many", "defense.fraction")),
    ]
    sent = replace(TABLE.defenses[0], upload_bytes=5000.0)
    said = advice_from(replace(TABLE, defenses=(sent, *filters)), accuracy_loss=5, threat="adaptive")
    assert {f"{name} is no differential privacy: it adds no noise." for name in ("P 10", "E")} <= set(said)
    assert "S spends an epsilon of 2,501 in each upload, which promises little." in said
    assert not any("T spends" in line for line in said)
    assert not any("no differential privacy:" in line for line in advice_from(TABLE, accuracy_loss=5, threat="honest"))


def test_it_is_said_who_tried() -> None:
    said = advice_from(TABLE, accuracy_loss=2, threat="adaptive", psnr_below=15)
    assert "Attacks tried: auto by victims=8 threat_model=strongest." in said


def test_where_none_does_both_what_is_not_enough_is_not_advised() -> None:
    said = " ".join(advice_from(TABLE, accuracy_loss=1, threat="adaptive", psnr_below=15))
    assert (
        "Take" not in said
        and "known leaks least, which is not enough" in said
        and "At a higher price, slow let nothing be reconstructed from one upload: " in said
    )
    said = " ".join(advice_from(TABLE, accuracy_loss=0, threat="adaptive", psnr_below=1))
    assert "At a higher price" not in said and "None does both" in said and ONCE not in said


@pytest.mark.parametrize("wrong", [read(13, failures=1), read(13, upper=16.0), read(13, upper=float("inf"))])
def test_what_is_not_known_to_hide_is_not_taken(wrong: Candidate) -> None:
    fast = defense("fast", 0.88, read(11), wrong, 0.01)
    table = replace(TABLE, defenses=(TABLE.defenses[0], fast))
    assert not any(
        line.startswith("Take") for line in advice_from(table, accuracy_loss=5, threat="adaptive", psnr_below=15)
    )


def test_what_knowing_the_defense_gives_is_said() -> None:
    said = " ".join(advice_from(TABLE, accuracy_loss=2, threat="honest", psnr_below=15))
    assert (
        "The recommendation does not cover an attacker that knows the defense: there, 4 of 8 images reconstructed."
        in said
    )
    assert "no guarantee of differential privacy" in said


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    exact = replace(read(5, upper=float("inf")), largest=float("inf"), psnr=float("inf"))
    told = replace(
        read(5), inferred={"membership": Measure(value=0.5, low=0.4, high=0.6, chance=0.01), "attribute": None}
    )
    one, two = defense("one", 0.5, exact, read(5), 1.0), defense("two", 0.5, told, told, 1.0)
    tables = (replace(TABLE, defenses=(*TABLE.defenses, one, two), unknown=("three",)), TABLE)
    write_tables(path, tables)
    assert read_tables(path) == tables
    for text in ("", "{}", '{"format": 3}', '{"format": 3, "tables": []}', '{"format": 3, "tables": [{}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="advise --save"):
            read_tables(path)


DAMAGES = {
    "of no format": lambda raw: raw.update(format=1),
    "tables is null": lambda raw: raw.update(tables=None),
    "tables is {}": lambda raw: raw.update(tables={}),
    "tables[0] is 3": lambda raw: raw.update(tables=[3]),
    "should have settings": lambda raw: raw["tables"][0].pop("settings"),
    "should not have more": lambda raw: raw["tables"][0].update(more=1),
    "settings is": lambda raw: raw["tables"][0].update(settings="data=x"),
    "a list of at least 2": lambda raw: raw["tables"][0].update(defenses=raw["tables"][0]["defenses"][:1]),
    "defenses[1] is null": lambda raw: raw["tables"][0]["defenses"].insert(1, None),
    "defenses[1].accuracy is": lambda raw: raw["tables"][0]["defenses"][1].update(accuracy="high"),
    "no accuracy between": lambda raw: raw["tables"][0]["defenses"][1].update(accuracy=91.4),
    "defenses[1].seconds is": lambda raw: raw["tables"][0]["defenses"][1].update(seconds=True),
    "defenses[1].epsilon is": lambda raw: raw["tables"][0]["defenses"][1].update(epsilon=[]),
    "by_threat is []": lambda raw: raw["tables"][0]["defenses"][1].update(by_threat=[]),
    "nothing that was read": lambda raw: raw["tables"][0]["defenses"][1].update(by_threat={}),
    "a mapping of some of honest": lambda raw: raw["tables"][0]["defenses"][1]["by_threat"].update(unknown={}),
    "honest.upper is": lambda raw: raw["tables"][0]["defenses"][1]["by_threat"]["honest"].update(upper="5"),
    "honest.psnr is NaN": lambda raw: raw["tables"][0]["defenses"][1]["by_threat"]["honest"].update(psnr=math.nan),
    "contradict": lambda raw: raw["tables"][0]["defenses"][1]["by_threat"]["honest"].update(upper=1.0),
    "honest contradict": lambda raw: raw["tables"][0]["defenses"][1]["by_threat"]["honest"].update(read=9),
    "a metric that there is not": lambda raw: raw["tables"][0]["defenses"][1]["by_threat"]["honest"].update(
        judged_by="beauty"
    ),
    "membership should have chance": lambda raw: raw["tables"][0]["defenses"][1]["by_threat"]["honest"].update(
        inferred={"membership": {"low": 1}}
    ),
}
"""What is said -> what someone did to the file."""


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_table_is_one_line_that_names_the_place(
    said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    write_tables(path, (TABLE,))
    raw = json.loads(path.read_text())
    DAMAGES[said](raw)
    path.write_text(json.dumps(raw))
    assert run_command_line(["advise", "--table", str(path), "accuracy_loss=2"]) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert error.count("error:") == 1 and "Traceback" not in error
    assert said in error and "measure and save them anew" in error


def test_what_was_not_measured_is_named_and_not_taken() -> None:
    plain = {"honest": read(1)}
    unheard = replace(defense("unheard", 0.9, read(1), read(1), 0.0), by_threat=plain)
    table = replace(TABLE, defenses=(*TABLE.defenses, unheard), unknown=("unfinished",))
    said = advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15)
    assert "Not known, since not everything was measured: unfinished, unheard." in said
    assert any(line.startswith("Take fast") for line in said)
    said = advice_from(table, accuracy_loss=2, threat="honest", psnr_below=15)
    assert any(line.startswith("Take unheard") for line in said)
    assert "It was not measured against an attacker that knows the defense." in said
    only = replace(TABLE, defenses=(TABLE.defenses[0], unheard))
    with pytest.raises(UserError, match="measured, honest, but got adaptive; threat_model=adaptive"):
        advice_from(only, accuracy_loss=2, threat="adaptive", psnr_below=15)


def test_texts_are_judged_by_what_is_said_of_texts() -> None:
    """By how many were read, whatever their F1 is, and not beside images."""

    def of_texts(largest: float) -> Candidate:
        many = 4 * (largest > 0.5)
        return replace(read(largest), judged_by="token_f1", psnr=largest, upper=largest, read=many, identified=0)

    told = [defense(name, 0.9, of_texts(f1), of_texts(f1), 0.1) for name, f1 in (("none", 1.0), ("a", 0.9), ("b", 0.1))]
    said = advice_from(replace(TABLE, defenses=tuple(told)), accuracy_loss=2, threat="adaptive", psnr_below=15)
    assert said[-1].startswith("b is not recommended: its attack did not search for the likeliest text.")
    told[2] = replace(told[2], overrides=("defense=dp_noise",))
    said = advice_from(replace(TABLE, defenses=tuple(told)), accuracy_loss=2, threat="adaptive", psnr_below=15)
    assert any(
        line.startswith("Take b") and "none of 8 texts reconstructed, though up to 37 %" in line for line in said
    )
    mixed = replace(TABLE, defenses=(*TABLE.defenses, *told))
    with pytest.raises(UserError, match="A table of images, or one of texts"):
        advice_from(mixed, accuracy_loss=2, threat="adaptive", psnr_below=15)


def test_a_large_delta_promises_little() -> None:
    guaranteed = replace(TABLE.defenses[4], epsilon=0.5, delta=1e-5)
    for delta, little in ((1e-5, False), (0.5, True)):
        table = replace(TABLE, defenses=(TABLE.defenses[0], replace(guaranteed, delta=delta)))
        said = " ".join(advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15))
        assert f"an epsilon of 0.5 at delta {delta:g} in the end" in said
        assert ("promises little" in said) == little
    table = replace(TABLE, defenses=(TABLE.defenses[0], replace(guaranteed, delta=None)))
    said = " ".join(advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15))
    assert "an epsilon of 0.5 at an unknown delta in the end, which promises little" in said


def test_no_defense_is_taken_where_the_undefended_was_not_read() -> None:
    first, *rest = TABLE.defenses
    deaf = replace(TABLE, defenses=(replace(first, by_threat={"adaptive": read(10)}), *rest))
    (line,) = advice_from(deaf, accuracy_loss=100, threat="adaptive", psnr_below=15)
    assert line.startswith("Measured on") and "without one, no image was reconstructed either" in line


def test_tables_without_the_threat_leave_the_others_their_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    known = [replace(one, by_threat={**one.by_threat, "malicious": read(10)}) for one in TABLE.defenses]
    path = tmp_path / "tables.json"
    write_tables(path, [TABLE, replace(TABLE, settings=("data=other",), defenses=tuple(known))])
    assert run_command_line(["advise", "--table", str(path), "threat=malicious"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("Measured on data=other") and said.count("Measured on") == 1
    assert "Not answered from data=mnist_mini model=lenet: threat is expected to be one that was measured" in said
    write_tables(path, [TABLE])
    assert run_command_line(["advise", "--table", str(path), "threat=malicious"]) == 2


def test_a_defense_that_tells_members_is_not_taken() -> None:
    tells = replace(read(5), inferred={"membership": TOLD})
    table = replace(TABLE, defenses=(TABLE.defenses[0], defense("told", 0.9, tells, tells, 0.1)))
    said = " ".join(advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15))
    assert "None does both" in said and "TPR at 1 % FPR 50.0 %" in said


def test_of_what_is_not_enough_what_failed_counts_as_read() -> None:
    failed, seen = (
        defense("failed", 0.9, read(5), read(5, failures=9), 0.1),
        defense("seen", 0.9, read(9), read(16), 0.1),
    )
    table = replace(TABLE, defenses=(TABLE.defenses[0], failed, seen))
    said = " ".join(advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15))
    assert "seen leaks least, which is not enough" in said
    table = replace(table, defenses=table.defenses[:2])
    said = " ".join(advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15))
    assert "while an attack failed on 9" in said


def test_less_than_a_moment_is_no_time() -> None:
    """Of what takes no time the smaller upload is the cheaper one, whichever was measured a millisecond sooner."""
    small = replace(defense("small", 0.88, read(4), read(5), 0.003), upload_bytes=10.0)
    large = defense("large", 0.88, read(4), read(5), 0.001)
    table = replace(TABLE, defenses=(TABLE.defenses[0], large, small))
    assert any(
        line.startswith("Take small") for line in advice_from(table, accuracy_loss=2, threat="honest", psnr_below=15)
    )


def test_an_unknown_cost_is_not_the_cheapest() -> None:
    unknown = replace(defense("unknown", 0.9, read(5), read(5), float("nan")), upload_bytes=float("nan"))
    table = replace(TABLE, defenses=(TABLE.defenses[0], unknown, *TABLE.defenses[1:]))
    said = advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=15)
    assert any(line.startswith("Take fast") for line in said)


def test_of_equal_cost_the_one_that_hides_more_is_taken() -> None:
    better = defense("better", 0.88, read(4), read(5), 0.0201)
    said = advice_from(
        replace(TABLE, defenses=(*TABLE.defenses, better)), accuracy_loss=2, threat="adaptive", psnr_below=15
    )
    assert any(line.startswith("Take better") for line in said)


def test_images_that_were_read_are_no_choice_however_few_decibels_they_have() -> None:
    """A negative has one decibel, and everybody sees what it is."""
    negatives = replace(read(2), read=8, identified=8)
    table = replace(TABLE, defenses=(TABLE.defenses[0], defense("signs", 0.9, negatives, negatives, 0.1)))
    for below in (None, 15):
        said = " ".join(advice_from(table, accuracy_loss=2, threat="adaptive", psnr_below=below))
        assert "None does both" in said and "8 of 8 images reconstructed" in said


def test_the_package_has_an_answer_of_adult(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["advise", "data=adult"]) == 0
    said = capfd.readouterr().out
    assert "rows reconstructed" in said and re.search(r"\(\d{4}-\d\d-\d\d, fl-privacy [\d.]+\):", said)
    assert all("out=" not in table.command for file in SHIPPED.glob("*.json") for table in read_tables(file))


def test_noise_to_try_is_measured_or_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ("dp_noise defense.scale=0.1", "")
    assert noise_to_try("row")[0].startswith("dp_noise") and "measured on adult, " in noise_to_try("row")[1]
    assert noise_to_try("text") == usual
    leaky = defense("noise", 0.7, read(20), read(20), 0.0)
    table = replace(TABLE, defenses=(TABLE.defenses[0], replace(leaky, overrides=("defense=dp_noise",))))
    monkeypatch.setattr("fl_privacy.report.advice.read_tables", lambda path: [table])
    noise_to_try.cache_clear()
    assert noise_to_try("row") == usual
    noise_to_try.cache_clear()


def test_a_setting_of_the_grid_that_was_changed_has_its_new_value_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a question about the old one would be answered by figures of the new."""
    monkeypatch.setattr("fl_privacy.runs.study.read_study", lambda entries: [])
    monkeypatch.setattr("fl_privacy.runs.study.measured_rows", lambda rows, **how: (TABLE.defenses, ()))
    assert run_command_line(["advise", "--grid", "tiny", "data=cifar10", "model=lenet", "threat=honest"]) == 0
    said = capfd.readouterr().out.splitlines()[0]
    assert said.startswith("Measured on data=cifar10 model=lenet ") and said.count("data=") == 1
    for table in (table for file in SHIPPED.glob("*.json") for table in read_tables(file)):
        keys = [setting.partition("=")[0] for setting in table.settings]
        assert len(keys) == len(set(keys))


def test_a_measurement_has_its_last_day_and_its_versions() -> None:
    told = [{"date": f"2026-01-0{day}T10:00+00:00", "packages": {"fl-privacy": f"1.{day}"}} for day in (2, 1)]
    assert when_measured([{}, *told]) == "2026-01-02, fl-privacy 1.1, fl-privacy 1.2"
    assert when_measured([{}]) == ""
    assert (
        "(2026-01-02): 5 defenses"
        in advice_from(replace(TABLE, when="2026-01-02"), accuracy_loss=2, threat="honest")[0]
    )


@pytest.mark.parametrize("size", [[], ["batch_size=1"]])
def test_the_package_has_an_answer_of_images_and_recommends_none_without_a_control(
    size: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its tables were measured before they had one, at one image an upload."""
    assert run_command_line(["advise", "data=mnist_mini", "accuracy_loss=30", *size]) == 0
    said = capfd.readouterr().out
    assert not re.search(r"^(Take|At a higher price)", said, re.MULTILINE)
    assert said.count("was not compared with the best guess" if size else "Nothing is recommended for uploads of") == 2
    assert len(re.findall(r"\(\d{4}-\d\d-\d\d, fl-privacy [\d.]+\):", said)) == said.count("Measured on") == 2


def test_what_a_malicious_server_reads_is_said_where_it_was_not_asked_for() -> None:
    told = replace(read(5), exact=5, images=8)
    fast = TABLE.defenses[4]
    told_of = replace(fast, by_threat={**fast.by_threat, "malicious": told})
    table = replace(TABLE, defenses=(*TABLE.defenses[:4], told_of, TABLE.defenses[5]))
    for threat in ("honest", "adaptive"):
        said = " ".join(advice_from(table, accuracy_loss=2, threat=threat, psnr_below=15))
        assert ("does not cover a malicious server: there" in said) == ("Take fast" in said)
    assert "other malicious servers" in said


def test_texts_that_were_not_measured_are_measured_by_the_grid_of_texts(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["advise", "data=cola"]) != 0
    assert "`fl-privacy trade-off text data=cola`" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["data=olivetti"],
            "got data=olivetti; what came with the package is of data=adult, data=",
        ),
        (["data=nowhere"], "data has no option 'nowhere'; allowed: "),
        (["accuracy_loss=much"], "accuracy_loss is expected to be a number"),
        (["threat=evil"], "threat is expected to be one of honest, adaptive"),
        (["--grid", "tiny", "out=nowhere"], "but 0 finished; run `fl-privacy trade-off tiny out=nowhere`"),
    ],
)
def test_what_does_not_fit_is_one_line(
    arguments: list[str], line: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command_line(["advise", *arguments]) == 2
    assert line in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("data", ["sst2", "ag_news", "adult"])
def test_the_package_has_an_answer_of_texts_and_rows_and_recommends_nothing(
    data: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for batch_size in ([], ["batch_size=1"], ["accuracy_loss=100"]):
        assert run_command_line(["advise", f"data={data}", *batch_size]) == 0
        said = capfd.readouterr().out
        assert said.startswith(f"Measured on data={data} ")
        assert "Nothing is recommended" in said or "None does both" in said
        assert not re.search(r"^(Take|At a higher price)", said, re.MULTILINE)
