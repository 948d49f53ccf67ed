"""The package keeps its shape: short files of one idea, short functions, and one name for each thing."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 300
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef

ENTRY_POINT = "fl_privacy/cli/main.py"
"""Named like the function that the installed command calls, as entry points are."""

OPTIONS = {
    "fl_privacy/defenses/data/refining.py:refiner": "each choice of the paper's algorithm, and those it leaves open",
    "fl_privacy/models/block_networks.py:__init__": "facts of the data, the layers' sizes and kinds, normalization",
    "fl_privacy/models/resnet.py:__init__": "likewise, with strides",
    "fl_privacy/models/torchvision_models.py:__init__": "likewise, of a transformer",
}
"""Whose parameters are the options of ``conf/``, which a user sets one by one -> why there are so many."""


def sources(root: Path) -> Iterator[tuple[str, ast.Module, int]]:
    """Each module's path, what it says, and its number of lines."""
    for path in sorted((root / "fl_privacy").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(root).as_posix(), ast.parse(text), len(text.splitlines())


def functions(module: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(module) if isinstance(node, Function))


def public(module: ast.Module) -> set[str]:
    """What a module defines for others; overloads are one name."""
    defined = (node.name for node in module.body if isinstance(node, Function | ast.ClassDef))
    return {name for name in defined if not name.startswith("_")}


def long_files(root: Path) -> set[str]:
    return {path for path, _, lines in sources(root) if lines > LONGEST_FILE}


def long_functions(root: Path) -> set[str]:
    return {
        f"{path}:{function.name}"
        for path, module, _ in sources(root)
        for function in functions(module)
        if (function.end_lineno or function.lineno) - function.lineno >= LONGEST_FUNCTION
    }


def wide_functions(root: Path) -> set[str]:
    return {
        f"{path}:{function.name}"
        for path, module, _ in sources(root)
        for function in functions(module)
        if len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]) > MOST_PARAMETERS
    }


def modules_named_like_their_content(root: Path) -> set[str]:
    return {path for path, module, _ in sources(root) if Path(path).stem in public(module)}


def names_defined_twice(root: Path) -> set[str]:
    counted = Counter(name for _, module, _ in sources(root) for name in public(module))
    return {name for name, times in counted.items() if times > 1}


def test_files_are_short() -> None:
    assert long_files(ROOT) == set()


def test_functions_are_short() -> None:
    assert long_functions(ROOT) == set()


def test_functions_take_few_parameters() -> None:
    assert wide_functions(ROOT) == OPTIONS.keys()


def test_no_module_is_named_like_what_it_defines() -> None:
    """``from room import name`` would mean the one or the other, by what was imported before."""
    assert modules_named_like_their_content(ROOT) == {ENTRY_POINT}


def test_no_public_name_is_defined_twice() -> None:
    assert names_defined_twice(ROOT) == set()


@pytest.fixture
def misshapen(tmp_path: Path) -> Path:
    """A package with every fault once."""
    room = tmp_path / "fl_privacy"
    room.mkdir()
    (room / "long.py").write_text("\n".join(f"a{i} = {i}" for i in range(LONGEST_FILE + 1)))
    (room / "tall.py").write_text("def high():\n" + "    pass\n" * LONGEST_FUNCTION)
    (room / "wide.py").write_text(f"def broad({', '.join(f'a{i}' for i in range(MOST_PARAMETERS))}, *, b): ...\n")
    (room / "shadow.py").write_text("def shadow(): ...\n")
    (room / "one.py").write_text("class Twin: ...\ndef _private(): ...\n")
    (room / "other.py").write_text("def Twin(): ...\ndef _private(): ...\n")
    return tmp_path


def test_faults_are_found(misshapen: Path) -> None:
    assert long_files(misshapen) == {"fl_privacy/long.py"}
    assert long_functions(misshapen) == {"fl_privacy/tall.py:high"}
    assert wide_functions(misshapen) == {"fl_privacy/wide.py:broad"}
    assert modules_named_like_their_content(misshapen) == {"fl_privacy/shadow.py"}
    assert names_defined_twice(misshapen) == {"Twin"}
