"""Files of updates as frameworks write them."""

import io
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
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
