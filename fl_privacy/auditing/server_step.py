"""How a strategy's server moves the global model, which is all that another site sees of the others' uploads."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fl_privacy.federation import ServerPlan
from fl_privacy.federation.server_optimizer import ServerOptimizer
from fl_privacy.flower.dp_mechanisms import adds_noise

PLAIN_MEAN = ServerPlan(norm_factor=math.inf)
"""FedAvg's rule, without a limit of norms."""

NOISED = "the server adds noise to the mean, which is not in what clients upload"

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
    """Return the rule of the first round of one of Flower's strategies or servers, or why it is no step of the mean.

    Strategies of other packages count as the Flower strategy that they extend, else as a plain mean.
    """
    found = PLAIN_MEAN
    for one in _inside(strategy):
        if adds_noise(one):
            return NOISED
        names = [kind.__name__ for kind in type(one).__mro__ if kind.__module__.startswith("flwr.")]
        if other := next((name for name in names if name in OTHER_RULES), ""):
            return f"the server's {other} {OTHER_RULES[other]}"
        optimizer = next((name for name in names if name in _PLANS), "")
        found = _PLANS[optimizer](one) if optimizer else found
    return found


def _inside(strategy: object) -> Iterator[object]:
    """Yield a server or strategy and those within, the outermost first."""
    seen = list[object]()
    while strategy is not None and not any(strategy is one for one in seen):
        seen.append(strategy)
        yield strategy
        strategy = getattr(strategy, "strategy", None)


def _momentum(one: Any) -> ServerPlan:
    rule = ServerOptimizer(name="momentum", momentum=float(one.server_momentum))
    return ServerPlan(lr=float(one.server_learning_rate), optimizer=rule, norm_factor=math.inf)


def _adaptive(one: Any, name: Any, beta2: float, rate: float = 1.0) -> ServerPlan:
    rule = ServerOptimizer(name=name, momentum=float(one.beta_1), beta2=beta2, tau=float(one.tau))
    return ServerPlan(lr=rate * float(one.eta), optimizer=rule, norm_factor=math.inf)


def _adam(one: Any) -> ServerPlan:
    """Return FedAdam's step, whose rate in round 1 is corrected as in round 2 of Kingma & Ba 2014."""
    return _adaptive(one, "adam", float(one.beta_2), math.sqrt(1 - one.beta_2**2) / (1 - one.beta_1**2))


_PLANS = {
    "FedAvgM": _momentum,
    "FedAdam": _adam,
    "FedYogi": lambda one: _adaptive(one, "yogi", float(one.beta_2)),
    "FedAdagrad": lambda one: _adaptive(one, "adam", 0.0),  # in round 1 the second moment is the square
}
