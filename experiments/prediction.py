"""Compare what ``fl-privacy predict`` says beforehand with what ``attack=auto`` reconstructed, in the kept rows.

    python experiments/prediction.py --out experiments/rows/prediction

Rows of ``auto_table``, ``trained_resnet``, ``many_steps``, ``exact_batches`` and the first of ``map_of_trainings``, on
which the rules were built, and those of the map whose prediction ``predicted_before`` kept before they were attacked:
of networks held out. A cell counts as reconstructed if one image was: identified more often than in the control, or
above 25 dB in ``auto_table``, in rows of the strongest budget. Networks have their initial values here.
"""

import argparse
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from auto_table import MODELS
from efficientnet import EfficientNetLite0
from many_steps import network as of_steps
from map_of_trainings import CELL, NETWORKS, PREDICTED
from row_file import RowFile, takes_rows
from torch import nn
from trained_resnet import FILES, Published

from fl_privacy.attacks.prediction import PlannedTraining, predict
from fl_privacy.models import MLP, build_model

ROWS = Path(__file__).parent / "rows"
SHAPE = (3, 32, 32)
BEFORE: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Source, network and training of the map's cells -> what was predicted before they were attacked."""


def rows(name: str) -> list[dict[str, Any]]:
    """Load the rows of an experiment; none if it has not been run."""
    path = ROWS / name / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def cells() -> Iterator[tuple[str, str, bool, nn.Module, tuple[int, ...], PlannedTraining, int, int]]:
    """Yield source, network, whether it is held out, the network, its input, the training, images found, and images."""
    build = partial(build_model, seed=0, in_channels=3, image_size=32, num_classes=10)
    for row in rows("auto_table"):
        if row["attack"] == "auto":
            factory, options = MODELS[row["model"]]
            found, of = round(row["recognizable"] * row["victims"] * row["batch"]), row["victims"] * row["batch"]
            model = build(factory, **options)
            yield "auto_table", row["model"], False, model, SHAPE, PlannedTraining(row["batch"]), found, of
    for row in rows("trained_resnet"):
        large = row["network"] == "efficientnet"
        model = EfficientNetLite0() if large else Published(FILES[row["network"]][1])
        form = (3, 224, 224) if large else SHAPE
        plan = PlannedTraining(row["batch"], row["mode"])
        yield "trained_resnet", row["network"], False, model, form, plan, row["identified"], row["of"]
    for row in rows("many_steps"):
        if row["attack"].startswith("auto") and row["version"] == "after":
            optimizer = "adam" if row["optimizer"] == "adam" else "sgd"
            plan = PlannedTraining(row["images"], "eval", row["steps"], optimizer)
            yield (
                "many_steps",
                row["network"],
                False,
                of_steps(row["network"]),
                SHAPE,
                plan,
                row["identified"],
                row["of"],
            )
    for row in rows("exact_batches"):
        model, of = build(MLP, widths=[row["outputs"]]), row["batch"] * row["victims"]
        found = round(row["proven"] * of)
        name = f"MLP, {row['outputs']} outputs"
        yield "exact_batches", name, False, model, SHAPE, PlannedTraining(row["batch"]), found, of
    kept = RowFile(PREDICTED)
    for row in rows("map_of_trainings"):
        plan = PlannedTraining(row["batch"], row["mode"], row["steps"])
        name, found = row["network"], max(0, row["identified"] - row["control_identified"])
        source, model = "map_of_trainings" + ", trained" * row["trained"], NETWORKS[name]()
        before = kept.find({field: row[field] for field in CELL})
        if before is not None:
            BEFORE[source, name, plan] = {field: before[field] for field in ("version", "predicted", "layer")}
        yield source, name, before is not None, model, SHAPE, plan, found, row["of"]


def predicted(model: nn.Module, form: tuple[int, ...], plan: PlannedTraining) -> dict[str, Any]:
    """Return the predicted outcome, the layer that decides, its equations and unknowns, and those of the images."""
    found = predict(model, form, plan)
    layer = next((each for each in found.layers if each.name == found.layer), None)
    counts = {"equations": layer and layer.equations, "unknowns": layer and layer.unknowns}
    in_all = {"in_all": sum(each.gradient for each in found.layers), "pixels": plan.batch_size * math.prod(form)}
    return {"predicted": found.outcome, "layer": found.layer, **counts, **in_all}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sources whose names begin so, such as map_of_trainings")
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.manual_seed(0)
    joined: dict[tuple[Any, ...], list[Any]] = {}
    for source, name, held_out, model, form, plan, found, of in cells():
        if not source.startswith(options.only):
            continue
        key = (source, name, plan)
        joined.setdefault(key, [held_out, model, form, 0, 0])
        joined[key][3:] = joined[key][3] + found, joined[key][4] + of
    counts = {held: [0, 0, 0, 0] for held in (False, True)}
    for (source, name, plan), (held_out, model, form, found, of) in joined.items():
        said = BEFORE.get((source, name, plan)) or predicted(model, form, plan)
        outcome = said["predicted"]
        agrees = None if outcome == "unknown" else (outcome == "reconstructible") == (found > 0)
        key = {"source": source, "network": name, "batch": plan.batch_size, "mode": plan.batch_norm}
        key |= {"steps": plan.steps, "optimizer": plan.optimizer}
        figures = {"held_out": held_out, **said, "found": found, "of": of}
        print(kept.add(key, {**figures, "agrees": agrees}), flush=True)
        wrong = outcome == "not by these attacks" and found > 0
        counts[held_out] = [
            a + b for a, b in zip(counts[held_out], (agrees is True, agrees is not None, 1, wrong), strict=True)
        ]
    for held_out, (right, decided, cells_in_all, wrong) in counts.items():
        print(
            "held out" if held_out else "built on",
            f"{right} of {decided} decided cells of {cells_in_all} agree, {wrong} said not",
        )


if __name__ == "__main__":
    main()
