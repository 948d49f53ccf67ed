"""Find the networks of a project: those that its code built while it ran, or else those that its files define."""

import ast
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property, partial
from itertools import islice, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import nn

from fl_privacy.auditing.app.bundle import App
from fl_privacy.auditing.app.defaults import UNKNOWN, Defaults, derived
from fl_privacy.auditing.app.scripts import (
    CLIENTS,
    STARTS,
    SourceFile,
    called,
    dotted,
    guards_main,
    named,
    parsed,
)
from fl_privacy.auditing.app.stand_in import Drawing
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files.foreign import read_text
from fl_privacy.site.gate.plain_yaml import PlainLoader

MOST_KEPT, MOST_PARAMETERS, MOST_CALLS, MOST_SETTINGS, LARGEST_SETTINGS = 2000, 100_000_000, 4, 100, 1 << 16
"""Largest numbers of modules that are kept, of a network's parameters, of calls by which a class is built, and of
settings files and the bytes of each."""

_BASES = {"Module", "LightningModule", "Model", "Sequential", "PreTrainedModel", "Functional"}
_MAKES = re.compile(r"(?i)(net|model|cnn|mlp|lstm|classifier|encoder)")
_PARTS = re.compile(r"(?i)(head|loss|block|layer|attention|pool|pooling|norm|embedding|activation)$")
_SETTINGS = re.compile(r"(?i)(^|_)(config|cfg|conf|args|opts?|options|params|hparams|settings)$")
_OTHERWISE = re.compile(
    r"(?i)(train|test|eval|save|load|param|weight|aggreg|fit|set_|updat|plot|predict|compile|print)"
)
_BUILT = re.compile(
    r"(^|\.)(Sequential|create_model)$|(^|\.)models\.\w+$|(^|\.)applications\.\w+$|^(resnet|vgg|mobilenet)\w+$"
    r"|(^|\.)AutoModel\w*\.from_pretrained$|^(keras\.|tf\.keras\.)?(models\.)?Model$"
)
_PLAIN = (
    ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A network of a project that can be built: its name, ``FILE:LINE`` of its place, and the code that builds it."""

    name: str
    place: str
    code: str
    make: Callable[[], nn.Module]


class BuiltNetworks:
    """Keeps a network for each line that builds one; ``of_losses`` counts loss modules by class."""

    def __init__(self, folder: Path) -> None:
        self._inside = f"{folder}{os.sep}"
        self._kept, self.of_losses, self._ended = dict[tuple[Any, ...], nn.Module](), Counter[str](), False

    @contextmanager
    def looking(self) -> Iterator[None]:
        with replaced(nn.Module, "__init__", self._note):
            yield

    def end(self) -> None:
        self._kept.clear()
        self._ended = True

    def _note(self, original: Any, made: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        frame = sys._getframe(2)  # the frame between is the hook's
        while frame is not None and (
            not frame.f_code.co_filename.startswith(self._inside)
            or (frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is made)
        ):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return
        if isinstance(made, nn.modules.loss._Loss):
            self.of_losses[type(made).__name__] += 1
        elif len(self._kept) < MOST_KEPT and not self._ended:
            self._kept.setdefault((type(made), frame.f_code.co_filename, frame.f_lineno), made)

    def networks(self, of_clients: set[Path], folder: Path) -> list[Network]:
        """List built networks that are not parts of others: those built in ``of_clients`` first, then the largest."""
        sizes = {
            key: size for key, made in self._kept.items() if isinstance(size := attempt(partial(_size, made)), int)
        }
        parts = {id(part) for key in sizes for part in self._kept[key].modules() if part is not self._kept[key]}
        whole = [key for key, size in sizes.items() if size and id(self._kept[key]) not in parts]

        def make(key: tuple[Any, ...]) -> nn.Module:
            _not_huge(sizes[key])
            return self._kept[key]

        def rank(key: tuple[Any, ...]) -> tuple[bool, bool, int]:
            alone = next(self._kept[key].children(), None) is None  # a layer of a network that was not finished
            return alone, Path(key[1]) not in of_clients, -sizes[key]

        return [
            Network(
                name=kind.__name__,
                place=f"{named(Path(file), folder)}:{line}",
                code="by the project's own code while it ran",
                make=partial(make, (kind, file, line)),
            )
            for kind, file, line in sorted(whole, key=rank)
            if not _PARTS.search(kind.__name__)
        ]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _not_huge(parameters: int) -> None:
    if parameters > MOST_PARAMETERS:
        raise UserError(f"it has {parameters // 1_000_000} million parameters, more than are trained here")


@dataclass(eq=False)
class DefinedNetworks:
    """A project's networks; only imports and definitions in its files are executed. ``skipped``: why others failed."""

    app: App
    seed: int = 0
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._modules, self._failed = dict[Path, ModuleType](), dict[tuple[Path, str], str]()
        self.defaults = Defaults([file.tree for file in self.files.values()], self.app.config)

    @cached_property
    def files(self) -> Mapping[Path, SourceFile]:
        return parsed(self.app.folder)

    @cached_property
    def drawing(self) -> Drawing:
        return Drawing(list(self.files.values()), self.app.folder, self.seed, self.app.config)

    @cached_property
    def settings(self) -> dict[str, object]:
        """Return the project's settings, innermost key -> value; if several files have a key, the first one counts."""
        found = dict[str, object]()
        paths = (path for kind in ("yaml", "yml", "json") for path in sorted(self.app.folder.rglob(f"*.{kind}")))
        shown = (path for path in paths if not re.search(r"/\.", path.relative_to(self.app.folder.parent).as_posix()))
        for path in islice(shown, MOST_SETTINGS):
            left = [attempt(lambda: yaml.load(read_text(path, LARGEST_SETTINGS), PlainLoader))]  # noqa: B023
            while left:
                each = left.pop(0)
                for key, value in each.items() if isinstance(each, dict) else ():
                    if isinstance(value, dict):
                        left.append(value)
                    else:
                        found.setdefault(str(key).replace("-", "_"), value)
        return found

    @cached_property
    def of_clients(self) -> set[Path]:
        """Return the files that start or define clients of Flower, and the files that they import."""
        words = re.compile(r"\b(client_fn|NumPyClient|ClientApp)\b")
        own = {p for p, file in self.files.items() if file.starts & CLIENTS or words.search(ast.unparse(file.tree))}
        return own.union(*(self.files[path].imports for path in own))

    def networks(self, chosen: str = "") -> Iterator[Network]:
        """Yield the networks in the project's code, most used by clients first; or only ``chosen`` (``FILE:NAME``)."""
        found = dict[tuple[Path, str], list[tuple[Path, ast.Call]]]()
        for path, file in self.files.items():
            for node in file.tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and self._may_make(node):
                    found[path, node.name] = []
        names = {name: key for key in found for name in [key[1]]}
        for path, each in self._nodes():
            if isinstance(each, ast.Call) and called(each) in names:
                key = (path, called(each)) if (path, called(each)) in found else names[called(each)]
                found[key].append((path, each))
        if chosen:
            found = {key: found[key] for key in [self._key_of(found, chosen)]}
        elif parts := self._parts():
            found = {key: calls for key, calls in found.items() if calls or key[1] not in parts}

        def rank(key: tuple[Path, str]) -> tuple[int, int, str]:
            near = sum(path in self.of_clients for path, _ in found[key])
            return -near, -len(found[key]), str(key)

        for path, name in sorted(found, key=rank):
            calls = [*found[path, name][:MOST_CALLS], None]
            place = named(path, self.app.folder)
            for call in calls:
                code = name if call is None else ast.unparse(call[1])[:200]
                make = partial(self._made, path, name, call)
                yield Network(name=name, place=place, code=f"as {code}", make=make)
        for path, each in () if chosen else self._nodes():
            value = each.value if isinstance(each, ast.Assign | ast.Return) else None
            if isinstance(value, ast.Call) and _BUILT.search(dotted(value.func)):  # of a library
                place, code = f"{named(path, self.app.folder)}:{value.lineno}", f"as {ast.unparse(value)[:200]}"
                make = partial(self._made, path, "", (path, value))
                yield Network(name=called(value), place=place, code=code, make=make)

    def _key_of(self, found: Mapping[tuple[Path, str], Any], chosen: str) -> tuple[Path, str]:
        file, _, name = chosen.rpartition(":")
        key = (self.app.folder / file, name)
        if key not in found:
            known = ", ".join(f"{named(path, self.app.folder)}:{each}" for path, each in sorted(found)[:8])
            raise UserError(
                f"--network is expected to name a network of the project as FILE:NAME ({known or 'it has none'}), but"
                f" got {chosen!r}; correct it."
            )
        return key

    @cached_property
    def _classes(self) -> set[str]:
        return {*derived(self.files.values(), _BASES)}

    def _parts(self) -> set[str]:
        nodes = (node for file in self.files.values() for node in file.tree.body)
        inside = (
            each
            for node in nodes
            if isinstance(node, ast.ClassDef) and node.name in self._classes
            for each in ast.walk(node)
        )
        return {called(each) for each in inside if isinstance(each, ast.Call)}

    def _may_make(self, node: ast.FunctionDef | ast.ClassDef) -> bool:
        if isinstance(node, ast.ClassDef):
            return node.name in self._classes and not _PARTS.search(node.name)
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        returns = any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(node))
        makes = any(_BUILT.search(dotted(each.func)) or called(each) in self._classes for each in calls)
        return returns and makes and bool(_MAKES.search(node.name)) and not _OTHERWISE.search(node.name)

    def _nodes(self) -> Iterator[tuple[Path, ast.AST]]:
        """Yield (file, syntax node) of the project's code outside of network classes, clients' files first."""
        for path in sorted(self.files, key=lambda path: (path not in self.of_clients, str(path))):
            left: list[ast.AST] = [self.files[path].tree]
            while left:
                node = left.pop(0)
                yield path, node
                if not (isinstance(node, ast.ClassDef) and node.name in self._classes):
                    left += ast.iter_child_nodes(node)

    def _made(self, path: Path, name: str, call: tuple[Path, ast.Call] | None) -> nn.Module:
        kind = self._evaluated(call[1].func, path) if call and not name else getattr(self.module(path), name, None)
        if kind is None:
            raise UserError(f"{name} can't be defined alone: {self._failed.get((path, name), 'its module lacks it')}")
        args, kwargs = self._arguments(kind, *((path, None) if call is None else call))
        build = partial(kind, *args, **kwargs)
        with torch.device("meta"):
            many = attempt(lambda: _size(build()))
        if isinstance(many, int):
            _not_huge(many)
        return build()

    def _arguments(self, kind: Any, path: Path, call: ast.Call | None) -> tuple[list[Any], dict[str, Any]]:
        signature, nodes = inspect.signature(kind), [] if call is None else call.args
        args = [self._value(each, path) for each in takewhile(lambda each: not isinstance(each, ast.Starred), nodes)]
        keywords = [] if call is None else [each for each in call.keywords if each.arg]
        bound = signature.bind_partial(*args, **{str(each.arg): self._value(each.value, path) for each in keywords})
        given = bound.arguments
        for name, one in signature.parameters.items():
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                held = given.get(name, ())
                if any(value is UNKNOWN for value in (held.values() if isinstance(held, dict) else held)):
                    raise UserError(f"{name} is called with arguments that nothing states")
            elif given.get(name, UNKNOWN) is UNKNOWN:
                given.pop(name, None)
                if one.default is one.empty:
                    kind = vars(self.module(path)).get(one.annotation, one.annotation)
                    given[name] = kind() if is_dataclass(kind) and isinstance(kind, type) else self.usual(name)
        return list(bound.args), bound.kwargs

    def _value(self, node: ast.expr, path: Path) -> Any:
        value = attempt(partial(self._evaluated, node, path))
        return self.defaults.value(node) if isinstance(value, Failure) else value

    def _evaluated(self, node: ast.expr, path: Path) -> Any:
        return eval(compile(ast.Expression(node), str(path), "eval"), vars(self.module(path)))

    def usual(self, name: str) -> Any:
        """Return a value for the constructor's argument ``name``, set or typical; ``UserError`` if there is none."""
        if name in self.settings:
            return self.settings[name]
        if (known := self.defaults.value(ast.Name(name))) is not UNKNOWN:
            return known
        usual = {
            r"^(num|n|number_of)?_?(class|label|output|target|categor)(es|s|ies)?$|^out(put)?_?(dim|size|features)?$": (
                self.drawing.classes or 10
            ),
            r"^(in(put)?|num|n|img|image)?_?(channels?|planes|ch)$": self.drawing.colors or 3,
            r"^(in(put)?|num|n)_?(dim|size|features|shape)$|^features?(_?(count|num|dim|size))?$": (
                self.drawing.features or 10
            ),
            r"vocab|num_embeddings": 1000,
            r"kernel": 3,
            r"stride|groups": 1,
            r"heads": 4,
            r"layers|depth|blocks": 2,
            r"hidden|embed|d_model|dim|width|units|size": 64,
            r"drop|^p$": 0.1,
            r"seq|len|steps": 16,
            r"^device$": "cpu",
            r"^(lr|learning_rate)$": 0.01,
            r"pretrained|bidirectional|freeze": False,
        }
        for pattern, value in usual.items():
            if re.search(pattern, name.lower()):
                return value
        if _SETTINGS.search(name):
            return GuessedSettings(self)
        raise UserError(f"its constructor needs {name}, for which nothing states a value")

    def module(self, path: Path) -> ModuleType:
        """Return a module with the imports, definitions and assignments of the file at ``path`` that do not fail."""
        if path in self._modules:
            return self._modules[path]
        module = self._modules[path] = ModuleType(f"{path.stem}_alone_{len(self._modules)}")
        vars(module).update(__file__=str(path), __builtins__=__builtins__)
        sys.modules[module.__name__], words = module, sys.argv  # where dataclasses look, and parsers of options
        sys.argv = [str(path)]
        try:
            for node in filter(self._is_plain, self.files[path].tree.body):
                if isinstance(node, ast.Import | ast.ImportFrom) and self._bound(node, path):
                    continue
                ended = attempt(lambda: exec(compile(ast.Module([node], []), str(path), "exec"), vars(module)))  # noqa: B023
                if isinstance(ended, Failure) and isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self._failed[path, node.name] = ended.reason
        finally:
            sys.argv = words
        return module

    def _is_plain(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.If | ast.Try) and not (isinstance(node, ast.If) and guards_main(node)):
            others = [each for handler in getattr(node, "handlers", ()) for each in handler.body]
            return all(
                self._is_plain(each) or isinstance(each, ast.Pass) for each in (*node.body, *node.orelse, *others)
            )
        starts = isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(each, ast.Call) and called(each) in STARTS for each in ast.walk(node)
        )
        return isinstance(node, _PLAIN) and not starts

    def _bound(self, node: ast.Import | ast.ImportFrom, path: Path) -> bool:
        names, level = vars(self.module(path)), getattr(node, "level", 0)
        if isinstance(node, ast.Import):
            places = [(alias, self._own(alias.name, 0, path)) for alias in node.names]
            for alias, place in places:
                if place is not None and (alias.asname or "." not in alias.name):
                    names[alias.asname or alias.name] = self.module(place)
            return all(place is not None for _, place in places)
        place = self._own(node.module or "", level, path)
        inner = [self._own(f"{node.module or ''}.{alias.name}".strip("."), level, path) for alias in node.names]
        for alias, own in zip(node.names, inner, strict=True):
            held = {} if place is None else vars(self.module(place))
            if alias.name == "*":
                names |= {key: value for key, value in held.items() if not key.startswith("_")}
            elif alias.name in held:
                names[alias.asname or alias.name] = held[alias.name]
            elif own is not None:
                names[alias.asname or alias.name] = self.module(own)
        return place is not None or any(inner)

    def _own(self, module: str, level: int, near: Path) -> Path | None:
        inner, folder = Path(*filter(None, module.split("."))), self.app.folder
        if not inner.parts:
            return None
        roots = [near.parents[level - 1]] if level else [near.parent, folder, folder / "src", *near.parent.parents[:2]]
        places = [place for root in roots for place in (root / f"{inner}.py", root / inner / "__init__.py")]
        return next((place for place in places if place in self.files), None)


class GuessedSettings:
    """Stand-in for unknown settings: each attribute or key has a value typical of its name, such as 0.01 for lr."""

    def __init__(self, defined: DefinedNetworks) -> None:
        self._defined = defined

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self._defined.usual(name.replace("-", "_"))
        except UserError:
            return GuessedSettings(self._defined) if default is None else default

    __getitem__ = get

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)
