"""What an audit is asked for, checked before anything is trained."""

from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy

from fl_privacy.checks import whole
from fl_privacy.errors import UserError
from fl_privacy.federation import audited_rounds


def expect_strategy(strategy: object) -> None:
    """Raise ``UserError`` unless ``strategy`` is a strategy of Flower's that trains a network."""
    if not isinstance(strategy, Strategy):
        raise UserError(_no_strategy(strategy))
    if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
        raise UserError(f"A strategy that trains a network is expected, but {type(strategy).__name__} trains trees.")


def expect_rounds(rounds: object) -> None:
    """What can be said of ``rounds`` before their number is known."""
    if isinstance(rounds, str):
        audited_rounds(rounds, 1, name="rounds", most="num_rounds")
    elif isinstance(rounds, list | tuple | set | frozenset | range) and rounds:
        for one in rounds:
            whole("rounds", one, at_least=1, example=1)
    elif not rounds or not isinstance(rounds, int):
        audited_rounds([], 1, name="rounds", most="num_rounds")
    else:
        whole("rounds", rounds, at_least=1, example=1)


def _no_strategy(strategy: object) -> str:
    kind = strategy if isinstance(strategy, type) else type(strategy)
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return f"strategy is expected to be made, but got the class {kind.__name__}; write {kind.__name__}(...)."
    legacy = any(base.__module__.startswith("flwr.server.strategy") for base in kind.__mro__)
    if legacy:
        return (
            f"A strategy of flwr.serverapp.strategy is expected, but {kind.__name__} is one of the legacy"
            f" flwr.server.strategy; use flwr.serverapp.strategy.{kind.__name__}, and for NumPyClients"
            " fl_privacy.flower.numpy_client_app(client_fn)."
        )
    return f"A strategy of flwr.serverapp.strategy is expected, but got {kind.__name__}; audit(FedAvg(...), model=Net)."
