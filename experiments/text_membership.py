"""Were these texts trained on? By each update and by the final model, beside a federation of other texts as a control.

    python experiments/text_membership.py
    python experiments/text_membership.py --models gpt_tiny --trained adapters --rounds 4

Four clients train with AdamW for a few rounds; the server, which follows the protocol, asks about their texts and as
many that nobody has. The control asks the same of clients that trained on texts of which none is asked about. One
line of ``--out``/rows.jsonl for each method and cell, as it comes; ``--minutes`` ends before the next cell, and the
same command goes on.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from observed_rounds import observed_rounds
from row_file import Row, RowFile
from text_attacks import MODELS
from torch import Tensor

from fl_privacy.attacks.inference import Membership, ReadRound
from fl_privacy.data import TextExamples, load_text
from fl_privacy.defenses import Defense, dp_noise, dp_sgd, quantization
from fl_privacy.measure.roc import Separation, auc, tpr_at
from fl_privacy.models import ADAPTED, TextModel, build_fitting, with_adapters
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation

CLIENTS = 4
METHODS = (
    "loss", "cosine", "gradient_norm", "fedmia", "fedmia_loss", "min_k",
    "final_loss", "final_reference", "final_min_k",
)  # fmt: skip
TRAINED = {"all": None, "adapters": 8}
"""What clients train and upload: every parameter, or adapters of this rank and the head."""

DEFENSES = {
    "none": Defense,
    "noise 0.01": lambda: dp_noise(clip_norm=10.0, scale=0.01),
    "quantization 8 bits": lambda: quantization(bits=8),
    "dp_sgd 1": lambda: dp_sgd(noise_multiplier=1.0),
}


def answered(found: Sequence[list[Observation]], asked: Batch) -> Mapping[str, Tensor]:
    """Ask all methods about ``asked``, round by round."""
    watch = Membership(methods=METHODS).begin(len(asked), range(CLIENTS), 2)
    for number, seen in enumerate(found):
        watch.add(ReadRound(observations=tuple(seen), candidates=asked, remaining=len(found) - number - 1, seed=0))
    return watch.answers()


def separated(scores: Tensor, members: int) -> Row:
    """Compute AUC and TPR at 1 % FPR, with their intervals, of members asked of their clients and others of any."""
    own = torch.arange(CLIENTS).repeat_interleave(members // CLIENTS)
    others = torch.arange(len(scores) - members) % CLIENTS
    picked = scores[torch.arange(len(scores)), torch.cat([own, others])].double()
    told = Separation(positives=picked[:members].numpy(), negatives=picked[members:].numpy())
    area, rate = auc(told), tpr_at(told, 0.01)
    assert rate is not None
    return {
        "auc": round(area.value, 3),
        "auc_low": round(area.low, 3),
        "auc_high": round(area.high, 3),
        "tpr_at_1_percent": round(rate.value, 4),
        "tpr_low": round(rate.low, 4),
        "tpr_high": round(rate.high, 4),
    }


@torch.no_grad()
def loss_of(model: TextModel, state: ModelState, batch: Batch) -> float:
    """Compute the mean loss at ``state``."""
    logits = torch.func.functional_call(model, {**state.parameters, **state.buffers}, (batch.inputs,))
    return float(F.cross_entropy(logits, batch.labels))


def measured(cell: Row, options: argparse.Namespace) -> dict[str, Row]:
    """Measure one cell, all methods at once."""
    make, settings = MODELS[cell["model"]]
    data = load_text(cell["data"], max_length=options.max_length, **settings)  # type: ignore[arg-type]
    examples, number = data.train, options.texts
    base = build_fitting(make, examples.architecture, seed=0)
    assert isinstance(base, TextModel) and isinstance(examples, TextExamples)
    torch.manual_seed(0)
    rank = TRAINED[cell["trained"]]
    model = (base if rank is None else with_adapters(base, rank=rank)).eval()
    plan = LocalPlan(
        trained=[] if rank is None else list(ADAPTED),
        shares="delta",
        optimizer="adamw",
        lr=options.lr,
        epochs=1,
        batch_size=16,
    )
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    members, others, strangers = (order[k * number : (k + 1) * number] for k in range(3))
    asked, began = examples.batch(torch.cat([members, others])), time.process_time()
    how: dict[str, Any] = {"defense": DEFENSES[cell["defense"]], "rounds": options.rounds}
    found = list(observed_rounds(model, examples, members.view(CLIENTS, -1), plan, **how))
    answers = answered(found, asked)
    seconds = (time.process_time() - began) / options.rounds
    control = answered(list(observed_rounds(model, examples, strangers.view(CLIENTS, -1), plan, **how)), asked)
    final = ReadRound(observations=tuple(found[-1]), candidates=asked).published
    losses = {
        "loss_of_members": round(loss_of(model, final, examples.batch(members)), 3),
        "loss_of_others": round(loss_of(model, final, examples.batch(others)), 3),
    }
    rows = {}
    for name, scores in answers.items():
        beside = separated(control[name], number)
        rows[name] = separated(scores, number) | {"control_auc": beside["auc"]}
        rows[name] |= {"control_tpr": beside["tpr_at_1_percent"]}
        rows[name] |= {**losses, "cpu_seconds_a_round": round(seconds, 1)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt_tiny", "bert_tiny"])
    parser.add_argument("--data", nargs="+", default=["sst2"])
    parser.add_argument("--trained", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--defenses", nargs="+", choices=DEFENSES, default=["none"])
    parser.add_argument("--texts", type=int, default=800, help="of all clients, and as many others")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=Path("experiments/rows/text_membership"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, began = RowFile(options.out), time.monotonic()
    for data, model, trained, defense in product(options.data, options.models, options.trained, options.defenses):
        cell: Row = {"data": data, "model": model, "trained": trained, "defense": defense, "texts": options.texts}
        cell |= {"rounds": options.rounds, "lr": options.lr}
        if rows.find(cell) is not None:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            break
        for method, figures in measured(cell, options).items():
            print(rows.add({**cell, "method": method}, figures), flush=True)


if __name__ == "__main__":
    main()
