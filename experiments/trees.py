"""What XGBoost's trees give away in Flower's federations: exact counts, values, rows, beside guesses without them.

    python experiments/trees.py --data DATA --part heart --out experiments/rows/trees
    python experiments/trees.py --data DATA --part settings --out experiments/rows/trees
    python experiments/trees.py --stroke STROKE.csv --part stroke --chains 1 --sweeps 5 --out experiments/rows/trees
    python experiments/trees.py --part sklearn --out experiments/rows/fitted
    python experiments/trees.py --data DATA --part fixtures --out tests/trees/models

Needs xgboost (no dependency of the package, which reads models by itself) for all parts but sklearn. Heart disease is
UCI's (--data, a folder with heart_disease/train.parquet); the stroke table is that of TimberStrike's repository
(github.com/necst/TimberStrike, dataset_partitioner/healthcare-dataset-stroke-prep-train.csv). Baselines: columns of the
client itself, each shuffled on its own, which is more than any attacker knows; and as many rows of the next client.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from measures import leaves_of
from row_file import RowFile, takes_rows
from tree_federation import Clients, auc, federate, heart, stroke

from fl_privacy.attacks.trees import Knowledge, Training, read_exchange, reconstruct_rows
from fl_privacy.measure.tables import PinnedRows, pinned_rows

USUAL: Mapping[str, Any] = {"mode": "bagging", "depth": 4, "rate": 0.3, "rounds": 30, "max_bin": 256, "noise": 0.0}

SETTINGS = (
    {},
    *({"depth": depth} for depth in (2, 6, 8)),
    *({"rate": rate} for rate in (0.1, 1.0)),
    *({"rounds": rounds} for rounds in (1, 5, 60)),
    *({"max_bin": bins} for bins in (64, 16, 4)),
    *({"noise": noise} for noise in (0.1, 1.0, 5.0)),
    {"mode": "cyclic", "rounds": 90},
)

SHOWN = 3
"""Rows of which the page shows what was read."""


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes_rows(parser)
    parser.add_argument("--part", choices=("heart", "settings", "stroke", "sklearn", "fixtures"), required=True)
    parser.add_argument("--data", type=Path, help="folder of data sets, NAME/SPLIT.parquet")
    parser.add_argument("--stroke", type=Path, help="TimberStrike's table")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--sweeps", type=int, default=20)
    asked = parser.parse_args()
    if asked.part == "sklearn":
        from fitted_rows import write_fitted  # noqa: PLC0415

        write_fitted(RowFile(asked.out))
        return
    if asked.part == "fixtures":
        write_fixtures(heart(asked.data), asked.out)
        return
    kept = RowFile(asked.out)
    if asked.part == "stroke":
        table = stroke(asked.stroke, rows=400)
        for mode, depth in (("bagging", 3), ("cyclic", 3), ("bagging", 6), ("cyclic", 6)):
            setting = {**USUAL, "mode": mode, "depth": depth, "rounds": 100}
            for known in (False, True):
                one(kept, "stroke", table, setting, asked, known=known)
        return
    table = heart(asked.data)
    if asked.part == "heart":
        for client in range(3):
            for known in (False, True):
                one(kept, "heart", table, dict(USUAL), asked, client=client, known=known)
        return
    for change in SETTINGS:
        one(kept, "heart", table, {**USUAL, **change}, asked)


def one(
    kept: RowFile,
    name: str,
    table: Clients,
    setting: dict[str, Any],
    asked: Any,
    *,
    client: int = 0,
    known: bool = False,
) -> None:
    """Train, attack one client, keep a row."""
    key = {"data": name, "client": client, **setting, "known": known, "chains": asked.chains, "sweeps": asked.sweeps}
    if kept.find(key):
        return
    params = {
        "objective": "binary:logistic",
        "eta": setting["rate"],
        "max_depth": setting["depth"],
        "max_bin": setting["max_bin"],
        "tree_method": "hist",
        "nthread": 1,
        "seed": 0,
    }
    exchanges, model = federate(table, params, setting["rounds"], mode=setting["mode"], noise=setting["noise"])
    rows, labels, other = table.rows[client], table.labels[client], (client + 1) % 3
    knowledge = Knowledge(
        categories=table.codes,
        rows=table.rows[other] if known else None,
        labels=table.labels[other] if known else None,
    )
    told = {
        "knowledge": knowledge,
        "training": Training(learning_rate=setting["rate"], reg_lambda=1.0) if setting["noise"] else None,
        "rows": len(rows),
        "positives": int(labels.sum()),
        "chains": asked.chains,
    }
    rounds = [read_exchange(sent, reply) for sent, reply in exchanges[client]]
    began = time.perf_counter()
    found = reconstruct_rows(rounds, sweeps=asked.sweeps, **told)
    start = reconstruct_rows(rounds, sweeps=0, **{**told, "chains": 1})

    def judged(guesses: np.ndarray, answers: np.ndarray) -> PinnedRows:
        categories = [*table.categories, rows.shape[1]]
        return pinned_rows(np.column_stack([rows, labels]), np.column_stack([guesses, answers]), categories)

    rng = np.random.default_rng(0)
    scored = judged(found.rows, found.labels)
    shuffled = judged(np.stack([rng.permutation(column) for column in rows.T], 1), rng.permutation(labels))
    chosen = rng.permutation(len(table.rows[other]))[: len(rows)]
    others = judged(table.rows[other][chosen], table.labels[other][chosen])
    leaf = leaves_of(rounds[0].reply.trees[0], rows)
    counted = None
    if found.first is not None:
        true = [[int(((leaf == k) & (labels == y)).sum()) for y in (0, 1)] for k in range(len(found.first.leaves))]
        counted = true == [list(each.labels) for each in found.first.leaves]
    row = kept.add(
        key,
        {
            "rows": len(rows),
            "features": rows.shape[1],
            "found_rows": len(found.rows),
            "training": [found.training.learning_rate, found.training.reg_lambda],
            "counts_right": counted,
            "labels_certain": certain_labels(found),
            **values_given(found, rows),
            "cells": round(scored.cells, 4),
            "pinned": round(scored.rows, 4),
            "first_tree": [round(float(part), 4) for part in _both(judged(start.rows, start.labels))],
            "shuffled": [round(float(part), 4) for part in _both(shuffled)],
            "others": [round(float(part), 4) for part in _both(others)],
            **certain_cells(found, scored),
            "by_feature": dict(zip([*table.names, "label"], scored.by_feature.round(3).tolist(), strict=True)),
            "misfit": [round(found.start_misfit, 3), round(found.misfit, 3)],
            "auc": round(auc(model, table.test_rows, table.test_labels), 4),
            "seconds": round(found.seconds, 1),
            "best": best_rows(table, client, found, scored) if name == "heart" and not known else [],
        },
    )
    told_now = {k: row[k] for k in ("cells", "pinned", "first_tree", "shuffled", "others", "auc", "seconds")}
    print({**setting, "client": client, "known": known}, told_now, f"{time.perf_counter() - began:.0f} s", flush=True)


def _both(found: PinnedRows) -> tuple[float, float]:
    return found.cells, found.rows


def certain_labels(found: Any) -> float | None:
    """Share of rows in leaves of the first tree that have one label: whose box is known has its label known."""
    if found.first is None or not found.first.whole:
        return None
    return round(sum(leaf.rows for leaf in found.first.leaves if 0 in leaf.labels) / found.first.rows, 4)


def values_given(found: Any, rows: np.ndarray) -> dict[str, int]:
    """Count thresholds, those that are values of the client's rows, and distinct values of these rows."""
    have = [np.unique(column[~np.isnan(column)]) for column in rows.T]
    given = sum(len(values) for values in found.values)
    right = sum(
        int(np.isin(values.astype(np.float32), own).sum()) for values, own in zip(found.values, have, strict=True)
    )
    return {"thresholds": given, "values": right, "distinct": sum(map(len, have))}


def certain_cells(found: Any, scored: PinnedRows) -> dict[str, float | None]:
    """Share of cells on which all chains agree, and how many of them are right."""
    there = scored.match >= 0
    sure = found.agreement[scored.match[there]] >= 1
    right = scored.right[there][:, :-1]
    return {
        "certain": round(float(sure.mean()), 4),
        "certain_right": round(float(right[sure].mean()), 4) if sure.any() else None,
    }


def best_rows(table: Clients, client: int, found: Any, scored: PinnedRows) -> list[dict[str, Any]]:
    """List the rows that the attacker is surest of, beside the true rows matched with them."""
    order = np.argsort(-found.certainty, kind="stable")
    owner = {int(guess): row for row, guess in enumerate(scored.match) if guess >= 0}

    def word(feature: int, value: float) -> Any:
        if np.isnan(value):
            return None
        return table.words[feature][int(value)] if feature in table.words else round(float(value), 2)

    shown = []
    for guess in [int(g) for g in order if int(g) in owner][:SHOWN]:
        row = owner[guess]
        cells = {
            name: [word(f, table.rows[client][row, f]), word(f, found.rows[guess, f]), bool(scored.right[row, f])]
            for f, name in enumerate(table.names)
        }
        cells["disease"] = [int(table.labels[client][row]), int(found.labels[guess]), bool(scored.right[row, -1])]
        shown.append({"certainty": round(float(found.certainty[guess]), 3), "cells": cells})
    return shown


def write_fixtures(table: Clients, folder: Path) -> None:
    """Write small models for tests, with the rows that they were fitted to: two hospitals, three rounds."""
    import xgboost  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    from sklearn.datasets import load_breast_cancer  # noqa: PLC0415

    rows, labels = load_breast_cancer(return_X_y=True)
    rows = rows[:, [0, 1, 4, 5, 6]].astype(np.float32)
    small = Clients(
        rows=[rows[:120], rows[120:240]], labels=[labels[:120], labels[120:240]], test_rows=rows[240:],
        test_labels=labels[240:], names=["a"] * 5, categories=[], words={},
    )  # fmt: skip
    params = {"objective": "binary:logistic", "eta": 0.3, "max_depth": 3, "nthread": 1, "seed": 0}
    for mode in ("bagging", "cyclic"):
        exchanges, _ = federate(small, params, 6, mode=mode)
        for number, (sent, reply) in enumerate(exchanges[0]):
            (folder / f"{mode}_{number}_sent.json").write_bytes(_short(sent))
            (folder / f"{mode}_{number}_reply.json").write_bytes(_short(reply))
    booster = xgboost.train(params, xgboost.DMatrix(small.rows[0], label=small.labels[0]), 2)
    (folder / "two_trees.ubj").write_bytes(bytes(booster.save_raw("ubj")))
    (folder / "two_trees.json").write_bytes(bytes(booster.save_raw("json")))
    margins = booster.predict(xgboost.DMatrix(small.rows[0]), output_margin=True)
    (folder / "two_trees_margins.json").write_text(json.dumps([float(m) for m in margins]))


def _short(model: bytes) -> bytes:
    return json.dumps(json.loads(model), separators=(",", ":")).encode() if model else b""


if __name__ == "__main__":
    main()
