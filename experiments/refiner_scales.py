"""What decides the figures of Refiner that do not come: each against a setting that the paper leaves open, by scales.

    python experiments/refiner_scales.py KIND --evaluator evaluator.safetensors --out experiments/rows/refiner_scales

``distance``: of robust data to the image and the noise seen in them (Appendix K), over the share of noise in the
start, the rate and the number of steps. ``tau``: how far robust data move from one tau to the next (Table 8), on
networks with which tau matters less and more, with the utility as printed and relative to noise's. ``start``: what is
read by the attacker that solves for the gradient (Table 15), over the spread of its random start, the weight of total
variation, and the steps at the paper's rate from gray. ``smooth``: the share of noise in what Inverting Gradients reads
(Figure 9), over its weight of total variation. ``course``: along an undefended training of the network that trains, how
long Refiner's error is beside the gradient of a batch (PMM of Tables 5 to 10), and what is read of single images
(Figure 18).
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from refiner_attackers import weights_of
from refiner_distance import noise_seen, statistic
from refiner_pictures import (
    attack_of,
    client_steps,
    configured,
    distance,
    gradient,
    observation,
    robust_series,
    takes_clients,
)
from row_file import RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.attacks._refiner_aware import solve_gradient
from fl_privacy.data import Examples
from fl_privacy.defenses.defense import LocalStep
from fl_privacy.defenses.robust_data import pull_within
from fl_privacy.measure.images import psnr
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork
from fl_privacy.models.pretrained.evaluator_files import load_evaluator
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_dataset
from fl_privacy.types import Batch, ModelState, Tensors

SHARES, RATES, STEPS = (0.5, 0.6, 0.75, 0.9), (1.0, 3.0, 10.0, 30.0), (10, 30, 100, 300)
TAUS = (0.91, 0.93, 0.95, 0.97, 1.0)
SEARCHES: Mapping[str, tuple[float, ...]] = {
    "steps from gray": (10, 20, 40, 100),
    "total variation": (1e-3, 1e-2, 1e-1),
    "spread": (0.1, 0.3, 1.0),
}
SMOOTHNESS = (0.0, 1e-5, 1e-4)
TRAINED, BATCHES, BLENDS = (0, 300, 1000, 3000), 8, (0.1, 0.5, 0.9)
NETWORKS: Mapping[str, tuple[str, ...]] = {
    "sigmoid": (),
    "ReLU": ("model.activation=relu",),
    "sigmoid, values from U(-0.5, 0.5)": ("model.init=uniform_0.5",),
}


def distances(options: argparse.Namespace, network: EvaluationNetwork, kept: RowFile) -> None:
    """Keep how far robust data are from the image, over three settings."""
    steps = client_steps(configured(options, "attack=none"), options.victims)
    images = torch.cat([step.batch.inputs for step in steps])
    clean = noise_seen(network, images)

    def keep(over: str, value: float, robust: Tensor) -> None:
        apart = (robust - images).square().flatten(1).mean(1)
        figures = {"robust": statistic(apart), "noise_apart": statistic(noise_seen(network, robust) - clean)}
        kept.add({"what": "distance", "over": over, "value": value, "victims": options.victims}, figures)
        print(over, value, f"{apart.mean():.4f}, noise {figures['noise_apart']['mean']:.3f}", flush=True)

    def series(**settings: float) -> list[Tensor]:
        of = [
            robust_series(
                replace(step, rng=derive_generator(options.seed, "scales", number)),
                network,
                **{"iterations": 10, **settings},
            )
            for number, step in enumerate(steps)
        ]
        return [torch.cat(iterates) for iterates in zip(*of, strict=True)]

    for alpha in SHARES:
        keep("alpha", alpha, series(alpha=alpha)[-1])
    for rate in RATES:
        keep("rate", rate, series(lr=rate)[-1])
    course = series(iterations=max(STEPS))
    for number in STEPS:
        keep("steps", number, course[number])


def moved(options: argparse.Namespace, network: EvaluationNetwork, kept: RowFile) -> None:
    """Keep how far robust data and uploads move from one tau to the next."""
    for name, more in NETWORKS.items():
        steps = client_steps(configured(options, "attack=none", *more), options.victims)
        for printed in (False, True):
            robust = [
                torch.cat(
                    [
                        robust_series(
                            replace(step, rng=derive_generator(options.seed, "scales", number)),
                            network,
                            10,
                            decay=tau,
                            relative=not printed,
                        )[-1]
                        for number, step in enumerate(steps)
                    ]
                )
                for tau in TAUS
            ]
            key = {"what": "tau", "network": name, "printed": printed, "victims": options.victims}
            for low, high, one, other in zip(TAUS, TAUS[1:], robust, robust[1:], strict=False):
                apart = (one - other).square().flatten(1).mean(1).sqrt()
                kept.add({**key, "from": low, "to": high}, {"moved": statistic(apart)})
                print(name, printed, low, high, f"{apart.mean():.2e}", flush=True)


def uploads_of(
    options: argparse.Namespace, network: EvaluationNetwork
) -> tuple[list[Tensors], list[Tensors], list[LocalStep]]:
    """Return true gradients, what is uploaded instead, and the steps of the victims."""
    steps = client_steps(configured(options, "attack=none"), options.victims)
    clean = [gradient(step, step.batch.inputs) for step in steps]
    robust = [gradient(step, robust_series(step, network, 10)[-1]) for step in steps]
    return clean, [pull_within(r, g, options.epsilon) for r, g in zip(robust, clean, strict=True)], steps


def read(options: argparse.Namespace, steps: list[LocalStep], tensors: list[Tensors], *settings: str) -> Tensor:
    attack = attack_of(configured(options, *settings))
    views = [observation(str(number), *pair) for number, pair in enumerate(zip(steps, tensors, strict=True))]
    return torch.cat([one.batch.inputs for one in attack(views, seed=options.seed) if one.batch is not None])


def started(options: argparse.Namespace, network: EvaluationNetwork, kept: RowFile) -> None:
    """Keep what is read after solving for the gradient, over what the paper leaves open of the search."""
    clean, sent, steps = uploads_of(options, network)
    truth = torch.cat([step.batch.inputs for step in steps])
    pairs = list(zip(steps, sent, clean, strict=True))
    const = sum(weighted(weights_of(step, g), upload, g) for step, upload, g in pairs) / len(pairs)
    for over, values in SEARCHES.items():
        for value in values:
            rng = torch.Generator().manual_seed(options.seed)
            spread = value if over == "spread" else 1.0
            found = [
                solve_gradient(upload, weights_of(step, upload), const, rng, scaled=over == "spread", spread=spread)
                for step, upload, _ in pairs
            ]
            settings = {
                "spread": (f"attack.iterations={options.iterations}",),
                "total variation": (f"attack.iterations={options.iterations}", f"attack.total_variation={value:f}"),
                "steps from gray": (f"attack.iterations={value:g}", "attack.lr=0.01", "attack.start=gray"),
            }[over]
            images = read(options, steps, found, "attack=inverting_gradients_refiner", *settings).clamp(0, 1)
            figures = {"psnr": statistic(psnr(images, truth)), "noise_ratio": statistic(noise_seen(network, images))}
            kept.add({"what": "start", "over": over, "value": value, "victims": options.victims}, figures)
            print(over, value, *(f"{figure['mean']:.3f}" for figure in figures.values()), flush=True)


def weighted(weights: Tensors, upload: Tensors, clean: Tensors) -> float:
    return sum(float((weights[name] * (upload[name] - g)).square().sum()) for name, g in clean.items())


def smoothed(options: argparse.Namespace, network: EvaluationNetwork, kept: RowFile) -> None:
    """Keep the share of noise in what is read, over the weight of total variation."""
    clean, sent, steps = uploads_of(options, network)
    truth = torch.cat([step.batch.inputs for step in steps])
    for weight in SMOOTHNESS:
        for name, tensors in (("none", clean), ("refiner", sent)):
            settings = (f"attack.iterations={options.iterations}", f"attack.total_variation={weight:f}")
            images = read(options, steps, tensors, "attack=inverting_gradients_refiner", *settings).clamp(0, 1)
            figures = {"psnr": statistic(psnr(images, truth)), "noise_ratio": statistic(noise_seen(network, images))}
            key = {"what": "smooth", "defense": name, "weight": weight, "victims": options.victims}
            kept.add({**key, "iterations": options.iterations}, figures)
            print(name, weight, *(f"{figure['mean']:.3f}" for figure in figures.values()), flush=True)


def course(options: argparse.Namespace, network: EvaluationNetwork, kept: RowFile) -> None:
    """Train as the paper's network that trains does, undefended, and keep what Refiner and an attack do on the way."""
    settings = configured(options, "attack=none", "model.activation=relu")
    victims = client_steps(settings, options.victims)
    model, data = victims[0].model, build_dataset(configured(options, "attack=none", "data=cifar10").data)
    rng, optimizer = torch.Generator().manual_seed(options.seed), torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(max(TRAINED) + 1):
        if number in TRAINED:
            sent = ModelState.of(model)
            figures = {"accuracy": accuracy(model, data.test), **errors(options, network, victims[0], sent, data.train)}
            now = [replace(step, sent=sent) for step in victims]
            figures |= {name: statistic(values) for name, values in reads(options, network, now).items()}
            kept.add({"what": "course", "steps": number, "victims": options.victims}, figures)
            told = {name: found["mean"] if isinstance(found, dict) else found for name, found in figures.items()}
            print(number, {name: round(value, 3) for name, value in told.items()}, flush=True)
        batch = drawn(data.train, 32, rng)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()


def drawn(examples: Examples, size: int, rng: torch.Generator) -> Batch:
    chosen = torch.randint(len(examples), (size,), generator=rng)
    return Batch(examples.images[chosen].float() / 255, examples.labels[chosen])


@torch.no_grad()
def accuracy(model: nn.Module, test: Examples) -> float:
    images, labels = test.images[:2000].float() / 255, test.labels[:2000]
    return float((model(images).argmax(1) == labels).double().mean())


def errors(
    options: argparse.Namespace, network: EvaluationNetwork, step: LocalStep, sent: ModelState, train: Examples
) -> dict[str, object]:
    """Compute how long a batch's gradient is, and Refiner's error beside it, by the share of noise in the start."""
    rng, lengths = torch.Generator().manual_seed(options.seed), []
    found: dict[float, list[float]] = {alpha: [] for alpha in BLENDS}
    for number in range(BATCHES):
        own = replace(step, sent=sent, batch=drawn(train, 16, rng))
        clean = gradient(own, own.batch.inputs)
        lengths.append(distance(clean, {name: torch.zeros_like(g) for name, g in clean.items()}))
        for alpha, apart in found.items():
            again = replace(own, rng=derive_generator(options.seed, "scales", number))
            robust = robust_series(again, network, 10, alpha=alpha)[-1]
            upload = pull_within(gradient(own, robust), clean, options.epsilon)
            apart.append(distance(upload, clean) / lengths[-1])
    told = {f"error_{alpha:g}": statistic(torch.tensor(apart)) for alpha, apart in found.items()}
    return {"length": statistic(torch.tensor(lengths)), **told}


def reads(options: argparse.Namespace, network: EvaluationNetwork, steps: list[LocalStep]) -> dict[str, Tensor]:
    """Compute the PSNR of what Inverting Gradients reads undefended and behind Refiner."""
    truth = torch.cat([step.batch.inputs for step in steps])
    clean = [gradient(step, step.batch.inputs) for step in steps]
    robust = [gradient(step, robust_series(step, network, 10)[-1]) for step in steps]
    sent = [pull_within(r, g, options.epsilon) for r, g in zip(robust, clean, strict=True)]
    settings = ("attack=inverting_gradients_refiner", f"attack.iterations={options.iterations}")
    return {
        name: psnr(read(options, steps, tensors, *settings).clamp(0, 1), truth)
        for name, tensors in (("undefended", clean), ("refined", sent))
    }


KINDS: Mapping[str, Callable[[argparse.Namespace, EvaluationNetwork, RowFile], None]] = {
    "distance": distances,
    "tau": moved,
    "start": started,
    "smooth": smoothed,
    "course": course,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=KINDS)
    takes_clients(parser, victims=16)
    parser.add_argument("--iterations", type=int, default=500, help="of Inverting Gradients")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = load_evaluator(options.evaluator)
    assert isinstance(network, EvaluationNetwork)
    KINDS[options.what](options, network, RowFile(options.out))


if __name__ == "__main__":
    main()
