"""Audit the network of a project alone, trained by plain SGD on drawn inputs, if the project's own training fails."""

import ast
import copy
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.auditing.app import odd_files
from fl_privacy.auditing.app.bundle import App
from fl_privacy.auditing.app.defaults import derived
from fl_privacy.auditing.app.network_found import BuiltNetworks, DefinedNetworks, Network
from fl_privacy.auditing.app.network_inputs import EXAMPLES, CodeSizes, Task, first_tensor, task_for
from fl_privacy.auditing.app.scripts import CLIENT_CLASSES, named, usual_for
from fl_privacy.auditing.app.stand_in import TEST, TRAIN, Drawing
from fl_privacy.auditing.app.started import Started, as_client, server_of, usual_server
from fl_privacy.auditing.instrument.keras_layers import is_keras
from fl_privacy.auditing.instrument.watch import state_kept
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.inside.legacy import LegacyClient, LegacyFedAvg, NumPyClient
from fl_privacy.measure.answer import Answer
from fl_privacy.progress import within_seconds
from fl_privacy.report.audit_page import NOT_TESTED, AuditRecord
from fl_privacy.rng import streams_put_back

NODES, MOST_TRIED, MOST_SKIPPED = 2, 24, 3
"""Numbers of clients, of networks that are tried, and of skipped ones that the page names."""

LEAST_SECONDS = 10.0  # shortest time for building a network, and a step of it

_SIZES = "dim|size|shape|len|num|count|col|name"

LAST_ALONE = "batch"  # last scenario whose uploads do not depend on how an app trains


@dataclass(frozen=True, kw_only=True)
class NetworkAlone(App):
    """A project of which only the network is trained, by FedAvg and plain SGD on random inputs.

    ``reason``: why the project's own training was not audited. ``built``: networks that its code built while it ran.
    ``chosen``: the network as ``FILE:NAME``; empty tries the likeliest first.
    """

    reason: str
    seconds: float
    seed: int = 0
    chosen: str = ""
    built: BuiltNetworks | None = None
    found: list["TrainedAlone"] = field(default_factory=list)  # the network that ``load`` found

    def load(self, stops: Callable[[App], str], drawing: Drawing | None = None) -> Started:
        """Return a server and clients that train one of the project's networks on random inputs.

        ``stops`` and ``drawing`` are not used. ``UserError`` if no network can be trained.
        """
        limit = max(LEAST_SECONDS, self.seconds / 10)
        defined, until = DefinedNetworks(self, self.seed), time.monotonic() + max(3 * limit, self.seconds)
        sizes = CodeSizes.of(defined.files.values(), defined.drawing, {**defined.settings, **self.config})
        losses = Counter[str]() if self.built is None else self.built.of_losses
        built = [] if self.built is None else self.built.networks(defined.of_clients, self.folder)
        for network in islice(chain(built, defined.networks(self.chosen)), MOST_TRIED):
            if time.monotonic() > until:
                break
            made = attempt(lambda: self._trained(network, sizes, losses, limit))  # noqa: B023
            if isinstance(made, Failure):
                reason = made.reason.removeprefix("UserError: ").rstrip(".")
                defined.skipped.append(f"{network.name} ({network.place}): {reason}")
                continue
            made.skipped += list(dict.fromkeys(defined.skipped))[:MOST_SKIPPED]
            self.found.append(made)
            client = ClientApp(client_fn=made.client)
            return Started(server_of({"strategy": LegacyFedAvg(fraction_evaluate=0.0)}, []), client, NODES)
        said = "; ".join(list(dict.fromkeys(defined.skipped))[:MOST_SKIPPED]) or "no file defines one"
        raise UserError(
            f"{self.name} is expected to have a network that can be trained alone, but has none ({said}): name another"
            " by --network FILE:NAME."
        )

    def _trained(self, network: Network, sizes: CodeSizes, losses: Counter[str], limit: float) -> "TrainedAlone":
        with within_seconds(limit), streams_put_back(self.seed):
            module = network.make()
            if not isinstance(module, nn.Module):
                raise UserError(f"it is no network of PyTorch, or of Keras on PyTorch, but {type(module).__name__}")
            module = module.to("cpu", torch.float32).train()
            task = task_for(module, sizes, losses)
            made = TrainedAlone(network, module, task, sizes, self.seed)
            before = copy.deepcopy(module.state_dict())
            made.train(module, 2, NODES)
            module.load_state_dict(before)
        return made

    def on_page(self, record: AuditRecord) -> AuditRecord:
        """Return a copy of ``record`` that says that only the network was audited; ``UserError`` if none trained."""
        made = self.found[-1]
        if not record.models:
            raise UserError(f"{made.network.name} could not be trained alone.")
        why = [f"Not taken: {each}." for each in made.skipped]
        answers = list[Answer]()
        for one in (one for one in record.answers if one.scenario.name != "site"):
            title = one.scenario.title.replace("The app's own", "A")
            answers.append(replace(one, scenario=replace(one.scenario, title=title)))
        plain = f"trained by plain SGD on {made.task.in_words}"
        return replace(
            record,
            network_alone=f"{made.network.name} ({made.network.place}) alone, {plain}",
            not_audited=self.reason,
            lede=f"{made.in_words} The app's own training and data may leak more or less.",
            answers=answers,
            findings=(),
            stated={},
            notes=[f"{NOT_TESTED}.", *why],
            drawn=True,
        )


@dataclass(frozen=True, kw_only=True)
class ClientsAlone(App):
    """Client class of a project, made with random data and trained by FedAvg. ``reason``: why no script was run."""

    reason: str
    seconds: float
    seed: int = 0

    def load(self, stops: Callable[[App], str], drawing: Drawing | None = None) -> Started:
        defined, why = DefinedClients(self, self.seed), self.reason
        defined.drawing = drawing or defined.drawing
        for path, name in defined.classes():
            defined.kind, defined.given = (path, name), []
            if isinstance(first := attempt(lambda: defined.made(0)), Failure):
                why = f"{self.reason} Its class {name} can't be made: {first.reason.removeprefix('UserError: ')}"
                continue
            given = ", ".join(defined.given) or "no data"
            said = f"No script starts a client: FedAvg asked objects of {name} ({named(path, self.folder)}), made with"
            client: Any = ClientApp(client_fn=defined.client)
            client.unchanged = lambda: state_kept([*defined.clients.values()])
            return Started(usual_server(self.folder), client, NODES, (f"{said} drawn {given}",))
        raise UserError(why)


@dataclass
class DefinedClients(DefinedNetworks):
    """Constructs a project's clients, with random data and the project's network as arguments."""

    app: ClientsAlone
    kind: tuple[Path, str] = (Path(), "")  # file and name of their class
    partition: int = 0
    clients: dict[int, Any] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)  # names of drawn arguments

    def classes(self) -> list[tuple[Path, str]]:
        found = derived(self.files.values(), CLIENT_CLASSES)
        last = found.keys() - set[str]().union(*found.values())  # from which no other one derives
        kinds = ((path, node) for path, file in self.files.items() for node in file.tree.body)
        return [(path, node.name) for path, node in kinds if isinstance(node, ast.ClassDef) and node.name in last]

    def made(self, partition: int) -> Any:
        if partition not in self.clients:
            (path, name), self.partition = self.kind, partition
            args, kwargs = self._arguments(kind := getattr(self.module(path), name), path, None)
            self.clients[partition] = kind(*args, **kwargs)
        return self.clients[partition]

    def client(self, context: Context) -> LegacyClient:
        return as_client(self.made(int(context.node_config["partition-id"])))

    @cached_property
    def trained(self) -> "TrainedAlone":
        alone = NetworkAlone.of(self.app, reason="", seconds=self.app.seconds, seed=self.seed)
        alone.load(lambda app: "")
        return alone.found[-1]

    def usual(self, name: str) -> Any:
        if usual_for(name.lower(), of_client=True) == "{partition}":
            return self.partition
        drawing, known = self.drawing, f"client {self.partition}"
        if re.fullmatch(r"(net|model|network)", name, re.IGNORECASE):
            return copy.deepcopy(self.trained.module)
        arrays = re.match(rf"(x|y|inputs?|features|labels?|targets?)(_(?!{_SIZES})|$)", name, re.IGNORECASE)
        if not arrays and not re.search(r"loader|(data|train|test|val)_?set", name, re.IGNORECASE):
            return super().usual(name)
        self.given += [] if name in self.given else [name]
        drawing.note(name, "drawn examples")
        if arrays:
            if not drawing.uses("torch", "keras", "tensorflow"):  # estimators take rows, of two classes as usual
                drawing.features, drawing.classes = drawing.features or 10, drawing.classes or 2
            return odd_files.array(drawing, name, known)
        number = TEST if re.search("test|val", name) else TRAIN
        data = TensorDataset(*self.trained.task.draw(number, drawing.rng(f"{known} {name}")))
        return DataLoader(data, batch_size=32) if "loader" in name else data


@dataclass(eq=False)
class TrainedAlone:
    """A network and its task, with the FedAvg server and the clients that train it by plain SGD."""

    network: Network
    module: nn.Module
    task: Task
    sizes: CodeSizes
    seed: int
    skipped: list[str] = field(default_factory=list)

    @property
    def in_words(self) -> str:
        task, sizes = self.task, self.sizes
        steps = f"learning rate {sizes.rate:g}, batches of {sizes.batch}, {task.loss}"
        return (
            f"The network {self.network.name} ({self.network.place}) was built {self.network.code}. FedAvg trained it"
            f" with {NODES} clients and plain SGD ({steps}) on {task.in_words}, the first size that it accepts."
        )

    def train(self, module: nn.Module, number: int, seed: int) -> None:
        """Train ``module`` for one pass over ``number`` examples, made up at random by ``seed``."""
        drawn = self.task.draw(number, np.random.default_rng([self.seed, seed]))
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=self.sizes.rate)
        for inputs, targets in DataLoader(TensorDataset(*drawn), batch_size=self.sizes.batch):
            optimizer.zero_grad()
            self.task.loss_of(first_tensor(module(inputs)), targets).backward()
            optimizer.step()

    def client(self, context: Context) -> LegacyClient:
        return _Client(self, int(context.node_config["partition-id"])).to_client()


class _Client(NumPyClient):
    def __init__(self, trained: TrainedAlone, partition: int) -> None:
        self._trained, self._partition = trained, partition
        own = None if is_keras(trained.module) else attempt(lambda: copy.deepcopy(trained.module))  # Keras calls a copy
        self._module = own if isinstance(own, nn.Module) else trained.module

    def get_parameters(self, config: dict[str, Any]) -> list[np.ndarray]:
        return [value.detach().cpu().numpy().copy() for value in self._module.state_dict().values()]

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        trained, module = self._trained, self._module
        named = zip(module.state_dict(), map(torch.from_numpy, map(np.array, parameters)), strict=True)
        module.load_state_dict(dict(named))
        trained.train(module, EXAMPLES, self._partition)
        return self.get_parameters({}), EXAMPLES, {}
