"""Runs the scripts of a project without the app format, with Flower's starting functions taken over."""

import argparse
import copy
import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fl_privacy.auditing.app.scripts import Scripts, source_of
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.errors import UserError, blamed_on, in_one_line
from fl_privacy.flower.inside.legacy import LegacyClient, NumPyClient, ServerAppComponents, ServerConfig

USUAL_CLIENTS = 2
"""Number of clients of a server that names none, as in Flower's strategies."""

WAITED = 5.0
"""Seconds to wait for a script's threads, one of which may start the server or a client."""

_PLACES = (
    *("flwr.server", "flwr.server.app", "flwr.compat.server.app"),
    *("flwr.client", "flwr.client.app", "flwr.compat.client.app"),
    *("flwr.simulation", "flwr.simulation.app", "flwr.simulation.run_simulation"),
)
"""Modules that have them, in this version of Flower or an earlier one."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """What scripts would have started.

    Attributes:
        nodes: number of clients that they name, if any.
    """

    server: ServerApp
    client: ClientApp
    nodes: int | None


class _AtStart(BaseException):
    """Ends a script where it would start Flower; no ``except Exception`` of its own stops that."""


@dataclass
class _Calls:
    """What the scripts gave to Flower's starting functions."""

    simulations: list[dict[str, Any]]
    servers: list[dict[str, Any]]
    clients: list[dict[str, Any]]

    def start_simulation(self, *given: Any, **told: Any) -> None:
        self.simulations.append({**dict(zip(("client_fn", "num_clients"), given, strict=False)), **told})
        raise _AtStart

    def run_simulation(self, *given: Any, **told: Any) -> None:
        names = ("server_app", "client_app", "num_supernodes")
        self.simulations.append({**dict(zip(names, given, strict=False)), **told})
        raise _AtStart

    def start_server(self, *given: Any, **told: Any) -> None:
        self.servers.append(
            {**dict(zip(("server_address", "server", "config", "strategy"), given, strict=False)), **told}
        )
        raise _AtStart

    def start_client(self, *given: Any, **told: Any) -> None:
        given = tuple(each for each in given if not isinstance(each, str))
        self.clients.append({**dict(zip(("client",), given, strict=False)), **told})
        raise _AtStart


def start_scripts(scripts: Scripts, folder: Path) -> Started:
    """Run the server's script up to its start, and return apps that Flower runs.

    Scripts of clients run when their client is first asked, each in modules of its own.

    Raises:
        UserError: a script raises an error, or ends without a start.
    """
    runner = _Runner(folder)
    calls = runner.run(scripts.server, scripts.server_arguments, nodes=len(scripts.clients) or USUAL_CLIENTS)
    if not calls.simulations:
        if not calls.servers:
            raise UserError(
                f"{runner.named(scripts.server)} is expected to start a simulation or a server, but ended without:"
                " name another by --script or --server, or its arguments by --server-args."
            )
        given, of_clients = calls.servers[0], calls.clients
        if not scripts.clients and not of_clients:
            raise UserError(
                f"{runner.named(scripts.server)} starts a server, but no script with a client was found: say --client."
            )
        least = getattr(given.get("strategy"), "min_available_clients", USUAL_CLIENTS)
        nodes = max(least if isinstance(least, int) else 0, len(scripts.clients), len(of_clients), USUAL_CLIENTS)
        clients = _Clients(scripts, runner, of_clients, nodes)
        return Started(server=_server_of(given), client=_ScriptApp(clients), nodes=nodes)
    given = calls.simulations[0]
    if isinstance(given.get("server_app"), ServerApp) and isinstance(given.get("client_app"), ClientApp):
        return Started(
            server=given["server_app"], client=given["client_app"], nodes=_count(given.get("num_supernodes"))
        )
    if not callable(given.get("client_fn")):
        raise UserError(
            f"{runner.named(scripts.server)} is expected to start a simulation with a client_fn or two apps, but gave"
            f" {', '.join(sorted(given)) or 'nothing'}."
        )
    named = _count(given.get("num_clients")) or _count(len(given.get("clients_ids") or ()))
    return Started(server=_server_of(given), client=ClientApp(client_fn=_client_fn(given["client_fn"])), nodes=named)


def _count(number: Any) -> int | None:
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


def _server_of(given: dict[str, Any]) -> ServerApp:
    config = given.get("config")
    if not isinstance(config, ServerConfig):  # a dictionary or an object of earlier versions of Flower
        told = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        config = ServerConfig(num_rounds=_count(told.get("num_rounds")) or 1, round_timeout=told.get("round_timeout"))
    server = given.get("server")
    kept = (
        {"server": server}
        if server is not None
        else {"strategy": given.get("strategy"), "client_manager": given.get("client_manager")}
    )
    return ServerApp(server_fn=lambda context: ServerAppComponents(config=config, **kept))


def _client_fn(made: Callable[..., Any]) -> Callable[[Context], LegacyClient]:
    """Take what ``made`` returns for a context or, as in earlier versions, for a client's number as text."""

    parameters = [*inspect.signature(made).parameters.values()]
    named = {each.name for each in parameters}

    def client_fn(context: Context) -> LegacyClient:
        takes = "context" in named or any("Context" in str(each.annotation) for each in parameters)
        return _as_client(made(context) if takes else made(str(context.node_config["partition-id"])))

    return client_fn


def _as_client(found: Any) -> LegacyClient:
    asks = getattr(found, "get_parameters", None)
    if isinstance(found, NumPyClient) and asks is not None and not inspect.signature(asks).parameters:
        vars(found)["get_parameters"] = lambda config=None: asks()  # as before Flower 1.0
    return found.to_client() if hasattr(found, "to_client") else found


class _Clients:
    """One client a partition, made by its script when it is first asked."""

    def __init__(self, scripts: Scripts, runner: "_Runner", given: Sequence[dict[str, Any]], nodes: int) -> None:
        self._scripts, self._runner, self._given, self._nodes = scripts, runner, given, nodes
        self._made: dict[int, Any] = {}

    def client(self, context: Context) -> LegacyClient:
        partition = int(context.node_config["partition-id"])
        if partition not in self._made:
            self._made[partition] = self._new(partition)
        made = self._made[partition]
        return _as_client(made["client"] if made.get("client") is not None else _client_fn(made["client_fn"])(context))

    def _new(self, partition: int) -> dict[str, Any]:
        if not self._scripts.clients:
            return self._given[partition % len(self._given)]
        path = self._scripts.clients[partition % len(self._scripts.clients)]
        calls = self._runner.run(path, self._scripts.client_arguments, partition=partition, nodes=self._nodes)
        if not calls.clients:
            raise UserError(
                f"{self._runner.named(path)} is expected to start a client, but ended without: name its arguments by"
                " --client-args '--option {partition}'."
            )
        return calls.clients[0]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the networks and optimizers that clients hold when the block ends."""
        held = [
            (each, copy.deepcopy(each.state_dict()))
            for made in self._made.values()
            for each in _parts(made.get("client"))
        ]
        try:
            yield
        finally:
            for each, state in held:
                each.load_state_dict(state)


def _parts(client: Any) -> list[Any]:
    holders = [client, *(vars(client).values() if hasattr(client, "__dict__") else ())]
    return [
        each
        for holder in holders
        for each in (vars(holder).values() if hasattr(holder, "__dict__") and not isinstance(holder, type) else ())
        if isinstance(each, torch.nn.Module | torch.optim.Optimizer)
    ]


class _ScriptApp(ClientApp):
    """A client app whose clients live as long as a process of each would."""

    def __init__(self, clients: _Clients) -> None:
        super().__init__(client_fn=clients.client)
        self.unchanged = clients.unchanged


class _Runner:
    """Runs scripts of a project, each in a ``__main__`` and in modules of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def named(self, path: Path) -> str:
        return str(path.relative_to(self._folder) if path.is_relative_to(self._folder) else path)

    def run(self, path: Path, arguments: Sequence[str], *, partition: int = 0, nodes: int = USUAL_CLIENTS) -> _Calls:
        """Run a script until it starts Flower.

        Raises:
            UserError: the script raises an error.
        """
        words = [_filled(each, partition, nodes) for each in arguments]
        first, second = str(path.parent), str(self._folder)
        try:
            return self._run(path, words, (first, second))
        except UserError as error:
            if first == second or not isinstance(error.__cause__, ImportError):
                raise
            return self._run(path, words, (second, first))  # as `python -m` from the project's folder

    def _run(self, path: Path, words: Sequence[str], places: Sequence[str]) -> _Calls:
        calls, name, module = _Calls([], [], []), self.named(path), ModuleType("__main__")
        module.__dict__.update(__file__=str(path), __builtins__=__builtins__)
        before, threads = set(sys.modules), set(threading.enumerate())
        sys.path[:] = [*places, *(each for each in sys.path if each not in places)]
        with ExitStack() as stack:

            @stack.callback
            def forget() -> None:  # so that the next script gets modules of its own
                for each in set(sys.modules) - before:
                    place = getattr(sys.modules[each], "__file__", None)
                    if place and Path(place).is_relative_to(self._folder):
                        del sys.modules[each]

            stack.enter_context(_taken_over(calls))
            stack.enter_context(replaced(argparse.ArgumentParser, "error", partial(_refusing, name)))
            stack.callback(setattr, sys, "argv", sys.argv)
            stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
            sys.argv, sys.modules["__main__"] = [str(path), *words], module
            try:
                with blamed_on(name):
                    exec(compile(source_of(path), str(path), "exec"), module.__dict__)
            except _AtStart:
                pass
            except UserError as error:
                if not isinstance(error.__cause__, SystemExit):
                    raise
                if not (calls.simulations or calls.servers or calls.clients):
                    raise UserError(
                        f"{name} ended with {in_one_line(error.__cause__)} before it started anything; its arguments"
                        f" were {' '.join(words) or 'none'}: name them by --client-args or --server-args."
                    ) from error.__cause__
            if not (calls.simulations or calls.servers or calls.clients):
                for thread in set(threading.enumerate()) - threads:
                    thread.join(WAITED)
        return calls


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        raise UserError(
            f"{name} refuses its arguments: {message}. Say them by --server-args or --client-args,"
            " as in --client-args '--id {partition}'."
        )

    return refuse


def _filled(text: str, partition: int, nodes: int) -> str:
    def value(found: re.Match[str]) -> str:
        choices = found[2].split("|") if found[2] else []
        return choices[partition % len(choices)] if choices else str(partition + int(found[1] or 0))

    return re.sub(r"\{partition(?:\+(\d+))?(?::([^}]*))?\}", value, text).replace("{nodes}", str(nodes))


def _instead(noted: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return noted


@contextmanager
def _taken_over(calls: _Calls) -> Iterator[None]:
    """Let Flower's starting functions note what they are given, here and in processes that a script begins."""
    taken = {
        "start_simulation": calls.start_simulation,
        "run_simulation": calls.run_simulation,
        "start_server": calls.start_server,
        "start_client": calls.start_client,
        "start_numpy_client": calls.start_client,
    }

    def at_once(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            if (getattr(target, "__module__", None) or "").partition(".")[0] in {
                "torch",
                "concurrent",
                "multiprocessing",
            }:
                return original(process)
            with suppress(_AtStart):
                process.run()
            return None

        return start

    with ExitStack() as stack:
        for place in _PLACES:
            try:
                module = importlib.import_module(place)
            except ImportError:
                continue
            for name, noted in taken.items():
                if hasattr(module, name) and not isinstance(getattr(module, name), ModuleType):
                    stack.enter_context(replaced(module, name, partial(_instead, noted)))
        stack.enter_context(replaced(BaseProcess, "start", at_once))
        stack.enter_context(replaced(BaseProcess, "join", lambda original: lambda process, timeout=None: None))
        yield
