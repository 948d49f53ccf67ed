"""What runs elsewhere is pinned: actions by commit, since a tag may be moved; what they install by version."""

import json
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def test_what_runs_elsewhere_is_pinned() -> None:
    files = [ROOT / "action.yml", *(ROOT / ".github" / "workflows").glob("*.yml")]
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    used = [line for line in lines if re.match(r"(- )?uses:", line)]
    installed = [line for line in lines if "pip install" in line and not line.startswith("description")]
    assert used and installed
    assert all(re.search(r"@[0-9a-f]{40}\b", line) for line in used)
    assert all("--constraint" in line for line in installed)


def pinned() -> dict[str, str]:
    """Return the versions that the tests were run with, by name."""
    lines = [line for name in ("", "-cuda") for line in (ROOT / f"constraints{name}.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    assert len(pairs) == len({name for name, _ in pairs})
    return {canonicalize_name(name): version for name, version in pairs}


def required(name: str, extras: frozenset[str]) -> list[Requirement]:
    """List what the installed package ``name`` needs here with ``extras``."""
    found = [Requirement(line) for line in metadata.requires(name) or []]
    return [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras | {""})]


def groups() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what the groups of ``pyproject.toml`` name."""
    for group in tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"].values():
        for found in (Requirement(line) for line in group if isinstance(line, str)):
            yield canonicalize_name(found.name), frozenset(found.extras)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the versions are those of one Python")
def test_every_package_that_is_installed_is_pinned() -> None:
    versions, seen, waiting = pinned(), set(), [("fl-privacy", frozenset({"all"})), *groups()]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        try:
            waiting += [(canonicalize_name(r.name), frozenset(r.extras)) for r in required(*one)]
        except metadata.PackageNotFoundError:  # left out by hand, as by a wheel of PyTorch without CUDA
            assert one[0] in versions
    names = {name for name, _ in seen} - {"fl-privacy"}
    assert len(names) > 150
    assert names <= versions.keys(), names - versions.keys()
    assert {"pip", "uv", "cryptography", "pyyaml", "requests", "urllib3", "starlette", "aiohttp"} <= versions.keys()


def test_every_requirement_ends_below_a_version_that_was_not_tested() -> None:
    """The bound above is the next major version after the pinned one at most; the pinned one is allowed."""
    tables, versions = tomllib.loads((ROOT / "pyproject.toml").read_text()), pinned()
    sets = [*tables["project"]["optional-dependencies"].values(), *tables["dependency-groups"].values()]
    lines = [*tables["project"]["dependencies"], *(one for lines in sets for one in lines if isinstance(one, str))]
    for found in map(Requirement, lines):
        name = canonicalize_name(found.name)
        if name in {"fl-privacy", "gan-face-generate"}:  # its own extras; what is not installed with the tests
            continue
        above = [one.version for one in found.specifier if one.operator == "<"]
        assert len(above) == 1, f"{found} has no bound above"
        assert int(above[0].split(".")[0]) <= int(versions[name].split(".")[0]) + 1
        assert found.specifier.contains(versions[name])


SKIPPED = {"name": "numpy", "skip_reason": "not found"}
SOUND = {"name": "scipy", "version": "1", "vulns": []}
UNSOUND = {"name": "pillow", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}


@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        (None, 0, "can't be reached"),
        ([SKIPPED], 0, "can't be reached"),
        ([SKIPPED, SOUND], 0, "0 known vulnerabilities in 1 packages; 1 could not be looked up"),
        ([SKIPPED, SOUND, UNSOUND], 1, "pillow 1: CVE-1, mended in 2"),
    ],
)
def test_a_known_vulnerability_is_an_error_and_no_network_is_none(
    packages: list[object] | None, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found").write_text("" if packages is None else json.dumps({"dependencies": packages}))
    assert runpy.run_path(str(ROOT / ".ci" / "vulnerabilities.py"))["main"](tmp_path / "found") == status
    assert said in capsys.readouterr().out
