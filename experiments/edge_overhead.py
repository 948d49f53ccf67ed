"""What a client round costs on a small device: time, CPU, memory, bytes, energy by defense (Refiner, Appendix O).

    python experiments/edge_overhead.py --models lenet resnet18 mobilenet_v2 --out experiments/rows/edge_overhead
    python experiments/edge_overhead.py --models resnet50_224 --defenses none --out experiments/rows/edge_overhead

Each cell is a process of its own, held to one core by its CPU affinity, with one thread, and to 1 GiB of memory by a
memory cgroup (without the right to make one, by its parent, which looks every 20 ms). What does not fit has a row that
says so. A row that is there is not measured again. ``fl-privacy node-cost RUN_DIR`` measures the client of a run.

A round is one batch: the gradient and the defense's hooks, as a client runs them. Energy is that of RAPL
(``/sys/class/powercap``), of the whole package; where the kernel does not expose it the column says so. The paper does
not run it: it multiplies the 28.47 to 44.04 ms of a forward pass of ResNet-50 at 224x224 on four devices by 640.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet50

from fl_privacy.defenses import (
    ClientState,
    Defense,
    dp_noise,
    dp_sgd,
    fdl_pp,
    none,
    pruning,
    quantization,
    refiner,
    soteria,
    split_fed,
    spn,
)
from fl_privacy.federation import public_state
from fl_privacy.federation.server import upload_bytes
from fl_privacy.federation.training import local_update
from fl_privacy.models import LeNet, MobileNetV2, ResNet18
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork
from fl_privacy.models.pretrained.evaluator_files import save_evaluator
from fl_privacy.site.deploy.device import MIB, joules_so_far, run_limited
from fl_privacy.types import Batch, LocalPlan

CLASSES = 10

MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "lenet": (32, lambda: LeNet(in_channels=3, image_size=32, num_classes=CLASSES)),
    "resnet18": (32, lambda: ResNet18(in_channels=3, image_size=32, num_classes=CLASSES)),
    "mobilenet_v2": (32, lambda: MobileNetV2(in_channels=3, image_size=32, num_classes=CLASSES)),
    "resnet50_224": (224, lambda: resnet50(num_classes=CLASSES)),
}

DEFENSES: dict[str, Callable[[Callable[[], str]], Defense]] = {
    "none": lambda evaluator: none(),
    "dp_noise": lambda evaluator: dp_noise(scale=0.01, clip_norm=1.0),
    "dp_sgd": lambda evaluator: dp_sgd(),
    "pruning": lambda evaluator: pruning(rate=0.9),
    "quantization": lambda evaluator: quantization(bits=8),
    "soteria": lambda evaluator: soteria(scores="estimated"),
    "refiner": lambda evaluator: refiner(evaluator=evaluator()),
    "refiner_warm": lambda evaluator: refiner(evaluator=evaluator(), iterations=5),
    "spn": lambda evaluator: spn(),
    "split_fed": lambda evaluator: split_fed(),
    "fdl_pp": lambda evaluator: fdl_pp(),
}

PAPER = {"Jetson Nano": 18.22, "Coral USB": 23.74, "Neural Stick": 24.59, "Coral PCIe": 28.19}
"""Refiner, Appendix O: seconds extrapolated for ResNet-50 at 224x224, batch 32, 10 iterations."""


def one_round(model: nn.Module, defense: Defense, batch: Batch) -> dict[str, Any]:
    """Measure the cost of one round of a client that holds ``batch``."""
    before, started, cpu = joules_so_far(), time.perf_counter(), time.process_time()
    result = local_update(
        model,
        public_state(model, defense),
        [batch],
        num_examples=len(batch),
        plan=LocalPlan(batch_norm="eval"),
        defense=defense,
        state=ClientState(),
        rng=torch.Generator().manual_seed(0),
        private_rng=torch.Generator().manual_seed(1),
    )
    used = joules_so_far()
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "joules": used - before if before is not None and used is not None else None,
        "mib_up": upload_bytes(result.upload) / MIB,
    }


def measure(model_name: str, defense_name: str, batch_size: int, repeats: int) -> dict[str, Any]:
    """Measure one cell in this process, which its parent limits."""
    torch.set_num_threads(1)
    size, build = MODELS[model_name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:

        def evaluator() -> str:
            file = Path(folder) / "evaluator.safetensors"
            save_evaluator(EvaluationNetwork(input_shape=(3, size, size)), file, {})
            return str(file)

        model, defense = build(), DEFENSES[defense_name](evaluator)
        for prepare in defense.prepare:
            prepare((3, size, size))
        images = torch.rand(batch_size, 3, size, size, generator=torch.Generator().manual_seed(0))
        batch = Batch(images, torch.arange(batch_size) % CLASSES)
        first = one_round(model, defense, batch)
        rounds = [first] if first["cpu_seconds"] > 20 else [one_round(model, defense, batch) for _ in range(repeats)]
    middle = {key: statistics.median(row[key] for row in rounds) for key in ("cpu_seconds", "seconds", "mib_up")}
    joules = [row["joules"] for row in rounds if row["joules"] is not None]
    return {
        **middle,
        "joules": statistics.median(joules) if joules else None,
    }


def cell(model: str, defense: str, batch_size: int, *, memory: int, core: int, repeats: int) -> dict[str, Any]:
    """Measure one cell in a process limited to one core and ``memory`` MiB, and return its row."""
    command = [sys.executable, __file__, "--cell", model, defense, str(batch_size), "--repeats", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ended = run_limited(command, memory=memory * MIB, core=core, environment=environment)
    row = {"model": model, "batch": batch_size, "memory_mib": memory, "defense": defense, "peak_mib": ended.peak / MIB}
    if ended.too_large:
        return row | {"failed": "does not fit"}
    if ended.status < 0:
        raise SystemExit(f"the cell was ended by signal {-ended.status}, which is no figure; start it again")
    if ended.status or not ended.out.strip():
        said = ended.complaint.strip().splitlines()
        return row | {"failed": said[-1][:200] if said else f"status {ended.status}"}
    return row | json.loads(ended.out.splitlines()[-1])


Key = tuple[str, str, int, int]


def read(rows: Path) -> dict[Key, dict[str, Any]]:
    lines = rows.read_text().splitlines() if rows.exists() else []
    return {(row["model"], row["defense"], row["batch"], row["memory_mib"]): row for row in map(json.loads, lines)}


def show(rows: dict[Key, dict[str, Any]]) -> None:
    exposed = "RAPL" if joules_so_far() is not None else "not exposed by this kernel"
    print(f"One core (affinity), one thread; energy: {exposed}\n")
    print("| model | batch | MiB | defense | seconds | CPU s | to undefended | peak MiB | MiB up | joules |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (model, defense, batch, memory), row in sorted(
        rows.items(), key=lambda item: (list(MODELS).index(item[0][0]), item[0][2:])
    ):
        if "failed" in row:
            print(f"| {model} | {batch} | {memory} | {defense} | {row['failed']} | | | {row['peak_mib']:.0f} | | |")
            continue
        base = rows.get((model, "none", batch, memory), {}).get("cpu_seconds")
        ratio = f"{row['cpu_seconds'] / base:.1f}" if base else ""
        joules = f"{row['joules']:.1f}" if row["joules"] is not None else "-"
        print(
            f"| {model} | {batch} | {memory} | {defense} | {row['seconds']:.3f} | {row['cpu_seconds']:.3f} | {ratio} |"
            f" {row['peak_mib']:.0f} | {row['mib_up']:.2f} | {joules} |"
        )
    theirs = ", ".join(f"{device} {seconds} s" for device, seconds in PAPER.items())
    print(f"\nExtrapolated in the paper for Refiner, ResNet-50 at 224x224, batch 32, 10 iterations: {theirs}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/edge_overhead"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--defenses", nargs="+", default=list(DEFENSES), choices=DEFENSES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=int, default=1024, help="MiB")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "DEFENSE", "BATCH"), help="measure in this process")
    options = parser.parse_args()
    if options.cell:
        model, defense, batch = options.cell
        print(json.dumps(measure(model, defense, int(batch), options.repeats)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    done = read(path)
    wanted = [(m, d, b, options.memory) for m in options.models for b in options.batches for d in options.defenses]
    for key in [] if options.only_table else [key for key in wanted if key not in done]:
        row = cell(*key[:3], memory=key[3], core=options.core, repeats=options.repeats)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*key, row.get("failed") or f"{row['seconds']:.3f} s", file=sys.stderr, flush=True)
    show(read(path))


if __name__ == "__main__":
    main()
