"""Files of updates as frameworks write them."""

import io
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from torch import Tensor, nn

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(48, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, images):
        return self.out(torch.relu(self.hidden(images.flatten(1))))
"""


def of_flare(
    path: Path, kind: str, arrays: dict[str, Tensor], meta: dict[str, Any], *, apart: bool = False, job: bool = False
) -> None:
    """Write a DXO as NVFlare 2.9's ``DXO.to_file`` does.

    ``apart`` as it does for arrays of more than 10 MB, ``job`` as within a job.
    """
    blobs = list[tuple[bytes, bytes]]()

    def array(value: Tensor) -> dict[str, Any]:
        stream = io.BytesIO()
        np.save(stream, value.numpy(), allow_pickle=False)
        data: Any = stream.getvalue()
        if apart:
            number = len(blobs).to_bytes(16, "big")
            blobs.append((number, data))
            name = "-".join(number.hex()[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
            ref = {"data": {"datum_id": name, "unwrap": True}}
            data = {"__fobs_type__": "nvflare.fuel.utils.fobs.datum.DatumRef", "__fobs_data__": ref}
        return {"__fobs_type__": "numpy.ndarray", "__fobs_data__": {"type": "native", "data": data}}

    of_kind = {"__fobs_type__": "nvflare.apis.dxo.DataKind", "__fobs_data__": kind}
    held: Any = {"data_kind": of_kind, "data": {name: array(value) for name, value in arrays.items()}, "meta": meta}
    in_job = {"__fobs_type__": "tuple", "__fobs_data__": [of_kind, meta, held["data"]]}
    held = in_job if job else {"data": held}
    body = msgpack.packb({"__fobs_type__": "nvflare.apis.dxo.DXO", "__fobs_data__": held})
    sections = [struct.pack(">BBQ", 100, 0, len(body)) + body]
    sections += [struct.pack(">BBQ", 102, 0, 16 + len(data)) + number + data for number, data in blobs]
    path.write_bytes(b"".join(sections))


def of_fedbiomed(path: Path, held: Any) -> None:
    """Write ``held`` as Fed-BioMed's ``Serializer.dump`` does."""

    def plain(value: Tensor) -> dict[str, Any]:
        array = value.numpy()
        return {"__type__": "torch.Tensor", "value": [array.tobytes(), array.dtype.name, list(array.shape)]}

    path.write_bytes(msgpack.packb(held, default=plain, strict_types=True))


def of_openfl(path: Path, arrays: dict[str, Tensor], *, tag: str, more: dict[str, Any] | None = None) -> None:
    """Write the message ModelProto of OpenFL's ``base.proto``."""

    def fields(*kinds: tuple[str, str, bool]) -> list[dict[str, Any]]:
        message = {"NamedTensor": ".fl.NamedTensor", "MetadataProto": ".fl.MetadataProto"}
        return [
            {"name": name, "number": place, "label": "LABEL_REPEATED" if many else "LABEL_OPTIONAL"}
            | ({"type": "TYPE_MESSAGE", "typeName": message[kind]} if kind in message else {"type": f"TYPE_{kind}"})
            for place, (name, kind, many) in enumerate(kinds, 1)
        ]

    named = [("name", "STRING", False), ("round_number", "INT32", False), ("lossless", "BOOL", False)]
    named += [("report", "BOOL", False), ("tags", "STRING", True)]
    named += [("transformer_metadata", "MetadataProto", True), ("data_bytes", "BYTES", False)]
    types = {
        "ModelProto": fields(("tensors", "NamedTensor", True)),
        "NamedTensor": fields(*named),
        "MetadataProto": fields(("int_to_float", "BYTES", True), ("int_list", "INT32", True)),
    }
    messages = [{"name": name, "field": own} for name, own in types.items()]
    pool = descriptor_pool.DescriptorPool()
    held = {"name": "fl.proto", "package": "fl", "syntax": "proto3", "messageType": messages}
    pool.Add(json_format.ParseDict(held, descriptor_pb2.FileDescriptorProto()))
    model = message_factory.GetMessageClass(pool.FindMessageTypeByName("fl.ModelProto"))()
    for name, value in arrays.items():
        own = {"name": name, "round_number": 3, "lossless": True, "tags": [tag]}
        model.tensors.add(
            **own,
            transformer_metadata=[{"int_list": list(value.shape), **(more or {})}],
            data_bytes=value.numpy().astype("<f4").tobytes(),
        )
    path.write_bytes(model.SerializeToString())


def trained(net: nn.Module, inputs: Tensor, labels: Tensor, *, lr: float, steps: int = 1) -> dict[str, Tensor]:
    """Return the values of ``net`` after steps of SGD, which leave it as it was."""
    own = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    after = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(own)
    return after
