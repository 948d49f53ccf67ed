"""Records of a message as bytes and back, as Flower sends them."""

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

__all__ = ["bytes_of", "records_of"]


def bytes_of(records: RecordDict) -> bytes:
    """Serialize ``records`` in Flower's own format; the same records are the same bytes."""
    return recorddict_to_proto(records).SerializeToString(deterministic=True)


def records_of(content: bytes) -> RecordDict:
    """Parse records from bytes of ``bytes_of``.

    Raises:
        ValueError: these are no such bytes.
    """
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(content))
    except DecodeError as error:
        raise ValueError(f"records of Flower are expected, but: {error}") from error
