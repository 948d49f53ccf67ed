"""What a command does with the whole machine: CPU use over time, from start to page, the same bits on any cores.

    python experiments/whole_machine.py --out experiments/rows/whole_machine
    python experiments/whole_machine.py --figure use.svg --out experiments/rows/whole_machine

It wants a machine on which nothing else runs and ends after ``--minutes``: first the commands, then the rows of
``speed.py`` that there is time for, into ``--speed``. Rows that are there already are kept.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import speed
import torch
from attack_speed import MODELS, observe
from row_file import Row, RowFile

from fl_privacy.attacks import inverting_gradients
from fl_privacy.federation.cores import usable_cores
from fl_privacy.federation.parallel import attack_by_all_cores
from fl_privacy.rng import cpu_threads

FIRST = ("attack", "model=lenet_dlg", "attack=idlg", "victims=6", "attack.iterations=100")
MANY = ("attack", "model=lenet", "victims=64", "attack.budget=quick")
LONG = ("attack", "model=lenet", "attack=inverting_gradients", "victims=64", "attack.iterations=2000")
APP = str(Path(__file__).parents[1] / "examples" / "flower_quickstart")
COMMANDS: dict[str, Sequence[str]] = {
    "attack, 6 victims": FIRST,
    "run, demo": ("run", "experiment=demo"),
    "attack, 64 victims": MANY,
    "attack, 64 victims, jobs=1": (*MANY, "jobs=1"),
    "attack, 64 victims, 2,000 iterations": LONG,
    "attack, 64 victims, 2,000 iterations, jobs=1": (*LONG, "jobs=1"),
    "audit, flower_quickstart": ("audit", APP),
    "trade-off quick, first minute": ("trade-off", "quick"),
    "benchmark smoke, first minute": ("benchmark", "smoke"),
}
STOPPED = 60.0
"""Seconds after which a study is stopped: it goes on in the same way."""

PHASES = {
    "settings": ("fl_privacy.runs.config.compose", "compose_run"),
    "data, model and victims": ("fl_privacy.runs.attack", "build_untrained"),
    "attack": ("fl_privacy.runs.attack_stage", "attack_by_all_cores"),
    "judging": ("fl_privacy.runs.attack_stage", "Judge.scores"),
    "page": ("fl_privacy.runs.run_location", "RunLocation.write_page"),
}
TICKS = os.sysconf("SC_CLK_TCK")
EVERY = 0.5


def cpu_of_tree(root: int) -> float:
    """Return the CPU seconds of a process, of all that it started and that are there, and of those waited for."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        process = int(place.parent.name)
        parents[process], seconds[process] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    inside = {root}
    while more := {process for process, parent in parents.items() if parent in inside} - inside:
        inside |= more
    return sum(seconds.get(process, 0.0) for process in inside)


def environment() -> dict[str, str]:
    """Return the variables of a user's shell: byte code is kept, and one thread is all that PyTorch begins with."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def used(arguments: Sequence[str], out: str) -> Row:
    """Run a command; return its seconds, CPU seconds and the share of all cores that it used, moment by moment."""
    began, cores, shares = time.perf_counter(), usable_cores(), list[float]()
    out = re.sub(r"[^\w/.-]+", "_", out)  # a comma would list several values
    place = ("--out", out) if arguments[0] == "audit" else (f"out={out}",)
    command = [sys.executable, "-m", "fl_privacy", *arguments, *place]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()) as process:
        before, at, most = 0.0, began, 0.0
        while process.poll() is None:
            time.sleep(EVERY)
            now, cpu = time.perf_counter(), cpu_of_tree(process.pid)
            shares.append(max(0.0, cpu - before) / (now - at) / cores)
            before, at, most = cpu, now, max(most, cpu)
            if arguments[0] in ("trade-off", "benchmark") and now - began > STOPPED:
                process.terminate()
                break
        said = process.stderr.read().decode() if process.stderr else ""
    seconds = time.perf_counter() - began
    if process.returncode not in (0, -15, 143):
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}: {said.strip().splitlines()[-1:]}")
    return {"seconds": seconds, "cpu_seconds": most, "every": EVERY, "share": [round(share, 3) for share in shares]}


INSIDE = """
import functools, importlib, json, sys, time
began = time.perf_counter()
seconds = {{}}
def timed(name, function):
    @functools.wraps(function)
    def run(*positional, **named):
        start = time.perf_counter()
        try:
            return function(*positional, **named)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    return run
phases = {phases!r}
for module in {imports!r}:
    timed("imports", importlib.import_module)(module)
for name, (module, path) in phases.items():
    place = importlib.import_module(module)
    *outer, last = path.split(".")
    for one in outer:
        place = getattr(place, one)
    setattr(place, last, timed(name, getattr(place, last)))
import fl_privacy.cli.jobs
fl_privacy.cli.jobs.compose_run = importlib.import_module("fl_privacy.runs.config.compose").compose_run
from fl_privacy.cli.main import main
sys.argv = ["fl-privacy", *{arguments!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
seconds["all"] = time.perf_counter() - began
print("PHASES " + json.dumps(seconds), file=sys.stderr)
"""


def phases(out: str) -> dict[str, float]:
    """Measure the seconds of each phase of the first command of a new user."""
    imports = ["torch", "fl_privacy.runs.attack", "fl_privacy.runs.run", "fl_privacy.cli.main"]
    program = INSIDE.format(phases=PHASES, imports=imports, arguments=[*FIRST, f"out={out}", "overwrite=true"])
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment()
    )
    found = re.search(r"PHASES (\{.*\})", done.stderr)
    assert found is not None
    told: dict[str, float] = json.loads(found[1])
    return {**told, "rest": told["all"] - sum(value for name, value in told.items() if name != "all")}


def median_phases(out: str, repeats: int) -> Row:
    """Measure the phases several times and return the median of each."""
    found = [phases(out) for _ in range(repeats)]
    return {**{name: statistics.median(one[name] for one in found) for name in found[0]}, "repeats": repeats}


def files_of(folder: Path) -> dict[str, bytes]:
    """Return what was reconstructed, by its place below the run's folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def same_bits(folder: Path) -> Row:
    """Attack by one, two and four processes and compare all that was reconstructed."""
    found = []
    for jobs in (1, 2, 4):
        out = folder / f"jobs-{jobs}"
        used((*MANY, f"jobs={jobs}"), str(out))
        (run,) = (path for path in out.iterdir() if path.name.startswith("attack-"))
        found.append(files_of(run))
    return {"files": len(found[0]), "bytes": sum(map(len, found[0].values())), "same": found[0] == found[1] == found[2]}


def parts_on_one_core(model: str, victims: int, repeats: int) -> Row:
    """Compare an attack in parts with one of all victims at once, both in one process of one thread, in turn."""
    torch.manual_seed(0)
    seen, attack = (
        observe(MODELS[model](), victims, "cpu"),
        inverting_gradients(iterations=60, restarts=1, compile="off"),
    )

    def seconds(parts: bool) -> float:
        began = time.process_time()
        if parts:
            attack_by_all_cores(attack, seen, seed=0, processes=1)
        else:
            attack(seen, seed=0)
        return time.process_time() - began

    with cpu_threads(1):
        pairs = [(seconds(True), seconds(False)) for _ in range(repeats + 1)][1:]
    return {"victims": victims, "cost": statistics.median(parts / whole for parts, whole in pairs), "pairs": repeats}


def measured(options: argparse.Namespace, folder: Path, kept: RowFile, where: Row) -> Iterator[Row]:
    """Measure what is not there yet, row by row."""
    for name, arguments in COMMANDS.items():
        key = {"item": "use", "of": name, **where}
        yield kept.find(key) or kept.add(key, used(arguments, str(folder / name)))
    key = {"item": "phases", "of": "attack, 6 victims", **where}
    yield kept.find(key) or kept.add(key, median_phases(str(folder / "phases"), options.repeats))
    key = {"item": "same bits", "of": "jobs 1, 2, 4", **where}
    yield kept.find(key) or kept.add(key, same_bits(folder))
    for model, victims in {"lenet": 64, "convnet": 32, "resnet20": 24}.items():
        key = {"item": "parts on one core", "of": model, **where}
        yield kept.find(key) or kept.add(key, parts_on_one_core(model, victims, options.repeats))


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the share of all cores over time, a panel for each command."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    shown = [row for row in rows if row["item"] == "use"]
    figure = Figure(figsize=(6, 1.3 * len(shown)), layout="constrained")
    for axes, row in zip(figure.subplots(len(shown), squeeze=False).flatten(), shown, strict=True):
        moments = [row["every"] * (number + 1) for number in range(len(row["share"]))]
        axes.fill_between(moments, [100 * share for share in row["share"]], step="pre", alpha=0.6)
        axes.set(title=row["of"], ylabel="percent", ylim=(0, 105))
        axes.title.set_fontsize(9)
    axes.set_xlabel("Seconds")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder in which rows.jsonl keeps the figures")
    parser.add_argument("--speed", type=Path, help="the same of speed.py; none leaves it out")
    parser.add_argument("--minutes", type=float, default=12.0, help="no row of speed.py begins later than so")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="only draw what is there already")
    options = parser.parse_args()
    kept, began = RowFile(options.out), time.monotonic()
    if options.figure:
        draw(kept.rows, options.figure)
        return
    where = {"machine": speed.machine(), "cores": usable_cores()}
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(options, Path(folder), kept, where):
            told = {name: value for name, value in row.items() if name not in (*where, "share", "every")}
            mean = f", {statistics.mean(row['share']):.0%} of all cores" if row.get("share") else ""
            print(
                ", ".join(f"{n} {v:.2f}" if isinstance(v, float) else f"{n} {v}" for n, v in told.items()) + mean,
                flush=True,
            )
    if options.speed is None:
        return
    items = (
        "one victim",
        "many victims",
        "L-BFGS",
        "start-up",
        "dp_sgd",
        "soteria",
        "ATS search",
        "passports",
        "opacus",
    )
    for item in items:
        left = 60 * options.minutes - (time.monotonic() - began)
        if left < 45:
            print(f"No time is left for {item}; the same command goes on.", flush=True)
            return
        command = [sys.executable, speed.__file__, "--repeats", "3", "--out", str(options.speed), "--items", item]
        try:
            subprocess.run(command, check=True, timeout=left)
        except subprocess.TimeoutExpired:
            print(f"{item} was stopped; the same command goes on.", flush=True)
            return


if __name__ == "__main__":
    main()
