"""The package keeps its shape: files of one idea, short functions, few parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef

OPTIONS = {
    "fl_privacy/cli/untouched.py:audit": "the options of a command, which a user sets one by one",
    "fl_privacy/defenses/_refiner.py:refiner": "each choice of the paper's algorithm, and those it leaves open",
    "fl_privacy/models/alexnet_vgg.py:__init__": "facts of the data, the layers' sizes and kinds, normalization",
    "fl_privacy/models/resnet.py:__init__": "likewise, with strides",
    "fl_privacy/models/torchvision_models.py:__init__": "likewise, of a transformer",
    "fl_privacy/types.py:of_update": "what an attacker knows of a client, of which a caller names the few that matter",
}
"""Whose parameters are the options of ``conf/`` or of a call, which a user sets one by one -> why there are so many."""


def sources(root: Path) -> Iterator[tuple[str, ast.Module, int]]:
    """Each module's path, what it says, and its number of lines."""
    for path in sorted((root / "fl_privacy").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(root).as_posix(), ast.parse(text), len(text.splitlines())


def functions(module: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(module) if isinstance(node, Function))


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


def test_files_are_short() -> None:
    assert long_files(ROOT) == set()


def test_functions_are_short() -> None:
    assert long_functions(ROOT) == set()


def test_functions_take_few_parameters() -> None:
    assert wide_functions(ROOT) == OPTIONS.keys()


@pytest.fixture
def misshapen(tmp_path: Path) -> Path:
    """Write a package that has every fault once."""
    room = tmp_path / "fl_privacy"
    room.mkdir()
    (room / "long.py").write_text("\n".join(f"a{i} = {i}" for i in range(LONGEST_FILE + 1)))
    (room / "tall.py").write_text("def high():\n" + "    pass\n" * LONGEST_FUNCTION)
    (room / "wide.py").write_text(f"def broad({', '.join(f'a{i}' for i in range(MOST_PARAMETERS))}, *, b): ...\n")
    return tmp_path


def test_faults_are_found(misshapen: Path) -> None:
    assert long_files(misshapen) == {"fl_privacy/long.py"}
    assert long_functions(misshapen) == {"fl_privacy/tall.py:high"}
    assert wide_functions(misshapen) == {"fl_privacy/wide.py:broad"}
