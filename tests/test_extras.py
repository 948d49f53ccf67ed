"""What runs without the optional packages, and the line that names what installs one that is missing."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from itertools import chain
from pathlib import Path

import pytest

from fl_privacy.checks.packages import INSTALLED_BY, lacks
from fl_privacy.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

ATTACK = ["attack", "model=mlp", "attack=idlg", "attack.iterations=5", "victims=2"]
WITHOUT = {
    "backend=flower": (["run", "backend=flower"], "flwr[simulation]"),
    "backend=ray": (["run", "backend=ray"], "flwr[simulation]"),
    "secagg": (["run", "secure_aggregation=secagg", "attack=none"], "flwr[simulation]"),
    "flower_mod": (["attack", "defense=local_dp_mod", "model=mlp"], "flwr[simulation]"),
    "supernode": (["supernode"], "flwr[simulation]"),
    "deploy": (["deploy", "out"], "cryptography"),
    "shards": ([*ATTACK, "attack.shards=2", "seed=1"], "flwr[simulation]"),
    "text": (["run", "data=sst2", "model=bert_tiny"], "tokenizers"),
    "epsilon": (["run", "defense=dp_sgd", "privacy.epsilon=8", "model=mlp"], "opacus"),
    "ckks": (
        ["run", "secure_aggregation=ckks", "attack=none", "federation.rounds=1", "model=mlp"],
        "tenseal",
    ),
    "fsim": (["search-policies", "fsim_at_least=0.5"], "piq"),
    "evolution": (["attack", "attack=ggl", "attack.optimizer=cma"], "cma"),
}
"""A command that needs a package, and what installs it."""

PROGRAM = """
import json, sys, io, contextlib
missing, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
from fl_privacy.cli.main import run_command_line
said = {}
for name, arguments in commands.items():
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        status = run_command_line(arguments)
    said[name] = [status, err.getvalue()]
try:
    from fl_privacy import audit
except Exception as error:
    said["audit"] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bare")


@pytest.fixture(scope="module")
def said(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Collect what each command answers in a process without any of the optional packages."""
    commands = {name: command for name, (command, _) in WITHOUT.items()}
    if any(item.name == test_the_core_attacks_and_reports_without_them.__name__ for item in request.session.items):
        commands["attack"] = ATTACK
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([list(INSTALLED_BY), commands])],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_the_core_attacks_and_reports_without_them(said: dict[str, list[str]], folder: Path) -> None:
    assert said["attack"][0] == 0, said["attack"]
    assert list(folder.glob("runs/*/report.html"))


@pytest.mark.parametrize("name", WITHOUT)
def test_a_line_names_the_package_that_is_missing(name: str, said: dict[str, list[str]]) -> None:
    status, error = said[name]
    assert status == 2, error
    (line,) = [line for line in error.splitlines() if line.startswith("error:")]
    assert f"pip install '{WITHOUT[name][1]}'" in line
    assert "Traceback" not in error


def test_so_does_the_python_interface(said: dict[str, list[str]]) -> None:
    kind, text = said["audit"]
    assert kind == UserError.__name__
    assert "pip install 'flwr[simulation]'" in text


def test_what_installs_a_package_is_what_the_project_says() -> None:
    """A requirement of the project or of an extra installs it; no index has the project itself."""
    extras = PROJECT["optional-dependencies"].values()
    brought = {re.split("[<>=;]", each)[0] for each in chain(PROJECT["dependencies"], *extras)}
    for package, install in INSTALLED_BY.items():
        assert install in brought and not install.startswith("fl-privacy"), package
        assert f"pip install '{install}'" in str(lacks(package, "It"))


def test_the_version_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    from fl_privacy.cli.main import run_command_line  # noqa: PLC0415

    assert run_command_line(["--version"]) == 0
    assert capfd.readouterr().out == f"fl-privacy {metadata('fl-privacy')['Version']}\n"
