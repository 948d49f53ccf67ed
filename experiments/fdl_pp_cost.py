"""What a round of FDL-PP costs beside SplitFed and beside cryptography (Table 1, training time).

    python experiments/fdl_pp_cost.py --repeats 5
    python experiments/fdl_pp_cost.py --model alexnet --override model.hidden=null --examples 20 --repeats 3

Seconds are CPU seconds of one thread for a round of all clients; the methods take turns, so that what else the machine
does reaches all of them. Bytes are those that the server receives.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from fl_privacy.config import compose
from fl_privacy.config.build import Federation, build_federation
from fl_privacy.federation import Audit, Interceptor, RoundReport, run_rounds
from fl_privacy.federation.encrypted import run_encrypted
from fl_privacy.flower.secure_aggregation import run_secure_aggregation

METHODS = {"plain": "none", "SplitFed": "split_fed", "FDL-PP": "fdl_pp", "SecAgg+": "none", "CKKS": "none"}


def federation_of(options: argparse.Namespace, defense: str) -> Federation:
    settings = [
        f"data={options.data}",
        f"model={options.model}",
        "federation=fedavg",
        f"federation.clients={options.clients}",
        "federation.plan.lr=0.01",
        "federation.plan.batch_size=10",
        "attack=none",
        f"defense={defense}",
        *options.override,
    ]
    federation = build_federation(compose(settings))
    participants = {c: replace(p, indices=p.indices[: options.examples]) for c, p in federation.participants.items()}
    return replace(federation, participants=participants, server=replace(federation.server, tested=frozenset()))


def one_round(federation: Federation, method: str) -> tuple[float, int]:
    server, reports = replace(federation.server), list[RoundReport]()
    rules: dict[str, Callable[..., object]] = {"SecAgg+": run_secure_aggregation, "CKKS": run_encrypted}
    interceptor = Interceptor(
        model=federation.model,
        plan=server.local_plan,
        input_shape=federation.dataset.train.input_shape,
        num_classes=federation.dataset.train.num_classes,
        sink=lambda observation: None,
    )
    more = {} if method in rules else {"audit": Audit(), "interceptor": interceptor}
    started = time.process_time()
    rules.get(method, run_rounds)(server, federation.participants, rounds=1, on_round=reports.append, **more)
    return time.process_time() - started, reports[0].upload_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist_mini")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--examples", type=int, default=100, help="of each client")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    federations = {method: federation_of(options, defense) for method, defense in METHODS.items()}
    for method, federation in federations.items():
        one_round(federation, method)
    rows = {method: list[tuple[float, int]]() for method in METHODS}
    for _ in range(options.repeats):
        for method, federation in federations.items():
            rows[method].append(one_round(federation, method))
    plain, split = (median(seconds for seconds, _ in rows[method]) for method in ("plain", "SplitFed"))
    print("| | CPU seconds a round | to plain | to SplitFed | bytes received |\n|---|---|---|---|---|")
    for method, measured in rows.items():
        seconds, size = median(s for s, _ in measured), measured[0][1]
        print(f"| {method} | {seconds:.2f} | {seconds / plain:.2f} | {seconds / split:.2f} | {size:,} |")


if __name__ == "__main__":
    main()
