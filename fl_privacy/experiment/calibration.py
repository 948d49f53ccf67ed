"""Noise for a privacy budget: how much of it spends what was asked for by the end of a run."""

from omegaconf import DictConfig, OmegaConf

from fl_privacy.config import RunSettings
from fl_privacy.defenses.privacy import mechanism, noise_of
from fl_privacy.defenses.privacy.accountants import noise_multiplier_for
from fl_privacy.errors import UserError
from fl_privacy.experiment.build import build_defense, build_federation
from fl_privacy.experiment.privacy import guarantees, rounds_taken_part


def calibrated(config: RunSettings) -> RunSettings:
    """``config`` with what ``noise_for_budget`` changes; ``privacy.epsilon`` is ``null`` in it.

    Raises:
        UserError: the defense gives no guarantee that noise could change.
    """
    changes = noise_for_budget(config)
    return config.changed(changes) if changes else config


def noise_for_budget(config: RunSettings) -> dict[str, float | None]:
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
    noise = _noise_setting(config.defense, config.choices.defense)
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


def _noise_setting(section: DictConfig, name: str) -> str:
    """The setting that the noise of a defense is proportional to: its part says which, and twice as much is tried."""
    part = mechanism(build_defense(section))
    if part and part.strength and part.strength in section:
        doubled = OmegaConf.merge(section, {part.strength: 2 * section[part.strength]})
        assert isinstance(doubled, DictConfig)
        other = mechanism(build_defense(doubled))
        if other and noise_of(other.effect) == 2 * (noise_of(part.effect) or 0.0):
            return part.strength
    raise UserError(
        "privacy.epsilon is expected with a defense whose noise is proportional to one of its settings, such as dp_sgd,"
        f" or dp_noise with a clip_norm, but got defense={name}; set privacy.epsilon=null."
    )
