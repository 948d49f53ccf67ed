"""Find the code of a project that runs by default, by flags of functions, modules, command lines and run config."""

import ast
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from fl_privacy.auditing.app.scripts import called, constant, dotted

UNKNOWN: Any = object()  # value that the code alone does not determine

DEEPEST, LONGEST_TEST = 12, 60  # most steps from a name to its value, and most letters of a shown condition

Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_APPLIED: Mapping[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "str": str}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Defaults:
    """Default values of the flags (options and variables) in a project's code.

    A name has a value only if all its assignments and defaults agree. ``config``: run config in ``pyproject.toml``.
    """

    def __init__(self, trees: Iterable[ast.Module], config: Mapping[str, Any]) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.config, self.parents = config, {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.calls, self.named = defaultdict[str, list[ast.Call]](list), Counter[str]()
        self.units, self.values = defaultdict[str, list[ast.AST]](list), defaultdict[str, list[ast.AST | None]](list)
        self._never, self._known = dict[str, str](), dict[str, Any]()
        for node in nodes:
            if isinstance(node, Function | ast.ClassDef):
                above = self.parents.get(node)
                init = isinstance(above, ast.ClassDef) and node.name == "__init__"
                self.units[above.name if init else node.name].append(node)  # type: ignore[union-attr]
        for node in nodes:
            if isinstance(node, ast.Call):
                self._index_call(node)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.named[_last(node)] += 1
            for name, value in assigned(node):
                self.values[name].append(value)

    def _index_call(self, node: ast.Call) -> None:
        given: dict[str | None, ast.AST] = {each.arg: each.value for each in node.keywords}
        self.calls[name := called(node)].append(node)
        if name == "add_argument":
            flags = [text for each in node.args if isinstance(text := constant(each), str)]
            option = constant(given.get("dest")) or next((each for each in flags if each.startswith("--")), "")
            stored = {"store_true": False, "store_false": True}.get(str(constant(given.get("action"))))
            default = given.get("default", None if constant(given.get("required")) else ast.Constant(stored))
            self.values[str(option).lstrip("-").replace("-", "_")].append(default)
            return
        for unit in (unit for unit in self.units[name] if isinstance(unit, Function)):
            places = [each.arg for each in (*unit.args.posonlyargs, *unit.args.args)]
            places = places[places[:1] == ["self"] :]
            if None in given or any(isinstance(each, ast.Starred) for each in node.args):
                given = dict.fromkeys(places, ast.Name("?"))
            given |= zip(places, node.args, strict=False)
        for key, value in given.items():
            self.values[key or ""].append(value)

    def off(self, node: ast.AST) -> str:
        """Return the condition that keeps the code at ``node`` from running by default; empty if it may run."""
        for test, wanted in self._conditions(node):
            if (value := self.value(test)) is not UNKNOWN and bool(value) != wanted:
                return f"{shown(test)} is {repr(value)[:LONGEST_TEST]}"
        return next(filter(None, map(self._never_called, self._units_around(node))), "")

    def _never_called(self, name: str) -> str:
        """Return the condition that keeps all calls of a function or class from running; empty if one may run."""
        if name not in self._never:
            self._never[name], calls = "", self.calls[name]
            if calls and len(calls) == self.named[name] and len(self.units[name]) == 1:
                reasons = list(map(self.off, calls))
                self._never[name] = reasons[0] if all(reasons) else ""
        return self._never[name]

    def unsure(self, node: ast.AST) -> list[str]:
        tests = [(test, wanted) for test, wanted in self._conditions(node) if self.value(test) is UNKNOWN]
        said = [shown(test) if wanted else f"not {shown(test)}" for test, wanted in tests]
        return [one for one in dict.fromkeys(said) if "__name__" not in one]

    def _conditions(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        for test, wanted in self._tests(node):
            while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                test, wanted = test.operand, not wanted  # noqa: PLW2901
            yield test, wanted

    def _tests(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        while (parent := self.parents.get(node)) is not None:
            if isinstance(parent, ast.If | ast.IfExp | ast.While) and node is not parent.test:
                body = parent.body if isinstance(parent.body, list) else [parent.body]
                yield parent.test, any(node is each for each in body)
            elif isinstance(parent, ast.BoolOp):
                for each in parent.values[: parent.values.index(node)]:  # type: ignore[arg-type]
                    yield each, isinstance(parent.op, ast.And)
            for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list) and node in block:
                    for each in block[: block.index(node)]:
                        if isinstance(each, ast.If) and not each.orelse and isinstance(each.body[-1], _LEAVES):
                            yield each.test, False
            node = parent

    def _units_around(self, node: ast.AST) -> Iterator[str]:
        """Yield the names of undecorated functions and classes around ``node``, except methods."""
        while (parent := self.parents.get(node)) is not None:
            method = isinstance(parent, Function) and isinstance(self.parents.get(parent), ast.ClassDef)
            if isinstance(parent, Function | ast.ClassDef) and not parent.decorator_list and not method:
                yield parent.name
            node = parent

    def value(self, node: ast.AST | None, within: frozenset[str] = frozenset()) -> Any:
        """Return an expression's default value, or ``UNKNOWN``; ``within``: names being resolved, to end cycles."""
        found: Any = UNKNOWN

        def known(each: ast.AST | None) -> Any:
            return self.value(each, within)

        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            match node:
                case ast.Constant(value=value):
                    found = value
                case ast.UnaryOp(op=ast.Not(), operand=one):
                    found = UNKNOWN if (value := known(one)) is UNKNOWN else not value
                case ast.BoolOp(op=joined, values=several):
                    stops, values = isinstance(joined, ast.Or), [known(each) for each in several]
                    if any(one is not UNKNOWN and bool(one) == stops for one in values):
                        found = stops
                    else:
                        found = UNKNOWN if UNKNOWN in values else values[-1]
                case ast.Compare(left=left, ops=[how], comparators=[right]) if type(how) in _COMPARED:
                    pair = known(left), known(right)
                    found = UNKNOWN if UNKNOWN in pair else _COMPARED[type(how)](*pair)
                case ast.Subscript(value=holder, slice=key):
                    found = self._set(holder, constant(key), UNKNOWN)
                case ast.Call(func=ast.Name(id=name), args=[one]) if name in _APPLIED:
                    found = UNKNOWN if (value := known(one)) is UNKNOWN else _APPLIED[name](value)
                case ast.Call(func=ast.Attribute(value=holder, attr="get" | "getenv"), args=[key, *more]):
                    found = self._set(holder, constant(key), known(more[0]) if more else None)
                case ast.Name() | ast.Attribute():
                    found = self._of_name(_last(node), within)
        return found

    def _of_name(self, name: str, within: frozenset[str]) -> Any:
        if name in self._known or len(within) > DEEPEST:
            return self._known.get(name, UNKNOWN)
        found, within = UNKNOWN, within | {name}
        for each in (each for each in self.values[name] if _last(each) not in within):
            value = self.value(each, within)
            if value is UNKNOWN or found not in (UNKNOWN, value):
                return UNKNOWN
            found = value
        return self._known.setdefault(name, found) if found is not UNKNOWN else found

    def _set(self, holder: ast.AST, key: object, default: Any) -> Any:
        last = _last(holder)
        if isinstance(key, str) and key in self.config and last not in ("environ", "os", "node_config"):
            return self.config[key]
        return default if last in ("run_config", "environ", "os") else UNKNOWN


def keys_read(trees: Iterable[ast.Module], holder: str) -> set[str]:
    """Return the keys of the mapping ``holder``, such as ``run_config``, that code reads without testing for them."""
    read, tested = set[object](), set[object]()
    for unit in (node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)):
        nodes = [*ast.walk(unit)]
        own = {holder, *(name for node in nodes for name, value in assigned(node) if _last(value) == holder)}
        for node in nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _last(node.value) in own:
                read.add(constant(node.slice))
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                tested.add(constant(node.left))
    return {each for each in read - tested if isinstance(each, str)}


def shown(test: ast.expr) -> str:
    """Return the source code of a condition, shortened."""
    text = " ".join(ast.unparse(test).split())
    return text if len(text) <= LONGEST_TEST else f"{text[:LONGEST_TEST]} ..."


def _last(node: ast.AST | None) -> str:
    return "" if node is None else dotted(node).rpartition(".")[2]


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield (name, value) of assignments and defaults at ``node``; ``None`` for values that vary, as in a loop."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                yield from ((_last(each), None) for each in target.elts)
            else:
                yield _last(target), node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield _last(node.target), node.value
    elif isinstance(node, ast.AugAssign | ast.For):
        yield _last(node.target), None
    elif isinstance(node, Function):
        places = [*node.args.posonlyargs, *node.args.args]
        yield from zip([a.arg for a in reversed(places)], reversed(node.args.defaults), strict=False)
        yield from ((a.arg, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d)
