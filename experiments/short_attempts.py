"""Ideas of thirty lines against defenses and clients that resist the strongest member, each beside it and its control.

    python experiments/short_attempts.py --out experiments/rows/short_attempts --minutes 60
    python experiments/short_attempts.py --minutes 5 --only InstaHide

Digits behind a model that nobody has trained, whose attacker knows the defense and 4,000 public images. A row is an
idea against a setting: PSNR, images read by the verdict's rule, the same of the guesses held against another victim.
"the mean of the class" knows the label and nothing of the update. Rows that are there are not computed again.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from red_team import Cell, attacked
from row_file import RowFile, takes_rows

from fl_privacy.attacks import AutoAttack, MaximumAPosteriori, Progress, ReconstructionAttack, SurrogateModel
from fl_privacy.attacks.attack import no_progress
from fl_privacy.effects import ClippedExamples, Effect, Noise
from fl_privacy.runs.config.compose import compose_run
from fl_privacy.runs.setup import build_untrained
from fl_privacy.types import Batch, Observation, Reconstruction


@dataclass(frozen=True)
class ClassMean:
    """Guess the mean public image of the label that the update gives away."""

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Return a guess for each observation."""
        labeled = MaximumAPosteriori(iterations=1, attempts=1)(observations, seed=seed)
        return [
            replace(one, batch=_drawn(o, one), member="class mean")
            for o, one in zip(observations, labeled, strict=True)
        ]


def _drawn(observation: Observation, found: Reconstruction) -> Batch | None:
    known = observation.knowledge
    if found.batch is None or known.public_images is None or known.public_labels is None:
        return None
    means = [known.public_images[known.public_labels == label].mean(0) for label in found.batch.labels]
    return Batch(torch.stack(means), found.batch.labels)


@dataclass(frozen=True)
class Averaged:
    """Attack the mean of all uploads of a victim once: of normal noise it says all that they say together.

    A hundred uploads cost what one does; their noise is a tenth. Labels, too, show in the mean.
    """

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Return a guess for each observation, of all uploads of the same victim."""
        victims: dict[object, list[Observation]] = {}
        for observation in observations:
            victims.setdefault((observation.id.client, observation.id.probe), []).append(observation)
        means = {name: _mean_of(seen) for name, seen in victims.items()}
        found = dict(zip(means, MaximumAPosteriori()(list(means.values()), seed=seed), strict=True))
        return [replace(found[o.id.client, o.id.probe], id=o.id, member="averaged") for o in observations]


def _mean_of(seen: Sequence[Observation]) -> Observation:
    """Return the observation of the mean upload, whose noise is smaller by the root of their number."""
    one, fewer = seen[-1], len(seen) ** -0.5
    tensors = {n: torch.stack([each.upload.tensors[n] for each in seen]).mean(0) for n in one.upload.tensors}
    parts = [replace(part, effect=_less_noisy(part.effect, fewer)) for part in one.knowledge.defense or ()]
    known = replace(one.knowledge, defense=tuple(parts), same_data=None)
    return replace(one, upload=replace(one.upload, tensors=tensors), knowledge=known)


def _less_noisy(effect: Effect, factor: float) -> Effect:
    if isinstance(effect, ClippedExamples) and effect.noise_multiplier is not None:
        return replace(effect, noise_multiplier=factor * effect.noise_multiplier)
    if isinstance(effect, Noise) and effect.std is not None:
        return replace(effect, std=factor * effect.std)
    return effect


UNTRAINED = ("data=mnist_mini", "model=lenet")
Attack = Callable[[], ReconstructionAttack]

LONGER = "ten times the iterations"
WHOLE = "auto, quick, with the prior"


@dataclass(frozen=True)
class Attempt:
    """An idea against a setting.

    Attributes:
        setting: as the table names it.
        overrides: of the run.
        idea: as the table names it.
        attack: that is it.
        uploads: of each victim.
    """

    setting: str
    overrides: tuple[str, ...]
    idea: str
    attack: Attack
    uploads: int = 1


def attempts() -> list[Attempt]:
    """List all attempts, a few for each setting."""
    found = []
    for setting, overrides in SETTINGS.items():
        if setting in NOISY:
            known: dict[str, Attack] = {"the mean of the class": ClassMean, "strongest member": MaximumAPosteriori}
            found += [Attempt(setting, overrides, idea, attack) for idea, attack in known.items()]
            found += [Attempt(setting, overrides, "averaged", Averaged, number) for number in (10, 100)]
            found.append(Attempt(setting, overrides, "strongest member", MaximumAPosteriori, 10))
            continue
        ideas: dict[str, Attack] = {"the mean of the class": ClassMean}
        if not setting.startswith("InstaHide"):  # whose mixtures are found exactly or not at all
            ideas["strongest member"] = MaximumAPosteriori
        if not setting.startswith(("ATS", "InstaHide")):  # the former has as many descents as outcomes
            ideas[LONGER] = lambda: MaximumAPosteriori(iterations=1500)
        ideas[WHOLE] = lambda: AutoAttack(budget="quick")
        found += [Attempt(setting, overrides, idea, attack) for idea, attack in ideas.items()]
        if "steps" in setting:
            found.append(Attempt(setting, overrides, "surrogate model", SurrogateModel))
        if setting.startswith("InstaHide"):
            found += [Attempt(setting, overrides, WHOLE, ideas[WHOLE], number) for number in (10, 30)]
    return found


NOISY = {
    "DP-SGD 0.5": (*UNTRAINED, "defense=dp_sgd", "defense.noise_multiplier=0.5"),
    "DP-SGD 2": (*UNTRAINED, "defense=dp_sgd", "defense.noise_multiplier=2"),
    "Local DP 10": (*UNTRAINED, "defense=local_dp", "defense.round_epsilon=10"),
}
SETTINGS = {
    **NOISY,
    "ATS 3-43-15": (*UNTRAINED, "defense=ats", "defense.policies=3-43-15"),
    "ATS 13-43-18": (*UNTRAINED, "defense=ats", "defense.policies=13-43-18"),
    "Soteria 0.95": (*UNTRAINED, "defense=soteria", "defense.scores=estimated", "defense.rate=0.95"),
    "InstaHide 2": (*UNTRAINED, "defense=instahide", "defense.k=2"),
    "InstaHide 4": (*UNTRAINED, "defense=instahide", "defense.k=4"),
    "InstaHide 4, photographs": ("data=cifar10_exact", "model=lenet", "defense=instahide", "defense.k=4"),
    "20 local steps": (
        *UNTRAINED,
        "federation=fedavg",
        "federation.plan.epochs=null",
        "federation.plan.steps=20",
        "federation.plan.lr=0.05",
    ),
    "batch norm in training mode": ("data=mnist_mini", "model=convnet8", "federation.plan.probe_batch_norm=train"),
    "ViT": ("data=mnist_mini", "model=vit"),
    "RecUP-FL": ("data=olivetti_halves", "model=lenet", "defense=recup_fl"),
    "DC": (*UNTRAINED, "defense=dc"),
    "DP-MERF 10": (*UNTRAINED, "defense=dp_merf", "defense.epsilon=10"),
    "GS-WGAN 10": (*UNTRAINED, "defense=gs_wgan", "defense.epsilon=10"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    takes_rows(parser)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--only", default="", help="settings whose name begins so")
    options = parser.parse_args()
    kept, end = RowFile(options.out), time.monotonic() + 60 * options.minutes
    for one in attempts():
        key = {"setting": one.setting, "idea": one.idea, "uploads": one.uploads}
        if kept.find(key) is not None or not one.setting.startswith(options.only):
            continue
        if time.monotonic() > end:
            return
        setup = build_untrained(compose_run([f"victims={options.victims}", *one.overrides]))
        seen = [o for r in range(one.uploads) for o in setup.observe(setup.server.state, round=r)]
        row = attacked(setup, Cell(one.idea, one.uploads, 4000), seen, one.attack())
        print(kept.add(key, row), flush=True)


if __name__ == "__main__":
    main()
