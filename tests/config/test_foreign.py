"""Configurations from files: only what is registered, nothing imported that they name."""

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run, options, to_yaml
from fl_privacy.runs.config.building import locate_target
from fl_privacy.runs.config.parse import config_folders, select
from fl_privacy.runs.config.untrusted import expect_plain, read_settings, recorded_parts

KEYS = ("data", "partition", "model", "federation", "defense", "seed")
STRANGERS = "tests.experiment.strangers"


@cache
def recorded(overrides: tuple[str, ...]) -> str:
    return to_yaml(compose_run(overrides))


def written(tmp_path: Path, *overrides: str, changes: dict[str, Any] | None = None, taken: str | None = None) -> Path:
    """``config.yaml`` of a run with these overrides, changed by dotted keys, ``taken`` deleted."""
    config = OmegaConf.create(recorded(overrides))
    for key, value in (changes or {}).items():
        OmegaConf.update(config, key, value, force_add=True)
    if taken is not None:
        above, _, name = taken.rpartition(".")
        del (OmegaConf.select(config, above) if above else config)[name]
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(config))
    return path


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data=cifar10_exact", "model=vit", "federation=fedavg", "defense=refiner", "partition=dirichlet"),
        ("model.width=3", "defense=pruning", "defense.rate=0.99", "federation.plan.loss_scale=1e-5", "data.root=/d"),
    ],
)
def test_what_a_run_writes_is_read_back(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = compose_run(overrides)
    read = recorded_parts(written(tmp_path, *overrides))
    assert read.keys() >= set(KEYS)
    assert all(value == select(config.plain(), key) for key, value in read.items())


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": {"_target_": "subprocess.getoutput", "cmd": "touch {mark}"}}, "subprocess.getoutput"),
    "another data set": ({"data._target_": "os.system"}, "os.system"),
    "another partition": ({"partition._target_": "os.system"}, "os.system"),
    "another defense": ({"defense._target_": "os.system"}, "os.system"),
    "something of this package": ({"defense._target_": "fl_privacy.files.write_whole"}, "write_whole"),
    "another option's": ({"defense._target_": "fl_privacy.defenses.pruning"}, "trust=fl_privacy.defenses.pruning"),
    "nested": ({"model.width": {"_target_": "os.system", "command": "touch {mark}"}}, "model.width._target_"),
    "within a list": ({"model.mean": [{"_target_": "os.system", "command": "touch {mark}"}]}, "model.mean._target_"),
    "in the plan": ({"federation.plan.lr": {"_target_": "os.system"}}, "federation.plan.lr._target_"),
    "a target that is no text": ({"model._target_": ["os", "system"]}, "model._target_"),
    "a target of dunders": ({"model._target_": "os.__builtins__.eval"}, "model._target_"),
    "partially": ({"model._partial_": True}, "model._partial_"),
    "by position": ({"model._args_": ["touch {mark}"]}, "model._args_"),
    "an option that is not there": ({"choices.model": "evil"}, "choices.model='evil'"),
    "an option elsewhere": ({"choices.model": "../../evil"}, "choices.model"),
    "an option that is no text": ({"choices.model": ["lenet"]}, "choices.model"),
    "a custom part without trust": ({"choices.model": "custom"}, "trust=fl_privacy.models.LeNet"),
    "the environment": ({"data.root": "${oc.env:HOME}"}, "refers to something else"),
    "another value": ({"model.init": "${seed}"}, "refers to something else"),
    "a missing value": ({"model.init": "???"}, "refers to something else"),
    "other data by name": ({"data.name": "mnist"}, "trust=mnist"),
    "data of the hub": ({"data.name": "owner/name"}, "trust=owner/name"),
    "data outside": ({"data.name": "../../secret"}, "../../secret"),
    "a section that is a number": ({"model": 5}, "model=5"),
    "no section": ({"defense": None}, "defense=None"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_registered_is_refused_and_never_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, hint = HOSTILE[name]
    mark = tmp_path / "mark"
    text = written(tmp_path, changes=changes).read_text().replace("{mark}", str(mark))
    (tmp_path / "config.yaml").write_text(text)
    compose_run()  # looks up what is registered, which is all that may be imported
    imported: list[str] = []
    own = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *of: imported.append(name) or own(name, *of))
    with pytest.raises(UserError) as error:
        recorded_parts(tmp_path / "config.yaml")
    assert hint in str(error.value)
    assert "\n" not in str(error.value)
    assert not mark.exists()
    assert not [name for name in imported if not name.startswith("hydra")]


@pytest.mark.parametrize("key", ["model.width", "federation.plan.batch_size", "data.name", "choices", "seed", "model"])
def test_a_setting_that_is_missing_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=key):
        recorded_parts(written(tmp_path, taken=key))


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"\x00\xff\x80\x01", "is no text"),
        (b"- 1\n- 2\n", "is "),
        (b"just words", "is "),
        (b"a: [", "is none"),
        (b"a: !!python/object/apply:os.system ['true']", "is none"),
        (b"a: 2020-01-01", "choices.data=None"),
        (b"a: !!binary aGVsbG8=", "a bytes"),
        (b"1: 2", "the key 1"),
        (b"a: " + b"9" * 5000, "is none"),
        (b"a: 1\na: 2", "is none"),
        (b"a: " + b"[" * 500 + b"]" * 500, "within"),
        (b"a: [" + b"1," * 30_000 + b"]", "values"),
        (b"a: '" + b"x" * 200_000 + b"'", "larger"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]", "refers to something else"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(content: bytes, hint: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError) as error:
        recorded_parts(tmp_path / "config.yaml")
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", Path("/dev/zero")):
        with pytest.raises(UserError, match="is no file"):
            read_settings(path)


def test_what_the_user_trusts_is_built(tmp_path: Path) -> None:
    own = {"choices.model": "custom", "model": {"_target_": f"{STRANGERS}.Net", "width": 2}}
    path = written(tmp_path, changes=own)
    path.write_text(path.read_text().replace("  activation: tanh\n", ""))
    for trust in (f"{STRANGERS}.Net", STRANGERS):
        found = recorded_parts(path, {trust})["model"]
        assert found == found | own["model"]
    with pytest.raises(UserError, match=f"trust={STRANGERS}.Net"):
        recorded_parts(path, {"tests.experiment"})


def test_trusting_a_module_is_not_trusting_what_it_imports(tmp_path: Path) -> None:
    path = written(tmp_path, changes={"model._target_": f"{STRANGERS}.nn"})
    with pytest.raises(UserError, match="name only"):
        recorded_parts(path, {STRANGERS})
    with pytest.raises(UserError, match="can't be imported"):
        recorded_parts(written(tmp_path, changes={"model._target_": "no.such.Net"}), {"no.such"})


def test_what_a_package_does_not_export_is_named_with_the_file_to_change() -> None:
    with pytest.raises(UserError, match=r"define pruned in fl_privacy\.defenses, .* __init__\.py"):
        locate_target({"_target_": "fl_privacy.defenses.pruned"}, "defense")
    with pytest.raises(UserError, match="check the spelling and that the package is installed"):
        locate_target({"_target_": "no_such.Net"}, "model")


@pytest.mark.parametrize(
    "override",
    [
        "model._target_=subprocess.getoutput",
        "+model={_target_: subprocess.getoutput}",
        "+model={a: [{_target_: subprocess.getoutput}]}",
        "+model={_target_: subprocess.getoutput},{a: 1}",
        "+defense._partial_=true",
        "~model._target_",
        "data.root=${oc.env:HOME}",
        "++hydra.searchpath=[file:///tmp]",
        "hydra/launcher=x",
        "trust=subprocess",
        "+model@attack=lenet",
        "model.__class__=1",
    ],
)
def test_overrides_of_others_are_plain(override: str) -> None:
    with pytest.raises(UserError, match="Overrides of another"):
        expect_plain(["seed=1,2", "model=lenet", override], (), where="Overrides of another")


def test_overrides_of_others_may_name_what_is_trusted() -> None:
    expect_plain([f"model._target_={STRANGERS}.Net"], [f"{STRANGERS}.Net"], where="Overrides of another")
    expect_plain(["model=custom", "defense.rate=0.1,0.5", "+model.mean=[1,2]"], (), where="Overrides of another")


def test_an_installed_plugin_registers_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, info = tmp_path / "strange_nets", tmp_path / "strange_nets-1.0.dist-info"
    (package / "conf" / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "conf" / "model" / "strange.yaml").write_text(f"_target_: {STRANGERS}.Net\nwidth: 2\n")
    (package / "conf" / "model" / "lenet.yaml").write_text("_target_: os.system\n")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fl_privacy.plugins]\nstrange = strange_nets\n")
    monkeypatch.syspath_prepend(tmp_path)
    config_folders.cache_clear()
    try:
        config = compose_run(["model=strange", "model.width=3"])
        assert "strange" in options("model") and config.model == {"_target_": f"{STRANGERS}.Net", "width": 3}
        assert compose_run(["model=lenet"]).model["_target_"] == "fl_privacy.models.LeNet"
        read = recorded_parts(written(tmp_path, "model=strange", "model.width=3"))
        assert read["model"] == config.model
        with pytest.raises(UserError, match=r"trust=os\.system"):
            recorded_parts(written(tmp_path, "model=strange", changes={"model._target_": "os.system"}))
    finally:
        monkeypatch.undo()
        config_folders.cache_clear()
    assert "strange" not in options("model")
