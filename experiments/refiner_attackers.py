"""What attackers read from Refiner's uploads when they know how it works (Refiner, Appendix M and beyond).

    python experiments/refiner_attackers.py --evaluator evaluator.safetensors --epsilon 0.1 --victims 16

All attack the same uploads of single images, behind the network of ``experiment=refiner_paper_attack``:

- ``undefended``: uploads of the true images; ``plain``: robust ones, as if they were gradients;
- ``solved``: Appendix M itself. A gradient g' is looked for by descent on (|w (g* - g')|^2 - const)^2, from values
  from N(0, 1) or, in ``solved, scaled``, from each tensor's own spread, and the attack inverts g'. The constant is the
  mean weighted distance of these uploads from the true gradients, which favors the attacker;
- ``sphere``: an image whose gradient is epsilon away from the upload; ``reach``: one that is as far away as robust data
  are on average, where epsilon is no bound;
- ``smooth``: with more total variation; ``away from noise``: with the evaluation network's noise ratio in the loss;
- ``N uploads averaged``: of the same image, with robust data made anew each time; ``blend undone``: what is read from
  them is taken for the mean of (1 - alpha) x + alpha v, v from U[0, 1], and x is what is left.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from refiner_pictures import attack_of, client_steps, configured, gradient, observation, takes_clients
from row_file import RowFile, takes_rows
from torch import Tensor

from fl_privacy.attacks import GradientInversion
from fl_privacy.attacks._refiner_aware import NoiseRatio, Sphere, solve_gradient
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine, layer_weight
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.defenses import refiner
from fl_privacy.defenses.defense import LocalStep
from fl_privacy.defenses.robust_data import importance, layer_depths
from fl_privacy.measure import aggregate
from fl_privacy.measure.images import psnr
from fl_privacy.models.pretrained.evaluator_files import load_evaluator
from fl_privacy.types import Observation, Tensors

ALPHA = 0.5
SMOOTHNESS = 3e-3
"""Weight of total variation and of the noise ratio, where the loss of a zero gradient is 1."""


@dataclass(frozen=True, eq=False)
class Victims:
    """Of each victim its step, its true gradient, and the uploads of its rounds."""

    steps: Sequence[LocalStep]
    clean: Sequence[Tensors]
    rounds: Sequence[Sequence[Tensors]]

    def seen(self, uploads: Sequence[Tensors]) -> list[Observation]:
        pairs = zip(self.steps, uploads, strict=True)
        return [observation(str(number), step, tensors) for number, (step, tensors) in enumerate(pairs)]

    def once(self) -> list[Observation]:
        return self.seen([own[0] for own in self.rounds])

    def averaged(self, rounds: int) -> list[Observation]:
        return self.seen([mean(own[:rounds]) for own in self.rounds])


def mean(rounds: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([r[name] for r in rounds]).mean(0) for name in rounds[0]}


def reach_of(victims: Victims, objective: L2 | Cosine) -> float:
    """Compute the root mean squared distance of first uploads to true gradients, in the objective's weights."""
    squared = [
        sum(
            layer_weight(objective.layers, name) * float((own[0][name] - g).square().sum()) for name, g in clean.items()
        )
        for own, clean in zip(victims.rounds, victims.clean, strict=True)
    ]
    return (sum(squared) / len(squared)) ** 0.5


def weights_of(step: LocalStep, gradient: Tensors) -> Tensors:
    """Compute UM's element weights (Eq. 3) at ``gradient``, with the clients' defaults."""
    depths = layer_depths(step.model, step.sent, step.batch.inputs[:1])
    return importance(gradient, step.sent.parameters, depths, by="product", decay=0.95)


def weighted_reach_of(victims: Victims) -> float:
    """Compute the victims' mean of |w (g* - g)|^2 over their first uploads."""
    squared = []
    for step, clean, own in zip(victims.steps, victims.clean, victims.rounds, strict=True):
        weights = weights_of(step, clean)
        squared.append(sum(float((weights[n] * (own[0][n] - g)).square().sum()) for n, g in clean.items()))
    return sum(squared) / len(squared)


def guesses(attack: GradientInversion, views: Sequence[Observation], seed: int) -> Tensor:
    batches = [found.batch for found in attack(views, seed=seed)]
    return torch.cat([batch.inputs for batch in batches if batch is not None])


def attempts(attack: GradientInversion, victims: Victims, options: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """Name of the attacker, and its guesses."""
    objective, seed, once = attack.objective, options.seed, victims.once()
    assert isinstance(objective, (L2, Cosine))
    reach = reach_of(victims, objective)
    yield "undefended", guesses(attack, victims.seen(victims.clean), seed)
    yield "plain", guesses(attack, once, seed)
    squared = weighted_reach_of(victims)
    for scaled in (False, True):
        rng = torch.Generator().manual_seed(seed)
        tensors = [
            solve_gradient(own[0], weights_of(step, own[0]), squared, rng, scaled=scaled)
            for step, own in zip(victims.steps, victims.rounds, strict=True)
        ]
        yield "solved, scaled" if scaled else "solved", guesses(attack, victims.seen(tensors), seed)
    yield "sphere", guesses(replace(attack, objective=Sphere(objective, options.epsilon)), once, seed)
    yield f"reach, {reach:.2g}", guesses(replace(attack, objective=Sphere(objective, reach)), once, seed)
    if isinstance(objective, Cosine):
        yield "smooth", guesses(replace(attack, priors=(TotalVariation(weight=SMOOTHNESS),)), once, seed)
        noise = NoiseRatio(SMOOTHNESS, str(options.evaluator))
        yield "away from noise", guesses(replace(attack, priors=(*attack.priors, noise)), once, seed)
    for number in options.rounds:
        images = guesses(attack, victims.averaged(number), seed)
        yield f"{number} uploads averaged", images
        yield f"{number} uploads averaged, blend undone", ((images - ALPHA / 2) / (1 - ALPHA)).clamp(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes_clients(parser, victims=16)
    parser.add_argument("--rounds", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--attacks", nargs="*", default=["inverting_gradients_refiner", "idlg_refiner"])
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.set_num_threads(1)
    network, steps = load_evaluator(options.evaluator), client_steps(configured(options), options.victims)
    (defend,) = refiner(epsilon=options.epsilon, alpha=ALPHA, evaluator=str(options.evaluator)).gradient
    clean = [gradient(step, step.batch.inputs) for step in steps]
    uploads = [
        [defend(g, step) for _ in range(max(options.rounds, default=1))] for g, step in zip(clean, steps, strict=True)
    ]
    victims, truth = Victims(steps, clean, uploads), torch.cat([step.batch.inputs for step in steps])
    distance = reach_of(victims, L2())
    print(
        f"epsilon {options.epsilon:g}, n = {options.victims}; the uploads are {distance:.2g} from the true gradients\n"
    )
    print("| attack | attacker | PSNR, dB | noise ratio |\n|---|---|---|---|")
    for name in options.attacks:
        config = configured(options, f"attack={name}")
        attack = attack_of(config)
        assert isinstance(attack, GradientInversion)
        for attacker, images in attempts(attack, victims, options):
            found = aggregate(psnr(images, truth).tolist())
            assert found is not None and found.ci95 is not None
            low, high = found.ci95
            ratio = float(network(images).mean())
            who = "reach" if attacker.startswith("reach") else attacker
            key = {"attack": name, "attacker": who, "epsilon": options.epsilon, "override": options.override}
            kept.add(key, {"psnr": asdict(found), "noise_ratio": ratio, "n": options.victims, "reach": distance})
            print(f"| {name} | {attacker} | {found.mean:.1f} [{low:.1f}, {high:.1f}] | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
