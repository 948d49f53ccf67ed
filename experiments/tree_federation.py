"""Federations of XGBoost as Flower's FedXgbBagging and FedXgbCyclic run them, without messages. Not a command."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.serverapp.strategy.strategy_utils import aggregate_bagging
from measures import margins_of

from fl_privacy.attacks.trees import read_model


@dataclass(frozen=True, kw_only=True, eq=False)
class Clients:
    """Tables of clients: rows (N, F) with NaN for no value, labels, and held-out rows."""

    rows: Sequence[np.ndarray]
    labels: Sequence[np.ndarray]
    test_rows: np.ndarray
    test_labels: np.ndarray
    names: Sequence[str]
    categories: Sequence[int]
    words: Mapping[int, Sequence[str]]

    @property
    def codes(self) -> dict[int, list[float]]:
        """Return feature -> codes that categories can have."""
        every = np.concatenate([*self.rows, self.test_rows])
        return {f: np.unique(every[:, f][~np.isnan(every[:, f])]).tolist() for f in self.categories}


def heart(data: Path, hospitals: Sequence[str] = ("cleveland", "hungary", "va_long_beach")) -> Clients:
    """Load UCI heart disease, with one hospital as each client."""
    frames = {split: pd.read_parquet(data / "heart_disease" / f"{split}.parquet") for split in ("train", "test")}
    names = [name for name in frames["train"].columns if name not in ("site", "severity", "label")]
    words = {}
    for place, name in enumerate(names):
        if frames["train"][name].dtype.kind not in "iuf":
            words[place] = sorted(set(frames["train"][name].dropna()))
    tables = {}
    for split, frame in frames.items():
        columns = [
            frame[name].map({word: code for code, word in enumerate(words[place])}) if place in words else frame[name]
            for place, name in enumerate(names)
        ]
        tables[split] = np.stack([column.to_numpy(dtype=np.float32) for column in columns], 1)
    chosen = [(frames["train"]["site"] == name).to_numpy() for name in hospitals]
    labels = frames["train"]["label"].to_numpy()
    vessels = names.index("vessels")  # 0 to 3, counted
    return Clients(
        rows=[tables["train"][mask] for mask in chosen],
        labels=[labels[mask] for mask in chosen],
        test_rows=tables["test"],
        test_labels=frames["test"]["label"].to_numpy(),
        names=names,
        categories=sorted([*words, vessels]),
        words=words,
    )


def stroke(file: Path, rows: int, clients: int = 3, seed: int = 0) -> Clients:
    """Load the stroke table of TimberStrike's repository, split at random.

    The file is healthcare-dataset-stroke-prep-train.csv.
    """
    frame = pd.read_csv(file).drop_duplicates().sample(frac=1, random_state=seed)
    table, labels = frame.drop(columns="stroke").to_numpy(np.float32), frame["stroke"].to_numpy()
    parts = [slice(k * rows, (k + 1) * rows) for k in range(clients)]
    names = list(frame.columns[:-1])
    numbers = {"age", "avg_glucose_level", "bmi"}
    held_out = slice(clients * rows, clients * rows + 1000)
    return Clients(
        rows=[table[part] for part in parts],
        labels=[labels[part] for part in parts],
        test_rows=table[held_out],
        test_labels=labels[held_out],
        names=names,
        categories=[place for place, name in enumerate(names) if name not in numbers],
        words={},
    )


def federate(
    clients: Clients, params: Mapping[str, Any], rounds: int, *, mode: str, noise: float = 0.0, seed: int = 0
) -> tuple[list[list[tuple[bytes, bytes]]], bytes]:
    """Train trees over all rounds; return each client's (sent, reply) pairs and the last model."""
    import xgboost  # noqa: PLC0415

    matrices = [xgboost.DMatrix(rows, label=labels) for rows, labels in zip(clients.rows, clients.labels, strict=True)]
    rng = np.random.default_rng(seed)
    exchanges: list[list[tuple[bytes, bytes]]] = [[] for _ in matrices]
    model = b""
    for number in range(rounds):
        asked = range(len(matrices)) if mode == "bagging" else [number % len(matrices)]
        following = model
        for client in asked:
            if model:
                booster = xgboost.Booster(params=dict(params))
                booster.load_model(bytearray(model))
                booster.update(matrices[client], booster.num_boosted_rounds())
                last = booster.num_boosted_rounds()
                booster = booster[last - 1 : last] if mode == "bagging" else booster
            else:
                booster = xgboost.train(dict(params), matrices[client], 1)
            reply = bytes(booster.save_raw("json"))
            reply = noised(reply, noise, float(params["eta"]), rng) if noise else reply
            exchanges[client].append((model, reply))
            following = aggregate_bagging(following, reply) if mode == "bagging" and following else reply
        model = following
    return exchanges, model


def noised(model: bytes, std: float, eta: float, rng: np.random.Generator) -> bytes:
    """Add Gaussian noise to each leaf's gradient sum (a quarter to its hessian sum) in the last tree."""
    told = json.loads(model)
    tree = told["learner"]["gradient_booster"]["model"]["trees"][-1]
    for node, left in enumerate(tree["left_children"]):
        if left < 0:
            cover, value = tree["sum_hessian"][node], tree["split_conditions"][node]
            gradient = -value / eta * (cover + 1) + std * rng.normal()
            cover = max(cover + std / 4 * rng.normal(), 0.0)
            tree["sum_hessian"][node] = cover
            tree["split_conditions"][node] = tree["base_weights"][node] = -eta * gradient / (cover + 1)
        else:
            tree["sum_hessian"][node] = tree["base_weights"][node] = tree["loss_changes"][node] = 0.0
    return json.dumps(told).encode()


def auc(model: bytes, rows: np.ndarray, labels: np.ndarray) -> float:
    """Compute the area under the curve of a model on held-out rows."""
    margins = margins_of(read_model(model), rows)[:, 0]
    over = margins[labels == 1][:, None] - margins[labels == 0][None]
    return float(((over > 0) + 0.5 * (over == 0)).mean())
