"""No module imports itself by way of others, not even for its type hints."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.sources import nodes_of

ROOT = Path(__file__).resolve().parent.parent


def modules(root: Path) -> dict[str, Path]:
    """Dotted names of all modules of ``fl_privacy`` below ``root``; a package is its ``__init__``."""
    paths = (root / "fl_privacy").rglob("*.py")
    return {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """List the modules of ``known`` that ``path`` imports, under ``TYPE_CHECKING`` and in functions too."""
    found = set()
    for node in nodes_of(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path} imports relatively"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts & known.keys() | ({node.module} if parts - known.keys() else set())
    return found & known.keys()


def circle(root: Path) -> list[str]:
    """Find a circle of imports; empty where there is none."""
    known = modules(root)
    try:
        TopologicalSorter({name: imported(path, known) for name, path in known.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_import_circle() -> None:
    assert circle(ROOT) == []


def test_a_circle_is_found_where_only_type_hints_close_it(tmp_path: Path) -> None:
    (tmp_path / "fl_privacy/room").mkdir(parents=True)
    (tmp_path / "fl_privacy/room/__init__.py").write_text("")
    (tmp_path / "fl_privacy/room/a.py").write_text("from fl_privacy.room import b\n")
    (tmp_path / "fl_privacy/room/b.py").write_text("if TYPE_CHECKING:\n    from fl_privacy.room.a import A\n")
    assert sorted(set(circle(tmp_path))) == ["fl_privacy.room.a", "fl_privacy.room.b"]
