"""What an audit adds to the memory of a server: peak of a training with and without it, by the number of rounds.

    python experiments/audit_memory.py --clients 50 --rounds 2 5 10 --out experiments/rows/audit_memory

Server and clients are one process, which Flower's messages go through; each training is a process of its own. In each
audited round every client is asked for the upload of one image, and each of these is captured and attacked.
"""

import argparse
import contextlib
import io
import json
import resource
import subprocess
import sys
import tempfile
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from row_file import RowFile, takes_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_privacy import audit, probe_mod
from fl_privacy.flower import LocalGrid

SIDE, CLASSES, IMAGES, WIDTH = 28, 10, 8, 512
MIB = 1 << 20


class Net(nn.Sequential):
    """407,050 parameters, 1.6 MiB."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(SIDE * SIDE, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, CLASSES))


@cache
def pictures(client: int) -> list[tuple[Tensor, int]]:
    """Draw the random images of a client."""
    drawn = torch.rand((IMAGES, 1, SIDE, SIDE), generator=torch.Generator().manual_seed(client))
    return [(image, place % CLASSES) for place, image in enumerate(drawn)]


def own(context: Context) -> list[tuple[Tensor, int]]:
    """Draw the images of the client of ``context``."""
    return pictures(int(context.node_config["partition-id"]))


def train(net: nn.Module, loader: DataLoader[Any]) -> None:
    """Train for one epoch of SGD."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


app = ClientApp(mods=[probe_mod(model=Net, train=train, dataset=own)])


@app.train()
def train_message(message: Message, context: Context) -> Message:
    """Train on the client's images."""
    net, data = Net(), own(context)
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    train(net, DataLoader(data, batch_size=4))
    metrics = MetricRecord({"num-examples": len(data)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


def train_all(clients: int, rounds: int, audited: bool) -> None:
    """Run one training in this process and print its peak memory in MiB."""
    torch.manual_seed(0)
    strategy: Any = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    initial, grid = ArrayRecord(Net().state_dict()), LocalGrid(range(clients), app)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if audited:
            settings = {"attack": "analytic", "victims": clients, "rounds": "all"}
            strategy = audit(strategy, model=Net, data=pictures, out=folder, **settings)
        strategy.start(grid, initial, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.1}))
        if audited and strategy.failure:
            raise SystemExit(strategy.failure)
    unit = 1 if sys.platform == "darwin" else 1024
    sys.__stdout__.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB}\n")  # type: ignore[union-attr]


def peak_mib(clients: int, rounds: int, audited: bool) -> float:
    """Measure the peak resident memory, in MiB, of a training in a process of its own."""
    command = [sys.executable, __file__, "--here", json.dumps([clients, rounds, audited])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--here", help=argparse.SUPPRESS)
    takes_rows(parser)
    options = parser.parse_args()
    if options.here:
        train_all(*json.loads(options.here))
        return
    kept = RowFile(options.out)
    for rounds in options.rounds:
        plain, audited = (peak_mib(options.clients, rounds, looked_at) for looked_at in (False, True))
        key = {"clients": options.clients, "rounds": rounds}
        figures = {"attacked": options.clients * rounds, "plain_mib": plain, "audited_mib": audited}
        kept.add(key, {**figures, "more_mib": audited - plain})
        print(f"{rounds} rounds of {options.clients} clients: {plain:.0f} MiB, audited {audited:.0f} MiB")


if __name__ == "__main__":
    main()
