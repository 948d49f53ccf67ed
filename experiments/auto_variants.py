"""What did not make it into ``attack=auto``: starts that are coarse first, descents that end on a plateau.

    python experiments/auto_variants.py --out experiments/rows/auto_variants

Each is ``attack=auto`` with one thing changed, on the same victims with the same evaluations: mean PSNR and the CPU
seconds that a victim takes. Variants go in turn; rows are kept as they come, and a run that was stopped goes on.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from auto_table import Cell, network, victims_of
from row_file import RowFile
from torch import Tensor

from fl_privacy.attacks import AutoAttack, GradientInversion
from fl_privacy.attacks.auto import sub_attacks as auto
from fl_privacy.attacks.gradient_inversion.settings import VictimContext
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.data import load_data
from fl_privacy.measure import aggregate, evaluate_all

CELLS = (Cell("LeNet sigmoid", trained=False, batch=4), Cell("ResNet-20", trained=False, batch=1))
"""That no equations solve."""


@dataclass(frozen=True, kw_only=True)
class Coarse:
    """Pixels near gray that follow a few values, from which the others are interpolated."""

    spread: float = 0.2
    side: int = 8

    def __call__(self, blank: VictimContext) -> Tensor:
        """Draw a coarse random image and return it as variables of ``blank.shape``."""
        few = torch.rand((*blank.shape[:-2], self.side, self.side), generator=blank.generator)
        pixels = F.interpolate(few, size=blank.shape[-2:], mode="bilinear", align_corners=False)
        return blank.space.to_variables(0.5 + self.spread * (pixels - 0.5))


def coarse(attack: GradientInversion) -> GradientInversion:
    return replace(attack, start=Coarse())


def plateau(change: float) -> Callable[[GradientInversion], GradientInversion]:
    """Make a change that ends L-BFGS once its loss or its step changes by less than ``change``."""

    def ending(attack: GradientInversion) -> GradientInversion:
        optimizer = attack.optimizer
        if not isinstance(optimizer, LBFGS):
            return attack
        return replace(attack, optimizer=replace(optimizer, tolerance_change=change))

    return ending


VARIANTS: Mapping[str, Callable[[GradientInversion], GradientInversion]] = {
    "auto": lambda attack: attack,
    "coarse start": coarse,
    "plateau 1e-9": plateau(1e-9),
    "plateau 1e-6": plateau(1e-6),
    "plateau 1e-4": plateau(1e-4),
}


def attacked(cell: Cell, variant: str, data: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Attack a cell by a variant; return its mean PSNR and CPU seconds."""
    usual, model = auto.entries, network(cell, data, options)
    seen, truths = zip(*victims_of(model, cell, data, options), strict=True)

    def entries(observation: Any, most: int, placed: Any) -> Any:
        found = usual(observation, most, placed)
        changed = {id(each): replace(each, attack=VARIANTS[variant](each.attack)) for each, _, _ in found}
        return [(changed[id(each)], start, rough) for each, start, rough in found]

    auto.entries = entries
    try:
        began = time.process_time()
        results = AutoAttack(evaluations=options.evaluations)(seen, seed=options.seed)
        took = time.process_time() - began
    finally:
        auto.entries = usual
    values = [image.values["psnr"] for score in evaluate_all(results, truths) for image in score.images if image.values]
    found = aggregate(values)
    assert found is not None and found.ci95 is not None
    low, high = found.ci95
    return {"victims": len(seen), "psnr": found.mean, "low": low, "high": high, "seconds": took / len(seen)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/auto_variants"))
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--evaluations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.training_steps = 0
    torch.set_num_threads(1)
    rows, data = RowFile(options.out), load_data(options.data)
    for cell, variant in product(CELLS, VARIANTS):
        key = {"model": cell.model, "batch": cell.batch, "variant": variant, "evaluations": options.evaluations}
        if rows.find(key) is None:
            print(rows.add(key, attacked(cell, variant, data, options)), flush=True)


if __name__ == "__main__":
    main()
