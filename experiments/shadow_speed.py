"""Many shadow models at once beside one after the other: CPU time, both sides in turn, and wall-clock time.

Beside them the share of either that the products and convolutions would take at the rate of two large matrices.

python experiments/shadow_speed.py --models 64 --batch-sizes 1 4 16 32 --threads 1
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from inference_runs import head, show
from peak import operations, peak_rate
from row_file import RowFile, takes_rows

from fl_privacy.models import LeNet
from fl_privacy.models.gradients import ManyModels, local_orders, loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState


def one_by_one(model: torch.nn.Module, pool: Batch, order: list[torch.Tensor], plan: LocalPlan, number: int) -> None:
    """Train ``number`` models one after the other, as a client trains."""
    for place in range(number):
        values = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        optimizer = torch.optim.SGD(values.values(), lr=plan.lr)
        for rows in order:
            batch = Batch(pool.inputs[rows[place]], pool.labels[rows[place]])
            found = loss_gradients(model, ModelState(values), batch)
            for name, parameter in values.items():
                parameter.grad = found.gradients[name]
            optimizer.step()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Measure CPU and wall-clock seconds of ``work``."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = LeNet(in_channels=3, image_size=32, num_classes=10, activation="tanh", mean=[0.5], std=[0.25])
    pool = Batch(torch.rand(1000, 3, 32, 32), torch.randint(10, (1000,)))
    head(
        [
            "batch",
            "models",
            "at once, CPU s",
            "one by one, CPU s",
            "ratio, CPU",
            "ratio, wall",
            "products, %",
            "one by one, %",
        ]
    )
    for size in options.batch_sizes:
        plan, rng = LocalPlan(shares="delta", lr=0.01, steps=options.steps, batch_size=size), derive_generator(size)
        subsets = torch.stack([torch.randperm(1000, generator=rng)[: 8 * size] for _ in range(options.models)])
        order = local_orders(subsets, plan, rng)
        many = ManyModels.copies(model, ModelState.of(model), options.models)
        many.trained(pool, order[:1], plan)
        one_by_one(model, pool, order[:1], plan, 1)
        pairs = [
            (
                timed(lambda: many.trained(pool, order, plan)),  # noqa: B023
                timed(lambda: one_by_one(model, pool, order, plan, options.models)),  # noqa: B023
            )
            for _ in range(options.pairs)
        ]
        cpu = [statistics.median(side[k][0] for side in pairs) for k in (0, 1)]
        ratios = [statistics.median(p[1][k] / p[0][k] for p in pairs) for k in (0, 1)]
        done = operations(lambda: one_by_one(model, pool, order, plan, 1)) * options.models / peak_rate()  # noqa: B023
        kept.add(
            {"batch": size, "models": options.models, "steps": options.steps},
            {"at_once": cpu[0], "one_by_one": cpu[1], "ratio": ratios[0], "pairs": options.pairs}
            | {"products_at_once": done / cpu[0], "products_one_by_one": done / cpu[1]},
        )
        show(
            [
                size,
                options.models,
                f"{cpu[0]:.2f}",
                f"{cpu[1]:.2f}",
                f"{ratios[0]:.1f}",
                f"{ratios[1]:.1f}",
                *(f"{100 * done / k:.0f}" for k in cpu),
            ]
        )


if __name__ == "__main__":
    main()
