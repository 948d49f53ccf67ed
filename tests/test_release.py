"""What a release consists of: one version, the files of a wheel and an sdist, workflows with few rights."""

import io
import re
import runpy
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_shape import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WHEEL = (
    "fl_privacy/py.typed",
    "fl_privacy/_moved.json",
    "fl_privacy/conf/config.yaml",
    "fl_privacy/report/templates/base.html.j2",
)
SDIST = ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY.md", "tests/conftest.py", "constraints.txt")


def test_one_version_and_one_author_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == PROJECT["version"]
    assert cited["authors"] == PROJECT["authors"] == PROJECT["maintainers"]


def test_the_paper_cites_what_its_bibliography_has() -> None:
    cited = set(re.findall(r"@([a-z]+[0-9]*)", (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")))
    entries = re.findall(r"^@\w+\{(\w+),", (ROOT / "paper" / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(cited) == sorted(entries)


def test_every_data_set_has_a_line_on_its_license() -> None:
    table = re.sub(r"[^a-z0-9]", "", (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8").lower())
    options = (ROOT / "conf" / "data").glob("*.yaml")
    names = {yaml.safe_load(file.read_text(encoding="utf-8")).get("name", "custom") for file in options}
    own = {"custom", "image_folder", "text_folder", "table"}  # the user's
    assert own < names
    missing = [n for n in names - own if n.removesuffix("_exact").replace("_", "") not in table]
    assert not missing, missing


def test_no_workflow_has_more_rights_than_a_job_needs() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        flow: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert flow["permissions"] == {"contents": "read"}, file.name
        assert "secrets." not in file.read_text(encoding="utf-8")


def built(folder: Path, version: str, *, more: str = "", without: str = "") -> None:
    names = [name for name in (*WHEEL, *([more] if more else [])) if name != without]
    with zipfile.ZipFile(folder / f"fl_privacy-{version}-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, "")
    with tarfile.open(folder / f"fl_privacy-{version}.tar.gz", "w:gz") as sdist:
        for name in SDIST:
            sdist.addfile(tarfile.TarInfo(f"fl_privacy-{version}/{name}"), io.BytesIO())


@pytest.mark.parametrize(
    ("changes", "tag", "said"),
    [
        ({}, "v1.2.0", "nothing missing"),
        ({}, "v1.3.0", "the tag v1.3.0 is not v1.2.0"),
        ({"more": "tests/test_it.py"}, "v1.2.0", "holds tests/test_it.py"),
        ({"more": "fl_privacy/weights.pt"}, "v1.2.0", "fl_privacy/weights.pt is in it"),
        ({"without": "fl_privacy/py.typed"}, "v1.2.0", "lacks fl_privacy/py.typed"),
    ],
)
def test_files_of_a_release_are_checked(  # noqa: PLR0917
    changes: dict[str, str], tag: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:  # fmt: skip
    built(tmp_path, "1.2.0", **changes)
    monkeypatch.setattr(sys, "argv", ["distribution.py", str(tmp_path), "--tag", tag])
    main = runpy.run_path(str(ROOT / ".ci" / "distribution.py"))["main"]
    assert main() == (said != "nothing missing")
    assert said in capsys.readouterr().out
