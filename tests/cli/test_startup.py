"""What answers at once imports nothing that takes its time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = {"torch", "torch._dynamo", "torchvision", "flwr", "ray", "opacus", "matplotlib", "scipy", "datasets", "pandas"}

PROGRAM = """
import json, sys
from fl_privacy.cli.main import run_command_line
status = run_command_line(sys.argv[1:])
print()
print(json.dumps([status, sorted(sys.modules)]))
"""


def imported(*arguments: str, folder: Path) -> tuple[int, set[str]]:
    """The exit status of a command and what it imported of ``SLOW``, where what each part takes is known."""
    environment = {**os.environ, "FL_PRIVACY_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    status, modules = json.loads(done.stdout.splitlines()[-1])
    return status, SLOW & set(modules)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache, as a first command leaves it."""
    folder = tmp_path_factory.mktemp("used")
    for defense in ("none", "pruning"):
        assert imported("run", f"defense={defense}", "--cfg", folder=folder)[0] == 0
    return folder


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list"], ["run", "defense=pruning", "--cfg"]])
def test_help_and_list_are_light(arguments: list[str], used: Path) -> None:
    assert imported(*arguments, folder=used) == (0, set())


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "seed=x"],
        ["run", "model=lenett"],
        ["run", "defense=pruning", "defense.rat=0.5"],
        ["run", "defense=pruning", "defense.rate=much"],
        ["attack", "attack.iterations=1.5"],
        ["run", "federation.clients=0"],
        ["trade-off", "nowhere"],
        ["benchmark", "nowhere"],
        ["search-policies", "polices=1"],
        ["report", "nowhere"],
    ],
)
def test_wrong_settings_are_told_before_anything_slow_is_imported(arguments: list[str], used: Path) -> None:
    assert imported(*arguments, folder=used) == (2, set())


def test_an_attack_compiles_nothing_and_draws_nothing_before_it_starts(used: Path) -> None:
    program = "import fl_privacy.experiment.attack, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    slow = {"torch._dynamo", "torchvision", "flwr", "ray", "opacus", "matplotlib", "scipy", "datasets", "pandas"}
    assert not slow & set(done.stdout.split())


def test_a_client_trains_without_the_compiler() -> None:
    program = (
        "import sys; from tests.federation import harness; from fl_privacy.defenses import ClientState;"
        " harness.clients()[0].update(harness.server().state, ClientState(), round=1);"
        " sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_damaged_cache_is_as_good_as_none(used: Path) -> None:
    file = used / "cache" / "signatures.json"
    kept = file.read_text()
    for damage in ("", "[]", kept[:-20], kept.replace("false", '"no"'), kept.replace("annotations", "x")):
        file.write_text(damage)
        assert imported("run", "defense=pruning", "defense.rate=much", folder=used)[0] == 2
        assert "defense.rate" not in file.read_text() and json.loads(file.read_text())["signatures"]
    file.write_text(kept)
