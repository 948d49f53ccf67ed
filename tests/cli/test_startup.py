"""What answers at once imports nothing that takes its time."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from fl_privacy.cli.jobs import _loading
from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.config.building import signature_of
from tests.experiment.runs import FEW_CANDIDATES, run
from tests.selection import few

SLOW = {"torch", "torch._dynamo", "torchvision", "flwr", "ray", "opacus", "matplotlib", "scipy", "datasets", "pandas"}

PROGRAM = """
import json, sys
from fl_privacy.cli.main import run_command_line
slow, commands = json.loads(sys.argv[1])
said = []
for arguments in commands:
    status = run_command_line(arguments)
    said.append([status, sorted(set(slow) & set(sys.modules))])
print()
print(json.dumps(said))
"""

LIGHT = ("--help", "run --help", "list", "run defense=pruning --cfg", "advise")
WRONG = (
    "run seed=x",
    "run model=lenett",
    "run defense=pruning defense.rat=0.5",
    "run defense=pruning defense.rate=much",
    "attack attack.iterations=1.5",
    "attack experiment=sapag_paper paper=half",
    "run federation.clients=0",
    "trade-off nowhere",
    "benchmark nowhere",
    "search-policies polices=1",
    "report nowhere",
)


def answers(commands: Iterable[str], folder: Path) -> dict[str, tuple[int, set[str]]]:
    """Exit status of each, given one after the other to one process, and what is imported of ``SLOW`` by then."""
    given = [command.split() for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([sorted(SLOW), given])],
        cwd=folder,
        env={**os.environ, "FL_PRIVACY_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return {command: (status, set(modules)) for command, (status, modules) in zip(commands, said, strict=True)}


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a cache, as first commands leave it."""
    folder = tmp_path_factory.mktemp("used")
    first = answers(("run defense=none --cfg", "run defense=pruning --cfg"), folder)
    assert [status for status, _ in first.values()] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def said(used: Path, request: pytest.FixtureRequest) -> dict[str, tuple[int, set[str]]]:
    """Collect the answers of the commands that tests ask about, once the memory of each part is known."""
    asked = " ".join(item.name for item in request.session.items if item.path == request.path)
    return answers([command for command in (*LIGHT, *WRONG) if f"[{command}]" in asked], used)


@pytest.mark.long
@pytest.mark.parametrize("command", LIGHT)
def test_help_and_list_are_light(command: str, said: dict[str, tuple[int, set[str]]]) -> None:
    assert said[command] == (0, set())


@pytest.mark.parametrize("command", few(WRONG, 4))
def test_wrong_settings_are_told_before_anything_slow_is_imported(
    command: str, said: dict[str, tuple[int, set[str]]]
) -> None:
    assert said[command] == (2, set())


def test_a_finished_attack_is_shown_without_pytorch(used: Path, tmp_path: Path) -> None:
    settings = ("attack=auto", "victims=1")
    assert run("attack", *settings, out=tmp_path).status == 0
    again = " ".join(("attack", *settings, FEW_CANDIDATES, f"out={tmp_path}"))
    assert answers([again], used)[again] == (0, {"scipy"}), "which has the distributions behind intervals"


RUN = """
import sys
import fl_privacy.runs.attack
slow = {"torch._dynamo", "torchvision", "flwr", "ray", "opacus", "matplotlib", "scipy", "datasets", "pandas"}
print(*sorted(slow & set(sys.modules)))
import torch
from fl_privacy.data import Examples, Iid
from fl_privacy.defenses import ClientState
from fl_privacy.measure import lpips
from tests.federation import harness

harness.clients()[0].update(harness.server().state, ClientState(), round=1)
Iid()(Examples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4).long(), ("a",)), num_clients=2, seed=0)
sizes = {0: (64, 3, 11, 11), 3: (192, 64, 5, 5), 6: (384, 192, 3, 3), 8: (256, 384, 3, 3), 10: (256, 256, 3, 3)}
weights = {f"features.{layer}.weight": torch.rand(size) for layer, size in sizes.items()}
biases = {f"features.{layer}.bias": torch.rand(size[0]) for layer, size in sizes.items()}
lpips.convolutions = lambda: weights | biases
assert lpips.lpips(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)) > 0
print(*sorted({"torch._dynamo", "torchvision", "datasets", "pandas", "matplotlib"} & set(sys.modules)))

from fl_privacy.data import Dirichlet
pictures = Examples(torch.zeros(40, 1, 2, 2, dtype=torch.uint8), torch.arange(40) % 2, ("a", "b"))
Dirichlet()(pictures, num_clients=2, seed=0)
print(*sorted({"scipy.stats", "statsmodels"} & set(sys.modules)))
import seaborn
assert callable(seaborn.heatmap) and "scipy.stats" in sys.modules
"""


@pytest.mark.long
def test_attacks_begin_and_runs_measure_without_the_compiler_or_what_flower_s_data_plot_with() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize("loaded", [False, True])
def test_the_collector_waits_for_imports_alone(monkeypatch: pytest.MonkeyPatch, *, loaded: bool) -> None:
    frozen = list[bool]()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    if loaded:
        monkeypatch.setitem(sys.modules, "fl_privacy.runs.run", sys)
    else:
        monkeypatch.delitem(sys.modules, "fl_privacy.runs.run", raising=False)
    with pytest.raises(ImportError), _loading():
        assert gc.isenabled() is loaded
        raise ImportError
    assert gc.isenabled() and frozen == [False] * (not loaded)


def test_a_damaged_cache_is_as_good_as_none(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(used / "cache"))
    file = used / "cache" / "signatures.json"
    kept = file.read_text()
    for damage in ("", "[]", kept[:-20], kept.replace("false", '"no"'), kept.replace("annotations", "x")):
        file.write_text(damage)
        signature_of.cache_clear()
        with pytest.raises(UserError, match=r"defense\.rate"):
            compose_run(["defense=pruning", "defense.rate=much"])
        assert json.loads(file.read_text())["signatures"].keys() >= {"fl_privacy.defenses.pruning"}
        assert '"no"' not in file.read_text() and '"x"' not in file.read_text()
    signature_of.cache_clear()
