"""What another site of a federation reconstructs, next to the server: sites, server's optimizers, defenses.

    python experiments/another_site.py --out experiments/rows/another_site

One core, about twenty minutes; rows that are there are kept. Needs FL_PRIVACY_DATA with adult, sst2, heart_disease,
cifar10_exact and weights.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from row_file import Row, RowFile, attack_failed, takes_rows
from safetensors.torch import load_file, save_file
from trained_resnet import MEAN, STD
from tree_federation import Clients, federate, heart

from fl_privacy.attacks.trees import (
    Exchange,
    Knowledge,
    count_first_tree,
    divide_among_sites,
    infer_training,
    own_trees,
    read_exchange,
    read_model,
    read_others,
    reconstruct_rows,
)
from fl_privacy.cli.main import run_command_line
from fl_privacy.federation import Server, ServerPlan, evaluate_model
from fl_privacy.federation.another_site import AnotherSite
from fl_privacy.federation.replies import norm
from fl_privacy.federation.server import weighted_mean
from fl_privacy.federation.server_optimizer import ServerOptimizer
from fl_privacy.measure.outcome import Outcome, outcome_of
from fl_privacy.measure.tables import pinned_rows
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import build_setup, build_untrained
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
ACTIVE = ((3, 8), (3, 32), (5, 16))
"""Sites, and examples of each, whose mean is attacked by a passive and by an active site."""
OBSERVERS: dict[str, tuple[str, ...]] = {"server": (), "another site": (*SITE, "federation.clients=2")}
METRICS = {"psnr": "control_psnr", "cells_right": "control_cells", "f1": "control_f1", "rouge_l": "control_f1"}
HOSPITALS = ("cleveland", "hungary", "va_long_beach", "switzerland")
FEW, MANY = 4, 5
"""Rows of a small hospital, and number of sites above which fewer means are attacked."""
NOISES = ("nothing", "noise .1 by each site", "noise .1 on the mean, by the server")
DEFENSES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "noise .1 by each site": ("defense=dp_noise", "defense.scale=.1"),
    "noise .1 on the mean, by the server": ("federation.server_noise=.1",),
    "secure aggregation": ("secure_aggregation=secagg",),
}


def attacked(command: str, *settings: str, rounds: bool = False) -> Row:
    """Run a command; return how many examples came out, and the main metric with its control."""
    with tempfile.TemporaryDirectory() as folder:
        if attack_failed(run_command_line([command, *QUICK, *settings, f"out={folder}"])):
            return {"verdict": "failed"}
        run = next(Path(folder).rglob("summary.json")).parent
        return best_round(run) if rounds else figures_of(run)


def best_round(run: Path) -> Row:
    """Count examples over all rounds, in the round that leaks most, by either attacker."""
    found, of = dict[tuple[str, int], int](), dict[tuple[str, int], int]()
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "image":
            place = line["attacker"], line["round"]
            of[place] = of.get(place, 0) + 1
            read = outcome_of(line) in (Outcome.EXACT, Outcome.IDENTIFIED, Outcome.RECOGNIZABLE)
            found[place] = found.get(place, 0) + read
    best = max(found, key=lambda place: found[place])
    tone = json.loads((run / "summary.json").read_text())["verdict"]["tone"]
    return {"verdict": tone, "reconstructed": found[best], "of": of[best], "in_the_best_round": best[1]}


def figures_of(run: Path) -> Row:
    verdict = json.loads((run / "summary.json").read_text())["verdict"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    images = [line for line in lines if line["kind"] == "image" and line["attacker"] == "plain"]
    found = [outcome_of(image) for image in images]  # over all rounds, of which each has others' examples
    row: Row = {
        "verdict": verdict["tone"],
        "reconstructed": sum(one in (Outcome.EXACT, Outcome.IDENTIFIED, Outcome.RECOGNIZABLE) for one in found),
        "of": len(found),
        "exact": found.count(Outcome.EXACT),
    }
    for name, control in METRICS.items():
        known = [(line[name], line[control]) for line in images if line.get(control) is not None and name in line]
        if known:
            return {**row, "metric": name} | {
                key: round(fmean(min(pair[k], 150.0) for pair in known), 3) for k, key in enumerate(("mean", "control"))
            }
    return row


def of_two(rows: RowFile) -> None:
    for data, settings in DATA.items():
        for observer, threats in OBSERVERS.items():
            add(rows, {"data": data, "observer": observer}, lambda s=settings, t=threats: attacked("attack", *s, *t))


def of_trained(rows: RowFile) -> None:
    """Attack CIFAR-10's trained ResNet-20 (91.6 % right), whose gradients are small next to its weights."""
    values = load_file(data_root() / "weights" / "cifar10_resnet20.safetensors")
    values |= {"mean": torch.tensor(MEAN)[:, None, None], "std": torch.tensor(STD)[:, None, None]}
    with tempfile.TemporaryDirectory() as folder:
        save_file(values, Path(folder) / "values.safetensors")
        network = ("model=custom", "model._target_=trained_resnet.Published", f"weights={folder}/values.safetensors")
        for observer, threats in OBSERVERS.items():
            for rate in (1.0,) if observer == "server" else (1.0, 0.1):
                words = ("data=cifar10_exact", *network, *threats, f"federation.server_lr={rate}")
                words = (*words, f"victims={4 if rate == 1 else 2}")
                key = {"data": "images, trained ResNet-20", "observer": observer}
                key |= {} if observer == "server" else {"server_lr": rate}
                add(rows, key, lambda w=words: attacked("attack", *w))


def of_many(rows: RowFile) -> None:
    for sites in (3, 5, 10):
        for masked in ("none", "secagg"):
            victims = {"images": 1 if sites > MANY else 2, "rows": 4}
            for data, settings in {"images": LENET, "rows": HEART}.items():
                key = {"sites": sites, "colluding": 1, "secure_aggregation": masked, "data": data}
                words = (*settings, f"victims={victims[data]}", *SITE)
                words = (*words, f"federation.clients={sites}", f"secure_aggregation={masked}")
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
        for observer, threats in OBSERVERS.items():
            summed = ("batch_size=2",) if observer == "server" and protected == "secure aggregation" else ()
            words = (*HEART, "victims=6", *settings, *threats, *summed)
            key = {"protected_by": protected, "observer": observer}
            add(rows, key, lambda w=words: attacked("attack", *w))


def of_rounds_seen(rows: RowFile) -> None:
    """Attack all rounds of 2 and 5 hospitals of four rows each: what noise, number of sites and of rounds change."""
    with tempfile.TemporaryDirectory() as folder:
        for rounds in (1, 4, 16):
            for sites in (2, 5):
                place = Path(folder) / f"{sites}-{rounds}"
                place.mkdir()
                write_hospitals(place, sites, rows=FEW)
                for protected, settings in {name: DEFENSES[name] for name in NOISES}.items():
                    words = (*HEART, f"data.root={place}", "partition=natural", f"federation.clients={sites}", *SITE)
                    words = (*words, "federation=fedsgd", f"federation.rounds={rounds}", f"evaluate_every={rounds}")
                    words = (*words, f"federation.plan.batch_size={2 * FEW}", "intercept.uploads=update", *settings)
                    words = (*words, "intercept.rounds=all", "threat_model.knows_defense=true", "baseline=false")
                    key = {"protected_by": protected, "observer": "another site, best round"}
                    key |= {"sites": sites, "rounds": rounds}
                    add(rows, key, lambda w=words: attacked("run", *w, rounds=True))


def of_participation(rows: RowFile) -> None:
    """Attack five hospitals of four rows each; a round asks three: single updates, means, and what solves them."""
    looks = {"the server": (), "another site, means": SITE}
    looks["another site, differences"] = (*SITE, "threat_model.differences=true")
    with tempfile.TemporaryDirectory() as folder:
        write_hospitals(Path(folder), 5, rows=FEW)
        for rate in (0.1, 0.01, 0.001):
            for observer, threats in looks.items():
                words = (*HEART, f"data.root={folder}", "partition=natural", "federation.clients=5", *threats)
                words = (*words, "federation=fedsgd", "federation.fraction=.6", f"federation.server_lr={rate}")
                words = (*words, "federation.rounds=12", "evaluate_every=12", f"federation.plan.batch_size={2 * FEW}")
                words = (*words, "intercept.uploads=update", "intercept.rounds=last")
                key = {"participation": "3 of 5 hospitals", "observer": observer, "server_lr": rate}
                add(rows, key, lambda w=words: attacked("run", *w))


def of_active(rows: RowFile) -> None:
    """Attack a trained network's means, by a site that follows the protocol and by one that poisons its update."""
    trained = ("data=mnist_mini", "model=mlp", "federation.rounds=10", "evaluate_every=10", "federation.clients=3")
    with tempfile.TemporaryDirectory() as folder:
        missing = [one for one in ACTIVE if rows.find({"active": "yes", "sites": one[0], "batch": one[1]}) is None]
        if missing:
            attack_failed(run_command_line(["run", *trained, "attack=none", "page=false", f"out={folder}"]))
        weights = next((path.parent for path in Path(folder).rglob("model.safetensors")), None)
        for sites, batch in missing:
            words = ("data=mnist_mini", "model=mlp", f"weights={weights}", "victims=1", f"batch_size={batch}", *SITE)
            words = (*words, f"federation.clients={sites}", "federation.server_lr=1", "attack.evaluations=20")
            crafts = ("server=trap_weights", f"server.fires={1 / batch / (sites - 1):.4f}")
            for active, settings in {"no": (), "yes": crafts}.items():
                key = {"active": active, "sites": sites, "batch": batch}
                found = attacked("attack", *words, *settings)
                add(rows, key, lambda f=found, s=settings, w=words: {**f, **(poison(*w, *s) if s else {})})


def poison(*words: str) -> Row:
    """Measure what the poisoned rounds cost and show: accuracy, and the update's norm in honest ones."""
    setup = build_untrained(compose_run(list(words)))
    crafts, masking, sent, client = setup.server_attack, setup.masking, setup.server.state, setup.first
    assert crafts is not None and masking is not None
    aim = crafts.craft(setup.model, sent, client.id)
    made = masking.poisoned(client, setup.states[client.id], sent, aim, round=0, probe=0)
    honest = client.probe(sent, setup.states[client.id], round=0, probe=0, batch_size=masking.examples).upload
    apart = norm({name: aim.parameters[name] - value for name, value in sent.parameters.items()})
    before, after = (evaluate_model(setup.model, state, setup.unattacked).accuracy for state in (sent, made))
    ratio = apart * setup.config.federation.clients / setup.server.plan.lr / norm(honest.tensors)
    return {"accuracy": round(before, 3), "poisoned": round(after, 3), "norm_ratio": round(ratio, 1)}


def of_trees(rows: RowFile) -> None:
    """Ask whose trees are whose in ten rounds of bagging, and what they add on Cleveland's rows; needs xgboost."""
    split = heart(data_root(), HOSPITALS[:1])
    parts = np.array_split(np.random.default_rng(0).permutation(len(split.rows[0])), 4)
    tables = {
        **{f"{number} hospitals": heart(data_root(), HOSPITALS[:number]) for number in (2, 3, 4)},
        "Cleveland in 4 parts": replace(
            split, rows=[split.rows[0][p] for p in parts], labels=[split.labels[0][p] for p in parts]
        ),
    }
    for name, table in tables.items():
        for sums in ("sent", "removed, as NVFlare does"):
            add(rows, {"trees": name, "hessian_sums": sums}, lambda t=table, s=sums: whose_trees(t, s == "sent"))
    two = tables["2 hospitals"]
    for observer in ("server", "another site", "another site, with its own rows"):
        add(
            rows,
            {"rows_of": "Cleveland, 10 rounds of trees", "observer": observer},
            lambda o=observer: rows_behind(two, o),
        )


def others_rounds(table: Clients, *, sums: bool = True) -> tuple[list[Exchange], list[list[set[bytes]]], list[Any]]:
    """Return what the last site takes from the models it is given, each other's new trees, and its exchanges."""
    params = {"objective": "binary:logistic", "eta": 0.3, "max_depth": 4, "nthread": 1, "seed": 0}
    exchanges, model = federate(table, params, 10, mode="bagging")
    if not sums:
        exchanges = [[(without_sums(sent), without_sums(reply)) for sent, reply in each] for each in exchanges]
        model = without_sums(model)
    pairs = exchanges[-1]
    after = [*(sent for sent, _ in pairs[1:]), model]
    made = [[{tree.digest for tree in read_model(reply).trees} for _, reply in each] for each in exchanges[:-1]]
    seen = [read_others(sent, then, own) for (sent, own), then in zip(pairs, after, strict=True)]
    return seen, made, exchanges


def without_sums(model: bytes) -> bytes:
    content = json.loads(model) if model else {}
    for tree in content["learner"]["gradient_booster"]["model"]["trees"] if model else ():
        tree["sum_hessian"] = [0.0] * len(tree["sum_hessian"])
    return json.dumps(content).encode() if model else b""


def whose_trees(table: Clients, sums: bool) -> Row:
    rounds, made, _ = others_rounds(table, sums=sums)
    divided, right, counted = divide_among_sites(rounds, len(made)), 0, 0
    for one in divided:
        site = next(k for k, own in enumerate(made) if one[0].reply.trees[0].digest in own[0])
        right += sum(each.reply.trees[0].digest in own for each, own in zip(one, made[site], strict=True))
        if sums:
            own = own_trees(one[:1])
            first = count_first_tree(own, one[0].reply.objective, infer_training(own))
            positives = sum(leaf.labels[1] for leaf in first.leaves)
            counted += (first.rows, positives) == (len(table.rows[site]), int(table.labels[site].sum()))
    total = sum(map(len, divided))
    exact = f"{counted} of {len(made)} sites" if sums else "none"
    return {"right_site": right, "of": total, "by_chance": total // len(made), "numbers_of_rows_and_positives": exact}


def rows_behind(table: Clients, observer: str) -> Row:
    rounds, _, exchanges = others_rounds(table)
    whole = [read_exchange(*pair) for pair in exchanges[0]]
    rounds = whole if observer == "server" else divide_among_sites(rounds, 1)[0]
    own = {"rows": table.rows[1], "labels": table.labels[1]} if "own rows" in observer else {}
    found = reconstruct_rows(rounds, knowledge=Knowledge(categories=table.codes, **own), chains=1, sweeps=5)
    truth = np.column_stack([table.rows[0], table.labels[0]])
    categories = [*table.categories, truth.shape[1] - 1]
    guesses = {
        "cells": np.column_stack([found.rows, found.labels]),
        "control, own rows": np.column_stack([table.rows[1], table.labels[1]]),
    }
    scored = {name: pinned_rows(truth, guess, categories) for name, guess in guesses.items()}
    return {name: round(one.cells, 3) for name, one in scored.items()} | {"whole_rows": scored["cells"].rows}


def of_unknown_numbers(rows: RowFile) -> None:
    """Let a site of four hospitals of different sizes estimate its share of the mean, and attack what is left."""
    sizes = {"4, 3, 2 and 5 rows": (4, 3, 2, 5), "12, 9, 6 and 15 rows": (12, 9, 6, 15), "all rows": None}
    for rows_of_each, numbers in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            write_hospitals(Path(folder), 4, rows=numbers)
            for known in ("true", "false"):
                words = (*HEART, f"data.root={folder}", "partition=natural", "federation.clients=4", *SITE)
                words = (*words, "federation=fedsgd", "federation.rounds=1", "federation.plan.batch_size=1000")
                words = (*words, "intercept.uploads=update", f"threat_model.knows_numbers={known}")
                key = {"hospitals": rows_of_each, "knows_numbers": known}
                add(
                    rows,
                    key,
                    lambda w=words, a=numbers is not None: {**share_of(*w), **(attacked("run", *w) if a else {})},
                )


def share_of(*words: str) -> Row:
    """Return a site's true and estimated share of round 1's mean, and the error of the others' mean by it."""
    setup = build_setup(compose_run(list(words)))
    sent, (site,) = setup.server.state, setup.config.sites
    uploads = {c: client.update(sent, setup.states[c], round=1).upload for c, client in setup.clients.items()}
    server = Server(
        state=sent, local_plan=setup.plan, plan=setup.server.plan, clients=sorted(uploads), seed=0,
    )  # fmt: skip
    server.receive(uploads, 1)
    numbers = {c: upload.num_examples for c, upload in uploads.items()}
    found = AnotherSite(plan=server.plan, local_plan=setup.plan, knows_numbers=setup.config.threat_model.knows_numbers)
    rest = found.rest(sent, server.state, {site: uploads[site]}, numbers)
    assert rest is not None
    others = [c for c in uploads if c != site]
    truth = weighted_mean([uploads[c].tensors for c in others], [numbers[c] for c in others])
    off = norm({name: rest.tensors[name] - value for name, value in truth.items()}) / norm(truth)
    share, how = found.shares[-1] if found.shares else (numbers[site] / sum(numbers.values()), "given")
    figures = {"share": round(numbers[site] / sum(numbers.values()), 4), "estimated": round(share, 4), "how": how}
    return {**figures, "error_of_the_others_mean": round(off, 6)}


def of_membership(rows: RowFile) -> None:
    """Ask of 200 patients of four hospitals who was in the training, or at the other hospitals, by gradients of 8."""
    for rounds in (20, 5):
        for observer, threats in {"server": (), "another site": SITE}.items():
            words = (*HEART, "partition=natural", "federation.clients=4", "federation.plan.batch_size=8", *threats)
            words = (*words, f"federation.rounds={rounds}", f"evaluate_every={rounds}", "intercept.uploads=update")
            asked = (f"inference.membership.{who}=100" for who in ("members", "others"))
            words = (*words, "attack=none", "inference=membership", *asked)
            key = {"membership": "4 hospitals", "observer": observer, "rounds": rounds}
            add(rows, key, lambda w=words: questioned(*w))


def questioned(*words: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        attack_failed(run_command_line(["run", "page=false", "jobs=1", *words, f"out={folder}"]))
        return best_question(next(Path(folder).rglob("summary.json")))


def best_question(summary: Path) -> Row:
    """Return the AUC with its interval of the method that ranks members best, of those that had an answer."""
    asked = [one for one in json.loads(summary.read_text())["inferred"] if "auc" in one["measures"]]
    best = max(asked, key=lambda one: one["measures"]["auc"]["value"])
    auc = best["measures"]["auc"]
    found = {"best_method": best["method"], "methods": len(asked), "auc": auc["value"], "low": auc["low"]}
    return {**found, "high": auc["high"], "chance": auc["chance"]}


def write_hospitals(folder: Path, number: int, *, rows: int | Sequence[int] | None = None) -> None:
    """Write heart disease of the largest ``number`` hospitals, the first ``rows`` rows of each; a fifth is a half."""
    given = {split: pd.read_parquet(data_root() / "heart_disease" / f"{split}.parquet") for split in ("train", "test")}
    train = given["train"]
    if number > train["site"].nunique():
        first = train.index[train["site"] == "cleveland"]
        train.loc[first[1::2], "site"] = "cleveland, second half"
    names = train["site"].value_counts().index[:number]
    (folder / "heart_disease").mkdir(exist_ok=True)
    for split, table in given.items():
        kept = table[table["site"].isin(names)]
        if rows and split == "train":
            each = dict.fromkeys(names, rows) if isinstance(rows, int) else dict(zip(names, rows, strict=True))
            kept = kept[kept.groupby("site").cumcount() < kept["site"].map(each)]
        kept.to_parquet(folder / "heart_disease" / f"{split}.parquet", index=False)


def data_root() -> Path:
    return Path(os.environ["FL_PRIVACY_DATA"])


def add(rows: RowFile, key: Row, measure: Callable[[], Row]) -> None:
    key = {name: value for name, value in key.items() if value is not None}
    if rows.find(key) is None:
        print(rows.add(key, measure()), flush=True)


PARTS: Sequence[Callable[[RowFile], None]] = (
    of_two,
    of_trained,
    of_many,
    of_participation,
    of_active,
    of_trees,
    of_unknown_numbers,
    of_rounds_seen,
    of_membership,
    of_servers,
    of_defenses,
)


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
