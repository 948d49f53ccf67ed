"""Replies put beside the messages they answer."""

from collections.abc import Iterable, Sequence

from flwr.app import Message

from fl_privacy.federation import Failure

SILENCE = Failure("no reply in time")


def pair(sent: Sequence[Message], replies: Iterable[Message]) -> list[tuple[Message, Message | Failure]]:
    """Each message of ``sent``, in order, with what came back.

    Matched by message id: replies arrive in any order, and an error on behalf of a node that died names no node.
    """
    by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
    return [(message, _content_or_failure(by_id.get(message.metadata.message_id))) for message in sent]


def _content_or_failure(reply: Message | None) -> Message | Failure:
    if reply is None:
        return SILENCE
    if reply.has_content():
        return reply
    lines = (reply.error.reason or "").strip().splitlines()
    return Failure(lines[0] if lines else f"Flower's error {reply.error.code}")
