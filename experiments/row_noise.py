"""Rows of a table behind a defense: the cells that the search for the likeliest rows reconstructs.

    python experiments/row_noise.py --out experiments/rows/row_noise
    python experiments/row_noise.py --defense noise --scale 0.1 --seed 1 --out experiments/rows/row_noise
    python experiments/row_noise.py --batch 4 --out experiments/rows/row_noise
    python experiments/row_noise.py --threat adaptive --out experiments/rows/row_noise

Adult behind an untrained network, one step of SGD on a batch of rows, rounded to ``--bits``, or clipped to norm 1 with
noise of ``--scale``. The attacker knows the defense, and 5,000 other rows unless ``--threat adaptive``. A row for each
victim: share of right cells of the reconstructed rows, assigned to the client's; the same with other victims' rows as a
control, and of the usual row; and by how much the reconstruction's posterior density exceeds that of the client's rows,
in nats: if it does, a longer search finds no more. Rows that are there are not computed again.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from row_file import RowFile, takes_rows

from fl_privacy.attacks.gradient_inversion.grouping import Groups
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.likelihood.rows import LikeliestRows, begin_search, row_moves
from fl_privacy.measure.tables import assign, right_cells, usual_row
from fl_privacy.progress import no_progress
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import Setup, build_untrained
from fl_privacy.types import Batch, Observation
from fl_privacy.types.schema import Schema, schema_of

PUBLIC = 5000


def right(schema: Schema, guess: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the share of cells (C,) of rows ``truth`` that rows ``guess``, assigned to them, have right."""
    found, own = schema.cells(guess), schema.cells(truth)
    return float(right_cells(schema, found[assign(schema, found, own)], own).double().mean())


def ahead(observation: Observation, found: Batch, truth: Batch) -> float:
    """Return by how many nats the posterior density of rows ``found`` exceeds that of ``truth``."""
    (group,) = Groups([observation], progress=no_progress)
    prepared = prepare(Settings(objective=L2(), compile="off"), group, 0)
    with torch.no_grad():
        search = begin_search(prepared, prepared.victims[0], row_moves(prepared, observation), None)
        search.doubt = 0.03
        rows, labels = (torch.stack(pair) for pair in ((found.inputs, truth.inputs), (found.labels, truth.labels)))
        own, other = search.of_whole(rows.float(), labels.long()).tolist()
    return float(other - own)


def observed(options: argparse.Namespace) -> tuple[Setup, Sequence[Observation], Batch]:
    """Return the clients behind the defense that is asked for, their uploads, and the attacker's public rows."""
    defense = ["defense=quantization", f"defense.bits={options.bits}"]
    if options.defense == "noise":
        defense = ["defense=dp_noise", "defense.clip_norm=1", f"defense.scale={options.scale}"]
    drawn = [f"batch_size={options.batch}", f"victims={options.victims}", f"seed={options.seed}"]
    setup = build_untrained(compose_run(["data=adult", "model=table_mlp", "federation=fedsgd", *defense, *drawn]))
    public = setup.unattacked.batch(torch.arange(min(PUBLIC, len(setup.unattacked))))
    return setup, setup.observe(setup.server.state), public


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defense", choices=("quantization", "noise"), default="quantization")
    parser.add_argument("--bits", type=int, default=1)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--threat", choices=("strongest", "adaptive"), default="strongest")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victims", type=int, default=6)
    parser.add_argument("--evaluations", type=int, default=4800)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    setup, seen, public = observed(options)
    known: dict[str, Any] = {"defense": setup.defense.parts}
    if options.threat == "strongest":
        known |= {"public_images": public.inputs, "public_labels": public.labels}
    truth, schema = setup.ground_truth(), schema_of(setup.model)
    rows = [truth.batch(one.id) for one in seen]
    assert schema is not None
    usual = usual_row(schema.cells(public.inputs), schema).expand(options.batch, -1)
    for number, observation in enumerate(seen):
        strength = options.scale if options.defense == "noise" else options.bits
        key = {"defense": options.defense, "strength": strength, "seed": options.seed}
        key |= {"threat": options.threat, "batch": options.batch, "victim": number, "evaluations": options.evaluations}
        if kept.find(key) is not None:
            continue
        began = time.process_time()
        (found,) = LikeliestRows(evaluations=options.evaluations)([observation.given(**known)], seed=0)
        used = time.process_time() - began
        if found.batch is None:
            raise SystemExit(found.failure)
        own = [right(schema, found.batch.inputs, each.inputs) for each in rows]
        figures = {"cells": own[number], "control": (sum(own) - own[number]) / (len(own) - 1)}
        cells = schema.cells(rows[number].inputs)
        figures["usual"] = float(right_cells(schema, usual, cells).double().mean())
        figures["ahead"] = round(ahead(observation.given(**known), found.batch, rows[number]), 2)
        print(kept.add(key, {**figures, "cpu_seconds": round(used, 1)}), flush=True)


if __name__ == "__main__":
    main()
