"""A Flower app in a folder or bundle: its pyproject.toml, server app and client app."""

import ast
import importlib.util
import os
import platform
import re
import sys
import tomllib
import weakref
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from fl_privacy.auditing.app.scripts import (
    EARLIER,
    MOST_PLACES,
    NoScriptError,
    Scripts,
    SourceFile,
    find_scripts,
    named,
    parsed,
)
from fl_privacy.auditing.app.stated import LARGEST_PROJECT, holders, requirements_of, table_in
from fl_privacy.errors import UserError, blamed_on, in_one_line
from fl_privacy.files import make_temporary, remove_temporary
from fl_privacy.files.foreign import expanded

if TYPE_CHECKING:
    from fl_privacy.auditing.app.stand_in import Drawing
    from fl_privacy.auditing.app.started import Started

LARGEST_BUNDLE, MOST_ENTRIES = 1 << 30, 20_000
"""Largest size of an unpacked bundle in bytes, and number of its files."""

MOST_NODES = 1000  # largest number of nodes from a file; ``--nodes`` may ask for more

ROUNDS_KEYS = ("num-server-rounds", "num-rounds", "num_server_rounds", "num_rounds", "rounds", "server-rounds")
"""Run config keys of the number of rounds, the likeliest first."""

Config = dict[str, bool | int | float | str]


@dataclass(frozen=True, kw_only=True)
class App:
    """A Flower app as its ``pyproject.toml`` describes it."""

    folder: Path
    name: str
    server: str  # reference such as ``package.app:app``
    client: str  # reference, too
    config: Mapping[str, bool | int | float | str]
    dependencies: tuple[str, ...] = ()
    python: str = ""  # value of ``requires-python``
    nodes: int | None = None  # number of nodes of the first simulation, if any
    scripts: Scripts | None = None  # files to run instead, if the project has no app format
    tried: tuple[Scripts, ...] | None = ()  # scripts run in vain; ``None`` if the user chose scripts
    by_fedavg: bool = False  # ``True`` if FedAvg asks its clients in place of its server
    misnamed: str = ""  # sentence on modules that ``pyproject.toml`` names wrongly; others are run

    @cached_property
    def renamed(self) -> dict[str, str]:
        """Map each missing package to a folder of another name with all modules that are imported from the package."""
        files, found = parsed(self.folder), dict[str, str]()
        imported = defaultdict[str, dict[str, set[str]]](lambda: defaultdict(set))  # package -> its modules -> names
        for node in (node for file in files.values() for node in _unguarded(file.tree)):
            for alias in node.names if isinstance(node, ast.Import) or not node.level else []:
                module, name = (alias.name, "*") if isinstance(node, ast.Import) else (node.module or "", alias.name)
                if "." in module:
                    imported[module.partition(".")[0]][module].add(name)
        for module, _, name in (each.partition(":") for each in (self.server, self.client) if "." in each):
            imported[module.partition(".")[0]][module].add(name.partition(".")[0])
        asked = {re.split(r"[^\w.-]", each)[0].replace("-", "_").lower() for each in self.dependencies}
        for package, modules in imported.items():
            held = {module.split(".")[1] for module in modules}
            few = len(held) < 1 + (f" {package}." not in self.misnamed)
            if not (few or package.lower() in asked or package in EARLIER["distributions"] or is_importable(package)):
                own, *places = ({*holders(self.folder, each, self.folder)} for each in (*held, package))
                both = [] if places[-1] else sorted(own.intersection(*places[:-1]))
                those = (each for each in both if all(_has(files, each, *pair) for pair in modules.items()))
                if (place := next(those, None)) is not None:
                    found[package] = place
        return found

    @property
    def notes(self) -> list[str]:
        """Return sentences on packages replaced by folders of another name, and on the scripts that are run."""
        found = [self.misnamed] if self.misnamed else []
        for name, place in self.renamed.items():
            given = "the project's folder" if place == str(self.folder) else named(Path(place), self.folder)
            found.append(f"It imports {name}, which is not here: {given} was imported.")
        return found if self.scripts is None else [*found, self.scripts.in_words(self.folder)]

    @classmethod
    def of(cls, app: "App", **given: Any) -> Self:
        """Copy ``app`` to this subclass; ``given``: values of the fields that the subclass adds."""
        return cls(**{each.name: getattr(app, each.name) for each in fields(App)} | given)

    def another(self, server_failed: bool = False) -> "App | None":
        """Return a copy that runs other scripts, or FedAvg if the server failed; ``None`` if nothing is left to try."""
        if server_failed and not (self.by_fedavg or (self.scripts and self.scripts.clients)) and self._is_legacy():
            return replace(self, by_fedavg=True)
        if self.tried is None:
            return None
        tried = (*self.tried, *([] if self.scripts is None else [self.scripts]))
        places = [(each.server, each.clients) for each in tried]
        servers, clients = [server for server, _ in places], [path for _, several in places for path in several]
        for but, alone in ((servers, False), (clients, False), (servers, True)):
            found = find_scripts(self.folder, but=but, alone=alone)
            if found is not None and (found.server, found.clients) not in places:
                return replace(self, scripts=found, tried=tried, config={}, by_fedavg=False)
        return None

    def _is_legacy(self) -> bool:  # by its clients, which any Flower's FedAvg can ask
        return any("client_fn" in ast.unparse(file.tree) for file in parsed(self.folder).values())

    def load(self, stops: Callable[["App"], str], drawing: "Drawing | None" = None) -> "Started":
        """Import server and client app, or run scripts until they would start Flower.

        ``stops(app)``: why the app can't start, or "". ``drawing`` makes up data. ``UserError`` if loading fails.
        """
        from flwr.clientapp import ClientApp  # noqa: PLC0415
        from flwr.serverapp import ServerApp  # noqa: PLC0415

        from fl_privacy.auditing.app.started import Started, start_scripts, usual_server  # noqa: PLC0415

        try:
            with blamed_on(f"The app {self.name}"):
                self._lend_renamed()
                if self.scripts is not None:
                    started = start_scripts(self.scripts, self.folder)
                    return replace(started, server=usual_server(self.folder)) if self.by_fedavg else started
                server = usual_server(self.folder) if self.by_fedavg else self._loaded(self.server)
                client = self._loaded_apart(self.client)
        except UserError as error:
            raise UserError(self._why_not_loaded(error, stops)) from error.__cause__
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # such as a port that a sandbox has not
                raise UserError(f"The app {self.name} raised {in_one_line(error)} on import; correct it.") from error
            does = f"opens {error.filename}" if error.filename else f"raised {in_one_line(error)}"
            missing = ", but there is none" * bool(error.filename)
            raise UserError(
                f"The app {self.name} {does} when it is imported{missing}. It works in {Path.cwd()}: put the file"
                " there, or give the app a whole path."
            ) from error
        if not isinstance(server, ServerApp) or not isinstance(client, ClientApp):
            raise UserError(
                f"{self.server} and {self.client} are expected to be a ServerApp and a ClientApp of Flower, but are"
                f" {type(server).__name__} and {type(client).__name__}; correct pyproject.toml."
            )
        return Started(server=server, client=client, nodes=self.nodes)

    def _why_not_loaded(self, error: UserError, stops: Callable[["App"], str]) -> str:
        cause, said = error.__cause__, str(error)
        if isinstance(cause, ModuleNotFoundError):
            name, package = cause.name or "a module", (cause.name or "").partition(".")[0]
            lacks = "neither its folder nor this Python has: install what the app needs, or set PYTHONPATH to the"
            lacks += " folder that holds it"
            if "site-packages" in str(getattr(sys.modules.get(package), "__file__", "")) and package != name:
                lacks = f"the {package} here does not have: install the version of {package} that the app needs"
            places = [each.filename for each in extract_tb(cause.__traceback__) if "importlib" not in each.filename]
            if by := re.search(r"site-packages/(?!flwr/|fl_privacy/)(\w+)", places[-1]):
                lacks = f"imports {name}, which is not installed: install it, or the {by[1]} that the app asks for"
                name = by[1]
            said = stops(self) or f"The app {self.name} imports {name}, which {lacks}."
        if absent := re.match(r"Unable to load attribute (\S+) from module (\S+)", str(cause)):
            said = "The module {1} defines no {0}, which pyproject.toml names: correct the name there."
            said = said.format(*absent.groups())
        wrong = str(cause) if isinstance(cause, SyntaxError) else ""
        minor = 12 * ("f-string" in wrong) or 14 * ("types must be parenthesized" in wrong)
        if minor > sys.version_info.minor:
            said = (
                f"The app {self.name} is written for Python 3.{minor} or later ({in_one_line(cause or error)}), and"
                f" this is {platform.python_version()}: run fl-privacy with that Python."
            )
        if isinstance(cause, AttributeError | ImportError) and "flwr" in str(cause):
            for each in holders(self.folder, "flwr", self.folder):
                copy = named(Path(each) / "flwr", self.folder)
                said += f" The copy of Flower in {copy} is not run: the installed one is."
        return said

    def _lend_renamed(self) -> None:
        for package, place in self.renamed.items():
            sys.modules[package] = module = ModuleType(package)
            module.__path__ = [place]

    def _loaded(self, reference: str) -> Any:
        """Import the object ``module:attribute`` (``reference``); add folders of missing modules to ``sys.path``."""
        from fl_privacy.flower.inside.identity import loaded  # noqa: PLC0415

        sys.path += [str(each) for each in [self.folder / "src"] if each.is_dir()]
        for _ in range(MOST_PLACES):
            try:
                return loaded(reference, self.folder)
            except ModuleNotFoundError as error:
                near = self.folder.joinpath(*reference.partition(":")[0].split("."))
                places = [each for each in holders(self.folder, error.name or "", near) if each not in sys.path]
                if not places:
                    raise
                sys.path.append(places[0])
        return loaded(reference, self.folder)

    def _loaded_apart(self, reference: str) -> Any:
        """Import the app ``module:attribute`` (``reference``) with its own copies of modules, for its runs alone."""
        others = {name: sys.modules.pop(name) for name in modules_in(self.folder)}
        self._lend_renamed()
        try:
            app = self._loaded(reference)
        except (Exception, SystemExit):  # noqa: BLE001  (code that runs only once, such as one that makes a folder)
            for name in modules_in(self.folder):
                del sys.modules[name]
            sys.modules.update(others)
            return self._loaded(reference)
        own = {name: sys.modules[name] for name in others if name in sys.modules}
        sys.modules.update(others)
        with suppress(TypeError):  # an object that is no app is refused later

            class OwnModules(type(app)):  # type: ignore[misc]
                def __call__(self, *args: Any, **kwargs: Any) -> Any:
                    sys.modules.update(own)
                    try:
                        return super().__call__(*args, **kwargs)
                    finally:
                        sys.modules.update(others)

            app.__class__ = OwnModules
        return app

    def with_config(self, overrides: Sequence[str], rounds: int | None) -> Config:
        """Return the run config with ``overrides`` (key=value) and ``rounds``; ``UserError`` for new keys or types."""
        config: Config = dict(self.config)
        for key, value in read_pairs("--run-config", overrides).items():
            if key not in config:
                known = ", ".join(sorted(config)) or "none at all"
                raise UserError(f"--run-config is expected to set one of {known}, but got {key}; correct the key.")
            plain = float(value) if isinstance(config[key], float) and type(value) is int else value
            if type(config[key]) is not type(plain):
                raise UserError(
                    f"--run-config {key} is expected to be like {config[key]!r} of the app, but got {value!r}; text"
                    " goes in quotes."
                )
            config[key] = plain
        if rounds is not None:
            config |= dict.fromkeys([key for key in ROUNDS_KEYS if key in config][:1], rounds)
        return config


def _unguarded(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    left = [node]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            left += [*node.handlers, *node.orelse, *node.finalbody]
        else:
            left += ast.iter_child_nodes(node)


def _has(files: Mapping[Path, SourceFile], place: str, module: str, names: set[str]) -> bool:
    """Return whether ``module`` defines ``names`` if the folder ``place`` is its package."""
    inner, found = Path(place, *module.split(".")[1:]), set[str]()
    there = [files[path].tree for path in (inner.with_suffix(".py"), inner / "__init__.py") if path in files]
    for node in (node for tree in there for node in ast.walk(tree)):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != module):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    left = set() if "*" in found else names - found - {"*"}
    return all(os.path.exists(inner / each) or inner / f"{each}.py" in files for each in left)  # noqa: PTH110  (any text)


def modules_in(folder: Path) -> list[str]:
    """List the loaded modules and packages of the code in ``folder``, except installed ones and ``fl_privacy``."""

    def place(module: object) -> str:
        found = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        return f"{found}{os.sep}"  # also the folder itself

    inside = f"{folder}{os.sep}"
    places = {name: place(module) for name, module in list(sys.modules.items()) if name.split(".")[0] != "fl_privacy"}
    return [
        name for name, each in places.items() if each.startswith(inside) and "site-packages" not in each[len(inside) :]
    ]


def read_app(path: str | Path, chosen: Mapping[str, Any] | None = None) -> App:
    """Load the description of the app in a folder or bundle (.fab) without importing it.

    A folder without Flower's app format is searched for scripts that start Flower, then for a single subfolder in the
    format. ``chosen``: options of ``find_scripts``, or ``network=True`` to audit only a network; they have priority
    over the format. ``UserError`` if ``path`` is no Flower app.
    """
    place = expanded(path).absolute()
    if (chosen or {}).get("network") and place.is_dir():
        wanted = requirements_of(place, {})
        return App(folder=place, name=place.name, server="none:app", client="none:app", config={}, dependencies=wanted)
    if not place.is_file() or place.suffix != ".fab":
        options = dict(chosen or {})
        if place.is_dir() and (options.get("server") is not None or not _names_app(place / "pyproject.toml")):
            scripts = find_scripts(place, **options)
            if scripts is not None:
                asked = requirements_of(place, {})
                found = App(
                    folder=place, name=place.name, server="", client="", config={}, scripts=scripts, dependencies=asked
                )
                return replace(found, tried=None) if options else found
            projects = [each for each in islice(place.rglob("pyproject.toml"), MOST_ENTRIES) if _names_app(each)]
            inner = sorted(each.parent for each in projects if "/." not in str(each.relative_to(place.parent)))
            if len(inner) > 1:
                names = ", ".join(named(each, place) for each in inner[:4])
                raise UserError(f"{path} is expected to hold one app, but holds {len(inner)}: name one of {names}.")
            if not inner and (files := parsed(place)):
                starts = any(each.starts for each in files.values())
                raise NoScriptError(
                    f"{path} has code that starts Flower, but no script that does so when it is run; it may wait for a"
                    " button: write a script that calls it, and name it by --script."
                    if starts
                    else f"{path} is expected to have a script that starts clients, a server or a simulation of Flower,"
                    " but has none, unless by a changed copy of Flower: name one by --script, or a network by --network"
                )
            return _read(inner[0] if inner else place, path)
        return _read(place, path)
    folder = _unpacked(place)
    try:
        app = _read(folder, path)
    except BaseException:
        remove_temporary(folder)
        raise
    weakref.finalize(app, remove_temporary, folder)
    return app


def _names_app(project: Path) -> bool:
    return project.is_file() and (project.stat().st_size > LARGEST_PROJECT or b"serverapp" in project.read_bytes())


def _read(folder: Path, path: str | Path) -> App:
    project = folder / "pyproject.toml"
    if not project.is_file():
        raise UserError(
            "APP is expected to be a folder with Flower's pyproject.toml, or with scripts that start a simulation or"
            f" server of Flower, or a .fab file, but got {path}; correct the path."
        )
    try:
        if not project.stat().st_size <= LARGEST_PROJECT:
            most = LARGEST_PROJECT >> 10
            raise UserError(f"{project} is expected to have at most {most} KiB, but is larger; shorten it.")
        content = tomllib.loads(project.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # TOMLDecodeError, no UTF-8, or a number of 5,000 digits
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{project} is expected to be TOML, but is not ({said}); correct it.") from error
    flower = table_in(table_in(content, "tool"), "flwr")
    components, about = table_in(table_in(flower, "app"), "components"), table_in(content, "project")
    if not all(str(components.get(name, "")).partition(":")[0].strip(".") for name in ("serverapp", "clientapp")):
        raise UserError(
            f"{project} is expected to name serverapp and clientapp in [tool.flwr.app.components], or to lie in a"
            " folder with scripts that start a simulation or server of Flower, but does neither; add the names."
        )
    try:
        # dotted keys may exceed Python's recursion limit
        config = _flat(table_in(table_in(flower, "app"), "config"))
    except RecursionError as error:
        raise UserError(f"{project} is expected to have a flat run config, but goes deeper; make it flat.") from error
    federations = [each for each in table_in(flower, "federations").values() if isinstance(each, Mapping)]
    numbers = [table_in(each, "options").get("num-supernodes") for each in federations]
    nodes = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    given = (str(components["serverapp"]), str(components["clientapp"]))
    spelled = (_as_spelled(folder, given[0]), _as_spelled(folder, given[1]))
    server, client = there = _elsewhere(folder, spelled) or spelled
    misnamed = f"Flower does not run it: its pyproject.toml names {' and '.join(given)}, which are not there."
    return App(
        folder=folder,
        name=str(about.get("name", folder.name)),
        server=server,
        client=client,
        misnamed=""
        if there == given
        else f"{misnamed} Here {server} and {client} were taken: correct the names there.",
        config=config,
        dependencies=requirements_of(folder, content),
        python=str(about.get("requires-python", "")),
        nodes=min(nodes[0], MOST_NODES) if nodes else None,
    )


def _as_spelled(folder: Path, reference: str) -> str:
    """Correct underscores and capital letters in a module's name."""
    *within, last = reference.partition(":")[0].split(".")
    place = folder.joinpath(*within) if all(map(str.isidentifier, within)) else folder / last
    near = [
        each.stem for each in place.glob("*.py") if each.stem.lower().replace("_", "") == last.replace("_", "").lower()
    ]
    return reference.replace(f"{last}:", f"{near[0]}:") if len(near) == 1 else reference


def _elsewhere(folder: Path, references: tuple[str, str]) -> tuple[str, str] | None:
    """Correct the apps' references (``package.module:app``) if their package does not exist.

    The package is replaced by the only folder with both modules; ``None`` if there is no such folder, or it exists.
    """
    (package, *inner), (of_client, *others) = (each.partition(":")[0].split(".") for each in references)
    if not package.isidentifier():
        return None
    there = any(any(folder.rglob(f"{package}{end}")) for end in ("/", ".py")) or is_importable(package)
    if there or package != of_client or not (inner and others):
        return None
    places = [each for each in holders(folder, inner[-1], folder) if Path(each, f"{others[-1]}.py").is_file()]
    if len(places) != 1 or not all(part.isidentifier() for part in Path(places[0]).relative_to(folder).parts):
        return None
    near = [file for path, file in parsed(folder).items() if [str(path.parent)] == places == [str(folder)]]
    if any(isinstance(node, ast.ImportFrom) and node.level for file in near for node in ast.walk(file.tree)):
        return None
    before = "".join(f"{part}." for part in Path(places[0]).relative_to(folder).parts)
    server, client = (re.sub(r"^[\w.]*\.(?=\w+:)", lambda _: before, each) for each in references)
    return server, client


def is_importable(name: str) -> bool:
    """Return whether this Python has the module ``name``."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ValueError, ImportError):
        return False


def _unpacked(bundle: Path) -> Path:
    into = make_temporary("fl-privacy-app-")
    try:
        with zipfile.ZipFile(bundle) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > LARGEST_BUNDLE:
                most = LARGEST_BUNDLE >> 20
                raise UserError(f"{bundle} is expected to unpack to at most {most} MiB, but is larger; take data out.")
            if len(entries) > MOST_ENTRIES:
                raise UserError(f"{bundle} is expected to hold {MOST_ENTRIES} files at most, but has more; drop some.")
            for entry in entries:
                if not (into / entry.filename).resolve().is_relative_to(into.resolve()):
                    raise UserError(f"{bundle} is expected to stay in its folder, but has {entry.filename}; drop it.")
            archive.extractall(into)
    except Exception as error:  # damaged or encrypted: each compression has its own errors
        remove_temporary(into)
        if isinstance(error, UserError):
            raise
        raise UserError(f"{bundle} is expected to be a bundle of `flwr build`, but is none; build it anew.") from error
    return into


def _flat(nested: Mapping[str, Any], before: str = "") -> Config:
    found: Config = {}
    for key, value in nested.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found


def read_pairs(option: str, texts: Sequence[str]) -> Config:
    """Combine the key=value pairs in all of ``texts``; ``UserError``, which names ``option``, for any other text."""
    import click  # noqa: PLC0415

    from fl_privacy.flower.inside.identity import parse_config_args  # noqa: PLC0415

    found: Config = {}
    for text in texts:
        try:
            pairs = dict(parse_config_args([text]))
            if not pairs:
                raise ValueError("no pair")
        except (click.ClickException, ValueError) as error:
            raise UserError(f"{option} expects 'key=value key=\"text\"', but got {text!r}; write it so.") from error
        found |= pairs
    return found
