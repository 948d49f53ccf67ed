"""What a round of FDL-PP costs beside SplitFed and beside cryptography (Table 1, training time).

    python experiments/fdl_pp_cost.py --repeats 5
    python experiments/fdl_pp_cost.py --model alexnet --override model.hidden=null --examples 20 --repeats 3

Seconds are CPU seconds of one thread for a round of all clients, medians. The methods take turns, so that what else the
machine does reaches all of them; ratios are medians of those within a turn, with the quartiles. Bytes are those that
the server receives.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import torch
from row_file import RowFile, takes_rows

from fl_privacy.federation import Audit, plain_rounds, run_all
from fl_privacy.federation.ckks import encrypted_rounds
from fl_privacy.flower.secagg import secure_rounds
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import Setup, build_setup

METHODS = {"plain": "none", "SplitFed": "split_fed", "FDL-PP": "fdl_pp", "SecAgg+": "none", "CKKS": "none"}


def federation_of(options: argparse.Namespace, defense: str) -> Setup:
    settings = [
        f"data={options.data}",
        f"model={options.model}",
        "model.mean=null",
        "model.std=null",
        "federation=fedavg",
        f"federation.clients={options.clients}",
        "federation.plan.lr=0.01",
        "federation.plan.batch_size=10",
        "attack=none",
        f"defense={defense}",
        *options.override,
    ]
    federation = build_setup(compose_run(settings))
    clients = {c: replace(p, indices=p.indices[: options.examples]) for c, p in federation.clients.items()}
    return replace(federation, clients=clients, server=replace(federation.server, tested=frozenset()))


def one_round(federation: Setup, method: str) -> tuple[float, int]:
    server = replace(federation.server)
    rules: dict[str, Callable[..., Any]] = {"SecAgg+": secure_rounds, "CKKS": encrypted_rounds}
    interceptor = federation.interceptor()
    more = {} if method in rules else {"audit": Audit(), "interceptor": interceptor}
    started = time.process_time()
    reports, _ = run_all(rules.get(method, plain_rounds)(server, federation.clients, rounds=1, **more))
    return time.process_time() - started, reports[0].upload_bytes


def to(measured: Sequence[tuple[float, int]], other: Sequence[tuple[float, int]]) -> str:
    """Format the median ratio within a turn, with its quartiles."""
    low, middle, high = quartiles(measured, other)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def quartiles(measured: Sequence[tuple[float, int]], other: Sequence[tuple[float, int]]) -> list[float]:
    """Compute the quartiles of the ratio within a turn."""
    return quantiles([one / two for (one, _), (two, _) in zip(measured, other, strict=True)], n=4, method="inclusive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist_mini")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--examples", type=int, default=100, help="of each client")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--methods", nargs="*", default=list(METHODS), choices=list(METHODS), help="plain, SplitFed too"
    )
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.set_num_threads(1)
    asked = [method for method in METHODS if method in {"plain", "SplitFed", *options.methods}]
    federations = {method: federation_of(options, METHODS[method]) for method in asked}
    for method, federation in federations.items():
        one_round(federation, method)
    rows = {method: list[tuple[float, int]]() for method in asked}
    for _ in range(options.repeats):
        for method, federation in federations.items():
            rows[method].append(one_round(federation, method))
    print("| | CPU seconds a round | to plain | to SplitFed | bytes received |\n|---|---|---|---|---|")
    for method, measured in rows.items():
        seconds, size = median(s for s, _ in measured), measured[0][1]
        figures = {
            f"to_{other}": dict(zip(("low", "value", "high"), quartiles(measured, rows[other]), strict=True))
            for other in ("plain", "SplitFed")
        }
        key = {"model": options.model, "method": method, "clients": options.clients, "examples": options.examples}
        kept.add(key, {"cpu_seconds": seconds, "bytes": size, "repeats": options.repeats, **figures})
        ratios = [to(measured, rows[other]) for other in ("plain", "SplitFed")]
        print(f"| {method} | {seconds:.2f} | {' | '.join(ratios)} | {size:,} |")


if __name__ == "__main__":
    main()
