"""Check a finished run's claim of differential privacy against its defense."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fl_privacy.checks import fits
from fl_privacy.defenses import Defense, dp_noise, dp_sgd, local_dp
from fl_privacy.defenses.privacy import Guarantee, guarantee
from fl_privacy.dp_check import Claim, Facts, recompute
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.claims import Unit
from fl_privacy.dp_check.of_defense import on_defense
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.runs.folder import Run, read_run
from fl_privacy.types import LocalPlan

DEFENSES: Mapping[str, Callable[..., Defense]] = {
    "dp_noise": dp_noise,
    "dp_sgd": dp_sgd,
    "local_dp": local_dp,
    "local_dp_mod": local_dp,
}
"""Option -> defense that claims differential privacy by noise in each round."""


def claims_of_run(path: Path, asked: DpCheckRequest) -> list[ClaimVerdict]:
    """Recompute a run's stated epsilon, and test its defense by sampling; ``UserError`` if the settings are wrong."""
    run = read_run(path)
    config = run.identity.config
    name = str((config.get("choices") or {}).get("defense", ""))
    settings = config.get("defense")
    if name not in DEFENSES or not isinstance(settings, Mapping):
        missing = run.summary.privacy and run.summary.privacy.missing
        silent = f"{name or 'The run'} adds no noise that an accountant counts."
        why = f"The run promises nothing: {missing}." if missing else silent
        return [ClaimVerdict(subject=name or run.name, claim=None, notes=(why,))]
    try:
        defense = DEFENSES[name](**{key: value for key, value in settings.items() if key != "_target_"})
    except TypeError as error:
        raise UserError(f"{path} is expected to have settings of {name}, but {error}; run it again.") from error
    rounds = max(1, len(run.of_kind("round")))
    spent, claim = run.summary.privacy, None
    if asked.epsilon is not None:
        claim = Claim(epsilon=asked.epsilon, delta=asked.delta, rounds=asked.rounds)
    elif spent is not None and spent.epsilon is not None:
        unit: Unit = "example" if spent.unit == "example" else "client"
        claim = Claim(epsilon=spent.epsilon, delta=spent.delta, unit=unit, rounds=rounds, by="this run")
    facts, notes = _facts(run, defense, rounds, asked)
    delta = claim.delta if claim else asked.delta
    subject = f"this run, by its {spent.accountant.upper()} accountant" if spent else name
    whole = ClaimVerdict(subject=subject, claim=claim, recomputed=recompute(facts, delta=delta), notes=notes)
    epsilon = claim.epsilon if claim is not None and name != "dp_sgd" else None
    return [whole, *on_defense(defense, replace(asked, epsilon=epsilon, delta=delta, rounds=rounds))]


def _facts(run: Run, defense: Defense, rounds: int, asked: DpCheckRequest) -> tuple[Facts, tuple[str, ...]]:
    raw = (run.identity.config.get("federation") or {}).get("plan") or {}
    plan = {key: value for key, value in raw.items() if key in ("batch_size", "epochs", "steps")}
    if run.partition is None or not fits(plan, Mapping[str, int | None]):
        missing = "how many examples clients hold, and how many steps a round has"
        return Facts(noise_multiplier=None, rounds=rounds, missing=(missing,)), ()
    smallest = min((sum(counts) for counts in run.partition.counts), default=0)
    if smallest < 1:
        return Facts(noise_multiplier=None, rounds=rounds, missing=("a client that holds no example",)), ()
    local = LocalPlan(lr=0.1, shares="delta", **plan)
    size = min(local.batch_size or smallest, smallest)
    steps = number_of_steps(smallest, local)
    found = guarantee(defense, sample_rate=size / smallest, delta=asked.delta, steps_per_round=steps)
    replaced = "A step's batch has a fixed size, so that an example counts as replaced by an empty one."
    return facts_of(found, rounds), (replaced,) if found.unit == "example" else ()


def facts_of(found: Guarantee, rounds: int) -> Facts:
    """Return the facts from which to recompute epsilon over ``rounds`` rounds, such as noise and sampling rate."""
    return Facts(
        noise_multiplier=None if found.missing else found.noise_multiplier,
        sample_rate=found.sample_rate,
        sampling="shuffle" if found.sample_rate < 1 else "none",
        releases=found.steps_per_round,
        rounds=rounds,
        missing=(found.missing,) if found.missing else (),
    )
