"""The package keeps its shape: files of one idea, short functions, few parameters."""

import ast
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.sources import nodes_of

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef

OPTIONS = {
    "fl_privacy/cli/audit.py:audit": "the options of a command, which a user sets one by one",
    "fl_privacy/cli/audit_update.py:audit_update": "options of a command",
    "fl_privacy/defenses/_refiner.py:refiner": "each choice of the paper's algorithm, and those it leaves open",
    "fl_privacy/types/nouns.py:of_update": "what an attacker knows of a client; a caller names the few that matter",
}
"""Whose parameters are the options of ``conf/`` or of a call, which a user sets one by one -> why there are so many."""


KINDS = {"TextModel", "TextExamples", "TableExamples", "Examples", "TableRows", "WordEmbeddings"}
"""Classes that are of one kind of examples."""

ROWS_OF_TABLES = {"IMAGES", "TEXTS", "ROWS"}
"""What a table has as keys, and nothing is compared with."""

OWN = (
    "fl_privacy/types/modality.py",
    "fl_privacy/types/schema.py",
    "fl_privacy/data/",
    "fl_privacy/models/",
    "fl_privacy/attacks/trees/",
    "fl_privacy/data/transformations/",
    "fl_privacy/attacks/text/",
    "fl_privacy/attacks/auto/other_modalities.py",
    "fl_privacy/attacks/gradient_inversion/other_modalities.py",
    "fl_privacy/attacks/gradient_inversion/embeddings.py",
    "fl_privacy/attacks/gradient_inversion/word_order.py",
    "fl_privacy/measure/texts.py",
    "fl_privacy/measure/tables.py",
)
"""Files of one kind of examples, and those that hold the table of kinds."""

_CAST = "numbers are cast, numbers of tokens are left"
_OWN = "data sets of this package are told apart from an app's own"
_SHAPES = "the inputs of an app's network are told apart by their shapes alone"

_GIVEN = "a user's files are of what the first layer of a network takes, which belongs to no package"
TOLD_APART: dict[str, str] = {
    "fl_privacy/attacks/exact/certificate.py": _CAST,
    "fl_privacy/attacks/gradient_inversion/labels.py": _CAST,
    "fl_privacy/attacks/gradient_inversion/minimization.py": "a snapshot is made of what its source reads",
    "fl_privacy/defenses/_refiner.py": _CAST,
    "fl_privacy/runs/app_truth.py": _OWN,
    "fl_privacy/runs/distractors.py": _OWN,
    "fl_privacy/auditing/scenario_problem.py": _SHAPES,
    "fl_privacy/auditing/scenario_scores.py": _SHAPES,
    "fl_privacy/auditing/update_audit.py": _GIVEN,
    "fl_privacy/auditing/update_given.py": _GIVEN,
    "fl_privacy/auditing/update_observed.py": _GIVEN,
}
"""File -> why it asks of what kind examples are, instead of looking that up in a table by ``modality``."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is misshapen in a package; of ``asks`` the lines of each file that ask of what kind examples are."""

    files: set[str]
    functions: set[str]
    parameters: set[str]
    asks: dict[str, list[int]]


@cache
def shape_of(root: Path) -> Shape:
    found = Shape(files=set(), functions=set(), parameters=set(), asks={})
    for path in sorted((root / "fl_privacy").rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        if len(text.splitlines()) > LONGEST_FILE:
            found.files.add(name)
        nodes = nodes_of(text)
        for node in nodes:
            if not isinstance(node, Function):
                continue
            if (node.end_lineno or node.lineno) - node.lineno >= LONGEST_FUNCTION:
                found.functions.add(f"{name}:{node.name}")
            if len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > MOST_PARAMETERS:
                found.parameters.add(f"{name}:{node.name}")
        if not name.startswith(OWN):
            narrowing = {id(node) for each in nodes if isinstance(each, ast.Assert) for node in ast.walk(each)}
            asked = [n.lineno for n in nodes if isinstance(n, ast.expr) and id(n) not in narrowing and _asks(n)]
            found.asks.update({name: asked} if asked else {})
    return found


def _asks(node: ast.expr) -> bool:
    """Say whether an expression tells kinds of examples apart."""
    if isinstance(node, ast.Call):
        match node.func, node.args:
            case ast.Name(id="isinstance"), [_, kinds]:
                return bool(KINDS & {n.id for n in ast.walk(kinds) if isinstance(n, ast.Name)})
            case ast.Attribute(attr="is_floating_point", value=of), []:
                return ast.unparse(of).rpartition(".")[2] in {"inputs", "images", "public_images", "texts", "tokens"}
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Name) and side.id in ROWS_OF_TABLES for side in sides):
            return True
        if any(ast.unparse(side) in {"'image'", "'text'", "'row'"} for side in sides):
            return any(ast.unparse(side).rpartition(".")[2] == "kind" for side in sides)
        return any("schema_of(" in ast.unparse(side) for side in sides)
    return False


def test_files_are_short() -> None:
    assert shape_of(ROOT).files == set()


def test_functions_are_short() -> None:
    assert shape_of(ROOT).functions == set()


def test_kinds_of_examples_are_told_apart_in_their_own_files() -> None:
    assert shape_of(ROOT).asks.keys() == TOLD_APART.keys(), shape_of(ROOT).asks


def test_functions_take_few_parameters() -> None:
    assert shape_of(ROOT).parameters == OPTIONS.keys()


@pytest.fixture
def misshapen(tmp_path: Path) -> Path:
    """Write a package that has every fault once."""
    room = tmp_path / "fl_privacy"
    room.mkdir()
    (room / "long.py").write_text("\n".join(f"a{i} = {i}" for i in range(LONGEST_FILE + 1)))
    (room / "tall.py").write_text("def high():\n" + "    pass\n" * LONGEST_FUNCTION)
    (room / "wide.py").write_text(f"def broad({', '.join(f'a{i}' for i in range(MOST_PARAMETERS))}, *, b): ...\n")
    asks = "isinstance(a, Examples)\ninputs.is_floating_point()\nkind == 'text'\nschema_of(a) is None\na is TEXTS\n"
    (room / "asks.py").write_text(asks + "assert isinstance(a, Examples)\n")
    return tmp_path


def test_faults_are_found(misshapen: Path) -> None:
    found = shape_of(misshapen)
    assert found.files == {"fl_privacy/long.py"}
    assert found.functions == {"fl_privacy/tall.py:high"}
    assert found.parameters == {"fl_privacy/wide.py:broad"}
    assert found.asks == {"fl_privacy/asks.py": [1, 2, 3, 4, 5]}


def test_no_constant_of_a_module_has_two_values() -> None:
    twice = set()
    for path in (ROOT / "fl_privacy").rglob("*.py"):
        body = nodes_of(path.read_text(encoding="utf-8"))[0].body  # type: ignore[attr-defined]
        targets = [each for node in body if isinstance(node, ast.Assign) for each in node.targets]
        names = Counter(name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name))
        twice |= {(path.name, name) for name, number in names.items() if number > 1 and name.isupper()}
    assert not twice
