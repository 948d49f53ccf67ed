"""How an app's clients train, read from what the app itself is configured by."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flwr.app import Context

from fl_privacy.errors import UserError
from fl_privacy.types import LocalPlan

KEYS: Mapping[str, tuple[str, ...]] = {
    "lr": ("lr", "learning-rate", "local-lr", "client-lr", "eta"),
    "epochs": ("local-epochs", "epochs", "num-epochs", "local-epoch", "max-epochs"),
    "steps": ("local-steps", "num-local-steps", "steps"),
    "batch_size": ("batch-size", "local-batch-size", "train-batch-size", "batch"),
    "momentum": ("momentum",),
    "weight_decay": ("weight-decay",),
    "optimizer": ("optimizer",),
}
"""Field of the plan -> names that apps have for it, the likeliest first."""

STOCK: Mapping[str, Any] = {"shares": "weights", "epochs": 1, "batch_size": 32, "probe_batch_norm": "train"}
"""Of a client of whom nothing is told."""

Told = LocalPlan | Mapping[str, object] | Context | None


def read_plan(told: Told, config: Mapping[str, object]) -> tuple[LocalPlan, frozenset[str]]:
    """The plan, and which of its fields were told.

    Args:
        told: a plan; some of its fields; the context of the server app, whose run config is searched; or nothing.
        config: that the server sends with its messages, searched after that.

    Raises:
        UserError: a field is none, or has a value that it can't have.
    """
    if isinstance(told, LocalPlan):
        return told, frozenset(f.name for f in fields(LocalPlan))
    found = _found(config)
    if isinstance(told, Context):
        found |= _found(told.run_config)
    elif isinstance(told, Mapping):
        found |= _named(told)
    elif told is not None:
        raise UserError(
            "plan is expected to be a LocalPlan, a mapping such as dict(lr=0.1, epochs=1, batch_size=32), or the server"
            f" app's context, but got {type(told).__name__}."
        )
    settings = {**STOCK, **found}
    if found.get("steps") is not None or found.get("shares") == "gradient":
        settings["epochs"] = found.get("epochs")
    return LocalPlan(**settings), frozenset(found)


def _found(config: Mapping[str, object]) -> dict[str, Any]:
    """What of ``config`` a plan can be, under other names; nonsense is left out, since it may mean something else."""
    spelled = {str(key).lower().replace("_", "-"): value for key, value in config.items()}
    found: dict[str, Any] = {}
    for name, keys in KEYS.items():
        value = next((spelled[key] for key in keys if key in spelled), None)
        if name == "optimizer":
            value = str(value).lower() if str(value).lower() in ("sgd", "adam", "adamw") else None
        elif isinstance(value, bool) or not isinstance(value, int | float):
            value = None
        if value is not None and _fits(name, value):
            found[name] = value
    if "steps" in found:
        found.pop("epochs", None)
    return found


def _fits(name: str, value: object) -> bool:
    try:
        LocalPlan(**{"shares": "delta", name: value})  # type: ignore[arg-type]
    except UserError:
        return False
    return True


def _named(told: Mapping[str, object]) -> dict[str, Any]:
    names = {f.name for f in fields(LocalPlan)}
    if unknown := [key for key in told if key not in names]:
        from fl_privacy.config.groups import suggest  # noqa: PLC0415

        raise UserError(f"Unknown key plan.{unknown[0]}{suggest(str(unknown[0]), names)}")
    return {str(key): value for key, value in told.items()}
