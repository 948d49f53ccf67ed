"""Every setting is declared once, and what is derived from its role holds."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from fl_privacy.errors import UserError
from fl_privacy.runs.config import CONFIG_DIR, Role, compose_file, compose_run
from fl_privacy.runs.config.parse import LATER, put, select
from fl_privacy.runs.config.settings import (
    captured_groups,
    captured_keys,
    declared_settings,
    groups,
    is_within,
    keys_of,
)
from fl_privacy.runs.folder.identity import attacked_hash, run_hash, training_hash

DECLARED = [key for key, _ in declared_settings()]
OPEN = [key for key, declared in declared_settings() if "group" in declared.metadata]
"""Groups, whose own settings are those of what the option builds."""


def leaves(value: Any, above: str = "") -> list[str]:
    if not isinstance(value, dict) or above in {key for key in OPEN if key not in ("federation", "threat_model")}:
        return [above]
    return [key for name, entry in value.items() for key in leaves(entry, f"{above}.{name}" if above else name)]


def test_every_key_of_a_run_is_declared_exactly_once() -> None:
    found = leaves({key: value for key, value in compose_run().plain().items() if key != "choices"})
    assert sorted(found) == sorted(key for key in DECLARED if key not in ("federation", "threat_model"))
    assert len(set(DECLARED)) == len(DECLARED)
    written = OmegaConf.load(CONFIG_DIR / "config.yaml").keys() - {"defaults"}
    assert written == {key.partition(".")[0] for key in DECLARED} - set(groups())


def test_every_group_of_options_is_declared() -> None:
    folders = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    assert folders == {*groups(), "experiment"}
    assert {key for role in Role for key in keys_of(role) if key.startswith("choices.")} == {
        f"choices.{name}" for name in folders
    }


def test_every_setting_has_one_role() -> None:
    roles = [set(keys_of(role)) for role in Role]
    assert sum(map(len, roles)) == len(set().union(*roles))
    for _, declared in declared_settings():
        assert isinstance(declared.metadata["role"], Role)
        assert declared.metadata["meaning"]


CHANGED = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v / 2 + 0.1, str: lambda v: f"{v}x"}


@pytest.mark.parametrize("key", [key for key in DECLARED if key not in OPEN])
def test_a_setting_tells_runs_apart_by_its_role(key: str) -> None:
    before, after = compose_run().plain(), compose_run().plain()
    value = select(before, key)
    put(after, key, CHANGED.get(type(value), lambda v: "something")(value))
    role = next(declared.metadata["role"] for name, declared in declared_settings() if name == key)
    assert (run_hash(before) != run_hash(after)) == (role is not Role.RUNTIME)
    assert (training_hash(before) != training_hash(after)) == (role is Role.TRAINING)
    assert (attacked_hash(before) != attacked_hash(after)) == (role in (Role.TRAINING, Role.DEFENSE))


@pytest.mark.parametrize("override", ["attack.shards=2", "backend=flower", "threat_model=honest_but_curious"])
def test_what_changes_no_result_leaves_a_run_the_same(override: str) -> None:
    assert run_hash(compose_run([override]).plain()) == run_hash(compose_run().plain())


@pytest.mark.parametrize("key", LATER)
def test_a_setting_that_came_later_leaves_older_runs_their_hash(key: str) -> None:
    defense = {"defense.layers": "dp_noise", "defense.samples": "pruning"}.get(key, "spn")
    now, before = (compose_run([f"defense={defense}", "attack=dlg"]).plain() for _ in range(2))
    above, _, name = key.rpartition(".")
    assert select(now, key) == LATER[key]
    del select(before, above)[name]
    assert run_hash(now) == run_hash(before)


def test_a_threat_model_by_its_name_or_by_its_fields_is_the_same_run() -> None:
    named, single = compose_run(["threat_model=adaptive"]), compose_run(["threat_model.knows_defense=true"])
    assert named.threat_model == single.threat_model
    assert run_hash(named.plain()) == run_hash(single.plain())


def test_captured_updates_bring_what_decided_them() -> None:
    taken = captured_keys()
    decides = {
        key for key, declared in declared_settings() if declared.metadata["role"] in (Role.TRAINING, Role.DEFENSE)
    }
    assert all(is_within(key, taken) for key in decides)
    assert not {"attack", "out", "device", "captured"} & set(taken)
    assert set(captured_groups()) <= set(taken)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    return importlib.import_module("settings_table")


def test_settings_are_frozen_and_changed_by_dotted_keys() -> None:
    config = compose_run()
    changed = config.changed({"federation.rounds": 3, "defense": compose_run(["defense=pruning"]).defense})
    assert (changed.federation.rounds, changed.defense["_target_"]) == (3, "fl_privacy.defenses.pruning")
    assert config.federation.rounds == 20
    with pytest.raises(UserError, match=r"federation\.rounds is expected to be at least 1"):
        config.changed({"federation.rounds": 0})
    with pytest.raises(UserError, match="did you mean rounds"):
        config.changed({"federation.ruonds": 3})


def test_the_table_of_settings_is_current(table: ModuleType) -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    assert table.with_table(page) == page, "run `make settings`"


def test_a_page_without_marks_is_refused(table: ModuleType) -> None:
    with pytest.raises(UserError, match="marks"):
        table.with_table("# fl_privacy\n")


def test_other_files_of_settings_are_composed_too() -> None:
    assert "widths" in compose_file("evaluator")
