"""Records, messages and contexts as bytes and back, in Flower's own format."""

from collections.abc import Sequence

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common import serde
from flwr.proto.message_pb2 import Context as ProtoContext, Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]


def bytes_of(records: RecordDict) -> bytes:
    """Serialize ``records``; the same records give the same bytes."""
    return serde.recorddict_to_proto(records).SerializeToString(deterministic=True)


def records_of(content: bytes) -> RecordDict:
    """Parse the bytes of ``bytes_of``; ``ValueError`` if the bytes are no records."""
    try:
        return serde.recorddict_from_proto(ProtoRecordDict.FromString(content))
    except DecodeError as error:
        raise ValueError(f"records of Flower are expected, but: {error}") from error


def message_bytes(message: Message) -> bytes:
    """Serialize ``message``."""
    return serde.message_to_proto(message).SerializeToString()


def message_of(content: bytes) -> Message:
    """Parse a message: the inverse of ``message_bytes``."""
    return serde.message_from_proto(ProtoMessage.FromString(content))


def message_with(message: Message, content: RecordDict) -> Message:
    """Copy ``message`` with other content."""
    proto = ProtoMessage(metadata=serde.metadata_to_proto(message.metadata), content=ProtoRecordDict())
    made = serde.message_from_proto(proto)
    made.content = content  # not copied: weights are large
    return made


def message_parts(message: Message) -> list[bytes]:
    """Return the bytes of ``message`` without array data, and then the data of each array, not copied."""
    if not message.has_content():
        return [message_bytes(message)]
    emptied, data = RecordDict(), list[bytes]()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            data += [array.data for array in record.values()]
            emptied[name] = ArrayRecord({key: _array_like(array, b"") for key, array in record.items()})
        else:
            emptied[name] = record
    return [message_bytes(message_with(message, emptied)), *data]


def message_from_parts(parts: Sequence[bytes]) -> Message:
    """Parse a message: the inverse of ``message_parts``; ``ValueError`` unless the number of arrays fits."""
    message, data = message_of(parts[0]), iter(parts[1:])
    if message.has_content():
        for name, record in message.content.array_records.items():
            held = {key: _array_like(array, next(data, None)) for key, array in record.items()}
            message.content[name] = ArrayRecord(held)
    if next(data, None) is not None:
        raise ValueError("more arrays are there than the message has")
    return message


def _array_like(array: Array, data: bytes | None) -> Array:
    if data is None:
        raise ValueError("fewer arrays are there than the message has")
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=data)


def context_bytes(context: Context) -> bytes:
    """Serialize ``context``."""
    return serde.context_to_proto(context).SerializeToString()


def context_of(content: bytes) -> Context:
    """Parse a context: the inverse of ``context_bytes``."""
    return serde.context_from_proto(ProtoContext.FromString(content))
