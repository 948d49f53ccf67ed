"""Templates are compiled once, by whichever process is the first."""

from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment

from fl_privacy.report.page import CompiledTemplates


def rendered(folder: Path, source: str = "{{ 1 + 2 }} of {{ name }}") -> tuple[str, bool]:
    """Render by an environment of its own; also say whether it compiled."""
    made = Environment(loader=DictLoader({"page": source}), bytecode_cache=CompiledTemplates(str(folder), "%s.j2c"))
    compiled, compile = [], made.compile
    made.compile = lambda *args: compiled.append(args) or compile(*args)  # type: ignore[method-assign,assignment]
    return made.get_template("page").render(name="4"), bool(compiled)


def test_a_template_is_compiled_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    folder = tmp_path / "made"
    assert rendered(folder) == ("3 of 4", True)
    assert rendered(folder) == ("3 of 4", False)
    assert rendered(folder, "{{ 2 + 2 }} of {{ name }}") == ("4 of 4", True)


def test_nothing_is_kept_where_nothing_can_be_written_or_shall_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [rendered(tmp_path / "absent" / "made") for _ in range(2)] == [("3 of 4", True)] * 2
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert [rendered(tmp_path / "made") for _ in range(2)] == [("3 of 4", True)] * 2
    assert not (tmp_path / "made").exists()
