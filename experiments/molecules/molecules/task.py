"""molecules: graphs, networks, training."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, global_mean_pool

ATOMS = 7
VALENCES = torch.tensor([4, 3, 2, 1, 1, 2, 1])
SHARES = torch.tensor([0.62, 0.12, 0.14, 0.04, 0.02, 0.03, 0.03])


def molecule(generator: torch.Generator, least: int = 8, most: int = 22) -> Data:
    number = int(torch.randint(least, most, (1,), generator=generator))
    atoms, bonds, free = [0], [], [4]
    while len(atoms) < number:
        places = [k for k, left in enumerate(free) if left > 0]
        if not places:
            break
        place = places[int(torch.randint(len(places), (1,), generator=generator))]
        atom = int(torch.multinomial(SHARES, 1, generator=generator))
        if atom and len(places) == 1 and VALENCES[atom] == 1 and len(atoms) < number - 1:
            atom = 0
        bonds.append((place, len(atoms)))
        free[place] -= 1
        atoms.append(atom)
        free.append(int(VALENCES[atom]) - 1)
    a, b = torch.tensor(bonds).T
    kinds = torch.tensor(atoms)
    label = int((kinds == 1).sum() > (kinds == 2).sum())
    edges = torch.stack([torch.cat([a, b]), torch.cat([b, a])])
    return Data(x=F.one_hot(kinds, ATOMS).float(), edge_index=edges, y=torch.tensor([label]))


class GCN(nn.Module):
    def __init__(self, hidden: int = 64):
        super().__init__()
        self.conv1 = GCNConv(ATOMS, hidden)
        self.conv2 = GCNConv(hidden, hidden)
        self.lin = nn.Linear(hidden, 2)

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x = self.conv2(x, edge_index).relu()
        return self.lin(global_mean_pool(x, batch))


class GIN(nn.Module):
    def __init__(self, hidden: int = 64):
        super().__init__()
        self.conv1 = GINConv(nn.Sequential(nn.Linear(ATOMS, hidden), nn.ReLU(), nn.Linear(hidden, hidden)))
        self.conv2 = GINConv(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)))
        self.lin = nn.Linear(hidden, 2)

    def forward(self, data):
        x = self.conv1(data.x, data.edge_index).relu()
        x = self.conv2(x, data.edge_index).relu()
        return self.lin(global_mean_pool(x, data.batch))


def build(name):
    return GCN() if name == "gcn" else GIN()


def forward(net, data):
    return net(data.x, data.edge_index, data.batch) if isinstance(net, GCN) else net(data)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    generator = torch.Generator().manual_seed(1000 + partition_id)
    graphs = [molecule(generator) for _ in range(60)]
    return (
        DataLoader(graphs[:48], batch_size=batch_size, shuffle=True),
        DataLoader(graphs[48:], batch_size=batch_size),
    )


def train(net, loader, epochs, lr, device):
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for _ in range(epochs):
        for data in (each.to(device) for each in loader):
            optimizer.zero_grad()
            loss = criterion(forward(net, data), data.y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader, device):
    net.to(device).eval()
    correct = total = 0
    with torch.no_grad():
        for data in (each.to(device) for each in loader):
            correct += int((forward(net, data).argmax(1) == data.y).sum())
            total += data.num_graphs
    return correct / total
