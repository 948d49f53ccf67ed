"""Flower's quickstart-pytorch audited in two ways: as it is, and with two lines in it; both come to one verdict.

    python experiments/two_lines.py --flower CHECKOUT --data DATA [--out FOLDER] [--rows experiments/rows/two_lines]

The first way is ``fl-privacy audit APP``. The second is ``audit(...)`` around the strategy and ``probe_mod`` in front
of the clients, in a copy of the app, with the same data, clients and seed. Rows: the verdict of each, what was read of
uploads of single images, and the seconds that it took here.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flower_data import make_mirror
from row_file import RowFile

ROWS = Path(__file__).resolve().parent / "rows" / "two_lines"
NODES = 10

IN_CLIENT = """
from fl_privacy import probe_mod


def _own(context):
    return load_data(context.node_config["partition-id"], context.node_config["num-partitions"], 32)[0]


def _train(net, loader, config):
    return train_fn(net, loader, 1, config["lr"], torch.device("cpu"))


app = ClientApp(mods=[probe_mod(model=Net, train=_train, dataset=_own)])
"""
"""In place of ``app = ClientApp()``: the line, and the app's own training and data as functions."""

IN_SERVER = """    from fl_privacy import audit
    from pytorchexample.task import load_data

    strategy = audit(strategy, model=Net, data=lambda partition: load_data(partition, NODES, 32)[0], plan=context)

    # Start strategy"""


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, help="a checkout of Flower's repository")
    parser.add_argument("--data", type=Path, help="folder of data sets, NAME/SPLIT.parquet")
    parser.add_argument("--out", type=Path, default=Path("two_lines"), help="folder of both audits")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder in which rows.jsonl is kept")
    parser.add_argument("--inside", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        run_inside(*asked.inside)
        return
    if asked.flower is None or asked.data is None:
        parser.error("--flower and --data are expected")
    out = asked.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    mirror = make_mirror(asked.data.absolute(), out / "mirror")
    kept = RowFile(asked.rows)
    example = asked.flower.absolute() / "examples" / "quickstart-pytorch"
    for way, of in (("fl-privacy audit APP", as_it_is), ("audit(...) and probe_mod", with_two_lines)):
        row = of(example, mirror, out)
        kept.add({"way": way}, row)
        print(way, row, flush=True)


def as_it_is(example: Path, mirror: Path, out: Path) -> dict[str, Any]:
    """Audit the example, and return what came of it."""
    command = [sys.executable, "-m", "fl_privacy", "audit", str(example), "--mirror", str(mirror)]
    seconds = timed([*command, "--nodes", str(NODES), "--rounds", "1", "--out", str(out)], out / "as_it_is.log", out)
    record = json.loads((out / "audit-quickstart-pytorch" / "audit.json").read_text(encoding="utf-8"))
    counts = next(rung["counts"] for rung in record["rungs"] if rung["rung"] == "one")
    return row_of(0, record["tone"], "read" if record["tone"] == "leak" else "unread", counts, seconds)


def with_two_lines(example: Path, mirror: Path, out: Path) -> dict[str, Any]:
    """Train a copy with the lines in it, and return what its audit came to."""
    copied, work = out / "edited", out / "work"
    for folder in (copied, work):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(example, copied)
    work.mkdir()
    edit(copied / "pytorchexample" / "client_app.py", "\napp = ClientApp()\n", IN_CLIENT)
    edit(copied / "pytorchexample" / "server_app.py", "    # Start strategy", IN_SERVER.replace("NODES", str(NODES)))
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", str(copied), str(mirror)]
    seconds = timed(command, out / "two_lines.log", work)
    (summary,) = (work / "audit").glob("audit-*/summary.json")
    verdict = json.loads(summary.read_text(encoding="utf-8"))["verdict"]
    return row_of(2, verdict["tone"], verdict["ground"], verdict["most"], seconds)


def row_of(lines: int, tone: str, ground: str, counts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Build a row of what both ways have in common."""
    return {
        "lines in the app": lines,
        "verdict": f"{tone}: {ground}",
        "images read": f"{counts['read']} of {counts['judged']}",
        "seconds": round(seconds),
    }


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text that is there once."""
    text = file.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{file.name} is expected to have {old.strip()!r} once: another version of the example?")
    file.write_text(text.replace(old, new), encoding="utf-8")


def timed(command: list[str], log: Path, folder: Path) -> float:
    """Run a command in a folder and return the seconds that it took."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    started = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with {done.returncode}, see {log}")
    return time.perf_counter() - started


def run_inside(folder: Path, mirror: Path) -> None:
    """Train the edited copy on nodes in this process, with data of the mirror."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from flwr.app import Context, RecordDict  # noqa: PLC0415

    from fl_privacy.auditing.app.bundle import read_app  # noqa: PLC0415
    from fl_privacy.auditing.app.environment import data_sets_of  # noqa: PLC0415
    from fl_privacy.flower.grids import LocalGrid  # noqa: PLC0415

    app = read_app(folder)
    config = app.with_config((), 1)
    with data_sets_of(mirror):
        begun = app.load()
        server, client = begun.server, begun.client
        for seeded in (torch.manual_seed, np.random.seed, random.seed):
            seeded(0)
        grid = LocalGrid(range(NODES), client)
        for node in grid.contexts.values():
            node.run_config = dict(config)
        server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config)))


if __name__ == "__main__":
    main()
