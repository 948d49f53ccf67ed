"""Noise for a privacy budget: how much of it spends what was asked for by the end of a run."""

from fl_privacy.config import RunSettings
from fl_privacy.defenses.privacy.accountants import noise_multiplier_for
from fl_privacy.errors import UserError
from fl_privacy.experiment.build import build_federation
from fl_privacy.experiment.privacy import guarantees, rounds_taken_part

_NOISE = {"fl_privacy.defenses.dp_sgd": "noise_multiplier", "fl_privacy.defenses.dp_noise": "scale"}
"""Defense -> the setting that its noise is proportional to."""


def calibrated(config: RunSettings) -> RunSettings:
    """``config`` with what ``calibration`` changes; ``privacy.epsilon`` is ``null`` in it.

    Raises:
        UserError: the defense gives no guarantee that noise could change.
    """
    changes = calibration(config)
    return config.changed(changes) if changes else config


def calibration(config: RunSettings) -> dict[str, float | None]:
    """Settings by which the worst-off client spends ``privacy.epsilon`` by the last round, if set: those of the noise.

    An undefended run stays undefended, so that it can stand beside the others of a sweep.

    Raises:
        UserError: the defense gives no guarantee that noise could change.
    """
    done: dict[str, float | None] = {"privacy.epsilon": None}
    if config.privacy.epsilon is None:
        return {}
    if config.choices.defense == "none":
        return done
    noise = _NOISE.get(str(config.defense.get("_target_")))
    if noise is None:
        raise UserError(
            f"privacy.epsilon is expected with defense=dp_sgd, or with defense=dp_noise and a clip_norm, but got"
            f" defense={config.choices.defense}; set privacy.epsilon=null."
        )
    delta, accountant = config.privacy.delta, config.privacy.accountant
    federation = build_federation(config)
    candidates = guarantees(federation, delta=delta, accountant=accountant)
    if (missing := candidates[0].missing) is not None:
        raise UserError(f"privacy.epsilon is expected with a defense that gives a guarantee, but {missing}.")
    number = rounds_taken_part(federation)[-1]
    factor = max(
        noise_multiplier_for(
            epsilon=config.privacy.epsilon,
            sample_rate=candidate.sample_rate,
            steps=number * candidate.steps_per_round,
            delta=delta,
            accountant=accountant,
        )
        / candidate.noise_multiplier
        for candidate in candidates
    )
    return {f"defense.{noise}": float(config.defense[noise]) * factor, **done}
