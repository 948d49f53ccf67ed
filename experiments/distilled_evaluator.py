"""Refiner with an evaluation network of a tenth of the operations, beside the one it learned from.

    fl-privacy train-evaluator data=cifar10_exact widths=[128,256,512] epochs=2 lr=1e-3 out=teacher.safetensors
    fl-privacy train-evaluator data=cifar10_exact teacher=teacher.safetensors epochs=4 lr=1e-3 out=student.safetensors
    python experiments/distilled_evaluator.py --teacher teacher.safetensors --student student.safetensors

First the noise ratio that each predicts for images that neither has seen, and then what becomes of these when a client
refines them with each: whoever judged on the way, the teacher says how much noise is there in the end, which a student
that can be fooled would not stand. Warm are the robust data of a second round, one step of training later, from those
of the first with half the iterations; cold of the same round anew. A cost is CPU time of a defended step to a plain
one's.
"""

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from defense_cost import MODELS, seconds
from row_file import RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.data import load_data
from fl_privacy.defenses import ClientState, LocalStep, none, refiner
from fl_privacy.defenses._refiner import ImageMemory, fingerprints
from fl_privacy.measure import aggregate
from fl_privacy.measure.images import psnr
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork, noise_curve
from fl_privacy.models.pretrained.evaluator_files import load_evaluator
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

ITERATIONS = 10


def step_of(model: nn.Module, batch: Batch, state: ClientState, round: int) -> LocalStep:
    rng = derive_generator(0, "refiner", round)
    return LocalStep(model, ModelState.of(model), batch, LocalPlan(batch_norm="eval"), state, rng)


def gradient(step: LocalStep) -> Tensors:
    return loss_gradients(step.model, step.sent, step.batch, batch_norm="eval").gradients


def refined(model: nn.Module, batch: Batch, file: Path, state: ClientState, round: int) -> tuple[Tensor, float]:
    """Refine a batch; return robust data (B, C, H, W) and the relative error of their gradient."""
    defense = refiner(evaluator=str(file), warm_start=True, iterations=ITERATIONS, epsilon=1e9)
    step = step_of(model, batch, state, round)
    true = gradient(step)
    found = defense.gradient[0](true, step)
    apart = torch.stack([(found[n] - t).square().sum() for n, t in true.items()]).sum().sqrt()
    length = torch.stack([t.square().sum() for t in true.values()]).sum().sqrt()
    data, there, _ = ImageMemory(state, "refiner").recall(fingerprints(batch.inputs), batch.inputs)
    assert there.all()
    return data, float(apart / length)


def moved(model: nn.Module, batch: Batch, lr: float) -> None:
    """Take one step of training in place."""
    step = step_of(model, batch, ClientState(), 0)
    with torch.no_grad():
        for name, g in gradient(step).items():
            model.get_parameter(name).sub_(lr * g)


def ratio_of_seconds(model: nn.Module, batch: Batch, file: Path, iterations: int, repeats: int) -> float:
    """Measure the median ratio of CPU time of a defended step to a plain one right before it."""
    defense, clock = refiner(evaluator=str(file), iterations=iterations), time.process_time
    pairs = [(seconds(model, none(), batch, clock), seconds(model, defense, batch, clock)) for _ in range(repeats + 1)]
    return statistics.median(defended / plain for plain, defended in pairs[1:])


def network_of(file: Path) -> EvaluationNetwork:
    network = load_evaluator(file)
    assert isinstance(network, EvaluationNetwork)
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--model", default="lenet", choices=MODELS)
    parser.add_argument("--images", type=int, default=500, help="of the test split, for the curve")
    parser.add_argument("--batches", type=int, default=4, help="that are refined")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="of a step that is timed; 0: none is")
    takes_rows(parser)
    options = parser.parse_args()
    kept, files = RowFile(options.out), {"teacher": options.teacher, "student": options.student}
    judges = {name: network_of(file) for name, file in files.items()}
    channels, size, _ = judges["teacher"].input_shape
    images = load_data(options.data, channels=channels, image_size=size).test
    ratios = torch.linspace(0, 1, 11)
    for name, judge in judges.items():
        curve = noise_curve(judge, images.images[: options.images], ratios)
        share = judge.multiply_adds / judges["teacher"].multiply_adds
        print(f"{name}: {share:.2f} of the operations, " + " ".join(f"{p:.2f}" for p in curve.mean(1).tolist()))
        for ratio, of_ratio in zip(ratios.tolist(), curve, strict=True):
            key = {"of": "curve", "judge": name, "ratio": round(ratio, 1)}
            kept.add(key, {"predicted": asdict(aggregate(of_ratio.tolist(), within=(0.0, 1.0))), "operations": share})
    for name, file in files.items():
        found: dict[str, dict[str, list[float]]] = {}
        for number in range(options.batches):
            rows = torch.arange(number * options.batch_size, (number + 1) * options.batch_size)
            torch.manual_seed(number)
            model = MODELS[options.model](in_channels=channels, image_size=size, num_classes=images.num_classes)
            batch, state = images.batch(rows), ClientState()
            refined(model, batch, file, state, 0)
            moved(model, batch, lr=0.01)
            for start, of_client in (("warm", state), ("cold", ClientState())):
                data, apart = refined(model, batch, file, of_client, 1)
                of_start = found.setdefault(start, {"noise": [], "psnr": [], "apart": []})
                of_start["noise"] += judges["teacher"](data).tolist()
                of_start["psnr"] += psnr(data, batch.inputs).tolist()
                of_start["apart"].append(apart)
        for start, values in found.items():
            row = {key: asdict(aggregate(of_key)) for key, of_key in values.items()}
            if options.repeats:
                iterations = ITERATIONS // 2 if start == "warm" else ITERATIONS
                row["cost"] = ratio_of_seconds(model, batch, file, iterations, options.repeats)
            kept.add({"of": "robust data", "model": options.model, "judge": name, "start": start}, row)
            shown = {key: f"{statistics.mean(of_key):.3f}" for key, of_key in values.items()}
            print(
                f"{name}, {start}: {shown}" + (f", {row['cost']:.1f} plain steps" if options.repeats else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
