"""The server of an ordinary Flower app: FedAvg."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from defended_quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for all rounds."""
    settings = context.run_config
    torch.manual_seed(0)
    strategy = FedAvg(fraction_evaluate=1.0, min_available_nodes=2)
    strategy.start(
        grid,
        ArrayRecord(Net().state_dict()),
        num_rounds=int(settings["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(settings["learning-rate"])}),
    )
