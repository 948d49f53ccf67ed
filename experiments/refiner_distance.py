"""How far robust data are from the image, beside what is read of both (Refiner, Equations 6 to 9, Appendix K).

    fl-privacy train-evaluator data=cifar10_exact widths=[32,64,128] epochs=3 lr=1e-3 out=evaluator.safetensors
    python experiments/refiner_distance.py --evaluator evaluator.safetensors --out experiments/rows/refiner_distance

The paper bounds what is read behind Refiner from below by the distance of the robust data x* to the image x less sigma,
the distance at which an undefended image is read: as mean squared error (Equation 8, whose squares are no distance: no
triangle inequality holds for them) and as share of noise that the evaluation network sees (Equation 9). A row has x* to
x, sigma, what is read behind Refiner and its distance to x*, the printed bound and the same of roots of mean squared
errors, and in how many of the images each holds. Images of single-image clients behind the network that the paper
attacks. With ``--decays`` a row instead says how far the upload moves when deep layers weigh otherwise (tau, Table 8).
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
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
from torch import Tensor

from fl_privacy.defenses.robust_data import pull_within
from fl_privacy.measure.intervals import aggregate
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork
from fl_privacy.models.pretrained.evaluator_files import load_evaluator
from fl_privacy.rng import derive_generator
from fl_privacy.types import VictimId


def statistic(values: Tensor) -> dict[str, Any]:
    found = aggregate(values.double().tolist())
    assert found is not None
    return asdict(found)


def bounds(images: Tensor, robust: Tensor, clean_read: Tensor, robust_read: Tensor) -> dict[str, Tensor]:
    """Return the squared errors (N,) of Equations 6 to 8 and what they say is the least that can be read."""
    apart, sigma, read = (
        (one - images).square().flatten(1).mean(1).double() for one in (robust, clean_read, robust_read)
    )
    of_robust = (robust_read - robust).square().flatten(1).mean(1).double()
    roots = (apart.sqrt() - sigma.sqrt()).clamp_min(0).square()
    return {
        "robust": apart,
        "sigma": sigma,
        "read": read,
        "to_robust": of_robust,
        "bound": apart - sigma,
        "roots": roots,
    }


def noise_seen(network: EvaluationNetwork, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network(images.clamp(0, 1).float()).flatten()


def row_of(network: EvaluationNetwork, clean: Tensor, robust: Tensor, reads: Sequence[Tensor]) -> dict[str, Any]:
    """Collect distances, bounds and how often these hold."""
    found = bounds(clean, robust, *reads)
    row: dict[str, Any] = {name: statistic(values) for name, values in found.items()}
    row["bound_holds"] = float((found["read"] >= found["bound"]).double().mean())
    row["roots_hold"] = float((found["read"] >= found["roots"] - 1e-9).double().mean())
    seen = {name: noise_seen(network, of) for name, of in zip(("clean", "sigma", "read"), (clean, *reads), strict=True)}
    shares = {"noise_robust": noise_seen(network, robust), "noise_read": seen["read"]}
    shares["noise_apart"] = shares["noise_robust"] - seen["clean"]
    shares["noise_sigma"] = (seen["sigma"] - seen["clean"]).abs()
    row |= {name: statistic(values) for name, values in shares.items()}
    held = shares["noise_read"] >= shares["noise_robust"] - shares["noise_sigma"]
    return row | {"noise_bound_holds": float(held.double().mean())}


def moved_by_decay(options: argparse.Namespace, network: EvaluationNetwork, kept: RowFile) -> None:
    """Keep how far the upload moves, in lengths of the gradient, when deep layers weigh less or more (tau)."""
    steps = client_steps(configured(options, f"attack={options.attack}"), options.victims)
    for decay in options.decays:
        lengths: list[float] = []
        for step in steps:
            clean = gradient(step, step.batch.inputs)
            uploads = []
            for tau in (0.95, decay):  # the same noise for both: a generator of the client's own for each
                again = replace(step, rng=derive_generator(options.seed, "refiner", "decay", len(lengths)))
                robust = robust_series(again, network, options.iterations, decay=tau)[-1]
                uploads.append(pull_within(gradient(step, robust), clean, options.epsilon))
            zero = {name: torch.zeros_like(g) for name, g in clean.items()}
            lengths.append(distance(*uploads) / distance(clean, zero))
        row = kept.add({"decay": decay, "victims": options.victims}, {"moved": statistic(torch.tensor(lengths))})
        print(f"tau {decay}: {row['moved']['mean']:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes_clients(parser, victims=16)
    parser.add_argument("--iterations", type=int, default=10, help="of the search for robust data")
    parser.add_argument("--attack", default="inverting_gradients_refiner")
    parser.add_argument("--decays", nargs="*", type=float, help="only how far uploads move when tau is one of these")
    takes_rows(parser)
    options = parser.parse_args()
    network = load_evaluator(options.evaluator)
    assert isinstance(network, EvaluationNetwork)
    if options.decays:
        moved_by_decay(options, network, RowFile(options.out))
        return
    config = configured(options, f"attack={options.attack}")
    steps, robust, views = client_steps(config, options.victims), [], []
    for number, step in enumerate(steps):
        robust.append(robust_series(step, network, options.iterations)[-1])
        clean = gradient(step, step.batch.inputs)
        upload = pull_within(gradient(step, robust[-1]), clean, options.epsilon)
        views.append(observation(VictimId(0, 0, number, part="raw"), step, clean))
        views.append(observation(VictimId(0, 0, number, part="robust"), step, upload))
    found = attack_of(config)(views, seed=options.seed)
    guesses = torch.cat([one.batch.inputs for one in found if one.batch is not None]).clamp(0, 1)
    images = torch.cat([step.batch.inputs for step in steps])
    row = row_of(network, images, torch.cat(robust), (guesses[::2], guesses[1::2]))
    settings = {"attack": options.attack, "epsilon": options.epsilon, "victims": options.victims}
    RowFile(options.out).add({**settings, "iterations": config.attack["iterations"]}, row)
    print({name: value["mean"] if isinstance(value, dict) else value for name, value in row.items()})


if __name__ == "__main__":
    main()
