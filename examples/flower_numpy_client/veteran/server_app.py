"""The server. ``audit`` is what fl_privacy adds."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fl_privacy import audit
from veteran.client_app import CLIENTS, make_net, own_examples

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for a few rounds."""
    torch.manual_seed(0)
    arrays = ArrayRecord(make_net().state_dict())
    strategy = FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    strategy = audit(
        strategy,
        model=make_net,
        data=own_examples,
        plan={"lr": 0.05, "epochs": 1, "batch_size": 20},
        out=str(context.run_config["audit"]),
        attack=str(context.run_config["attack"]),
    )
    strategy.start(grid, arrays, num_rounds=2)
