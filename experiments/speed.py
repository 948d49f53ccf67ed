"""How fast all is that there is a target for, each beside its reference, measured in turn in one process.

    python experiments/speed.py --out experiments/rows/speed

    python experiments/speed.py --out experiments/rows/speed --items compiled

Rows that are there already are kept, so that it goes on where it was stopped; ``--items`` chooses some. A row has how
many times as fast ours is, and how many times as long it takes, the medians over the pairs with their quartiles, and
the machine, the clock and the threads.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ats_speed
import attack_speed
import defense_cost
import fdl_pp_cost
import torch
from row_file import RowFile

Pairs = Sequence[tuple[float, float]]
"""Seconds (of ours, of the reference)."""

MANY = {"lenet": 128, "convnet": 32, "convnet_3": 32, "resnet20": 16, "resnet18": 8}
"""Victims at once."""

SLOW = {"compiled"}
"""Items that take minutes: the compiler runs for each pair."""


def compared(pairs: Pairs) -> dict[str, float]:
    """Compute medians and quartiles of the ratios."""
    found = {"ours_ms": 1e3 * statistics.median(own for own, _ in pairs)}
    for name, ratios in {"faster": [r / o for o, r in pairs], "cost": [o / r for o, r in pairs]}.items():
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found |= {name: middle, f"{name}_low": low, f"{name}_high": high}
    return found


def attacked(options: argparse.Namespace, model: str, victims: int, attack: str, compile: str) -> dict[str, float]:
    """Measure an attack beside the public loop."""
    iterations = 2 * attack_speed.MOVES if attack == "lbfgs" else 10
    arguments = argparse.Namespace(
        device="cpu", clock=options.clock, threads=options.threads, iterations=iterations, repeats=options.repeats
    )
    row = attack_speed.measure(model, attack, victims, compile, arguments=arguments)
    return {
        **{"ours_ms": row.engine_ms, "faster": row.ratio, "faster_low": row.low, "faster_high": row.high},
        **{"cost": 1 / row.ratio, "cost_low": 1 / row.high, "cost_high": 1 / row.low, "lean_faster": row.lean_ratio},
        **{"share_of_peak": row.share_of_peak, "gflops": row.gflops, "peak_gflops": row.peak_gflops},
    }


def passports(options: argparse.Namespace) -> Pairs:
    """Time a round of FDL-PP beside one of SplitFed, in CPU time of one thread."""
    settings = argparse.Namespace(data="mnist_mini", model="lenet5", clients=4, examples=100, override=[])
    federations = {m: fdl_pp_cost.federation_of(settings, fdl_pp_cost.METHODS[m]) for m in ("FDL-PP", "SplitFed")}
    turns = [[fdl_pp_cost.one_round(f, m)[0] for m, f in federations.items()] for _ in range(options.repeats + 1)]
    return [(ours, other) for ours, other in turns[1:]]


def searched(options: argparse.Namespace) -> Pairs:
    """Time ATS' privacy score of a policy beside a loop over samples and points."""
    make = ats_speed.MODELS["ResNet-20, width 16, 28x28"]
    rows = ats_speed.compare(make, images=8, together=2, repeats=options.repeats, device="cpu")
    return [(engine, ratio * engine) for ratio, engine in rows]


def started(options: argparse.Namespace, arguments: Sequence[str]) -> Pairs:
    """Time a process of ours beside one that imports PyTorch alone."""

    def seconds(*command: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began

    return [(seconds(*arguments), seconds("-c", "import torch")) for _ in range(options.repeats + 1)][1:]


def measurements(options: argparse.Namespace) -> dict[tuple[str, str], Callable[[], dict[str, float]]]:
    """Map each (item, variant) to the function that measures it."""
    clock, repeats, found = attack_speed.CLOCKS[options.clock], options.repeats, {}
    for model, many in MANY.items():
        for victims in dict.fromkeys((1, min(many, options.most_victims))):
            item = "one victim" if victims == 1 else "many victims"
            found[item, model] = lambda m=model, v=victims: attacked(options, m, v, "inverting_gradients", "off")
    lenets = min(MANY["lenet"], options.most_victims)
    found["L-BFGS", "lenet"] = lambda: attacked(options, "lenet", lenets, "lbfgs", "off")
    for label in ("dp_sgd", "opacus"):
        for model in options.trained:
            found[label, model] = lambda m=model, d=label: compared(
                defense_cost.pairs(m, d, options.batch_size, repeats, clock)
            )
    for label in ("soteria", "soteria_exact"):
        found[label, "convnet"] = lambda d=label: compared(defense_cost.soteria_pairs("convnet", d, repeats, clock))
    found["passports", "lenet5"] = lambda: compared(passports(options))
    found["ATS search", "resnet20"] = lambda: compared(searched(options))
    found["start-up", "import"] = lambda: compared(started(options, ["-c", "import fl_privacy"]))
    found["start-up", "list"] = lambda: compared(started(options, ["-m", "fl_privacy", "list"]))
    found["compiled", "lenet"] = lambda: attacked(options, "lenet", lenets, "inverting_gradients", "on")
    return found


def machine() -> str:
    """Describe the processor and its number of cores."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, PyTorch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder in which rows.jsonl keeps the figures")
    parser.add_argument("--items", nargs="+", help="such as dp_sgd; all but compiled by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=attack_speed.CLOCKS, default="wall")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of each row, at least 2")
    parser.add_argument("--most-victims", type=int, default=128, help="at once")
    parser.add_argument("--batch-size", type=int, default=128, help="of a step of training")
    parser.add_argument("--trained", nargs="+", choices=defense_cost.MODELS, default=defense_cost.STEPPED)
    options = parser.parse_args()
    kept = RowFile(options.out)
    where = {"machine": machine(), "clock": options.clock, "threads": options.threads}
    print(f"{where['machine']}; {options.clock} clock, {options.threads} threads", flush=True)
    for (item, of), measure in measurements(options).items():
        if item not in (options.items or {each for each, _ in measurements(options)} - SLOW):
            continue
        key = {"item": item, "of": of, **where}
        torch.set_num_threads(options.threads)
        row = kept.find(key) or kept.add(key, {**measure(), "pairs": options.repeats})
        peak = f", {row['share_of_peak']:.0%} of peak" if "share_of_peak" in row else ""
        print(
            f"{item:13} {of:10} {row['ours_ms']:10.3f} ms, {row['faster']:6.2f} times as fast"
            f" [{row['faster_low']:.2f}, {row['faster_high']:.2f}], cost {row['cost']:.2f}{peak}",
            flush=True,
        )


if __name__ == "__main__":
    main()
