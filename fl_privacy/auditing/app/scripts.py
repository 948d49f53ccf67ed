"""Find the scripts that start Flower in a project without the app format, from the files on disk."""

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import decode_source
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fl_privacy.auditing.app.stated import LEFT_OUT, MOST_BYTES, MOST_LISTED, MOST_TOGETHER, OptionsStated, allowed
from fl_privacy.errors import UserError
from fl_privacy.files import shipped

SIMULATIONS = {"start_simulation", "run_simulation"}
SERVERS = {"start_server"}
CLIENTS = {"start_client", "start_numpy_client"}
STARTS = SIMULATIONS | SERVERS | CLIENTS  # names of Flower's functions that start a simulation, a server or a client

CLIENT_CLASSES = {"NumPyClient", "Client"}

MOST_FILES = 2000

EARLIER: Mapping[str, Any] = shipped(__file__, "earlier_names.yaml")

MOST_PLACES = 6  # largest number of folders that are added to a project's search path

_DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
_LIKELY = ("main", "simulation", "simulate", "sim", "run", "app", "server")
_OF_CLIENT = re.compile(
    r"^(partition|client|node|site|user|worker|hospital)?[-_]?(cid|id|idx|index|no|num|number|rank|partition)?$"
)
_COUNT = re.compile(
    r"^(num|n|number|total|min|minimum)[-_]?((of|fit|eval|evaluate|available)[-_]?)*(clients|partitions|nodes|users|workers|sites)$"
    r"|^(client|partition|node|user|worker)s?[-_](count|total)$"
)
_ENDS = re.compile(r"(.*[-_])?(end|stop|until)([-_]|$)")
_USUAL = [(re.compile(pattern), value) for pattern, value in EARLIER["usual"].items()]

_OF_TYPE = {"int": "1", "float": "0.1"}
_FROM_ONE = re.compile(r"(start|begin|count)\w* (from|at|with) (1|one)\b", re.IGNORECASE)
_NUM = re.compile(r"num(?!ber)", re.IGNORECASE)
_EXAMPLE = re.compile(r"""(?:e\.g\.|such as|example|like)[,:]?\s+['"`]?([\w./-]+\w)""", re.IGNORECASE)
_PATH = re.compile(r"(^|[-_])(dir|directory|folder|root)$")
_COMMAND = re.compile(r"(\w+\.)?(command|option)\b")
_ADDRESS = re.compile(r"(^|[-_])(address|addr|ip|host|url)$")


class NoScriptError(UserError):
    """A project's functions start Flower, but no script of it calls them when it is run."""


@dataclass(frozen=True, kw_only=True)
class Scripts:
    """The scripts of a project to run, with their command lines.

    Attributes:
        server: script or notebook that starts the simulation or the server; the first client if none does.
        clients: scripts that each start one client, assigned to clients in turn; empty for a simulation.
        server_arguments, client_arguments: their command lines; ``{partition}`` is a client's number, ``{nodes}`` the
            number of clients.
        notes: sentences on what was chosen among several.
        longest: seconds that a script takes at most to start Flower.
    """

    server: Path
    clients: tuple[Path, ...] = ()
    server_arguments: tuple[str, ...] = ()
    client_arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    longest: float = math.inf

    def works_in(self, folder: Path) -> Path:
        here = self.server.parent
        return Path() if here == folder or (here / "__init__.py").exists() else here.relative_to(folder)

    def in_words(self, folder: Path) -> str:
        names = [named(path, folder) for path in (self.server, *self.clients)]
        said = f"The project has no app format of Flower: {names[0]} is run"
        if self.server in self.clients:
            said = f"In place of a server of the project, FedAvg with usual settings asks {', '.join(names[1:])}"
        elif self.clients:
            said += f" as the server, and {', '.join(names[1:])} as the client{'s' * (len(names) > 2)}"
        given = " ".join(self.client_arguments or self.server_arguments)
        said += f" with the arguments {given}" if given else ""
        return " ".join([f"{said}.", *self.notes])


@dataclass(frozen=True)
class SourceFile:
    """A parsed file of a project, and the other files of the project that it imports."""

    path: Path
    tree: ast.Module
    imports: frozenset[Path] = field(default=frozenset(), compare=False)

    @cached_property
    def flower(self) -> set[str]:
        found = set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                flower = [alias for alias in node.names if alias.name.partition(".")[0] == "flwr"]
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in flower}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
                found |= STARTS if any(alias.name == "*" for alias in node.names) else set()
                found |= {alias.asname or alias.name for alias in node.names}
        return found

    @cached_property
    def starts(self) -> set[str]:
        return {called(node) for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.begins(node)}

    def begins(self, node: ast.Call) -> bool:
        return called(node) in STARTS and dotted(node.func).partition(".")[0] in self.flower

    @cached_property
    def is_script(self) -> bool:
        guarded = any(isinstance(node, ast.If) and guards_main(node) for node in self.tree.body)
        notebook = self.path.suffix == ".ipynb" and bool(self.starts)
        return notebook or guarded or any(map(self.begins, self._calls))

    @cached_property
    def entry(self) -> str:
        """Return the name of the first unused function that starts Flower and needs no arguments; empty if none."""
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and all(
                _COMMAND.match(ast.unparse(each)) for each in node.decorator_list
            ):
                args, calls = node.args, (each for each in ast.walk(node) if isinstance(each, ast.Call))
                free = len(args.posonlyargs + args.args) == len(args.defaults) and None not in args.kw_defaults
                if free and node.name not in used and any(map(self.begins, calls)):
                    return node.name
        return ""

    @property
    def calls_imported(self) -> bool:
        imported = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom))
        names = {alias.asname or alias.name for node in imported for alias in node.names}
        return any(called(each) in names for each in self._calls)

    @cached_property
    def is_idle(self) -> bool:
        """Return ``True`` if running the file calls nothing of the project, nor a start of Flower."""
        own = {each.name for each in self.tree.body if isinstance(each, _DEFINITIONS)}
        modules = {path.parent.name if path.stem == "__init__" else path.stem for path in self.imports}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                path = "." * getattr(node, "level", 0) + (getattr(node, "module", None) or "")
                inner = path.startswith(".") or {*path.split(".")} & modules
                names = [each for each in node.names if inner or {*each.name.split(".")} & modules]
                own |= {each.asname or each.name.partition(".")[0] for each in names}
        return not any(dotted(each.func).partition(".")[0] in own or self.begins(each) for each in self._calls)

    @cached_property
    def _calls(self) -> list[ast.Call]:
        run = (each for node in self.tree.body if not isinstance(node, _DEFINITIONS) for each in ast.walk(node))
        return [each for each in run if isinstance(each, ast.Call)]


def find_scripts(
    folder: Path,
    *,
    server: str | Path | None = None,
    clients: Sequence[str | Path] = (),
    server_arguments: Sequence[str] | None = None,
    client_arguments: Sequence[str] | None = None,
    but: Collection[Path] = (),
    alone: bool = True,
) -> Scripts | None:
    """Find the scripts of the project in ``folder`` that start Flower, without running them.

    Given scripts are relative to the folder. ``but``: scripts to leave out. ``alone=True`` also accepts clients without
    a server. ``None`` if no script starts Flower. ``UserError`` if a given script does not exist, or if functions would
    start a client or server, but no script calls them.
    """
    for path in (each for each in (server, *clients) if each is not None):
        if not (folder / path).is_file():
            raise UserError(f"--server, --client and --script expect files of {folder}, but got {path}; correct it.")
    files = parsed(folder)
    notes: list[str] = []
    if server is not None:
        chosen, of_clients = folder / server, [folder / path for path in clients]
    else:
        found = None
        for kind, lonely in (("is_script", False), ("calls_imported", False), ("is_script", alone), ("entry", False)):
            scripts = [path for path, each in files.items() if getattr(each, kind) and path not in but]
            starts = {path: set[str]().union(*(each.starts for each in reached([path], files))) for path in scripts}
            starts |= {path: CLIENTS for each in clients if (path := folder / each) in files}
            found = found or _chosen(folder, starts, files, notes, alone=lonely)
        if found is None:
            starts_of_all = set[str]().union(*(each.starts for each in files.values()))
            here = "server" if starts_of_all <= SERVERS else "client"
            if but or not starts_of_all or not (starts_of_all <= SERVERS or starts_of_all <= CLIENTS):
                return None
            raise NoScriptError(
                f"{folder} has code that starts a {here} of Flower, but no script that starts a client when it is run:"
                " name a folder that holds one, or name it by --client."
            )
        chosen, of_clients = found
        of_clients = [folder / path for path in clients] or of_clients

    def arguments(given: Sequence[str] | None, path: Path, *, of_client: bool) -> tuple[str, ...]:
        if given is not None:
            return tuple(given)
        near = [files[path], *(files[each] for each in files[path].imports)] if path in files else []
        return tuple(_guessed([each.tree for each in near], OptionsStated(folder, path).values, of_client=of_client))

    return Scripts(
        server=chosen,
        clients=tuple(of_clients),
        server_arguments=arguments(server_arguments, chosen, of_client=chosen in of_clients),
        client_arguments=arguments(client_arguments, of_clients[0], of_client=True) if of_clients else (),
        notes=tuple(notes),
    )


def cells_of(path: Path) -> list[str]:
    """Return the Python code of a script, or of each code cell of a notebook; ``UserError`` for an unreadable file."""
    try:
        if path.suffix != ".ipynb":
            return [decode_source(b"\n".join(path.read_bytes().splitlines()))]  # as Python: it reads lines first
        cells = [cell for cell in json.loads(path.read_bytes())["cells"] if cell.get("cell_type") == "code"]
        texts = (text for cell in cells if not _OF_SHELL.match(text := "".join(cell["source"])))
        return ["\n".join(_MAGIC.sub(r"\1pass", line) for line in text.splitlines()) for text in texts]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, SyntaxError) as error:
        raise UserError(f"{path} is expected to be a script or a notebook, but can't be read; repair it.") from error


_OF_SHELL = re.compile(r"\s*%%(?!time|capture)")
_MAGIC = re.compile(r"^(\s*)([%!].*|(pip3?|conda|apt-get|cd|ls|wget|unzip)\s+[\w./-].*|\w[\w.]*\?+$)")
"""Cells in another language, and IPython's own lines, also without a sign before them."""


def parsed(folder: Path, unread: list[str] | None = None) -> dict[Path, SourceFile]:
    """Parse a project's Python files and notebooks, without hidden ones, tests and files that can't be parsed.

    ``unread`` collects the names of files that can't be parsed or are too large; if it is given, tests are parsed, too.
    """
    found, together, gone = dict[Path, SourceFile](), 0, [] if unread is None else unread
    sources = chain(folder.rglob("*.py"), folder.rglob("*.ipynb"))
    for path in sorted(islice(sources, MOST_LISTED)):
        inner = path.relative_to(folder)
        left_out = unread is None and LEFT_OUT & set(inner.parts)
        if left_out or any(part.startswith(".") for part in inner.parts) or path.is_symlink() or not path.is_file():
            continue
        if len(found) >= MOST_FILES:
            gone.append(f"files after the first {MOST_FILES}")
            break
        try:
            if (size := path.stat().st_size) > min(MOST_BYTES, MOST_TOGETHER - together):
                most, whose = (MOST_BYTES, "") if size > MOST_BYTES else (MOST_TOGETHER, "with those before it ")
                gone.append(f"{inner.as_posix()} ({whose}larger than {most >> 10} KiB)")
                continue
            together += size
            found[path] = SourceFile(path, ast.parse("\n".join(cells_of(path))))
        except (UserError, SyntaxError, ValueError, RecursionError, MemoryError, OSError):
            gone.append(inner.as_posix())
    return {path: SourceFile(path, each.tree, frozenset(_imports(each, folder, found))) for path, each in found.items()}


def _imports(file: SourceFile, folder: Path, files: Mapping[Path, SourceFile]) -> Iterator[Path]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [base, *(f"{base}.{alias.name}".replace("..", ".") for alias in node.names)]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "flwr":  # the installed one is run, not a copy
                continue
            inner = Path(*(part for part in name.split(".") if part)) if name.strip(".") else Path()
            for root in {folder, file.path.parent, file.path.parent.parent}:
                for path in (root / inner.with_suffix(".py") if inner.parts else root, root / inner / "__init__.py"):
                    if path in files and path != file.path:
                        yield path


def reached(paths: Sequence[Path], files: Mapping[Path, SourceFile]) -> list[SourceFile]:
    """Return the files at ``paths`` and all that they import, directly or not."""
    seen, left = set(paths), [path for path in paths if path in files]
    found = []
    while left:
        found.append(files[left.pop()])
        new = found[-1].imports - seen
        seen |= new
        left.extend(new)
    return found


def _chosen(
    folder: Path, starting: Mapping[Path, set[str]], files: Mapping[Path, SourceFile], notes: list[str], *, alone: bool
) -> tuple[Path, list[Path]] | None:
    def best(kinds: set[str], words: Sequence[str]) -> list[Path]:
        def rank(path: Path) -> tuple[bool, bool, int, int, int, str]:
            place = next((n for n, word in enumerate(words) if word in path.stem.lower()), len(words))
            file, depth = files[path], len(path.relative_to(folder).parts)
            return file.is_idle, not file.starts & kinds, depth, place, len(path.stem), str(path)

        return sorted((path for path, starts in starting.items() if starts & kinds), key=rank)

    def note_others(paths: Sequence[Path], what: str, option: str) -> None:
        if others := ", ".join(named(path, folder) for path in paths[1:4]):
            notes.append(f"Others start a {what}, too ({others}): {option} chooses.")

    simulations, servers = best(SIMULATIONS, _LIKELY), best(SERVERS, ("server", *_LIKELY))
    servers.sort(key=lambda path: bool(starting[path] & CLIENTS))  # a server between others starts a client as well
    if simulations:
        note_others(simulations, "simulation", "--script")
        return simulations[0], []
    clients = best(CLIENTS, ("client",))
    if not clients or not (servers or alone):
        return None
    server = (servers or clients)[0]
    own = server.stem.lower().replace("server", "client")  # such as sim_client.py of sim_server.py
    clients.sort(key=lambda path: (path.parent != server.parent, path == server, path.stem.lower() != own))
    nearest = clients[0] if servers else server
    note_others(servers, "server", "--server")
    alike = [path for path in clients if _unnumbered(path, folder) == _unnumbered(nearest, folder)]
    near = [path for path in alike if path.parent == server.parent]
    return server, sorted(near or alike)


def _unnumbered(path: Path, folder: Path) -> str:
    """Return a script's path below ``folder`` without clients' numbers: ``client`` for client1.py and client-b.py."""
    inner = path.relative_to(folder).with_suffix("").as_posix().lower()
    return re.sub(r"[-_ ]?(\d+|(?<=[-_ ])[a-d]|one|two|three)(?=/|$|[-_ ])", "", inner)


def _guessed(
    trees: Sequence[ast.Module], stated: Callable[[Sequence[str]], list[str]], *, of_client: bool
) -> Iterator[str]:
    """Yield command-line words for options that have no usable default; ``stated(flags)`` lists known values.

    ``trees``: code of the scripts. ``of_client``: ``True`` if they start clients.
    """
    named = {to.id: node.value for each in trees for node, to in _assigned(each) if isinstance(to, ast.Name)}
    for tree in trees:
        asked = dict(_options(tree))
        own = [flag for flag in asked if of_client and _OF_CLIENT.match(flag.lstrip("-").lower())]
        own = [flag for flag in own if "iid" not in ast.unparse(asked[flag])]  # a way to divide data
        for flag in filter(None, asked):
            name, taken = flag.lstrip("-").lower(), {each.arg: each.value for each in asked[flag].keywords}
            among = taken.get("choices", taken.get("type"))
            among = among.args[0] if isinstance(among, ast.Call) and called(among) == "Choice" and among.args else among
            while isinstance(among, ast.Call) and called(among) in {"list", "sorted", "tuple", "keys"}:
                among = among.func.value if isinstance(among.func, ast.Attribute) else next(iter(among.args), None)
            among = named.get(dotted(among), among) if among is not None else None
            given = sorted(each, key=str) if isinstance(each := constant(among), set | dict) else each
            choices = given if isinstance(given, list | tuple) else ()
            kind = dotted(taken.get("type", tree))
            empty = constant(taken.get("default")) == 0 and bool(_ENDS.match(name))
            needed = not flag.startswith("-") or constant(taken.get("required")) is True or empty
            unset = not taken.keys() & {"default", "nargs"}  # None, unless it is given
            first = 1 if _FROM_ONE.search(str(constant(taken.get("help")))) else _first_of_range(taken.get("choices"))
            usual = str(first) if (text := usual_for(name)) and first is not None and "choices" in taken else text
            usual = next(iter(allowed([usual], name, kind, choices)), None)
            value: str | None = None
            if role := _role(choices, of_client=of_client):
                value = role
            elif flag in own and _NUM.search(flag) and not all(map(_NUM.search, filter(None, own))):  # next to its own
                value = "{nodes}"
            elif flag in own:
                one = f"{{partition+{first}}}" if first else "{partition}"
                value = f"{{partition:{'|'.join(map(str, choices))}}}" if choices else one
            elif needed:
                example = _EXAMPLE.search(str(constant(taken.get("help"))))
                last = "{partition}" if of_client else "." if _PATH.search(name) else "0"
                fitting = stated([str(constant(each)) for each in asked[flag].args]) if flag.startswith("-") else []
                fitting = allowed(fitting, name, kind, choices)
                alike = of_client and len({re.sub(r"\d+|(?<![a-z])[a-d](?![a-z])", "", each) for each in fitting}) == 1
                fitting = [f"{{partition:{'|'.join(fitting)}}}"] if alike and fitting[1:] else fitting[:1]
                known = usual, *fitting, *map(str, choices[:1]), None if first is None else str(first)
                value = next(filter(None, (*known, _OF_TYPE.get(kind), example and example[1], last)))
            elif unset:
                flags = [] if usual or kind not in _OF_TYPE else [str(constant(each)) for each in asked[flag].args]
                known = usual, *allowed(stated(flags) if flags else [], name, kind, choices)
                value = next(filter(None, known), None) if kind in _OF_TYPE and not _ENDS.match(name) else None
            if value is not None:
                many = constant(taken.get("nargs"))
                yield from [flag] * flag.startswith("-") + [value] * (
                    many if isinstance(many, int) and 0 < many < 100 else 1
                )
        if asked:
            return
    yield from _of_argv(trees[0], of_client=of_client) if trees else ()


def usual_for(name: str, *, of_client: bool = False) -> str | None:
    """Return a plausible value of a script's option ``name``, or ``None``; ``of_client``: for a client's script."""
    if of_client and name and _OF_CLIENT.match(name):
        return "{partition}"
    if _COUNT.match(name):
        return "{nodes}"
    return "127.0.0.1:8080" if _ADDRESS.search(name) else next((text for it, text in _USUAL if it.match(name)), None)


def _of_argv(tree: ast.Module, *, of_client: bool) -> Iterator[str]:
    """Yield values of ``sys.argv[1]`` and so on, guessed from names of variables to which the script assigns them."""
    lists = {dotted(to) for node, to in _assigned(tree) if dotted(node.value).endswith("argv")}
    names: dict[int, str] = {}
    for node in [*(node for node, _ in _assigned(tree)), tree]:
        name = dotted(node.targets[0]).rpartition(".")[2].lower() if isinstance(node, ast.Assign) else ""
        for each in ast.walk(node):
            if isinstance(each, ast.Subscript) and (dotted(each.value).endswith("argv") or dotted(each.value) in lists):
                place = constant(each.slice)
                names.setdefault(place if isinstance(place, int) else 0, name)
    compared = [each for each in ast.walk(tree) if isinstance(each, ast.Compare)]
    tests = [each for each in compared if "argv" in ast.unparse(each.left)]
    roles = _role([constant(each.comparators[0]) for each in compared], of_client=of_client)
    needed = [constant(each.comparators[0]) for each in tests if isinstance(each.ops[0], ast.NotEq | ast.Lt)]
    many = max((each - 1 for each in needed if isinstance(each, int)), default=0)  # or the script ends
    guarded = any("argv" in ast.unparse(each.test) for each in ast.walk(tree) if isinstance(each, ast.If | ast.IfExp))
    if not of_client and not roles and guarded and not many and not any(map(usual_for, names.values())):
        return
    for place in range(1, max([*names, many]) + 1):
        value = usual_for(names.get(place, ""), of_client=of_client)
        value = roles if place == 1 and value is None else value
        yield value or ("{partition}" if of_client and place == 1 else "1")


def _assigned(tree: ast.Module) -> Iterator[tuple[ast.Assign, ast.expr]]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    return ((node, to) for node in nodes for to in node.targets)


def _role(words: Iterable[object], *, of_client: bool) -> str | None:
    """Return which of the ``words`` lets a script start a client, or a server; ``None`` if not both are among them."""
    plain = [each for each in words if isinstance(each, str) and len(each) < 20]
    client, server = ([each for each in plain if kind in each.lower()] for kind in ("client", "server"))
    return (client if of_client else server)[0] if client and server else None


def _options(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield (long name, call that adds it) for each option of a parser; the name is "" if it takes no value."""
    for node in [*ast.walk(tree), *_of_fire(tree)]:
        if isinstance(node, ast.Call) and _ADDS.search(dotted(node.func)):
            flags = [text for each in node.args if isinstance(text := constant(each), str)]
            takes = flags and all(each.arg not in {"action", "is_flag"} for each in node.keywords)
            yield next((each for each in flags if each.startswith("--")), flags[0]) if takes else "", node


_ADDS = re.compile(r"\badd_argument$|^click\.(option|argument)$")


def _of_fire(tree: ast.Module) -> Iterator[ast.AST]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "Fire")
    run = {dotted(node.args[0]) for node in calls if node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in run:
            for each in node.args.args[: len(node.args.args) - len(node.args.defaults)]:
                kind = ast.unparse(each.annotation) if each.annotation else "str"
                text = f", help='such as {each.arg}'" * (kind == "str")  # of digits, Fire makes a number
                yield ast.parse(f"add_argument('--{each.arg}', required=True, type={kind}{text})", mode="eval").body


def _first_of_range(node: ast.AST | None) -> int | None:
    if not isinstance(node, ast.Call) or called(node) != "range":
        return None
    first = constant(node.args[0]) if len(node.args) > 1 else 0
    return first if isinstance(first, int) else None


def dotted(node: ast.AST) -> str:
    """Return the dotted path of a name or attribute, such as ``a.b.c``."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts += [node.id] if isinstance(node, ast.Name) else []
    return ".".join(reversed(parts))


def guards_main(node: ast.If) -> bool:
    """Return ``True`` for the statement ``if __name__ == "__main__"``."""
    return any(isinstance(each, ast.Constant) and each.value == "__main__" for each in ast.walk(node.test))


def called(node: ast.Call) -> str:
    """Return the last name of the called function, such as ``c`` of ``a.b.c()``."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal, or ``None``."""
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def named(path: Path, folder: Path) -> str:
    """Return ``path`` relative to ``folder`` if it is inside, else unchanged."""
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
