"""Options are composed once; what is set afterwards is of one composition alone."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose as composition, compose_run, options
from fl_privacy.runs.config.parse import read_section


@dataclass
class Inner:
    number: int


@dataclass
class Outer:
    inner: Inner


def test_a_value_in_place_of_a_section_is_named() -> None:
    assert read_section(Outer, {"inner": {"number": 3}}) == Outer(Inner(3))
    with pytest.raises(UserError, match=r"^inner is expected to be a section, but got 3; set inner\.KEY=VALUE\.$"):
        read_section(Outer, {"inner": 3})


@pytest.mark.parametrize("few", [0, 10**9])
def test_a_setting_is_of_one_composition_alone(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "FEW", few)
    options = ["model=lenet", "federation=fedavg"]
    before = compose_run(options)
    changed = compose_run([*options, "victims=77", "federation.plan.lr=3", "+model.mean=[0.5]"])
    assert (changed.victims, changed.federation.plan["lr"], changed.model["mean"]) == (77, 3, [0.5])
    assert compose_run(options) == before


@pytest.mark.long
def test_sections_composed_by_themselves_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group for group in compose_run().choices if group != "experiment"]
    every = [
        [f"{group}={list(options(group))[number % len(options(group))]}" for group in groups] for number in range(8)
    ]
    every += [
        [*every[number % 8][number % 4 :: 4], f"experiment={name}"] for number, name in enumerate(options("experiment"))
    ]
    for chosen in every:
        found = []
        for few in (0, 10**9):
            monkeypatch.setattr(composition, "FEW", few)
            config, choices = composition.composed("config", chosen)
            found.append((OmegaConf.to_yaml(config), choices))
        assert found[0] == found[1], chosen


def test_options_are_put_on_a_preset_that_sets_nothing_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "FEW", 0)
    packed, whole = composition._packed, []
    counted = lru_cache(lambda *asked: whole.append(asked) or packed(*asked))
    monkeypatch.setattr(composition, "_packed", counted)
    for chosen in (["defense=pruning"], ["defense=spn", "model=lenet"], ["federation=fedavg"]):
        composition.composed("config", [*chosen, "experiment=spn_paper"])
    assert [chosen for base, chosen, _ in whole if base == "config"] == [
        ("experiment=spn_paper",),
        ("federation=fedavg", "experiment=spn_paper"),
    ]
    with pytest.raises(UserError):  # no file has this name
        compose_run([f"attack._target_={'a' * 5000}.b"])


def test_settings_are_put_in_their_order() -> None:
    assert compose_run(["seed=1", "++seed=2", "seed=3"]).seed == 3
    assert compose_run(["intercept={save:true}", "intercept.save=false"]).intercept.save is False
    assert "width" not in compose_run(["model.width=3", "~model.width=3"]).model


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+seed=1", "write seed=VALUE"),
        ("~nothing", "An existing setting is expected after ~, but got ~nothing"),
        ("~seed=5", "An existing setting is expected after ~, but got ~seed=5"),
        ("federation.plan={rate:0.5}", "to add one, write +federation.plan={rate:0.5}"),
        ("+nothing@there=1", "group of options is expected before @"),
    ],
)
def test_what_can_not_be_put_is_one_line(override: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        compose_run([override])
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model" / "lenet.yaml"
    file.parent.mkdir()
    file.write_text("_target_: a.B\n")
    monkeypatch.setattr(composition, "config_folders", lambda: (tmp_path,))
    before = composition._stamp()
    assert composition._stamp() == before
    os.utime(file, ns=(1, 1))
    assert composition._stamp() != before
