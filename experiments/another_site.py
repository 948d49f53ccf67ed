"""What another site of a federation reconstructs, next to the server: sites, server's optimizers, defenses.

    python experiments/another_site.py --out experiments/rows/another_site

One core, about ten minutes; rows that are there are kept. Needs FL_PRIVACY_DATA with adult, sst2 and heart_disease.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch
from row_file import Row, RowFile, takes_rows

from fl_privacy.cli.main import run_command_line
from fl_privacy.federation import Server, ServerPlan
from fl_privacy.federation.another_site import AnotherSite
from fl_privacy.federation.server_optimizer import ServerOptimizer
from fl_privacy.types import LocalPlan, ModelState, Upload

SITE = ("threat_model=another_site",)
QUICK = ("attack=auto", "attack.budget=quick", "films=0", "page=false", "jobs=1")
LENET = ("data=mnist_mini", "model=lenet")
HEART = ("data=heart_disease", "model=table_mlp")
DATA: dict[str, tuple[str, ...]] = {
    "images, LeNet": (*LENET, "victims=4"),
    "rows of Adult, MLP": ("data=adult", "model=table_mlp", "victims=4"),
    "texts of SST-2, BERT tiny": ("data=sst2", "model=bert_tiny", "victims=4"),
}
METRICS = {"psnr": "control_psnr", "cells": "control_cells", "f1": "control_f1", "rouge_l": "control_f1"}
DEFENSES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "noise .1 by each site": ("defense=dp_noise", "defense.scale=.1"),
    "noise .1 on the mean, by the server": ("federation.server_noise=.1",),
    "secure aggregation": ("secure_aggregation=secagg",),
}


def attacked(command: str, *settings: str) -> Row:
    """Run a command; return how many examples came out, and the main metric with its control."""
    with tempfile.TemporaryDirectory() as folder:
        if run_command_line([command, *QUICK, *settings, f"out={folder}"]):
            return {"reconstructed": None}
        run = next(Path(folder).rglob("summary.json")).parent
        most = json.loads((run / "summary.json").read_text())["verdict"]["most"] or {}
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    images = [line for line in lines if line["kind"] == "image" and line["attacker"] == most.get("attacker")]
    found: Row = {"reconstructed": most.get("read", 0), "of": most.get("judged", 0), "exact": most.get("exact", 0)}
    for name, control in METRICS.items():
        known = [(line[name], line[control]) for line in images if line.get(control) is not None and name in line]
        if known:
            return {**found, "metric": name} | {
                key: round(fmean(min(pair[k], 150.0) for pair in known), 3) for k, key in enumerate(("mean", "control"))
            }
    return found


def of_two(rows: RowFile) -> None:
    for data, settings in DATA.items():
        for observer, threats in {"server": (), "another site": (*SITE, "federation.clients=2")}.items():
            add(rows, {"data": data, "observer": observer}, lambda s=settings, t=threats: attacked("attack", *s, *t))


def of_many(rows: RowFile) -> None:
    for sites in (3, 5):
        for masked in ("none", "secagg"):
            for data, settings in {"images": (*LENET, "victims=2"), "rows": (*HEART, "victims=4")}.items():
                key = {"sites": sites, "colluding": 1, "secure_aggregation": masked, "data": data}
                words = (*settings, *SITE, f"federation.clients={sites}", f"secure_aggregation={masked}")
                add(rows, key, lambda w=words: attacked("attack", *w))
        key = {"sites": sites, "colluding": sites - 1, "secure_aggregation": "none", "data": "rows"}
        words = (*HEART, "victims=4", *SITE, f"federation.clients={sites}", f"threat_model.colluding_sites={sites - 1}")
        add(rows, key, lambda w=words: attacked("attack", *w))


def of_servers(rows: RowFile) -> None:
    for name in ("sgd", "momentum", "adam", "yogi"):
        for tau in (1e-3, 1e-9) if name in ("adam", "yogi") else (1e-3,):
            words = (f"federation.server_optimizer={name}", f"federation.server_tau={tau}")
            words = (*LENET, "victims=4", *SITE, "federation.clients=2", *words)
            key = {"server_optimizer": name, "tau": tau if name in ("adam", "yogi") else None}
            add(rows, key, lambda w=words, n=name, t=tau: {**attacked("attack", *w), "error": of_rounds(n, t)})


def of_rounds(name: str, tau: float) -> dict[str, float]:
    """Return the relative error of the other's update in three rounds of updates that vary by a third."""
    rng = torch.Generator().manual_seed(0)
    plan = ServerPlan(lr=0.1, optimizer=ServerOptimizer(name=name, tau=tau))  # type: ignore[arg-type]
    local = LocalPlan(shares="delta")
    server = Server(
        state=ModelState({"w": torch.randn(2000, generator=rng) / 10}), local_plan=local, plan=plan, clients=[0, 1],
        seed=0,
    )  # fmt: skip
    site, found = AnotherSite(plan=plan, local_plan=local), {}
    usual = torch.randn(2, 2000, generator=rng) / 30
    for round in (1, 2, 3):
        drawn = usual * (1 + torch.randn(2, 2000, generator=rng) / 3)
        uploads = {k: Upload(tensors={"w": drawn[k]}, num_examples=1) for k in (0, 1)}
        sent = server.state
        server.receive(uploads, round)
        rest = site.rest(sent, server.state, {1: uploads[1]}, {0: 1, 1: 1})
        assert rest is not None
        found[f"round {round}"] = float((rest.tensors["w"] - drawn[0]).norm() / drawn[0].norm())
    return found


def of_defenses(rows: RowFile) -> None:
    for protected, settings in DEFENSES.items():
        for observer, threats in {"server": (), "another site": (*SITE, "federation.clients=2")}.items():
            summed = ("batch_size=2",) if observer == "server" and protected == "secure aggregation" else ()
            words = (*HEART, "victims=6", *settings, *threats, *summed)
            key = {"protected_by": protected, "observer": observer}
            add(rows, key, lambda w=words: attacked("attack", *w))


def add(rows: RowFile, key: Row, measure: Callable[[], Row]) -> None:
    key = {name: value for name, value in key.items() if value is not None}
    if rows.find(key) is None:
        print(rows.add(key, measure()), flush=True)


PARTS: Sequence[Callable[[RowFile], None]] = (of_two, of_many, of_servers, of_defenses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[part.__name__ for part in PARTS])
    takes_rows(parser)
    options = parser.parse_args()
    rows = RowFile(options.out)
    for part in PARTS:
        if options.only in (None, part.__name__):
            part(rows)


if __name__ == "__main__":
    main()
