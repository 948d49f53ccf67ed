"""Messages of a hostile server to defended nodes: none gets the undefended update, and none stops a node."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from fl_privacy.flower._node_memory import STATE_VARIABLE
from fl_privacy.flower.inside.identity import identify_process
from tests.flower import hostile
from tests.flower.hostile import APPS, drawn, expect_kept, honest_message, hostile_message, undefended_app

HOW_MANY = 100
"""Messages to each kind of node; a tenth in the sample."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identify_process()
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))


def last_answered(folder: Path) -> int:
    """Find the last round that a node has answered; an honest server asks for the next."""
    counted = [json.loads(path.read_bytes()) for path in folder.rglob("*.answered")]
    return max((last for each in counted for last in each.values()), default=0)


def answered(app: ClientApp, message: Message, context: Context) -> Message:
    """As a node replies, where Flower itself refuses messages that the app has no function for."""
    hostile.SEEN.clear()
    message.metadata._message_id = "a question"  # type: ignore[attr-defined]
    try:
        return app(message, context)
    except ValueError as error:
        if not re.match(r"Invalid message type|No \w+ function registered", str(error)):
            raise
        return Message(Error(2, str(error)), reply_to=message)


@pytest.mark.parametrize("number", [HOW_MANY // 10, pytest.param(HOW_MANY, marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("make", APPS.values(), ids=APPS)
def test_no_message_gets_the_undefended_update_or_stops_the_node(
    make: Callable[[], ClientApp], number: int, tmp_path: Path
) -> None:
    app = make()
    context = Context(1, 1, UserConfig({"partition-id": 0, "num-partitions": 2}), RecordDict(), UserConfig())
    replies = []
    for question in drawn(number):
        if (message := hostile_message(question)) is not None:
            replies.append(answered(app, message, context))
            expect_kept(replies[-1], hostile.SEEN)
    assert len(replies) > number // 2 and any(reply.has_error() for reply in replies)
    reply = answered(app, honest_message(last_answered(tmp_path) + 1), context)
    expect_kept(reply, hostile.SEEN)
    assert reply.has_content() and hostile.SEEN


def test_what_is_looked_for_is_found_in_the_reply_of_an_undefended_node() -> None:
    context = Context(1, 1, UserConfig({"partition-id": 0, "num-partitions": 2}), RecordDict(), UserConfig())
    reply = answered(undefended_app(), honest_message(1), context)
    with pytest.raises(AssertionError):
        expect_kept(reply, hostile.SEEN)
