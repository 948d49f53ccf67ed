"""A test of a claimed epsilon by many draws of the mechanism."""

import inspect
from collections.abc import Callable
from typing import Any

from fl_privacy.defenses import Defense
from fl_privacy.dp_check.check import DpCheckRequest, tested
from fl_privacy.dp_check.of_defense import on_defense
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.errors import UserError


def verdict_on(mechanism: Any, *, claimed: float, delta: float, **asked: Any) -> ClaimVerdict:
    """Test ``mechanism`` against a ``claimed`` epsilon at ``delta``.

    Args:
        mechanism: a defense, a function from an update to the upload, or a Flower mod or strategy.
        asked: further fields of ``DpCheckRequest``.

    Raises:
        UserError: it is none of these, or a field is unknown.
    """
    fields = set(DpCheckRequest.__dataclass_fields__) - {"epsilon", "delta"}
    if unknown := sorted(set(asked) - fields):
        raise UserError(
            f"leakage.epsilon is expected to get {', '.join(sorted(fields))}, but got {unknown[0]}; drop it."
        )
    question = DpCheckRequest(epsilon=claimed, delta=delta, **asked)
    if isinstance(mechanism, Defense):
        return on_defense(mechanism, question)[0]
    if callable(mechanism) and _takes_one(mechanism):
        return tested(getattr(mechanism, "__name__", "mechanism"), mechanism, None, question)
    from fl_privacy.flower.dp_subjects import verdicts_on  # noqa: PLC0415

    return verdicts_on(mechanism, question)[0]


def _takes_one(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters) == 1
