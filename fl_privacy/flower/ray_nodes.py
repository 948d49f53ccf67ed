"""A Flower grid whose nodes are served by Ray processes."""

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import ray
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.federation import ClientSource, Failure
from fl_privacy.federation.parallel import joins_cluster, one_line, ray_cluster
from fl_privacy.flower.client_app import simulated_client_app
from fl_privacy.flower.grids import LocalGrid, error_reply
from fl_privacy.progress import counted

_STARTING = 600.0  # additional seconds for a process to start and make its clients, before its first message
LOSSES = 2  # number of times a message is given to another actor because its machine is gone


class ClientProcess:
    """Ray actor that serves clients. It builds the app from ``source`` at the first message, to reply any error."""

    def __init__(self, source: list[Any]) -> None:
        self._source = source

    @cached_property
    def _app(self) -> ClientApp:
        return simulated_client_app(ray.get(self._source[0])())

    def prepare(self) -> None:
        with suppress(Exception):
            self._app  # noqa: B018

    def answer(self, message: Message, context: Context) -> tuple[Message, Context]:
        return self._app(message, context), context


class RayGrid(LocalGrid):
    """Grid whose nodes are served by Ray actors; each node's context travels with its message.

    ``capacity``: function that counts the actors fitting into the cluster. ``actors``: number of actors; a dead one is
    replaced if there is room, and its message gets an error, or goes to another actor if the machine is gone.
    ``timeout``: seconds for one message, after which the actor is ended and replaced.
    """

    def __init__(
        self, clients: Sequence[int], start: Callable[[], Any], capacity: Callable[[], int], actors: int, timeout: float
    ) -> None:
        super().__init__(clients)
        self._start, self._capacity = start, capacity
        self._timeout = timeout
        self._actors, self._machines = 0, _machines()
        self._heard = dict[Any, frozenset[str]]()
        self._asked_again = Counter[str]()
        self._preparing = dict[Any, Any]()
        self._idle = deque[Any]()
        for _ in range(actors):
            self._add_actor()

    def _add_actor(self) -> None:
        actor = self._start()
        self._actors += 1
        self._heard[actor] = self._machines
        self._preparing[actor.prepare.remote()] = actor
        self._idle.append(actor)

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        waiting, working, replies = deque(messages), dict[Any, _Errand](), list[Message]()
        progress = counted("reply of a client", messages)
        next(progress, None)
        while waiting or working:
            while waiting and (actor := self._next_idle(working)) is not None:
                message = waiting.popleft()
                limit = self._timeout + (_STARTING if actor in self._preparing.values() else 0.0)
                answer = actor.answer.remote(message, self.contexts[message.metadata.dst_node_id])
                errand = _Errand(actor, message, answer, time.monotonic() + limit)
                working[errand.answer] = errand
            over, done = self._wait(working)
            if over is not None:
                del working[over.answer]
                if (reply := self._reply(over, done=done)) is None:
                    waiting.appendleft(over.message)
                    continue
                replies.append(reply)
                next(progress, None)
        return replies

    def _next_idle(self, working: Mapping[Any, "_Errand"]) -> Any:
        starting = list(self._preparing.values())  # chosen only if no started one is busy: their machine may be gone
        started = [actor for actor in self._idle if actor not in starting]
        busy = any(errand.actor not in starting for errand in working.values())
        chosen = next(iter(started or ([] if busy else self._idle)), None)
        if chosen is not None:
            self._idle.remove(chosen)
        return chosen

    def _wait(self, working: Mapping[Any, "_Errand"]) -> tuple["_Errand | None", bool]:
        oldest = min(working.values(), key=lambda errand: errand.deadline)
        busy = {errand.actor: errand for errand in working.values()}
        ready, _ = ray.wait([*self._preparing, *working], timeout=max(0.0, oldest.deadline - time.monotonic()))
        if not ready:
            return oldest, False
        actor = self._preparing.pop(ready[0], None)
        if actor is None:
            return working[ready[0]], True
        if actor in busy:
            busy[actor].deadline = time.monotonic() + self._timeout
        return None, False

    def _reply(self, errand: "_Errand", *, done: bool) -> Message | None:
        message = errand.message
        if not done:
            ray.kill(errand.actor)
            self._replace(errand.actor)
            return error_reply(message, Failure(f"no reply within {self._timeout:g} s (backend.timeout)"))
        try:
            reply, self.contexts[message.metadata.dst_node_id] = ray.get(errand.answer)
        except ray.exceptions.RayError as error:
            reply = error_reply(message, Failure(one_line(error)))
            if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.ObjectLostError):
                return None if self._lost(errand, error) else reply
        self._heard[errand.actor] = self._machines
        self._idle.append(errand.actor)
        return reply

    def _lost(self, errand: "_Errand", error: Exception) -> bool:
        """Replace a lost actor; return ``True`` if its message should be sent again, since its machine is lost too."""
        silent = isinstance(error, ray.exceptions.ActorUnavailableError | ray.exceptions.ObjectLostError)
        if silent:
            ray.kill(errand.actor)
        before, self._machines = self._machines, _machines()
        lost = bool(self._heard[errand.actor] - self._machines)
        self._replace(errand.actor)
        number = errand.message.metadata.message_id
        self._asked_again[number] += silent or bool(before - self._machines)
        return (silent or lost) and self._asked_again[number] <= LOSSES

    def _replace(self, actor: Any) -> None:
        self._preparing = {ref: other for ref, other in self._preparing.items() if other is not actor}
        del self._heard[actor]
        self._actors -= 1
        if self._actors < self._capacity():
            self._add_actor()


@dataclass(eq=False)
class _Errand:
    actor: Any
    message: Message
    answer: Any
    deadline: float


@contextmanager
def ray_grid(
    clients: Sequence[int],
    source: ClientSource,
    *,
    num_cpus: float,
    num_gpus: float,
    actors: int | None,
    timeout: float,
) -> Iterator[RayGrid]:
    """Join or start a Ray cluster; yield a grid with as many ``actors`` (client processes) as fit.

    ``source``: function that builds the clients. ``num_cpus``, ``num_gpus``: for an actor. See also ``rounds_on_ray``.
    """
    check_request(num_cpus, num_gpus, actors)
    number("backend.timeout", timeout, above=0, infinite=True, example="it is in seconds, try 3600")
    with ray_cluster():
        capacity = partial(_capacity, num_cpus, num_gpus)
        fitting = min(capacity(), len(clients), actors or len(clients))
        process = ray.remote(ClientProcess).options(num_cpus=num_cpus, num_gpus=num_gpus)
        yield RayGrid(clients, partial(process.remote, [ray.put(source)]), capacity, fitting, timeout)


def check_request(num_cpus: float = 1, num_gpus: float = 0, actors: int | None = None) -> None:
    """Raise ``UserError`` unless this machine or cluster can give a Ray actor these resources."""
    number("backend.num_cpus", num_cpus, above=0, example=1)
    number("backend.num_gpus", num_gpus, at_least=0, example="0.5 lets two share a GPU")
    if actors is not None:
        whole("backend.actors", actors, at_least=1, example="null takes what fits")
    cpus, gpus = os.cpu_count() or 1, torch.cuda.device_count()
    if not joins_cluster() and min(cpus / num_cpus, gpus / num_gpus if num_gpus else 1) < 1:
        raise _does_not_fit(num_cpus, num_gpus, cpus, gpus)


def _machines() -> frozenset[str]:
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _capacity(num_cpus: float, num_gpus: float) -> int:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = [(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes]
    fits = sum(math.floor(min(cpus / num_cpus, gpus / num_gpus if num_gpus else math.inf)) for cpus, gpus in free)
    if fits < 1:
        raise _does_not_fit(num_cpus, num_gpus, *(max(counts) for counts in zip(*free, strict=True)))
    return fits


def _does_not_fit(num_cpus: float, num_gpus: float, cpus: float, gpus: float) -> UserError:
    return UserError(
        f"A client is expected to fit into one machine, but asks for {num_cpus} CPUs and {num_gpus} GPUs where there"
        f" are {cpus} and {gpus}; lower backend.num_cpus or backend.num_gpus."
    )
