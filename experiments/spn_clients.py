"""Accuracy over the number of clients: each alone, together, and together behind defenses (SPN, Figures 7, 28 and 29).

    python experiments/spn_clients.py --data mnist_mini --width 4 --rounds 20 --lr 0.02 --batch-size 16 --clients 8 20

AlexNet, federated averaging as in the paper (SGD with momentum, all clients in every round, one local epoch of batches
of 64; ``--steps`` and ``--per-round`` make rounds shorter). ``Alone`` trains in as many rounds on one client's examples
only, mean over at most five clients. Every accuracy is a line of ``rows.jsonl`` in the folder ``--out`` as soon as it
is known and is not computed again, so that several processes can share the numbers of clients between them; the figure
``clients.png``, a panel for each partition, is drawn at the end. ``--clients`` without numbers only draws.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from fl_privacy.data import Examples, load_data
from fl_privacy.data.partition import Dirichlet, Iid, Partition
from fl_privacy.defenses import ClientState, dp_noise, none, selective_sharing, spn
from fl_privacy.federation import Audit, Client, Server, ServerPlan, evaluate_model, plain_rounds, run_all
from fl_privacy.federation.interception import Interceptor
from fl_privacy.models import AlexNet, build_model
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.types import LocalPlan, ModelState

DEFENSES = {
    "FedAvg": none(),
    "SPN-0.1": spn(alpha2=0.1),
    "PPDL-0.3": selective_sharing(share=0.3),
    "PPDL-0.05": selective_sharing(share=0.05),
    "DP-0.1": dp_noise(scale=0.1, at="gradient"),
}
METHODS = ("Alone", *DEFENSES)
COLORS = ("#777777", "#111111", "#2b63d9", "#2a9d6f", "#8fc9ae", "#d9622b")
ALONE = 5

Row = dict[str, Any]
Members = dict[int, Client]


def together(clients: Members, rounds: int, seed: int, per_round: int | None) -> ModelState:
    first = clients[0]
    server = Server(
        state=ModelState.of(first.model),
        local_plan=first.plan,
        plan=ServerPlan(fraction=min(1.0, (per_round or len(clients)) / len(clients))),
        clients=sorted(clients),
        seed=seed,
    )
    interceptor = Interceptor(
        model=first.model,
        plan=first.plan,
        input_shape=first.examples.input_shape,
        num_classes=first.examples.num_classes,
    )
    run_all(plain_rounds(server, clients, rounds=rounds, audit=Audit(), interceptor=interceptor))
    return server.state


def alone(client: Client, rounds: int) -> ModelState:
    """Train one client by itself."""
    state, values = ClientState(), ModelState.of(client.model)
    for number in range(1, rounds + 1):
        delta = client.update(values, state, round=number).upload.tensors
        values = ModelState({name: p + delta[name] for name, p in values.parameters.items()}, values.buffers)
    return values


def accuracy(method: str, members: Members, test: Examples, options: argparse.Namespace) -> float:
    if method == "Alone":
        states = [alone(member, options.rounds) for member in list(members.values())[:ALONE]]
    else:
        defended = {k: replace(member, defense=DEFENSES[method]) for k, member in members.items()}
        states = [together(defended, options.rounds, options.seed, options.per_round)]
    return sum(evaluate_model(members[0].model, state, test).accuracy for state in states) / len(states)


def partition_called(name: str) -> Partition:
    return Iid() if name == "iid" else Dirichlet(alpha=float(name))


def title_of(partition: str) -> str:
    return "Equal random shares" if partition == "iid" else f"Dirichlet({partition})"


def missing(options: argparse.Namespace, rows: Callable[[], list[Row]]) -> Iterator[Row]:
    """Measure and yield the requested rows that ``rows`` does not have yet."""
    data = load_data(options.data)
    train, test = some(data.train, options.images, options.seed), some(data.test, options.test_images, options.seed)
    channels, size, _ = train.input_shape
    shape = {"in_channels": channels, "image_size": size, "num_classes": train.num_classes}
    model = build_model(
        AlexNet, seed=options.seed, width=options.width, init="kaiming_uniform", mean=[0.5], std=[0.25], **shape
    )
    duration = {"epochs": 1} if options.steps is None else {"steps": options.steps}
    plan = LocalPlan(shares="delta", lr=options.lr, momentum=0.9, batch_size=options.batch_size, **duration)
    seed = derive_seed(options.seed, "partition")
    for number in options.clients:
        for partition in options.partitions:
            parts = partition_called(partition)(train, num_clients=number, seed=seed)
            members = {
                k: Client(id=k, examples=train, indices=part, model=model, plan=plan, seed=options.seed)
                for k, part in enumerate(parts)
            }
            for method in options.methods:
                key = {**setting(options), "partition": partition, "clients": number, "method": method}
                if not any(key.items() <= row.items() for row in rows()):
                    yield {**key, "accuracy": accuracy(method, members, test, options)}


def some(examples: Examples, number: int | None, seed: int) -> Examples:
    """Draw ``number`` examples at random; keep all for ``None``."""
    if number is None:
        return examples
    order = torch.randperm(len(examples), generator=derive_generator(seed, "images"))
    return examples.subset(order[:number].sort().values)


def setting(options: argparse.Namespace) -> Row:
    """Return the settings that all rows of a figure have in common."""
    names = ("data", "images", "test_images", "width", "rounds", "lr", "steps", "batch_size", "per_round", "seed")
    return {name: getattr(options, name) for name in names}


def read(path: Path, common: Row) -> list[Row]:
    """Load the rows of ``path`` that match ``common``."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if common.items() <= row.items()]


def draw(rows: list[Row], path: Path) -> None:
    """Draw a panel for each partition, with a curve for each method."""
    matplotlib.rcParams["font.size"] = 9
    partitions = sorted({row["partition"] for row in rows}, key=lambda name: (name != "iid", name))
    figure = Figure(figsize=(4.2 * len(partitions) + 1, 3.4), layout="constrained")
    panels = figure.subplots(1, len(partitions), sharey=True, squeeze=False)[0]
    for axes, partition in zip(panels, partitions, strict=True):
        found = {(r["method"], r["clients"]): 100 * r["accuracy"] for r in rows if r["partition"] == partition}
        numbers = sorted({number for _, number in found})
        for method, color in zip(METHODS, COLORS, strict=True):
            x = [number for number in numbers if (method, number) in found]
            line = "--o" if method == "Alone" else "-o"
            axes.plot(x, [found[method, n] for n in x], line, color=color, label=method, markersize=4)
        axes.set_xscale("log")
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.minorticks_off()
        axes.set(title=title_of(partition), xlabel="Clients")
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("Test accuracy, percent")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def table(rows: list[Row]) -> str:
    """Render a line for each partition and number of clients."""
    found = {(r["partition"], r["clients"], r["method"]): f"{100 * r['accuracy']:.1f} %" for r in rows}
    lines = [
        f"| {title_of(partition)} | {number} | {' | '.join(found.get((partition, number, m), '-') for m in METHODS)} |"
        for partition, number in sorted({key[:2] for key in found}, key=lambda key: (key[0] != "iid", *key))
    ]
    return "\n".join([f"| | clients | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 2) + "|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--images", type=int, help="of the training set; all if not given")
    parser.add_argument("--test-images", type=int, help="of the test set; all if not given")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--clients", type=int, nargs="*", default=[8, 20, 50, 100])
    parser.add_argument("--partitions", nargs="+", default=["iid", "0.9"], help="iid, or the alpha of a Dirichlet one")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, help="of each client in a round; one epoch if not given")
    parser.add_argument("--per-round", type=int, help="clients that take part, at most; all if not given")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/spn_clients"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path, common = options.out / "rows.jsonl", setting(options)
    for row in missing(options, lambda: read(path, common)):
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{title_of(row['partition'])}, {row['clients']} clients, {row['method']}: {row['accuracy']}", flush=True)
    rows = read(path, common)
    if rows:
        draw(rows, options.out / "clients.png")
        print(table(rows))


if __name__ == "__main__":
    main()
