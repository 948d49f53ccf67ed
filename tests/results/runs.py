"""Runs as the pipeline records them, on made-up numbers."""

import math
from pathlib import Path

import torch

from fl_privacy.effects import Part
from fl_privacy.federation import Evaluation, RoundReport
from fl_privacy.measure import ImageScore, VictimScore
from fl_privacy.measure.counts import count
from fl_privacy.runs.config.study import AttackCell
from fl_privacy.runs.folder import Attacker, RunFolder
from fl_privacy.runs.folder.study import StudyEntry
from fl_privacy.types import VictimId

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def config(**changes):
    base = {
        "seed": 0,
        "out": "runs",
        "data": {"name": "cifar10"},
        "model": {"name": "lenet", "activation": "relu"},
        "federation": {"clients": 4, "rounds": 12, "lr": 0.1},
        "defense": {"_target_": "fl_privacy.defenses.none"},
        "attack": {"name": "inverting_gradients", "iterations": 4800, "total_variation": 1e-4},
        "choices": {"defense": "none", "attack": "inverting_gradients", "backend": "loop"},
        "victims": 6,
    }
    return base | changes


def defended(**settings):
    return {
        "defense": {"_target_": "fl_privacy.defenses.dp_noise", **settings},
        "choices": {"defense": "dp_noise", "attack": "inverting_gradients", "backend": "loop"},
    }


def counts_of(records):
    """Count the ``image`` records of one attacker and round."""
    return count((str(record["id"]), ImageScore.of_record(record)) for record in records)


def study_entry(family, strength, training, attacks=(), overrides=()):
    """Of a study with one training; attacks by their names."""
    found = {AttackCell(attack=name): path for name, path in dict(attacks).items()}
    return StudyEntry(
        family=family, strength=strength, overrides=tuple(overrides), trainings={"": training}, attacks=found
    )


def pictures(n, shape=(3, 32, 32), seed=0):
    """(n, C, H, W): soft blobs, each different."""
    c, h, w = shape
    rng = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(0, 1, h), torch.linspace(0, 1, w), indexing="ij")
    center, color, width = (torch.rand(n, k, 1, 1, generator=rng) for k in (2, 2 * c, 1))
    blob = torch.exp(-((x - center[:, :1]) ** 2 + (y - center[:, 1:]) ** 2) / (0.02 + 0.1 * width))
    return (color[:, :c] * blob + color[:, c:] * (1 - blob) * (0.5 + 0.5 * x)).clamp(0, 1)


def score(round, victim, *, noise, shape=(3, 32, 32), failure=None, exact=False):
    truth = pictures(1, shape, seed=97 * round + victim)
    rng = torch.Generator().manual_seed(victim)
    guess = (truth + noise * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    mse = (guess - truth).square().mean().item()
    values = {
        "psnr": math.inf if exact else -10 * math.log10(mse),
        "ssim": math.exp(-20 * mse),
        "lpips": 1 - math.exp(-12 * mse),
        "mse": 0.0 if exact else mse,
        "rmse": math.sqrt(mse / truth.square().mean().item()),
        "label_correct": float(noise < 0.3),
    }
    values |= compared(noise, values)
    return VictimScore(
        id=VictimId(round, victim % 4, victim),
        images=(ImageScore(image=0, guess=None if failure else 0, values={} if failure else values, failure=failure),),
        originals=truth,
        guesses=torch.zeros_like(guess) if failure else guess,
        attack_loss=noise,
        history=tuple(noise + math.exp(-t / 10) for t in range(40)),
    )


def compared(noise, values):
    """With 1,000 others and with a control that never saw the update."""
    return {
        "likeness": max(0.0, 1 - noise),
        "best_rank": 1 if noise < 0.4 else 40,
        "lead": 2.0 if noise < 0.4 else 0.0,
        "candidates": 1000,
        "aligned_psnr": values["psnr"],
        "aligned_ssim": values["ssim"],
        "control_psnr": 12.0,
        "control_ssim": 0.2,
    }


def round_report(round=1, *, clients=(0,), **given):
    """Of a round in which nothing went wrong, with what is ``given``."""
    usual = {"train_loss": 1.0, "seconds": 1.0, "defense_seconds": 0.0, "upload_bytes": 1}
    return RoundReport(round=round, clients=tuple(clients), **usual | given)


def record(
    out: Path,
    *,
    changes=None,
    label="cifar10-lenet",
    noise=0.1,
    accuracy=0.6,
    rounds=12,
    victims=6,
    shape=(3, 32, 32),
    failures=0,
    undefended=False,
    clients=4,
    finish=True,
    undefended_accuracy=None,
    adaptive=None,
):
    """Record a run through ``RunFolder``; with ``finish=False`` as a killed process leaves it.

    ``adaptive`` is the noise in the guesses of an attacker that knows the defense.
    """
    settings = config(**(changes or {}))
    text = "\n".join(f"{key}: {value}" for key, value in settings.items())
    folder = RunFolder.open_or_create(out, label=label, config=settings, config_text=text, undefended=undefended)
    folder.write_environment(seed=settings["seed"])
    folder.write_threat_model(
        ["The server is honest but curious.", "Each client uploads the gradient of one batch.", "a < b & c"]
    )
    folder.write_defense([] if undefended else [Part("dp_noise", strength="scale")])
    rng = torch.Generator().manual_seed(settings["seed"])
    counts = torch.distributions.Dirichlet(torch.ones(10)).sample((clients,)).mul(500).int()
    folder.write_partition(counts.tolist(), CLASSES)
    for r in range(1, rounds + 1):
        wobble = 0.03 * torch.randn((), generator=rng).item()
        report = round_report(
            r,
            clients=range(clients),
            excluded={3: "the reply holds NaN"} if r == 5 else {},
            train_loss=2.3 * math.exp(-r / 8),
            seconds=0.5,
            defense_seconds=0.04,
            upload_bytes=1_250_000,
        )
        accuracy_now = max(0.1, accuracy * (1 - math.exp(-3 * r / rounds)) + wobble)
        folder.add_round(report, Evaluation(accuracy=accuracy_now, loss=2.3 * math.exp(-r / 9), num_examples=1000))
    for r in (1, rounds):
        scores = [
            score(
                r,
                v,
                noise=noise * (0.5 + v / victims + r / rounds / 2),
                shape=shape,
                failure="The attack's loss is not a number." if v < failures else None,
            )
            for v in range(victims)
        ]
        for s in scores:
            folder.add_victim(s)
        folder.add_attack(round=r, victims=victims, seconds=31.5)
        folder.save_reconstructions(r, scores)
        if adaptive is not None:
            scores = [score(r, v, noise=adaptive, shape=shape) for v in range(victims)]
            for s in scores:
                folder.add_victim(s, attacker=Attacker.ADAPTIVE)
            words = ["It looks twice.", f"In round {r} thrice."]
            folder.add_attack(round=r, victims=victims, seconds=5.0, attacker=Attacker.ADAPTIVE, countermeasures=words)
            folder.save_reconstructions(r, scores, attacker=Attacker.ADAPTIVE)
    if finish:
        folder.finish(undefended_accuracy=undefended_accuracy)
    else:
        folder.close()
    return folder.path
