"""A grid that looks for replies soon, and rounds that wait for nodes that have left."""

import time
from collections.abc import Iterable

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fl_privacy.errors import UserError
from fl_privacy.flower import numpy_client_app
from fl_privacy.flower.grids import FIRST_NODE, LocalGrid, PromptGrid
from fl_privacy.flower.strategy import Nodes


def echo() -> ClientApp:
    app = ClientApp()

    @app.query()
    def query(message: Message, context: object) -> Message:
        return Message(message.content, reply_to=message)

    return app


class Late(LocalGrid):
    """Replies are there from the n-th look on, and a look may take its time."""

    def __init__(self, looks: int, seconds: float = 0.0) -> None:
        super().__init__([0, 1], echo())
        self.looks, self.seconds, self.looked = looks, seconds, 0

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.looked += 1
        time.sleep(self.seconds)
        return super().pull_messages(message_ids) if self.looked >= self.looks else []


def ask(grid: PromptGrid, timeout: float | None) -> list[Message]:
    return grid.send_and_receive([Message(RecordDict(), FIRST_NODE + n, "query") for n in (0, 1)], timeout=timeout)


def test_replies_are_looked_for_soon_and_until_all_are_there() -> None:
    started = time.monotonic()
    replies = ask(PromptGrid(Late(looks=3)), timeout=60)

    assert {reply.metadata.src_node_id for reply in replies} == {FIRST_NODE, FIRST_NODE + 1}
    assert time.monotonic() - started < 1


def test_who_does_not_reply_in_time_is_not_waited_for() -> None:
    started = time.monotonic()

    assert ask(PromptGrid(Late(looks=1000)), timeout=0.3) == []
    assert time.monotonic() - started < 2


def test_replies_that_came_while_a_look_took_long_count() -> None:
    assert len(ask(PromptGrid(Late(looks=2, seconds=0.3)), timeout=0.2)) == 2


class Leaving(LocalGrid):
    """Node 1 is not there for the first looks after it has left."""

    absent = 0

    def __init__(self) -> None:
        super().__init__([0, 1], numpy_client_app(lambda context: pytest.fail("only asked who it is")))

    def get_node_ids(self) -> list[int]:
        self.absent -= 1
        return [FIRST_NODE] if self.absent > 0 else super().get_node_ids()


@pytest.mark.parametrize(("reconnect", "back"), [(0.0, False), (5.0, True)])
def test_a_round_waits_for_a_node_that_has_left_as_long_as_it_is_told(reconnect: float, back: bool) -> None:
    grid, nodes = Leaving(), Nodes([0, 1], patience=1, reconnect=reconnect)
    nodes.refresh(grid)
    grid.absent = 3

    nodes.refresh(grid)

    assert 0 in nodes
    assert (1 in nodes) is back


def test_nodes_and_run_agree_whose_the_data_are() -> None:
    grid = Leaving()
    for context in grid.contexts.values():
        context.node_config["data-path"] = "/data"

    with pytest.raises(UserError, match=r"train on the data that the run names, but the one of partition 0 does not"):
        Nodes([0, 1], patience=0.1, own_data=False).refresh(grid)
    Nodes([0, 1], patience=0.1, own_data=True).refresh(grid)
