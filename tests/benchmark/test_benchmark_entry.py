"""A defense is found where its user wrote it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_privacy.errors import UserError
from fl_privacy.runs.study import find_entry
from tests.benchmark.tracks import OWN, write_defense


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forget what a test imports from its folder, so that the next test does not find it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield
    own = [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(tmp_path))]
    for name in own:
        del sys.modules[name]


def test_a_file_a_function_in_it_an_import_path_and_a_name_are_found(tmp_path: Path) -> None:
    file = write_defense(tmp_path, name="found_here.py")
    for entry in (file, f"{file}:mostly_sent", "found_here.mostly_sent"):
        points, digest = find_entry(entry, ["defense.share=0.1,0.5"])
        assert [(p.family, p.strength) for p in points] == [("mostly_sent", "share 0.1"), ("mostly_sent", "share 0.5")]
        assert points[0].overrides == ("defense=custom", "defense._target_=found_here.mostly_sent", "defense.share=0.1")
        assert len(digest) == 64
    changed = write_defense(tmp_path, OWN + "\n# changed\n", name="found_here.py")
    assert find_entry(changed, [])[1] != digest
    assert find_entry("pruning", ["defense.rate=0.3"])[0][0].overrides == ("defense=pruning", "defense.rate=0.3")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("two_of_them.py", OWN + OWN.replace("mostly", "never"), "mostly_sent, never_sent; name it as"),
        ("none_of_them.py", "x = 1\n", "has none; name it as"),
        ("broken_one.py", "import nowhere_at_all\n", "can't be imported .ModuleNotFoundError"),
        ("json.py", OWN, "rename it"),
        ("not-a-name.py", OWN, "rename it"),
    ],
)
def test_what_is_no_defense_is_one_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        find_entry(write_defense(tmp_path, text, name), [])
    assert "\n" not in str(error.value)
