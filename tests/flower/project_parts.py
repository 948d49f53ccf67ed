"""Parts of projects without Flower's app format, as their authors write them."""

NETWORK = """
import flwr as fl
import torch
from collections import OrderedDict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))


class FlowerClient(fl.client.NumPyClient):
    def __init__(self, number):
        generator = torch.Generator().manual_seed(number)
        images = torch.rand(24, 1, 8, 8, generator=generator)
        labels = torch.randint(0, 10, (24,), generator=generator)
        self.net = Net()
        self.loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def get_parameters(self, config):
        return [value.numpy() for value in self.net.state_dict().values()]

    def set_parameters(self, parameters):
        named = zip(self.net.state_dict().keys(), parameters)
        self.net.load_state_dict(OrderedDict((name, torch.tensor(value)) for name, value in named))

    def fit(self, parameters, config):
        self.set_parameters(parameters)
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(images), labels).backward()
            self.optimizer.step()
        return self.get_parameters({}), 24, {}

    def evaluate(self, parameters, config):
        self.set_parameters(parameters)
        return 1.0, 24, {"accuracy": 0.1}
"""

SIMULATION = """
from network import FlowerClient
import flwr as fl


def client_fn(cid: str):
    return FlowerClient(int(cid))


if __name__ == "__main__":
    history = fl.simulation.start_simulation(
        client_fn=client_fn,
        num_clients=3,
        config=fl.server.ServerConfig(num_rounds=4),
        strategy=fl.server.strategy.FedAvg(),
    )
    print(history.losses_distributed[-1])
"""

APPS = """
import flwr as fl
from flwr.client import ClientApp
from flwr.common import Context
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.simulation import run_simulation
from network import FlowerClient


def client_fn(context: Context):
    return FlowerClient(context.node_config["partition-id"]).to_client()


def server_fn(context: Context):
    return ServerAppComponents(config=ServerConfig(num_rounds=3), strategy=fl.server.strategy.FedAvg())


run_simulation(server_app=ServerApp(server_fn=server_fn), client_app=ClientApp(client_fn=client_fn), num_supernodes=2)
"""

SERVER = """
import flwr as fl


def main():
    strategy = fl.server.strategy.FedAvg(min_available_clients=3, min_fit_clients=3)
    history = fl.server.start_server(server_address="0.0.0.0:8080", config={"num_rounds": 5}, strategy=strategy)
    print(history.losses_distributed)


if __name__ == "__main__":
    main()
"""

CLIENT = """
import argparse

import flwr as fl
from network import FlowerClient

parser = argparse.ArgumentParser()
parser.add_argument("--client-id", type=int, required=True, choices=[1, 2, 3])
parser.add_argument("--server-address", required=True)
told = parser.parse_args()
fl.client.start_numpy_client(server_address=told.server_address, client=FlowerClient(told.client_id))
"""
