"""The server. ``audit`` is what fl_privacy adds."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fl_privacy import audit
from quickstart.task import Net, load_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and write the final model."""
    settings = context.run_config
    clients = int(settings["clients"])
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_evaluate=1.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy = audit(
        strategy,
        model=Net,
        data=lambda client: load_data(client, clients)[0],
        plan=context,
        out=str(settings["audit"]),
        attack=str(settings["attack"]),
    )
    strategy.start(
        grid,
        arrays,
        num_rounds=int(settings["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(settings["learning-rate"])}),
    )
