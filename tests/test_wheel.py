"""What a wheel brings along."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "fl_privacy", "conf", "tests/__init__.py")


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=copy, check=True)
    (wheel,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_setting_is_in_it(contents: set[str]) -> None:
    settings = {f"fl_privacy/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert len(settings) > 20
    assert settings <= contents


def test_every_module_template_and_marker_is_in_it(contents: set[str]) -> None:
    own = [path for path in (ROOT / "fl_privacy").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in own} <= contents
    assert "fl_privacy/py.typed" in contents
    assert any(name.startswith("fl_privacy/report/templates/") for name in contents)


def test_nothing_else_is_in_it(contents: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in contents} == {"fl_privacy"}
    assert not [name for name in contents if "__pycache__" in name]


def test_the_license_and_the_command_are_in_it(contents: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in contents)
    assert any(name.endswith("entry_points.txt") for name in contents)
