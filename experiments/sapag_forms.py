"""SAPAG's kernel by element (Wang et al. 2020, Equations 6, 7), by layer (Equation 4), and DLG: digits behind LeNet-5.

    python experiments/sapag_forms.py --images 16 --minutes 30 --out experiments/rows/sapag_forms
    python experiments/sapag_forms.py --data cifar100 --optimizers lbfgs --images 10 --out runs/cifar100

A row for each distance, optimizer and distribution of the weights, with the PSNR of each image so far: the same
command goes on, the first images of all rows before the next ones. L-BFGS has the paper's rate and 500 iterations;
AdamW its rate and ``--adamw-iterations``, of which the paper has 20,000. An image that comes out without finite pixels
counts as 0 dB.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import torch
from refiner_distance import statistic
from refiner_pictures import attack_of, client_steps, gradient, observation
from row_file import Row, RowFile, takes_rows

from fl_privacy.measure.images import psnr
from fl_privacy.runs.config import compose_run
from fl_privacy.types import Knowledge, Reconstruction, VictimId

FORMS: Mapping[str, Mapping[str, list[str]]] = {
    "by element": {"lbfgs": ["attack=sapag", "attack.per=element"]},
    "by layer, as printed": {"lbfgs": ["attack=sapag_paper"]},
    "by layer, times its elements": {"lbfgs": ["attack=sapag"]},
    "DLG": {"lbfgs": ["attack=dlg"], "adamw": ["attack=adam_dlg"]},
}
INITS = ("uniform_0.5", "xavier_normal")
DATA: Mapping[str, list[str]] = {"mnist": ["data=mnist"], "cifar100": ["data=cifar100", "data.name=cifar100_samples"]}


def overrides_of(cell: Row) -> list[str]:
    """List the settings of a cell's attack and network."""
    form, optimizer = FORMS[cell["form"]], cell["optimizer"]
    attack = form.get(optimizer, [*form["lbfgs"], f"attack.optimizer={optimizer}"])
    model = ["model=lenet_dlg", "model.strides=[1,1,1,1]", f"model.init={cell['init']}"]
    data = DATA[cell.get("data", "mnist")]
    return [*data, *model, *attack, f"attack.iterations={cell['iterations']}"]


def attacked(cell: Row, numbers: range) -> list[float]:
    """Return the PSNR of each of these images of the test split, attacked at once; their labels are searched, too."""
    config = compose_run(overrides_of(cell))
    steps = client_steps(config, numbers.stop)[numbers.start :]
    views = [
        observation(VictimId(0, 0, n), s, gradient(s, s.batch.inputs)) for n, s in zip(numbers, steps, strict=True)
    ]
    classes = 100 if cell.get("data") == "cifar100" else 10
    views = [replace(view, num_classes=classes, knowledge=Knowledge()) for view in views]
    found = attack_of(config)(views, seed=0)
    return [psnr_of(one, step.batch.inputs) for one, step in zip(found, steps, strict=True)]


def psnr_of(found: Reconstruction, truth: torch.Tensor) -> float:
    if found.failure and "finite" not in found.failure:
        raise RuntimeError(found.failure)
    if found.batch is None or not bool(torch.isfinite(found.batch.inputs).all()):
        return 0.0
    return float(psnr(found.batch.inputs, truth))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist", choices=list(DATA), help="cifar100: the samples `cifar100_samples`")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--together", type=int, default=1, help="images that one program attacks")
    parser.add_argument("--optimizers", nargs="+", default=["lbfgs", "adamw"], choices=["lbfgs", "adamw"])
    parser.add_argument("--adamw-iterations", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next image after so many")
    takes_rows(parser)
    options = parser.parse_args()
    kept, end = RowFile(options.out), time.monotonic() + 60 * options.minutes
    together = options.together
    for first, optimizer, init, form in product(range(0, options.images, together), options.optimizers, INITS, FORMS):
        iterations = 500 if optimizer == "lbfgs" else options.adamw_iterations
        data = {} if options.data == "mnist" else {"data": options.data}
        cell: Row = {**data, "form": form, "optimizer": optimizer, "init": init, "iterations": iterations}
        before = (kept.find(cell) or {"each": [], "seconds": 0.0}) | {}
        numbers = range(len(before["each"]), min(first + together, options.images))
        if not numbers or time.monotonic() > end:
            continue
        began = time.process_time()
        each = [*before["each"], *(round(one, 2) for one in attacked(cell, numbers))]
        figures = {"psnr": statistic(torch.tensor(each)), "above_15": sum(one > 15 for one in each)}
        seconds = round(before["seconds"] + time.process_time() - began, 1)
        kept.add(cell, {**figures, "images": len(each), "each": each, "seconds": seconds})
        print(*cell.values(), each, flush=True)


if __name__ == "__main__":
    main()
