"""Robust data of Refiner next to the images and to where they start (Refiner, Figures 5 and 14, a).

    python experiments/refiner_pictures.py --evaluator evaluator.safetensors --victims 6 --out refiner.png

With an alpha of 0 robust data start as the image itself, which Figure 5 shows next to 0.5. The course over iterations,
Figure 13, is measured by ``paper_observations.py``; what is reconstructed, Figure 14, b, is on the page of
``fl-privacy attack experiment=refiner_paper_attack``.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.defenses.defense import ClientState, LocalStep
from fl_privacy.defenses.robust_data import batch_gap, descend, importance, layer_depths
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork, uniform_noise
from fl_privacy.models.pretrained.evaluator_files import load_evaluator
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_attack, build_dataset, build_network
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Tensors, Upload, VictimId


def gradient(step: LocalStep, images: Tensor) -> Tensors:
    found = loss_gradients(step.model, step.sent, Batch(images, step.batch.labels), batch_norm="eval").gradients
    return {name: g.detach() for name, g in found.items()}


def distance(one: Tensors, other: Tensors) -> float:
    return float(torch.stack([(one[name] - g).square().sum() for name, g in other.items()]).sum().sqrt())


def robust_series(
    step: LocalStep,
    network: EvaluationNetwork,
    iterations: int,
    *,
    alpha: float = 0.5,
    decay: float = 0.95,
    lr: float = 1.0,
    relative: bool = True,
) -> list[Tensor]:
    """Return Refiner's start and each of its iterates, (1, C, H, W), with the defense's defaults.

    Without ``relative`` the utility is the one that the paper prints, instead of in parts of noise's.
    """
    target = gradient(step, step.batch.inputs)
    depths = layer_depths(step.model, step.sent, step.batch.inputs)
    weights = importance(target, step.sent.parameters, depths, by="product", decay=decay)
    noise = uniform_noise(step.batch.inputs, step.rng)
    start = torch.lerp(step.batch.inputs, noise, alpha)
    gap = batch_gap(step, target, weights, lambda images: images, start)
    unit = gap(noise).detach()
    unit = unit if relative else torch.ones_like(unit)
    return [start, *descend(start, gap, network, unit=unit, beta=1.0, lr=lr, iterations=iterations)]


def takes_clients(parser: argparse.ArgumentParser, *, victims: int) -> None:
    """Add the options of who is attacked behind Refiner."""
    parser.add_argument("--evaluator", type=Path, required=True)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--victims", type=int, default=victims)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--override", nargs="*", default=[], help="of the configuration, such as attack.iterations=800")
    parser.add_argument("--seed", type=int, default=0)


def configured(options: argparse.Namespace, *more: str) -> RunSettings:
    """Compose the paper's attack settings, with the overrides of the command line."""
    own = (f"data={options.data}", f"seed={options.seed}")
    return compose_run(["experiment=refiner_paper_attack", *own, *more, *options.override])


def client_steps(config: RunSettings, victims: int) -> list[LocalStep]:
    """Build a step for each of the first test images, as far as there are so many, on a fresh network."""
    dataset = build_dataset(config.data)
    model, examples = build_network(config.model, dataset, seed=config.seed), dataset.test
    sent, plan = ModelState.of(model), LocalPlan(batch_norm="eval")
    return [
        LocalStep(
            model=model,
            sent=sent,
            batch=Batch(examples.images[number : number + 1].float() / 255, examples.labels[number : number + 1]),
            plan=plan,
            state=ClientState(),
            rng=derive_generator(config.seed, "refiner", number),
        )
        for number in range(min(victims, len(examples)))
    ]


def attack_of(config: RunSettings) -> ReconstructionAttack:
    attack = build_attack(config.attack, device=config.device, threads=config.attack_threads)
    assert attack is not None
    return attack


def observation(victim: VictimId, step: LocalStep, tensors: Tensors) -> Observation:
    images = step.batch.inputs
    return Observation(
        id=victim,
        model=step.model,
        sent=step.sent,
        upload=Upload(tensors=tensors, num_examples=1),
        plan=step.plan,
        input_shape=tuple(images.shape[1:]),
        num_classes=10,
        knowledge=Knowledge(labels=step.batch.labels),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes_clients(parser, victims=6)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.0, 0.5], help="share of noise in the start")
    parser.add_argument("--out", type=Path, default=Path("refiner.png"))
    options = parser.parse_args()
    network, steps = load_evaluator(options.evaluator), client_steps(configured(options), options.victims)
    rows = {"raw": [step.batch.inputs for step in steps]}
    for alpha in options.alphas:
        series = [robust_series(step, network, options.iterations, alpha=alpha) for step in steps]
        rows[f"start, alpha {alpha:g}"] = [images[0] for images in series]
        rows[f"robust, alpha {alpha:g}"] = [images[-1] for images in series]
    figure = Figure(figsize=(1.2 * len(steps) + 1.6, 1.3 * len(rows)), dpi=150, layout="constrained")
    for line, (name, images) in zip(figure.subplots(len(rows), len(steps), squeeze=False), rows.items(), strict=True):
        for axis, image in zip(line, images, strict=True):
            axis.imshow(image[0].permute(1, 2, 0).clamp(0, 1), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
    figure.savefig(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
