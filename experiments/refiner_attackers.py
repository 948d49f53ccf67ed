"""What attackers read from Refiner's uploads when they know how it works (Refiner, Appendix M and beyond).

    python experiments/refiner_attackers.py --evaluator evaluator.safetensors --epsilon 0.1 --victims 32

All attack the same uploads of single images, behind the network of ``experiment=refiner_paper_attack``: ``undefended``
those of the true images; ``plain`` robust ones as if they were gradients; ``smooth`` with more total variation;
``sphere`` looks for an image whose gradient is epsilon away from the upload, as in Appendix M, ``reach`` for one at the
mean distance that robust data have, where epsilon is no bound; ``away from noise`` adds the evaluation network's noise
ratio to its loss; ``N rounds`` averages N uploads of the same image, with robust data made anew each time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from refiner_pictures import attack_of, client_steps, configured, distance, gradient, observation
from torch import Tensor

from fl_privacy.attacks import GradientInversion, idlg
from fl_privacy.attacks.against_refiner import NoiseRatio, Sphere
from fl_privacy.attacks.objectives import L2, Cosine
from fl_privacy.attacks.priors import TotalVariation
from fl_privacy.defenses import refiner
from fl_privacy.defenses.base import LocalStep
from fl_privacy.evaluator import EvaluationNetwork, load_evaluator
from fl_privacy.metrics import aggregate
from fl_privacy.metrics.pixel import psnr
from fl_privacy.types import Observation, Tensors

SMOOTHNESS = 3e-3
"""Weight of total variation and of the noise ratio, in shares of the loss of a zero gradient."""


def mean(rounds: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([r[name] for r in rounds]).mean(0) for name in rounds[0]}


def attackers(
    attack: GradientInversion, evaluator: str, epsilon: float, reach: float, scale: float
) -> dict[str, GradientInversion]:
    """By name; ``scale`` is the loss of a gradient that is zero."""
    assert isinstance(attack.objective, (L2, Cosine))
    smooth = replace(attack, priors=(TotalVariation(weight=SMOOTHNESS * scale),))
    return {
        "plain": attack,
        "smooth": smooth,
        "sphere": replace(attack, objective=Sphere(attack.objective, epsilon)),
        "reach": replace(attack, objective=Sphere(attack.objective, reach)),
        "away from noise": replace(attack, priors=(*attack.priors, NoiseRatio(SMOOTHNESS * scale, evaluator))),
    }


def robust_uploads(steps: Sequence[LocalStep], options: argparse.Namespace) -> tuple[list[list[Tensors]], list[float]]:
    """Of each victim in each round, and their distances to the true gradient."""
    defense = refiner(epsilon=options.epsilon, evaluator=str(options.evaluator))
    uploads, distances = list[list[Tensors]](), list[float]()
    for step in steps:
        clean = gradient(step, step.batch.inputs)
        uploads.append([defense.gradient[0](clean, step) for _ in range(max(options.rounds))])
        distances.append(distance(uploads[-1][0], clean))
    return uploads, distances


def cells(guesses: Tensor, truth: Tensor, network: EvaluationNetwork) -> str:
    """PSNR with its interval, and the noise ratio."""
    found = aggregate(psnr(guesses, truth).tolist())
    assert found is not None and found.ci95 is not None
    return f"{found.mean:.1f} [{found.ci95[0]:.1f}, {found.ci95[1]:.1f}] | {float(network(guesses).mean()):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluator", type=Path, required=True)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--victims", type=int, default=32)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--base", nargs="*", default=["idlg", "inverting_gradients"])
    parser.add_argument("--moves", type=int, default=100, help="iterations of iDLG, whose matching is by L-BFGS")
    parser.add_argument("--override", nargs="*", default=[], help="of the configuration, such as attack.iterations=800")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network, config = load_evaluator(options.evaluator), configured(options)
    steps = client_steps(config, options.victims)
    uploads, distances = robust_uploads(steps, options)
    truth = torch.cat([step.batch.inputs for step in steps])
    reach = sum(distances) / len(distances)
    print(f"{options.victims} victims, epsilon {options.epsilon:g}, mean distance to the true gradient {reach:.2g}")

    def seen(tensors: Sequence[Tensors]) -> list[Observation]:
        return [observation(str(n), step, t) for n, (step, t) in enumerate(zip(steps, tensors, strict=True))]

    once = seen([rounds[0] for rounds in uploads])
    averaged = {f"{n} rounds": seen([mean(rounds[:n]) for rounds in uploads]) for n in options.rounds}
    clean = seen([gradient(step, step.batch.inputs) for step in steps])
    squared = [sum(float(t.square().sum()) for t in o.upload.tensors.values()) for o in once]
    inverting = attack_of(config)
    assert isinstance(inverting, GradientInversion)
    bases = {
        "idlg": (idlg(iterations=options.moves), sum(squared) / len(squared)),
        "inverting_gradients": (inverting, 1.0),
    }
    print("| attack | attacker | PSNR, dB | noise ratio |\n|---|---|---|---|")
    for base in options.base:
        attack, scale = bases[base]
        known = attackers(attack, str(options.evaluator), options.epsilon, reach, scale)
        asked = [("undefended", attack, clean), *((name, one, once) for name, one in known.items())]
        asked += [
            (f"{how}, {name}", known[how], views) for name, views in averaged.items() for how in ("plain", "smooth")
        ]
        for name, one, views in asked:
            batches = [found.batch for found in one(views, seed=options.seed)]
            guesses = torch.cat([batch.inputs for batch in batches if batch is not None])
            print(f"| {base} | {name} | {cells(guesses, truth, network)} |", flush=True)


if __name__ == "__main__":
    main()
