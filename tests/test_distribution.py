"""How tests are spread over processes: a file's in one, so that its fixtures are made once, and all on Ray in one."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import os, time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(4))
def test_one(number):
    time.sleep(0.02)
    with (Path(__file__).parent / "said.txt").open("a") as said:
        print(Path(__file__).stem, os.getpid(), file=said)
"""
ON_RAY = TESTS.replace("@pytest.mark.parametrize", "@pytest.mark.ray\n@pytest.mark.parametrize")


@pytest.mark.long
def test_a_file_stays_in_one_process_and_those_on_ray_share_one(tmp_path: Path) -> None:
    for name, content in {"a": TESTS, "b": ON_RAY, "c": TESTS, "d": TESTS, "e": ON_RAY}.items():
        (tmp_path / f"test_{name}.py").write_text(content)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  ray: starts a Ray cluster\n")
    options = "-p xdist -p tests.conftest -p no:cacheprovider --numprocesses 2 --dist loadfile --no-loadscope-reorder"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    processes, begun = defaultdict(set), dict[str, str]()
    for line in (tmp_path / "said.txt").read_text().splitlines():
        name, process = line.split()
        processes[name].add(process)
        begun.setdefault(process, name)
    assert {name: len(found) for name, found in processes.items()} == dict.fromkeys(processes, 1)
    assert processes["test_b"] == processes["test_e"] and len(set.union(*processes.values())) == 2
    assert "test_b" in begun.values(), "Ray's begin"


@pytest.mark.parametrize(("files", "ends"), [("aa", 0), ("ab", 1), ("a", 1), ("bb", 0), ("ba", 0), ("b", 0)])
def test_the_cluster_ends_with_the_last_file_on_ray(
    files: str, ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a test and the next one, if any: ``a`` is on Ray."""
    ended: list[None] = []
    ray = SimpleNamespace(is_initialized=lambda: True, shutdown=lambda: ended.append(None))
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name, content in {"a": ON_RAY, "b": TESTS}.items():
        (tmp_path / name).write_text(content)
    item, following = [*(SimpleNamespace(path=tmp_path / name) for name in files), None][:2]
    conftest.pytest_runtest_teardown(item, following)  # type: ignore[arg-type]
    assert len(ended) == ends


def test_files_that_look_through_the_package_share_what_is_parsed() -> None:
    sharing = ("test_shape.py", "test_yardsticks.py", "test_import_circles.py", "flower/test_inside.py")
    assert {conftest._shared_by(ROOT / "tests" / name) for name in sharing} == {"sources"}
    assert conftest._shared_by(ROOT / "tests" / "test_neutral.py") == ""
