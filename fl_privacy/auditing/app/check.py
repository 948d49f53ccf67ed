"""Find what an app needs from its code, without running it: packages, Python, Flower's names, data, network."""

import ast
import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fl_privacy.auditing.app.bundle import MOST_NODES, ROUNDS_KEYS, App, is_importable
from fl_privacy.auditing.app.review import NETWORK
from fl_privacy.auditing.app.scripts import (
    EARLIER,
    Scripts,
    SourceFile,
    called,
    constant,
    dotted,
    find_scripts,
    guards_main,
    parsed,
    reached,
)
from fl_privacy.errors import visible

_NOT_PUBLISHED = re.compile(
    r"(my_?)?(data(set|loader|_?utils|_loader)?s?|utils?|helpers?|common|configs?|settings|models?|nets?|networks?"
    r"|clients?|servers?|strateg(y|ies)|train(ing|er)?|tasks?|preprocess(ing)?|src|core|lib|app|constants)"
)
"""Names of a project's own modules, which no package index has under this meaning."""

TABLES = ("read_csv", "read_table", "read_excel", "read_parquet", "read_json", "read_feather", "read_pickle")
"""Functions of pandas that read a file."""

MOST_UP = 3  # number of folders above an app's in which modules of its own are looked for

_FILES = {"load", "loadtxt", "genfromtxt", "loadmat", "open", "ImageFolder", "load_from_disk", "imread"}
_DATA = re.compile(
    r"\.(csv|tsv|txt|npy|npz|pkl|pickle|joblib|json|jsonl|parquet|pt|pth|mat|xlsx?|h5|hdf5|arff|zip|data)$", re.I
)
_WRITES = re.compile(r"to_(csv|parquet|pickle|json|disk)$|save|dump|write_text$|copy")
_PREPARES = re.compile(r"prep|split|part|generat|creat|make|build|download|data", re.I)
_HUB = {"load_dataset", "FederatedDataset"}
_FETCHED = re.compile(r"^fetch_\w+$|^load_data$")
_VISION = re.compile(r"(^|\.)(datasets)\.([A-Z]\w+)$")


@dataclass(frozen=True, kw_only=True)
class DataAsked:
    """A call that loads a data set or file; ``there``: ``True`` if the app has the file, ``None`` if unknown."""

    what: str
    where: str
    there: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """Packages, data and settings that an app's code needs, and those that are missing on this machine."""

    app: str
    runs: str
    missing: dict[str, str] = field(default_factory=dict)  # missing imported name -> requirement, needed at the start
    later: dict[str, str] = field(default_factory=dict)  # the same for imports not needed at the start
    versions: list[str] = field(default_factory=list)  # sentences on requirements that installed packages do not meet
    python: str = ""  # version that the app requires, if this Python does not meet it
    modules: list[str] = field(default_factory=list)  # modules named in pyproject.toml that the folder lacks
    above: dict[str, str] = field(default_factory=dict)  # imported module -> the outer folder that has it
    lent: list[str] = field(default_factory=list)  # earlier names of Flower that the app uses, as ``module.name``
    data: list[DataAsked] = field(default_factory=list)
    network: list[str] = field(default_factory=list)
    nodes: int = 0  # number that the app names, or 0
    rounds: int = 0  # number that the app names, or 0

    def stops_with(self, *, stand_in: bool) -> str:
        """Return why an audit can't start, in a sentence, or ""; ``stand_in`` replaces missing packages."""
        return self.stops if self.modules or not stand_in else ""

    @property
    def stops(self) -> str:
        """Return why an audit can't start, and the remedy, in a sentence, or ""."""
        if self.modules:
            return (
                f"The app {self.app} is expected to have the module{'s' * (len(self.modules) > 1)}"
                f" {', '.join(self.modules)}, which its pyproject.toml names, but its folder has none: correct the name"
                " there."
            )
        if not self.missing:
            return ""
        own = [name for name in self.missing if _NOT_PUBLISHED.fullmatch(name) and self.missing[name] == name]
        if own := list(self.above) or own:
            places = os.pathsep.join(dict.fromkeys(self.above.values()))
            holds = f"={places}, which holds" if places else " to the folder that holds"
            return (
                f"The app {self.app} imports {', '.join(own)}, of its own, which its folder does not have: set"
                f" PYTHONPATH{holds} {'them' if len(own) > 1 else 'it'}."
            )
        are, them = ("are", "them") if len(self.missing) > 1 else ("is", "it")
        return (
            f"The app {self.app} imports {', '.join(self.missing)}, which {are} not installed here:"
            f" run {install(self.missing.values())}, or set PYTHONPATH to the folder that holds {them}."
        )

    def as_plain(self) -> dict[str, Any]:
        return {**asdict(self), "stops": self.stops}

    def in_words(self) -> str:
        lines = [f"{self.app}: {self.runs}; its code was read, not run."]
        lines += [f"Stops: {self.stops}"] if self.stops else ["Packages: all that it imports at its start are here."]
        if self.later:
            lines.append(f"Not installed, and not needed at the start: {install(self.later.values())}")
        lines += [f"Version: {each}" for each in self.versions]
        if self.python:
            lines.append(f"Python: it asks for {self.python}, and this is {platform.python_version()}.")
        if self.lent:
            lines.append(f"Flower {metadata.version('flwr')} has moved, and lends: {', '.join(self.lent)}.")
        named = [each for each in self.data if not each.there]
        lines += [f"Data: {each.what} ({each.where}){', which is not there' * (each.there is False)}" for each in named]
        if named:
            lines.append(
                "Data that are not there: --mirror DIR has sets by their hub name, --node-config 'key=\"path\"' gives a"
                " path to clients, --stand-in draws examples instead."
            )
        if self.network:
            lines.append(f"The sandbox has no network: {', '.join(self.network)} will fail there.")
        clients, rounds = self.nodes or "not named; 10 unless --nodes says", self.rounds or "not named"
        return "\n".join(map(visible, [*lines, f"Clients: {clients}. Rounds: {rounds}."]))


def install(requirements: Iterable[str]) -> str:
    """Return the command that installs ``requirements``."""
    words = [f"'{each}'" if re.search(r"[<>=\[!~ ;]", each) else each for each in dict.fromkeys(requirements)]
    return f"pip install {' '.join(words)}"


def stops_of(app: App) -> str:
    """Return why an app can't start, in a sentence; empty if nothing is known to stop it."""
    return check_app(app).stops


def check_app(app: App) -> Check:
    """Find what ``app`` needs and what is missing here, from its code; none of it is run or imported."""
    files = parsed(app.folder)
    begun, modules = entries(app, files)
    near = reached(begun, files)
    own = {part.removesuffix(".py") for path in files for part in path.relative_to(app.folder).parts}
    own |= sys.stdlib_module_names
    asked = {_normal(wanted.name): text for wanted, text in _requirements(app.dependencies)}
    needed, optional = _imports(near)
    calls = [(node, file) for file in near for node in ast.walk(file.tree) if isinstance(node, ast.Call)]
    rounds = next((app.config[key] for key in ROUNDS_KEYS if key in app.config), 0)

    def absent(names: Iterable[str]) -> dict[str, str]:
        found = {name: EARLIER["distributions"].get(name, name.replace("_", "-")) for name in sorted({*names} - own)}
        wanted = {name: asked.get(_normal(text), asked.get(_normal(name), text)) for name, text in found.items()}
        return {name: text for name, text in wanted.items() if not is_importable(name)}

    unmet = ""
    with suppress(InvalidSpecifier):
        unmet = "" if SpecifierSet(app.python).contains(platform.python_version()) else app.python
    missing = absent(needed - set(EARLIER["trackers"]))
    outer = [each for each in app.folder.parents[:MOST_UP] if each not in {Path("/"), Path(tempfile.gettempdir())}]
    missing = {name: text for name, text in missing.items() if name not in app.renamed} if missing else {}
    around = [(each, name) for each in outer[::-1] for name in missing if not {name, _normal(name)} & asked.keys()]
    held = [(each, name) for each, name in around if any(each.glob(f"{name}.py")) or any(each.glob(f"{name}/*.py"))]
    data = chain.from_iterable(_asked(node, file, app) for node, file in calls)
    others = ", not the modules that its pyproject.toml names" * bool(app.misnamed)
    return Check(
        app=app.name,
        runs=app.scripts.in_words(app.folder).rstrip(".") if app.scripts else f"{app.server} and {app.client}{others}",
        missing=missing,
        later={name: text for name, text in absent(optional | needed).items() if name not in missing},
        versions=list(_unmet(app.dependencies)),
        python=unmet,
        modules=modules,
        above={name: str(each) for each, name in held},
        lent=sorted(set(_lent(near))),
        data=list({each.what: each for each in data}.values()),
        network=sorted((needed | optional) & NETWORK - {*EARLIER["trackers"]}),  # which are switched off there
        nodes=min(app.nodes or 0, MOST_NODES),
        rounds=rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else 0,
    )


def entries(app: App, files: Mapping[Path, SourceFile]) -> tuple[list[Path], list[str]]:
    """Return the files of the server and client apps, and modules that pyproject.toml names but that are missing."""
    if app.scripts is not None:
        return [app.scripts.server, *app.scripts.clients], []
    found, absent = [], []
    for reference in filter(None, (app.server, app.client)):
        package, *within = reference.partition(":")[0].split(".")
        roots = (Path(app.renamed.get(package, app.folder / package)), app.folder / "src" / package)
        inner = [root.joinpath(*within) for root in roots]
        places = [path for each in inner for path in (each.with_suffix(".py"), each / "__init__.py")]
        there = next((path for path in places if path in files), None)
        if there is not None:
            found.append(there)
        elif not any(path.exists() for path in places) and not is_importable(package):
            absent.append(f"{reference.partition(':')[0]} (of {reference})")
    return found, list(dict.fromkeys(absent))


def reached_by(app: App, *also: Path) -> list[SourceFile]:
    """Return the files that server, clients and ``also`` import; all files if server and clients are not found."""
    files = parsed(app.folder)
    begun = [] if app.renamed else entries(app, files)[0]  # imports by another name lead nowhere
    return reached([*begun, *also] if begun else list(files), files)


def preparing(app: App, why: str, drawn: Iterable[str]) -> Scripts | None:
    """Find the project's own script that makes its missing data, with the script's arguments.

    ``why``: error of the project, which may name the script. ``drawn``: missing files, one of which the script may
    write. ``None`` if there is no such script.
    """
    files, names = parsed(app.folder), {Path(each).name for each in drawn if _DATA.search(each)}
    near = {each.path for each in reached_by(app)}
    asked = [*re.findall(r"[\w-]+\.py\b", why)]

    def makes(path: Path) -> bool:
        written = {text for each in reached([path], files) if each.path not in near for text in _written(each.tree)}
        if not _PREPARES.search(path.stem):
            written = {each for each in written if not each.startswith("*.")}  # of any name
        return any(fnmatch(name, each) for each in written for name in names)

    def rank(path: Path) -> tuple[bool, bool, str]:
        return path.name not in asked, not _PREPARES.search(path.stem), str(path)

    alone = (path for path, each in files.items() if path not in near and each.is_script and not each.starts)
    found = sorted((path for path in alone if path.name in asked or makes(path)), key=rank)
    here = [path.relative_to(app.folder) for path in found[:1]]
    return find_scripts(app.folder, server=here[0], clients=here) if here else None


def _written(tree: ast.Module) -> Iterator[str]:
    """Yield the names of files that code writes, with ``*`` for each value that an f-string inserts."""
    assigned, nodes = defaultdict[str, list[ast.AST]](list), [*ast.walk(tree)]
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            assigned[dotted(target)].append(node.value)  # type: ignore[attr-defined]
    for node in (node for node in nodes if isinstance(node, ast.Call)):
        given: list[ast.AST] = [node.func, *node.args, *(each.value for each in node.keywords)]
        modes = {
            text for each in given if isinstance(text := constant(each), str) and re.fullmatch("[wax][bt+]*", text)
        }
        if _WRITES.match(called(node)) or (called(node) == "open" and modes):
            inner = [each for one in given for each in ast.walk(one)]
            held = [value for each in inner for value in assigned[dotted(each)] if dotted(each)]
            for each in chain(inner, *map(ast.walk, held)):
                parts = each.values if isinstance(each, ast.JoinedStr) else [each]
                texts = (str(one.value) if isinstance(one, ast.Constant) else "*" * (len(parts) > 1) for one in parts)
                if _DATA.search(text := "".join(texts)):
                    yield text.rpartition("/")[2]


def _imports(files: Sequence[SourceFile]) -> tuple[set[str], set[str]]:
    """Return the names of modules imported at the start, and in functions, ``if`` or ``try``."""
    needed, optional = set[str](), set[str]()

    def visit(body: Iterable[ast.stmt], into: set[str]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                into.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                if not node.level and node.module:
                    into.add(node.module.partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try):
                visit([each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)], optional)
            elif isinstance(node, ast.If):
                visit([*node.body, *node.orelse], into if guards_main(node) else optional)
            elif isinstance(node, ast.ClassDef | ast.With):
                visit(node.body, into)

    for file in files:
        visit(file.tree.body, needed)
    return needed, optional - needed


def _requirements(texts: Iterable[str]) -> Iterator[tuple[Requirement, str]]:
    for text in texts:
        with suppress(InvalidRequirement):
            yield Requirement(text), text


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()


def _unmet(texts: Iterable[str]) -> Iterator[str]:
    for wanted, text in _requirements(texts):
        with suppress(metadata.PackageNotFoundError):
            here = metadata.version(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate()
            if applies and not wanted.specifier.contains(here, prereleases=True):
                yield f"it asks for {text}, and {here} is installed."


def _lent(files: Sequence[SourceFile]) -> Iterator[str]:
    spec = importlib.util.find_spec("flwr")
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else Path()
    places = {home: folder.joinpath(*home.split(".")[1:]) for home in EARLIER["homes"]}
    there = {home for home, place in places.items() if (place / "__init__.py").exists()}
    homes = {home for home, place in places.items() if not place.with_suffix(".py").exists()} - there
    for node in chain.from_iterable(ast.walk(file.tree) for file in files):
        if isinstance(node, ast.ImportFrom) and node.module in homes:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in homes)


def _asked(node: ast.Call, file: SourceFile, app: App) -> Iterator[DataAsked]:
    name, last, given = dotted(node.func)[-80:], called(node), {each.arg: each.value for each in node.keywords}
    first = node.args[0] if node.args else given.get("dataset", given.get("path", given.get("filepath_or_buffer")))
    where = f"{file.path.relative_to(app.folder).as_posix()}:{node.lineno}"
    text = constant(first)
    known = repr(text) if isinstance(text, str) else ""
    if last in _HUB:
        yield DataAsked(what=f"{last}({known or '...'})", where=where)
    elif (found := _VISION.search(name)) and "keras" not in name:
        yield DataAsked(what=f"torchvision's {found[3]}", where=where)
    elif _FETCHED.match(last) and ("keras" in name or last.startswith("fetch_")):
        yield DataAsked(what=f"{name}({known})", where=where)
    elif isinstance(text, str) and (last in TABLES or (last in _FILES and _DATA.search(text))):
        mode = str(constant(node.args[1])) if last == "open" and node.args[1:] else ""
        if not set(mode) & set("wax"):
            there = any(os.path.exists(place / text) for place in (app.folder, file.path.parent))  # noqa: PTH110  (any text)
            yield DataAsked(what=f"{last}({text!r})", where=where, there=there)
    elif last in TABLES:
        yield DataAsked(what=f"{last}({dotted(first) if first is not None else ''})", where=where)
