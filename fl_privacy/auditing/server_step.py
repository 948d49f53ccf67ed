"""Find the rule by which a strategy's server moves the global model, from which a site infers others' uploads."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fl_privacy.federation import ServerPlan
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.federation.server_optimizer import ServerOptimizer

PLAIN_MEAN = ServerPlan()  # fedAvg's rule

NOISED = "the server adds noise to the mean, which is not in what clients upload"
MOST_NESTED = 5

OTHER_RULES: Mapping[str, str] = {
    "MultiKrum": "sends the mean of uploads that it chooses; of a single one, another site sees what the server sees",
    "FedMedian": "sends the median of each value",
    "FedTrimmedAvg": "sends a trimmed mean of each value",
    "Bulyan": "sends a trimmed mean of each value",
    "QFedAvg": "weights updates by their losses",
    "Krum": "sends the upload that it chooses, of which another site sees what the server sees",
}
"""Name of a Flower strategy whose model is no mean of all uploads -> what it sends."""


def server_plan_of(strategy: object) -> ServerPlan | str:
    """Return how a server applies the clients' mean update in round 1; if it does something else, a sentence on that.

    A ``strategy`` of another package counts as the Flower strategy that it extends, or else as a plain mean.
    """
    plan = PLAIN_MEAN
    for _ in range(MOST_NESTED):
        names = [kind.__name__ for kind in type(strategy).__mro__ if kind.__module__.startswith("flwr.")]
        private = any(name.startswith(("DifferentialPrivacy", "DPFedAvg")) for name in names)
        if private and getattr(strategy, "server_side_noising", True) and getattr(strategy, "noise_multiplier", 0) != 0:
            return NOISED
        if other := next((name for name in names if name in OTHER_RULES), ""):
            return f"the server's {other} {OTHER_RULES[other]}"
        if name := next((name for name in names if name in _PLANS), ""):
            made = attempt(partial(_PLANS[name], strategy))
            if isinstance(made, Failure):
                return f"the settings of the server's {name} are not understood ({made.reason.rstrip('.')})"
            plan = made
        strategy = getattr(strategy, "strategy", None)  # of a server, or one around another
    return plan


def _plan(lr: float, **rule: Any) -> ServerPlan:
    plain = rule["name"] == "momentum" and not rule["momentum"]
    return ServerPlan(lr=lr, optimizer=ServerOptimizer(**{} if plain else rule))


def _adaptive(one: Any, name: str, beta2: float, rate: float = 1.0) -> ServerPlan:
    return _plan(rate * one.eta, name=name, momentum=one.beta_1, beta2=beta2, tau=one.tau)


_PLANS: Mapping[str, Callable[[Any], ServerPlan]] = {
    "FedAvgM": lambda one: _plan(one.server_learning_rate, name="momentum", momentum=one.server_momentum),
    # its rate in round 1 is corrected as in round 2 of Kingma and Ba 2014
    "FedAdam": lambda one: _adaptive(one, "adam", one.beta_2, math.sqrt(1 - one.beta_2**2) / (1 - one.beta_1**2)),
    "FedYogi": lambda one: _adaptive(one, "yogi", one.beta_2),
    "FedAdagrad": lambda one: _adaptive(one, "adam", 0.0),  # in round 1 the second moment is the square
}
