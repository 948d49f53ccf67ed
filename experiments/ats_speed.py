"""How fast policies are scored, beside a plain loop over samples and points.

    python experiments/ats_speed.py

Both score in turn, on one thread; the median of the ratios counts.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from row_file import RowFile, takes_rows

from fl_privacy.data.transformations import random_policies
from fl_privacy.defenses.policy_search import GradientSimilarity, PrivacyPlan, privacy_scores, transformed_by
from fl_privacy.models import LeNet, ResNet20
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState

MODELS = {
    "LeNet, 28x28": lambda: LeNet(in_channels=1, image_size=28, num_classes=10, activation="tanh"),
    "ResNet-20, width 16, 28x28": lambda: ResNet20(in_channels=1, image_size=28, num_classes=10, width=16),
}


def by_loop(model, state, batch, goals, points):
    """Compute the mean of each sample's privacy curve by a plain loop."""
    start = torch.rand(batch.inputs.shape, generator=derive_generator(0, "start")).to(goals)

    def gradient(image, label):
        found = loss_gradients(model, state, Batch(image[None], label[None]), batch_norm="eval").gradients
        return torch.cat([g.flatten() for g in found.values()])

    areas = []
    for x0, goal, label in zip(start, goals, batch.labels, strict=True):
        wanted = gradient(goal, label)
        curve = [
            F.cosine_similarity(gradient(torch.lerp(x0, goal, j / points), label), wanted, 0) for j in range(points)
        ]
        areas.append(torch.stack(curve).mean())
    return torch.stack(areas)


def seconds(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(make, images, together, repeats, device):
    """Time engine and loop; return (ratio, seconds of one policy) of each repeat."""
    torch.manual_seed(0)
    model, plan = make().to(device), PrivacyPlan()
    state, shape = ModelState.of(model), (1, 28, 28)
    levels = torch.randint(0, 256, (images, *shape), generator=derive_generator(0, "images"))
    batch = Batch((levels / 255).to(device), (torch.arange(images) % 10).to(device))
    similarity = GradientSimilarity(model, state, shape, device=device)
    policies = random_policies(together, derive_generator(0, "policies"))
    goals = transformed_by(batch.inputs, policies[0], 0)
    few = max(1, images // 4)
    part = Batch(batch.inputs[:few], batch.labels[:few])
    rows = []
    for _ in range(repeats):
        engine = seconds(lambda: privacy_scores(similarity, batch, policies, plan=plan, seed=0)) / together
        loop = seconds(lambda: by_loop(model, state, part, goals[:few], plan.points)) * images / few
        rows.append((loop / engine, engine))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--together", type=int, default=4, help="policies in one call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    takes_rows(parser)
    arguments = parser.parse_args()
    kept = RowFile(arguments.out)
    torch.set_num_threads(1)
    for name, make in MODELS.items():
        rows = compare(make, arguments.images, arguments.together, arguments.repeats, arguments.device)
        ratios, engine = [ratio for ratio, _ in rows], statistics.median(engine for _, engine in rows)
        rate = 60 / engine * arguments.images / 100
        times = {"times": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        kept.add(
            {"model": name, "device": arguments.device}, {"policies_a_minute": rate, "n": arguments.repeats, **times}
        )
        print(
            f"{name}: {statistics.median(ratios):.1f} times the loop ({min(ratios):.1f} to {max(ratios):.1f});"
            f" {rate:.2g} policies of 100 images a minute",
            flush=True,
        )


if __name__ == "__main__":
    main()
