"""Graphs of several kinds and the gradients of graph networks: nodes and edges that are reconstructed.

    python experiments/graph_networks.py --packages FOLDER [--only NETWORK ...] [--graphs KIND ...]

FOLDER holds torch_geometric, rdkit and chemicals (``pip install --target``). Each graph is one client's batch; the
network has two layers of messages, mean pooling and a linear layer. Molecules are the first ones, in an order drawn
with a seed, of the list of the package chemicals. Rows: experiments/rows/graph_networks.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from row_file import RowFile
from torch import nn

from fl_privacy.auditing.instrument.watch import OnlyExamples, TrainingWatch
from fl_privacy.auditing.scenario_graphs import graph_of, score_graphs
from fl_privacy.auditing.scenario_problem import StepProblem, gradient_plan, read_problem, reason_of
from fl_privacy.federation.replies import Failure
from fl_privacy.types import Observation

HERE = Path(__file__).resolve().parent
ATOMS = ("C", "N", "O", "F", "P", "S", "Cl")
NETWORKS = (
    "gin",
    "gin 3 layers",
    "gin dropout",
    "gin batch norm",
    "gin sum pool",
    "gin max pool",
    "gcn",
    "sage",
    "gat",
)
GRAPHS = (
    "drawn 8-21",
    "drawn 22-40",
    "molecules",
    "random",
    "karate",
    "one node",
    "isolated",
    "self loops",
    "directed",
)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with torch_geometric, rdkit and chemicals")
    parser.add_argument("--only", nargs="*", choices=NETWORKS, default=["gin"])
    parser.add_argument("--graphs", nargs="*", choices=GRAPHS, default=["drawn 8-21"])
    parser.add_argument("--number", type=int, default=24, help="graphs of each kind")
    asked = parser.parse_args()
    sys.path += [str(asked.packages.absolute()), str(HERE / "molecules")]
    kept = RowFile(HERE / "rows" / "graph_networks")
    for kind in asked.graphs:
        graphs = graphs_of(kind, asked.number, asked.packages)
        for name in asked.only:
            print(kept.add({"network": name, "graphs": kind}, figures_of(name, graphs)), flush=True)


def figures_of(name: str, graphs: list[Any]) -> dict[str, Any]:
    """Attack each graph's gradient; return the right nodes, edges and graphs next to the control's."""
    seen = [observed(network(name, graphs[0].x.shape[1]), [graph]) for graph in graphs]
    if not all(problem.model.kinds for problem, _ in seen):
        return {"number": len(graphs), "reason": "attacked as rows: graphs of three nodes or more are expected"}
    started = time.perf_counter()
    found = [graph_of(observation, problem.model.kinds) for problem, observation in seen]
    seconds = time.perf_counter() - started
    failed = [reason_of(each) for each in found if isinstance(each, Failure)]
    figures = {"number": len(graphs), "solved": len(found) - len(failed), "seconds": seconds}
    if len(failed) == len(found):
        return {**figures, "reason": failed[0]}
    answer = score_graphs([problem for problem, _ in seen], found)
    assert answer.counts is not None and answer.control is not None
    nodes = sum(len(graph.x) for graph in graphs)
    figures |= {"nodes": answer.counts.exact, "of nodes": nodes, "control nodes": answer.control.exact}
    edges, whole = re.findall(r"(\d+) (?:of \d+ )?(?:edges|graphs)", answer.notes[1])
    others = re.findall(r"control: (\d+)", answer.notes[1])
    figures |= {"edges": int(edges), "of edges": sum(graph.edge_index.shape[1] // 2 for graph in graphs)}
    return {**figures, "control edges": int(others[0]), "whole": int(whole), "control whole": int(others[1])}


def observed(net: nn.Module, graphs: list[Any]) -> tuple[StepProblem, Observation]:
    """Return a client's step on one batch of ``graphs``, and what is known of its gradient."""
    from torch_geometric.loader import DataLoader  # noqa: PLC0415, of --packages

    with TrainingWatch(program=True, only=OnlyExamples(first=0, number=len(graphs))).looking() as seen:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for data in DataLoader(graphs, batch_size=len(graphs)):
            optimizer.zero_grad()
            F.cross_entropy(net(data.x, data.edge_index, data.batch), data.y).backward()
            optimizer.step()
    problem = read_problem(seen, [torch.cat([graph.x for graph in graphs])])
    return problem, problem.observed(0, seen.gradients, gradient_plan(seen))


def network(name: str, width: int, hidden: int = 64) -> nn.Module:
    """Build a network with its values drawn by a seed."""
    from torch_geometric import nn as layers  # noqa: PLC0415

    pools: dict[str, Callable[..., Any]] = {"sum": layers.global_add_pool, "max": layers.global_max_pool}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [width] + [hidden] * (3 if "3 layers" in name else 2)
            pairs = list(pairwise(sizes))
            kinds = {"gcn": layers.GCNConv, "sage": layers.SAGEConv, "gat": layers.GATConv}
            kind = name.split(maxsplit=1)[0]
            self.layers = nn.ModuleList(
                kinds[kind](*pair) if kind in kinds else self.isomorphism(*pair) for pair in pairs
            )
            self.norm = nn.BatchNorm1d(hidden) if "batch norm" in name else nn.Identity()
            self.dropout = nn.Dropout(0.5 if "dropout" in name else 0.0)
            self.pool = next((pool for key, pool in pools.items() if key in name), layers.global_mean_pool)
            self.last = nn.Linear(hidden, 2)

        def isomorphism(self, first: int, second: int) -> nn.Module:
            return layers.GINConv(nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, second)))

        def forward(self, x: Any, edges: Any, batch: Any) -> Any:
            for layer in self.layers:
                x = self.dropout(self.norm(layer(x, edges).relu()))
            return self.last(self.pool(x, batch))

    torch.manual_seed(0)
    return Net()


def graphs_of(kind: str, number: int, packages: Path) -> list[Any]:
    """Return graphs of a kind, drawn with a seed, or the first ones of a public list."""
    from molecules.task import molecule  # noqa: PLC0415

    generator = torch.Generator().manual_seed(1000)
    if kind == "molecules":
        return known_molecules(number, packages)
    if kind == "karate":
        return [graph for node in range(34) if len((graph := around(node)).x) > 2][:number]
    if kind.startswith("drawn"):
        least, most = map(int, kind.split()[1].split("-"))
        graphs = (molecule(generator, least, most + 1) for _ in range(100 * number))
        return [graph for graph in graphs if len(graph.x) >= least][:number]
    graphs = [molecule(generator) for _ in range(number)]
    return [changed(kind, graph, generator) for graph in graphs]


def changed(kind: str, graph: Any, generator: torch.Generator) -> Any:
    """Return a copy of a drawn molecule with other edges or fewer nodes."""
    edges, number = graph.edge_index, len(graph.x)
    if kind == "one node":
        graph.x, edges = graph.x[:1], edges[:, :0]
    elif kind == "isolated":
        graph.x = torch.cat([graph.x, graph.x[:2]])
    elif kind == "self loops":
        edges = torch.cat([edges, torch.zeros(2, 1).long()], 1)
    elif kind == "directed":
        edges = edges[:, : edges.shape[1] // 2]
    elif kind == "random":  # as many edges as nodes, drawn among all pairs
        pairs = torch.combinations(torch.arange(number)).T
        some = pairs[:, torch.randperm(pairs.shape[1], generator=generator)[:number]]
        edges = torch.cat([some, some.flip(0)], 1)
    graph.edge_index = edges
    return graph


def known_molecules(number: int, packages: Path) -> list[Any]:
    """Return molecules of 5 to 25 atoms from the list of the package chemicals, kinds of atoms as nodes."""
    from rdkit import Chem  # noqa: PLC0415
    from torch_geometric.data import Data  # noqa: PLC0415

    listed = packages / "chemicals" / "Identifiers" / "chemical identifiers pubchem small.tsv"
    texts = [line.split("\t")[4] for line in listed.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(texts)
    found = list[Any]()
    for text in texts:
        made = Chem.MolFromSmiles(text)
        if made is None or "." in text or not 5 <= made.GetNumAtoms() <= 25:
            continue
        if not {atom.GetSymbol() for atom in made.GetAtoms()} <= set(ATOMS):
            continue
        kinds = torch.tensor([ATOMS.index(atom.GetSymbol()) for atom in made.GetAtoms()])
        pairs = torch.tensor([(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in made.GetBonds()]).T
        edges = torch.cat([pairs, pairs.flip(0)], 1)
        x = F.one_hot(kinds, len(ATOMS)).float()
        found.append(Data(x=x, edge_index=edges, y=torch.tensor([len(found) % 2])))
        if len(found) == number:
            break
    return found


def around(node: int) -> Any:
    """Return the part of Zachary's karate club next to a node; nodes by their four communities."""
    from torch_geometric.data import Data  # noqa: PLC0415
    from torch_geometric.datasets import KarateClub  # noqa: PLC0415
    from torch_geometric.utils import k_hop_subgraph  # noqa: PLC0415

    club = KarateClub()[0]
    nodes, edges, _, _ = k_hop_subgraph(node, 1, club.edge_index, relabel_nodes=True)
    return Data(x=F.one_hot(club.y[nodes], 4).float(), edge_index=edges, y=torch.tensor([node % 2]))


if __name__ == "__main__":
    main()
