"""The settings that belong to a run itself, not to the data, models or methods that it puts together."""

from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf

from fl_privacy.config.instantiate import expect_type
from fl_privacy.config.suggest import suggest
from fl_privacy.errors import UserError

SECTIONS = (
    "data",
    "partition",
    "model",
    "federation",
    "federation.plan",
    "defense",
    "attack",
    "backend",
    "secure_aggregation",
    "intercept",
)

SETTINGS: dict[str, Any] = {
    "seed": int,
    "victims": int,
    "batch_size": int,
    "intercept.target": Literal["probe", "update"],
    "intercept.rounds": Literal["first", "last", "ends", "all"] | int | list[int],
    "intercept.clients": Literal["all"] | list[int],
    "intercept.when": Literal["after", "during"],
    "intercept.save": bool,
    "secure_aggregation.name": Literal["none", "secagg", "ckks"],
    "knows_labels": bool,
    "colluder": int | None,
    "knows_features": bool,
    "tracing": int | None,
    "tracing_queries": int | None,
    "features_at": str | None,
    "bpki.bins": int,
    "bpki.smoothing": float,
    "public_images": int,
    "knows_defense": bool,
    "privacy.epsilon": float | None,
    "privacy.delta": float,
    "privacy.accountant": Literal["rdp", "prv"],
    "twin": bool,
    "evaluate_every": int,
    "split": Literal["train", "test"],
    "weights": str | None,
    "captured": str | None,
    "trust": str | list[str] | None,
    "evaluator": str | None,
    "device": str,
    "client_threads": int,
    "attack_threads": int,
    "out": str,
    "name": str | int | None,
    "overwrite": bool,
    "federation.clients": int,
    "federation.rounds": int,
    "federation.fraction": float,
    "federation.aggregation": Literal["mean", "round_robin"],
    "federation.server_lr": float,
    "federation.norm_factor": float,
}
"""Dotted key -> type."""

LIMITS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "victims": (1, 1_000_000),
    "batch_size": (1, 1_000_000),
    "public_images": (0, 1_000_000),
    "bpki.bins": (2, 65_536),
    "bpki.smoothing": (0, 1e12),
    "client_threads": (1, 256),
    "evaluate_every": (1, 10_000_000),
    "attack.iterations": (0, 100_000_000),
    "attack.restarts": (1, 10_000),
    "attack.history": (1, 10_000),
    "secure_aggregation.levels": (2, 2**32),
    "federation.clients": (1, 1_000_000),
    "federation.rounds": (1, 1_000_000),
    "tracing": (1, 1_000_000),
    "tracing_queries": (1, 10_000_000),
}
"""Dotted key -> least and most of a number: beyond, memory or threads run out before anything can be said."""


def check_settings(config: DictConfig) -> None:
    """Refuse settings of a wrong type, and keys that nothing reads.

    Raises:
        UserError: there is one, or a section is missing.
    """
    for section in SECTIONS:
        if not isinstance(OmegaConf.select(config, section), DictConfig):
            raise UserError(f"{section} is expected to be a section of settings, but is none; leave it as it is.")
    for name, annotation in SETTINGS.items():
        value = OmegaConf.select(config, name)
        expect_type(name, list(value) if isinstance(value, ListConfig) else value, annotation)
    expect_seed(config.seed)
    for name, (least, most) in LIMITS.items():
        value = OmegaConf.select(config, name)
        if isinstance(value, int | float) and not least <= value <= most:
            raise UserError(f"{name} is expected to be at least {least:g} and at most {most:g}, but got {value}.")
    for section in ("federation", "intercept"):
        for key in config[section]:
            if (name := f"{section}.{key}") not in SETTINGS and name not in SECTIONS:
                allowed = [k.partition(".")[2] for k in (*SETTINGS, *SECTIONS) if k.startswith(f"{section}.")]
                raise UserError(f"Unknown key {name}{suggest(str(key), allowed)}")


def expect_seed(seed: int) -> None:
    """Refuse a negative ``seed``.

    Raises:
        UserError: it is one.
    """
    if seed < 0:
        raise UserError(f"seed is expected to be at least 0, but got {seed}; try {-seed}.")


def expect_readable_updates(config: DictConfig, where: str) -> None:
    """Refuse secure aggregation where every update is read.

    Args:
        config: of the run.
        where: that is, to begin the message with.

    Raises:
        UserError: ``secure_aggregation`` is another one than ``none``.
    """
    if (name := config.secure_aggregation.name) != "none":
        raise UserError(
            f"{where} reads every update and is expected with secure_aggregation=none, but got {name};"
            " use `fl-privacy run` with backend=loop and attack=none."
        )
