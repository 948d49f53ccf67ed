"""Run the scripts of a project without the app format, with Flower's starting functions replaced."""

import argparse
import ast
import builtins
import importlib
import inspect
import logging
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fl_privacy.auditing.app.lent import caller, code_of, is_installed
from fl_privacy.auditing.app.scripts import MOST_PLACES, Scripts, SourceFile, cells_of, named, usual_for
from fl_privacy.auditing.app.stated import OptionsStated, filled, holders
from fl_privacy.auditing.instrument.watch import replaced, state_kept
from fl_privacy.errors import UserError, blamed_on, in_one_line
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.inside.legacy import LegacyClient, LegacyFedAvg, NumPyClient, ServerAppComponents, ServerConfig
from fl_privacy.progress import within_seconds

USUAL_CLIENTS = 2  # number of clients of a server that names none, as in Flower's strategies

_OFFERED = re.compile(r"[\[(]([^\])]+)[\])]")  # choices or a default in a question, as in ``yes or no [y/n]``

_MOST_WORDS, WAITED = 200, 5.0  # letters of what is printed, and seconds to wait for threads, which may start Flower

_PLACES = (
    *("flwr.server", "flwr.server.app", "flwr.compat.server.app"),
    *("flwr.client", "flwr.client.app", "flwr.compat.client.app"),
    *("flwr.simulation", "flwr.simulation.app", "flwr.simulation.run_simulation"),
)
"""Modules that have starting functions, in this version of Flower or an earlier one."""

_STARTS = {
    "start_simulation": ("simulations", ("client_fn", "num_clients")),
    "run_simulation": ("simulations", ("server_app", "client_app", "num_supernodes")),
    "start_server": ("servers", ("server_address", "server", "config", "strategy")),
    "start_client": ("clients", ("client",)),
    "start_numpy_client": ("clients", ("client",)),
}
"""Starting function -> kind of its app, and names of its positional arguments (a client's without texts)."""


@dataclass(frozen=True)
class Started:
    """Server and client app that scripts would have started, and the number of clients if known; ``failed``: errors."""

    server: ServerApp
    client: ClientApp
    nodes: int | None
    failed: Sequence[str] = ()


class _AtStart(BaseException):
    """Ends a script where it would start Flower; the script's own ``except Exception`` does not catch it."""


_Calls = defaultdict[str, list[dict[str, Any]]]
"""Kind of an app -> arguments that scripts passed to the starting functions of this kind."""


def start_scripts(scripts: Scripts, folder: Path) -> Started:
    """Run the server's script until it would start Flower, and return apps that Flower can run.

    A client's script runs when that client is first asked, with its own copies of modules. ``UserError`` if a script
    raises an error, or ends without a start.
    """
    runner, calls = ScriptRunner(folder, scripts.longest), _Calls(list, servers=[{"strategy": _usual_strategy(folder)}])
    if scripts.server not in scripts.clients:
        calls = runner.run(scripts.server, scripts.server_arguments, nodes=len(scripts.clients) or USUAL_CLIENTS)
    if not calls["simulations"]:
        if not calls["servers"]:
            remedy = "name another by --script or --server, or its arguments by --server-args"
            raise runner.silent(scripts.server, "a simulation or a server", remedy)
        given, of_clients = calls["servers"][0], calls["clients"]
        if not scripts.clients and not of_clients:
            raise UserError(
                f"{named(scripts.server, folder)} starts a server, but no script of a client was found: give --client."
            )
        least = getattr(given.get("strategy"), "min_available_clients", USUAL_CLIENTS)
        nodes = max(least if isinstance(least, int) else 0, len(scripts.clients), len(of_clients), USUAL_CLIENTS)
        clients = _Clients(scripts, runner, of_clients, nodes)
        living: Any = ClientApp(client_fn=clients.client)
        living.unchanged = lambda: state_kept([made.get("client") for made in clients.made.values()])
        return Started(server_of(given, runner.failed), living, nodes, runner.failed)
    given = calls["simulations"][0]
    server, client = given.get("server_app"), given.get("client_app")
    if isinstance(server, ServerApp) and isinstance(client, ClientApp):
        return Started(server, client, _count(given.get("num_supernodes")), runner.failed)
    if not callable(given.get("client_fn")):
        raise UserError(
            f"{named(scripts.server, folder)} is expected to start a simulation with a client_fn or two apps, but gave"
            f" {', '.join(sorted(given)) or 'nothing'}: name another by --script."
        )
    many = _count(given.get("num_clients")) or _count(len(given.get("clients_ids") or ()))
    return Started(
        server_of(given, runner.failed), ClientApp(client_fn=_client_fn(given["client_fn"])), many, runner.failed
    )


def usual_server(folder: Path) -> ServerApp:
    """Return a FedAvg server with usual settings for the project in ``folder``."""
    return server_of({"strategy": _usual_strategy(folder)}, [])


def _usual_strategy(folder: Path) -> LegacyFedAvg:
    settings = usual_settings(code_of(folder))
    return LegacyFedAvg(on_fit_config_fn=settings, on_evaluate_config_fn=settings)


def usual_settings(code: str) -> Callable[[int], dict[str, Any]]:
    """Return a function from a round's number to plausible values of the settings that clients' ``code`` reads."""
    names = {*re.findall(r"""\bconfig\[["'](\w+)["']]""", code)}
    usual = {name: text for name in names if re.fullmatch(r"[\d.]+", text := usual_for(name) or "")}
    rounds = {name for name in names if re.search(r"round|rnd", name)}
    return lambda number: {n: ast.literal_eval(text) for n, text in usual.items()} | dict.fromkeys(rounds, number)


def _count(number: Any) -> int | None:
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


def server_of(given: dict[str, Any], failed: list[str]) -> ServerApp:
    """Return the server app that a script starts with arguments ``given``; ``failed`` collects evaluations' errors."""
    config = given.get("config")
    if not isinstance(config, ServerConfig):  # a dictionary or an object of earlier versions of Flower
        plain = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        config = ServerConfig(num_rounds=_count(plain.get("num_rounds")) or 1, round_timeout=plain.get("round_timeout"))
    names = ("strategy", "client_manager") if given.get("server") is None else ("server",)
    kept: dict[str, Any] = {name: given.get(name) for name in names}
    for held in (kept.get("strategy"), getattr(kept.get("server"), "strategy", None)):
        _name_rounds(held)
        if (evaluate := getattr(held, "evaluate", None)) is not None:
            vars(held)["evaluate"] = partial(_evaluated, evaluate, failed)
    return ServerApp(server_fn=lambda context: ServerAppComponents(config=config, **kept))


def _evaluated(evaluate: Callable[..., Any], failed: list[str], *args: Any, **kwargs: Any) -> Any:
    """Call ``evaluate``, a strategy's method; if it fails, return ``None`` and add the reason to ``failed``."""
    found = attempt(lambda: evaluate(*args, **kwargs))
    if isinstance(found, Failure):
        failed.append(f"The server's own evaluation failed, and was left out: {found.reason}")
        return None
    return found


def _name_rounds(strategy: Any) -> None:
    for name in ("configure_fit", "aggregate_fit", "configure_evaluate", "aggregate_evaluate"):
        method = getattr(strategy, name, None)
        if method is not None and "rnd" in inspect.signature(method).parameters:

            def called(server_round: int, *args: Any, _method: Any = method, **kwargs: Any) -> Any:
                return _method(server_round, *args, **kwargs)

            vars(strategy)[name] = called


def _client_fn(made: Callable[..., Any]) -> Callable[[Context], LegacyClient]:
    parameters = inspect.signature(made).parameters.values()
    takes = any(each.name == "context" or "Context" in str(each.annotation) for each in parameters)
    return lambda context: as_client(made(context if takes else str(context.node_config["partition-id"])))


def as_client(found: Any) -> LegacyClient:
    """Return a client of any earlier Flower as one of Flower 1."""
    asks: Any = getattr(found, "get_parameters", len)
    if isinstance(found, NumPyClient | LegacyClient) and not inspect.signature(asks).parameters:
        vars(found)["get_parameters"] = lambda config=None: asks()  # as before Flower 1.0
    return found.to_client() if hasattr(found, "to_client") else found


class _Clients:
    """Clients by partition; each is made when it is first asked, by running its script if it has one."""

    def __init__(self, scripts: Scripts, runner: "ScriptRunner", given: Sequence[dict[str, Any]], nodes: int) -> None:
        self._scripts, self._runner, self._given, self._nodes = scripts, runner, given, nodes
        self.made: dict[int, Any] = {}

    def client(self, context: Context) -> LegacyClient:
        partition = int(context.node_config["partition-id"])
        if partition not in self.made:
            self.made[partition] = self._new(partition, context.node_config.get("num-partitions", self._nodes))
        made = self.made[partition]
        return as_client(made["client"] if made.get("client") is not None else _client_fn(made["client_fn"])(context))

    def _new(self, partition: int, nodes: Any) -> dict[str, Any]:
        if not self._scripts.clients:
            return self._given[partition % len(self._given)]
        path = self._scripts.clients[partition % len(self._scripts.clients)]
        calls = self._runner.run(path, self._scripts.client_arguments, partition=partition, nodes=int(nodes))
        if not calls["clients"]:
            raise self._runner.silent(path, "a client", "name its arguments by --client-args '--option {partition}'")
        return calls["clients"][partition % len(calls["clients"])]


def _tree_of(path: Path) -> ast.Module:
    return ast.parse("\n".join(cells_of(path)))


def _main_module(path: Path) -> tuple[ModuleType, list[str]]:
    """Return an empty ``__main__`` module for a script, and the folders (one or none) to import its package from."""
    module, level = ModuleType("__main__"), 0
    module.__dict__.update(__file__=str(path), __builtins__=__builtins__, __package__="")
    with suppress(SyntaxError):  # its cells' own errors come when they run
        nodes = (node for cell in cells_of(path) for node in ast.walk(ast.parse(cell)))
        level = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)
    if not 0 < level < len(path.parent.parents):
        return module, []
    around = path.parent.parents[level - 1]
    while (around / "__init__.py").is_file():
        around = around.parent
    module.__package__ = ".".join(path.parent.relative_to(around).parts)  # as by `python -m`
    return module, [str(around)]


class ScriptRunner:
    """Runs scripts of a project, each as ``__main__`` and with its own copies of the project's modules."""

    def __init__(self, folder: Path, longest: float = math.inf) -> None:
        self.folder, self._longest, self._words = folder, longest, ""
        self.failed, self._unset, self._options = list[str](), list[str](), list[str]()
        self._stated = OptionsStated(folder, folder)
        self._taken, self._untaken = dict[str, str](), dict[str, str]()
        self._loggers = {"__main__"}  # which the next script, in a process of its own, would find without handlers

    def run(self, path: Path, arguments: Sequence[str], *, partition: int = 0, nodes: int = USUAL_CLIENTS) -> _Calls:
        """Run a script until it would start Flower, and return what it passes; ``UserError`` if it fails.

        ``partition``, ``nodes``: number of the client that it starts, and number of clients.
        """
        calls = self._tried(path, arguments, partition, nodes)
        flags = [] if any(calls.values()) else OptionsStated(self.folder, path).flags
        if not flags:
            return calls
        self.failed.append(f"{path.name} starts nothing alone: it ran with {' '.join(flags)}, as pages say")
        return self._tried(path, [*arguments, *flags], partition, nodes)

    def _tried(self, path: Path, arguments: Sequence[str], partition: int, nodes: int) -> _Calls:
        try:
            return self._run_from_places(path, arguments, partition, nodes)
        except (UserError, OSError):
            if not self._untaken:
                raise
            self._taken, self._untaken = self._untaken, {}
            return self._run_from_places(path, arguments, partition, nodes)

    def prepare(self, path: Path, arguments: Sequence[str], nodes: int) -> None:
        """Run a script that makes data: once, or for each of ``nodes`` clients if ``arguments`` use ``{partition}``."""
        for partition in range(nodes if "{partition" in " ".join(arguments) else 1):
            try:
                self._tried(path, arguments, partition, nodes)
            except UserError as error:
                if not isinstance(end := error.__cause__, SystemExit) or end.code:
                    raise

    def _run_from_places(self, path: Path, arguments: Sequence[str], partition: int, nodes: int) -> _Calls:
        words, self._words = [filled(each, partition, nodes) for each in arguments], ""
        first, second = str(path.parent), str(self.folder)
        places: list[tuple[str, ...]] = [(first, second)]
        places += [(second, first)] if first != second else []  # as `python -m` from the project's folder
        for tried, order in enumerate(places):
            try:
                return self._run(path, words, order, (partition, nodes))
            except FileNotFoundError as error:
                said = re.findall(r"[\w./-]+\.\w+", str(error))  # if the app raises it itself
                here, name = Path.cwd(), Path(str(error.filename or next(iter(said), None)))
                name = name.relative_to(here) if name.is_relative_to(here) else name
                above = here.parents[: len(path.relative_to(self.folder).parts) - 1]
                place = next((each for each in above if not name.is_absolute() and (each / name).exists()), None)
                if place is None:
                    if not any(word and name.is_relative_to(word) for word in words):
                        raise
                    why = f"{named(path, self.folder)} opens {name}, but there is none."
                    raise self._blamed(UserError(why), path, words) from error
                os.chdir(place)  # where the project's own files are
                places.insert(tried + 1, order)
            except UserError as error:
                if not isinstance(cause := error.__cause__, ImportError):
                    raise
                others = [each for each in holders(self.folder, cause.name or "", path.parent) if each not in order]
                if others and len(places) < MOST_PLACES:
                    places.append((others[0], *order))
                if tried == len(places) - 1:
                    raise
        raise AssertionError("no place")

    def _run(self, path: Path, words: Sequence[str], places: Sequence[str], numbers: tuple[int, int]) -> _Calls:
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra ends scripts without their errors otherwise
        calls, name, (module, around) = _Calls(list), named(path, self.folder), _main_module(path)
        before, threads = set(sys.modules), set(threading.enumerate())
        self._options.clear()
        for each in self._loggers:
            logging.getLogger(each).handlers.clear()
        places = [*dict.fromkeys([*places, *around])]
        sys.path[:] = [*places, *(each for each in sys.path if each not in places)]
        files = [path for place in places for path in (*Path(place).glob("*.py"), *Path(place).glob("*/__init__.py"))]
        own = {path.parent.name if path.stem == "__init__" else path.stem for path in files} - sys.stdlib_module_names

        def refuse(original: Any, parser: argparse.ArgumentParser, message: str) -> None:
            raise UserError(
                f"{name} refuses its arguments: {message}. Give them by --server-args or --client-args,"
                " as in --client-args '--id {partition}'."
            )

        def note(original: Any, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            found = original(parser, *args, **kwargs)
            own = () if is_installed(caller(r"\bargparse\b")) else parser._actions  # Hydra's are not the project's
            unset = (each.option_strings[-1:] for each in own if getattr(found[0], each.dest, "") is None)
            self._options[:] = chain.from_iterable(unset)
            return found

        with ExitStack() as stack:
            own -= {"flwr", "torch", "fl_privacy"}
            hidden = [name for name in sys.modules if name.partition(".")[0] in own]
            stack.callback(sys.modules.update, {name: sys.modules.pop(name) for name in hidden})  # such as datasets

            @stack.callback
            def forget() -> None:  # so that the next script gets modules of its own
                for each in set(sys.modules) - before:
                    place = getattr(sys.modules[each], "__file__", None)
                    if place and Path(place).is_relative_to(self.folder):
                        del sys.modules[each]
                        self._loggers.add(each)

            stack.enter_context(_taken_over(calls, self.heard, bool(re.search(r"\bray\b", code_of(self.folder)))))
            stack.enter_context(replaced(argparse.ArgumentParser, "error", refuse))
            stack.enter_context(replaced(argparse.ArgumentParser, "parse_known_args", note))
            if threading.current_thread() is not threading.main_thread():  # where Python lets none be set
                stack.enter_context(replaced(signal, "signal", lambda original, number, handler: None))
            stack.enter_context(replaced(builtins, "input", partial(_answered, *numbers, Counter())))
            stack.enter_context(replaced(type(os.environ), "__getitem__", partial(self._variable, *numbers)))
            stack.callback(setattr, sys, "argv", sys.argv)
            stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
            sys.argv, sys.modules["__main__"] = [str(path), *words], module
            try:
                with blamed_on(name):
                    self._execute(path, module.__dict__, calls)
            except _AtStart:
                pass
            except UserError as error:
                if not isinstance(error.__cause__, SystemExit) or not any(calls.values()):
                    raise self._blamed(error, path, words) from error.__cause__
            if not any(calls.values()):
                for thread in set(threading.enumerate()) - threads:
                    thread.join(WAITED)
        return calls

    def silent(self, path: Path, what: str, remedy: str) -> UserError:
        said = f"{named(path, self.folder)} is expected to start {what}, but ended without"
        words = f". It last said: {self._words.rstrip('.')}. If that is no reason, " if self._words else ": "
        return UserError(f"{said}{words}{remedy}.")

    def heard(self, original: Any, *given: Any, **options: Any) -> None:
        logged = given[-1] if given and isinstance(given[-1], logging.LogRecord) else None
        if logged is None or logged.levelno >= logging.ERROR:
            words = attempt(lambda: " ".join(map(str, given)) if logged is None else logged.getMessage())
            self._words = (isinstance(words, str) and words.strip()[:_MOST_WORDS]) or self._words
        original(*given, **options)

    def _blamed(self, error: UserError, path: Path, words: Sequence[str]) -> UserError:
        given = " ".join(words)
        if not isinstance(cause := error.__cause__, SystemExit):
            asked, options = (", ".join(sorted({*names})) for names in (self._unset, self._options))
            lacks = {
                f"Environment variables that it asks for are not set: {asked}; --environment NAME passes one.": asked,
                f"It ran with the arguments {given}: --server-args or --client-args names others.": given,
                f"Options have no default: {options}; --server-args or --client-args sets them.": options,
            }
            return UserError(" ".join([str(error), *(text for text, applies in lacks.items() if applies)]))
        said = f"{named(path, self.folder)} ended with {in_one_line(cause)} before it started anything"
        lines = [each.lineno for each in traceback.extract_tb(cause.__traceback__) if each.filename == str(path)]
        plain = [each for each in _tree_of(path).body if isinstance(each, ast.Expr)]
        ends = [ast.unparse(each) for each in plain if each.lineno in lines]
        always = any(re.fullmatch(r"(sys\.)?(exit|quit)\([^()]*\)", text) for text in ends)
        if always or not re.search(r"\bargv\b|add_argument|\b(click|typer|fire)\b", code_of(self.folder)):
            return UserError(f"{said}: name another script by --script, --server or --client.")
        return UserError(f"{said}; its arguments were {given or 'none'}: name them by --client-args or --server-args.")

    def _variable(self, partition: int, nodes: int, original: Any, environ: Any, key: str) -> str:
        """Return the environment variable ``key``; if unset, a value from the project's documents, or a usual one."""
        with suppress(KeyError):
            return original(environ, key)
        asked, asker = sys._getframe(2), caller("<frozen")  # the frame between is the hook's
        default = asked.f_locals.get("default") if asked.f_code.co_name == "get" else None
        asks = asker is not None and Path(asker.f_code.co_filename).is_relative_to(self.folder)
        if not asks or asked.f_code.co_name == "__contains__":
            raise KeyError(key)
        value = next((each for each in self._stated.variables.get(key, ()) if each != default), None)
        if default is not None and key not in self._taken:
            self._untaken |= {} if value is None else {key: value}
            raise KeyError(key)
        words, stored = key.lower().split("_"), re.search(r"database|db|dsn|sql|redis|mongo", key, re.IGNORECASE)
        names = [] if stored else ["_".join(words[n:]) for n in range(len(words))]  # no usual value stands for those
        usual = (usual_for(name, of_client=of_client) for of_client in (False, True) for name in names)
        value = value or next((filled(each, partition, nodes) for each in usual if each), None)
        if value is None:
            self._unset.append(key)
            raise KeyError(key)
        said = f"The environment variable {key} is not set: {value} was taken"
        self.failed += [said] if said not in self.failed else []
        return value

    def _execute(self, path: Path, names: dict[str, Any], calls: _Calls) -> None:
        failed = dict[str, Exception]()
        script = named(path, self.folder)
        late = UserError(f"{script} did not start Flower within {self._longest:.0f} s; raise --seconds to wait longer.")
        with within_seconds(self._longest, late):
            for cell in cells_of(path):
                try:
                    exec(compile(cell, str(path), "exec"), names)
                except _AtStart:
                    self.failed += failed
                    raise
                except (ImportError, OSError):  # the script runs again from elsewhere
                    raise
                except Exception as error:  # noqa: BLE001  (third-party code can raise anything)
                    begins = cell.strip().partition("\n")[0][:60]
                    failed[f"The cell {begins!r} of {script} failed: {in_one_line(error)}"] = error
            if failed:
                raise late if late in failed.values() else next(iter(failed.values()))
            if not any(calls.values()) and (entry := SourceFile(path, _tree_of(path)).entry):
                names[entry]()  # as a command of its package would


def _answered(partition: int, nodes: int, asked: Counter[str], original: Any, prompt: object = "") -> str:
    """Answer a script's ``prompt`` from standard input or, if that is closed, by the next of the likely answers.

    ``asked``: number of times that each prompt was asked so far.
    """
    with suppress(EOFError, RuntimeError, OSError):
        return original(prompt)
    text = str(prompt)
    words = re.findall(r"[a-z]+", text.lower())
    names = ["_".join(words[n : n + many]) for many in (3, 2, 1) for n in range(len(words) - many + 1)]
    usual = [each for of_client in (False, True) for name in names if (each := usual_for(name, of_client=of_client))]
    offered = [re.split(r" *[/|,] *|(?<=\d)-(?=\d)", found) for found in _OFFERED.findall(text)]
    answers = [*usual[:1], *(each for one in offered for each in ([] if one[1:] else [""]) + one), "1", "y", "0"]
    asked[text] += 1
    if asked[text] > len(answers):
        raise UserError(f"The script asks {text.strip()!r} again and again, but no answer fits: run another script.")
    return filled(answers[asked[text] - 1], partition, nodes)


@contextmanager
def _taken_over(calls: _Calls, heard: Callable[..., None], ray: bool = False) -> Iterator[None]:
    """Record the arguments of Flower's starting functions in ``calls``, and end the script at the first.

    Processes that the script begins run in this process. ``heard`` is called with what is printed or logged.
    """

    def note(kind: str, names: Sequence[str], original: Any, *given: Any, **options: Any) -> None:
        ordered = [each for each in given if kind != "clients" or not isinstance(each, str)]
        calls[kind].append({**dict(zip(names, ordered, strict=False)), **options})
        raise _AtStart

    def at_once(original: Any, process: Any) -> None:
        place = getattr(getattr(process, "_target", None), "__module__", None) or ""
        if place.partition(".")[0] in {"torch", "concurrent", "multiprocessing"}:
            return original(process)
        with suppress(_AtStart):
            process.run()
        return None

    with ExitStack() as stack:
        for place in _PLACES:
            try:
                module = importlib.import_module(place)
            except ImportError:
                continue
            for name, (kind, names) in _STARTS.items():
                if hasattr(module, name) and not isinstance(getattr(module, name), ModuleType):
                    stack.enter_context(replaced(module, name, partial(note, kind, names)))
        stack.enter_context(replaced(threading, "excepthook", lambda hook, one: one.exc_type is _AtStart or hook(one)))
        if ray and find_spec("ray") is not None:  # the script starts it, and nothing needs it here
            stack.enter_context(replaced(importlib.import_module("ray"), "init", lambda *_, **__: None))
        stack.enter_context(replaced(builtins, "print", heard))
        stack.enter_context(replaced(logging.Logger, "callHandlers", heard))
        stack.enter_context(replaced(BaseProcess, "start", at_once))
        stack.enter_context(replaced(BaseProcess, "join", lambda original, process, timeout=None: None))
        yield
