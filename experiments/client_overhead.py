"""What a client costs in a round beside a bare PyTorch loop that does the same mathematics, in CPU time.

    python experiments/client_overhead.py --clients 20 --rounds 21 --out experiments/rows/client_overhead

A round of the federation and one of the bare loop are run in turn in one process; the first is not counted. The bare
loop takes the same batches of the same clients, and checks, counts, records and defends nothing: it ends with the same
weights up to rounding, or the command fails.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from row_file import RowFile, takes_rows
from unwatched import unwatched_rounds

from fl_privacy.federation.client import local_batches
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import clients_of
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import Setup, build_setup
from fl_privacy.types import Tensors


def bare_rounds(federation: Setup, weights: Tensors) -> Iterator[Tensors]:
    """Yield the global weights after each round of FedSGD, written as plainly as for a paper."""
    plan, server, clients = federation.server.local_plan, federation.server, federation.clients
    net = copy.deepcopy(federation.model).train()
    own = dict(net.named_parameters())
    images, labels = clients[0].examples.images, clients[0].examples.labels  # type: ignore[attr-defined]
    for number in range(1, federation.rounds + 1):
        total = {name: torch.zeros_like(p) for name, p in weights.items()}
        for client in clients.values():
            rng = derive_generator(client.seed, "client", client.id, "order", number)
            rows = client.indices[local_batches(len(client.indices), plan, rng)[0]]
            with torch.no_grad():
                for name, p in own.items():
                    p.copy_(weights[name])
            net.zero_grad()
            loss = F.cross_entropy(net(images[rows].float() / 255), labels[rows])
            loss.backward()
            loss.item()
            for name, p in own.items():
                assert p.grad is not None
                total[name] += p.grad / len(clients)
        weights = {name: p - server.plan.lr * total[name] for name, p in weights.items()}
        yield weights


def measure(backend: str, overrides: list[str]) -> tuple[list[float], list[float]]:
    """Measure CPU seconds of each counted round, of the federation and of the bare loop."""
    config = compose_run(overrides)
    federation = build_setup(config)
    weights = federation.server.state.parameters
    bare = bare_rounds(federation, weights)
    ours, theirs = list[float](), list[float]()
    began = time.process_time()
    for round in unwatched_rounds(backend, federation, partial(clients_of, config)):
        round.report  # noqa: B018
        ended = time.process_time()
        weights = next(bare)
        theirs.append(time.process_time() - ended)
        ours.append(ended - began)
        began = time.process_time()
    for name, p in federation.server.state.parameters.items():
        torch.testing.assert_close(p, weights[name], rtol=1e-3, atol=1e-4)
    return ours[1:], theirs[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["loop", "flower"], choices=["loop", "flower"])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="mnist")
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.set_num_threads(1)
    settings = {name: getattr(options, name) for name in ("model", "data", "clients", "batch_size")}
    overrides = [
        "federation=fedsgd",
        "attack=none",
        "device=cpu",
        f"model={options.model}",
        f"data={options.data}",
        f"federation.clients={options.clients}",
        f"federation.rounds={options.rounds}",
        f"federation.plan.batch_size={options.batch_size}",
    ]
    for backend in options.backends:
        ours, theirs = measure(backend, overrides)
        ratios = [own / bare for own, bare in zip(ours, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        own_ms, bare_ms = (1e3 * statistics.median(side) / options.clients for side in (ours, theirs))
        figures = {"client_ms": own_ms, "bare_ms": bare_ms, "ratio": middle, "q1": low, "q3": high}
        kept.add({"backend": backend, **settings}, {**figures, "rounds": len(ratios)})
        print(
            f"{backend:7} {own_ms:.2f} ms of CPU a client and round, the bare loop {bare_ms:.2f} ms:"
            f" {middle:.2f} ({low:.2f} to {high:.2f}, quartiles of {len(ratios)} rounds)"
        )


if __name__ == "__main__":
    main()
