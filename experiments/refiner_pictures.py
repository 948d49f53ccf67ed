"""What Refiner does to an image and to an attack (Refiner, Figures 5, 13 and 14).

    python experiments/refiner_pictures.py --evaluator evaluator.safetensors --victims 6 --out runs/refiner

Writes ``figure_13.png``, the distance of the gradients and the noise ratio over the iterations of Eq. 2, and
``figure_14.png``: raw images, robust images, and what Inverting Gradients reads from the gradients of both. With
``--alpha 0`` robust data start as the image itself, which Figure 5 shows beside the default.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.defenses.defense import ClientState, LocalStep
from fl_privacy.defenses.robust_data import batch_gap, descend, importance, layer_depths, pull_within
from fl_privacy.measure.images import psnr
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


def draw_series(series: Sequence[tuple[list[float], list[float]]], file: Path) -> None:
    figure = Figure(figsize=(8, 3), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for distances, ratios in series:
        left.plot(distances, color="tab:blue", alpha=0.5)
        right.plot(ratios, color="tab:red", alpha=0.5)
    left.set(xlabel="iteration", ylabel="distance to the true gradient", ylim=(0, None))
    right.set(xlabel="iteration", ylabel="predicted noise ratio", ylim=(0, 1))
    figure.savefig(file)


def draw_rows(rows: dict[str, list[Tensor]], notes: dict[str, list[float]], file: Path) -> None:
    columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(1.2 * columns + 1.6, 1.45 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (name, images) in zip(axes, rows.items(), strict=True):
        for number, (axis, image) in enumerate(zip(row, images, strict=True)):
            axis.imshow(image[0].permute(1, 2, 0).clamp(0, 1), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            if name in notes:
                axis.set_xlabel(f"{notes[name][number]:.1f} dB", fontsize=7, labelpad=2)
        row[0].set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes_clients(parser, victims=6)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=0.5, help="share of noise in the start (Figure 5: 0 beside 0.5)")
    parser.add_argument("--out", type=Path, default=Path("runs/refiner"))
    options = parser.parse_args()
    network = load_evaluator(options.evaluator)
    config = configured(options, "attack=inverting_gradients_refiner")
    steps = client_steps(config, options.victims)
    series, robust, clean_views, robust_views = [], [], [], []
    for number, step in enumerate(steps):
        images = robust_series(step, network, options.iterations, alpha=options.alpha)
        clean = gradient(step, step.batch.inputs)
        distances = [distance(gradient(step, i), clean) for i in images]
        series.append((distances, [float(network(i)) for i in images]))
        upload = pull_within(gradient(step, images[-1]), clean, options.epsilon)
        robust.append(images[-1])
        clean_views.append(observation(VictimId(0, 0, number, part="raw"), step, clean))
        robust_views.append(observation(VictimId(0, 0, number, part="robust"), step, upload))
        ends = f"{distances[0]:.3f} -> {distances[-1]:.3f}"
        norm = distance(clean, {name: torch.zeros_like(g) for name, g in clean.items()})
        print(f"victim {number}: distance {ends} of a gradient of {norm:.3f}, noise ratio {series[-1][1][-1]:.2f}")
    attack = attack_of(config)
    guesses = {
        name: [found.batch.inputs for found in attack(views, seed=options.seed)]
        for name, views in (("read from raw\ngradients", clean_views), ("read from robust\ngradients", robust_views))
    }
    truths = [step.batch.inputs for step in steps]
    quality = {name: psnr(torch.cat(images), torch.cat(truths)).tolist() for name, images in guesses.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    draw_series(series, options.out / "figure_13.png")
    draw_rows({"raw": truths, "robust": robust, **guesses}, quality, options.out / "figure_14.png")
    for name, values in quality.items():
        print(f"{' '.join(name.split())}: PSNR {sum(values) / len(values):.1f} dB")
    print(options.out)


if __name__ == "__main__":
    main()
