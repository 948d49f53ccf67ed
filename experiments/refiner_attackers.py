"""What attackers read from Refiner's uploads when they know how it works (Refiner, Appendix M and beyond).

    python experiments/refiner_attackers.py --evaluator evaluator.safetensors --epsilon 0.9 --victims 12

All attack the same uploads: ``plain`` as if they were gradients; ``smooth`` with total variation; ``sphere`` looks for
an image whose gradient is epsilon away from the upload, as in Appendix M; ``away from noise`` adds the evaluation
network's noise ratio to its loss; ``rounds`` averages uploads of the same image, with robust data made anew each time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from refiner_pictures import client_steps, gradient, observation

from fl_privacy.attacks import GradientInversion, idlg, inverting_gradients
from fl_privacy.attacks.against_refiner import NoiseRatio, Sphere
from fl_privacy.attacks.objectives import L2, Cosine
from fl_privacy.attacks.priors import TotalVariation
from fl_privacy.defenses import refiner
from fl_privacy.evaluator import load_evaluator
from fl_privacy.metrics.pixel import psnr
from fl_privacy.types import Tensors

SMOOTHNESS = 3e-3


def mean(rounds: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([r[name] for r in rounds]).mean(0) for name in rounds[0]}


def attackers(attack: GradientInversion, evaluator: str, epsilon: float, scale: float) -> dict[str, GradientInversion]:
    """By name; ``scale`` is the loss of a gradient that is zero."""
    smooth = attack
    if not any(isinstance(prior, TotalVariation) for prior in attack.priors):
        smooth = replace(attack, priors=(*attack.priors, TotalVariation(weight=SMOOTHNESS * scale)))
    assert isinstance(attack.objective, (L2, Cosine))
    return {
        "plain": attack,
        "smooth": smooth,
        "sphere": replace(smooth, objective=Sphere(attack.objective, epsilon)),
        "away from noise": replace(smooth, priors=(*smooth.priors, NoiseRatio(SMOOTHNESS * scale, evaluator))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluator", type=Path, required=True)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--victims", type=int, default=12)
    parser.add_argument("--epsilon", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=600, help="of Inverting Gradients; iDLG takes a twentieth")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    network = load_evaluator(options.evaluator)
    defense = refiner(epsilon=options.epsilon, evaluator=str(options.evaluator))
    once, averaged, truths, norms = [], [], [], []
    for number, step in enumerate(client_steps(options.data, network, options.victims, options.seed)):
        clean = gradient(step, step.batch.inputs)
        rounds = [defense.gradient[0](clean, step) for _ in range(options.rounds)]
        once.append(observation(str(number), step, rounds[0]))
        averaged.append(observation(str(number), step, mean(rounds)))
        truths.append(step.batch.inputs)
        norms.append(torch.stack([g.square().sum() for g in rounds[0].values()]).sum())
    truth = torch.cat(truths)
    print("| attacker | iDLG, PSNR | Inverting Gradients, PSNR |")
    print("|---|---|---|")
    table: dict[str, list[float]] = {}
    scale = float(torch.stack(norms).mean())
    for base, size_of_loss in (
        (idlg(iterations=max(1, options.iterations // 20), enough=0.0), scale),
        (inverting_gradients(iterations=options.iterations), 1.0),
    ):
        chosen = attackers(base, str(options.evaluator), options.epsilon, size_of_loss)
        for name, attack, seen in (
            *((name, attack, once) for name, attack in chosen.items()),
            ("smooth, rounds", chosen["smooth"], averaged),
        ):
            guesses = torch.cat([found.batch.inputs for found in attack(seen, seed=options.seed)])
            table.setdefault(name, []).append(float(psnr(guesses, truth).mean()))
    for name, values in table.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |")


if __name__ == "__main__":
    main()
