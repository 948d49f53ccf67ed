"""Machines that are lost while some of their processes have nothing to do, by a Ray that is made up."""

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fl_privacy.flower.grids import FIRST_NODE
from fl_privacy.flower.ray_nodes import RayGrid

ray = pytest.importorskip("ray")


class Actor:
    """On a machine; a reference to what it is asked for is how to find out."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.prepare = SimpleNamespace(remote=object)
        self.answer = SimpleNamespace(remote=lambda *asked: lambda: (self.machine, *asked))


@pytest.mark.parametrize("idle", [0, 1, 5])
def test_processes_that_went_with_their_machine_cost_no_reply(idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, machines = {"here", "there"}, iter(["there"] * (1 + idle) + ["here"] * 20)

    def get(reference: Any) -> Any:
        machine, message, context = reference()
        if machine not in alive:
            raise ray.exceptions.ActorDiedError
        return Message(RecordDict(), reply_to=message), context

    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": name, "Alive": True} for name in sorted(alive)])
    monkeypatch.setattr(ray, "wait", lambda references, timeout: (references[:1], references[1:]))
    monkeypatch.setattr(ray, "get", get)
    grid = RayGrid([0], lambda: Actor(next(machines)), lambda: 2, 2 + idle, timeout=60.0)
    assert not ask(grid).has_error()
    alive.remove("there")
    assert not ask(grid).has_error()


def ask(grid: RayGrid) -> Message:
    (reply,) = grid.send_and_receive([Message(RecordDict(), FIRST_NODE, "query")])
    return reply
