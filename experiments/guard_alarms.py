"""True and false alarms of the guard, what it costs, and what an attack reads that was tuned to pass it.

    python experiments/guard_alarms.py

Ten clients train three networks on real images, from untrained on, with equal random shares and with Dirichlet ones. In
every round each client looks at the honest model, and at those that every attack makes of it, at its published strength
and at half: half of the rows of each changed tensor are crafted, the others honest. A line of ``rows.jsonl`` in the
folder ``--out`` for each network and partition, and one for each tuned attack; what is there is not measured again. The
crafted models are shown without an agreed architecture, which would give an inserted layer away by its name.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from malicious_server import network, observed, public, read, scored, table
from torch import nn

from fl_privacy.attacks.malicious import (
    Fishing,
    Imprint,
    Inconsistent,
    Loki,
    MembershipTrap,
    ServerAttack,
    TrapWeights,
)
from fl_privacy.data import Dataset, load_data
from fl_privacy.data.partition import Dirichlet, Iid
from fl_privacy.defenses import ClientState
from fl_privacy.defenses.guard import ModelGuard, behavior_of
from fl_privacy.federation import Client, Server, ServerPlan, evaluate_model
from fl_privacy.models import ResNet20, build_model
from fl_privacy.types import LocalPlan, ModelState

Row = dict[str, Any]

CLIENTS = 10
PLAN = LocalPlan(shares="delta", lr=0.02, momentum=0.9, epochs=1, batch_size=32)
ATTACKS: dict[str, tuple[ServerAttack, ...]] = {
    "mlp": (Imprint(), Loki(bins=64), TrapWeights(), Fishing(), Inconsistent(client=1), MembershipTrap()),
    "lenet": (Imprint(), Loki(bins=64), Fishing(), Inconsistent(client=1)),
    "resnet20": (Imprint(), Loki(bins=64), Fishing(), Inconsistent(client=1)),
}


def made(data: Dataset, kind: str) -> nn.Module:
    if kind != "resnet20":
        return network(data, kind, activation="relu")
    channels, side, _ = data.train.input_shape
    shape = {"in_channels": channels, "image_size": side, "num_classes": data.train.num_classes}
    return build_model(ResNet20, seed=0, width=8, mean=[0.5], std=[0.25], **shape)


def weakened(crafted: ModelState, honest: ModelState) -> ModelState:
    """Weaken a crafted model: half of each layer's rows, drawn at random, are reset to honest ones."""
    mixed = {}
    for name, tensor in crafted.parameters.items():
        kept = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))[: len(tensor) // 2]
        mixed[name] = tensor.clone()
        mixed[name][kept] = honest.parameters[name][kept]
    return ModelState(mixed, crafted.buffers)


def looked_at(data: Dataset, kind: str, partition: str, options: argparse.Namespace) -> Row:
    """Run one training whose clients check every round's model with the guard."""
    model, guard = made(data, kind), ModelGuard()
    parts = (Iid() if partition == "iid" else Dirichlet(alpha=0.5))(data.train, num_clients=CLIENTS, seed=0)
    clients = {
        k: Client(id=k, examples=data.train, indices=part, model=model, plan=PLAN, seed=0)
        for k, part in enumerate(parts)
    }
    server = Server(
        state=ModelState.of(model), local_plan=PLAN, plan=ServerPlan(fraction=0.3), clients=sorted(clients), seed=0
    )
    attacks = [attack.informed(public(data)) for attack in ATTACKS[kind]]
    kept: dict[int, dict[str, torch.Tensor]] = {k: {} for k in clients}
    false, true, reasons, shown = 0, Counter[str](), Counter[str](), Counter[str]()
    looking = training = 0.0
    margins = {"least_firing": 1.0, "most_alone": 0.0, "most_alone_later": 0.0, "most_leading": 0.0}
    for round in range(1, options.rounds + 1):
        for k, client in clients.items():
            batch = client.examples.batch(client.indices[: guard.examples])
            started = time.process_time()
            reason = guard.refusal(model, server.state, batch, kept[k])
            kept[k] = guard.remembered(server.state)
            looking += time.process_time() - started
            false += reason is not None
            reasons[str(reason)] += reason is not None
        seen = behavior_of(model, server.state, clients[0].examples.batch(clients[0].indices[: guard.examples]))
        margins["least_firing"] = min([margins["least_firing"], *(float(f.mean()) for f in seen.firing.values())])
        first, *later = seen.alone.values()
        margins["most_alone"] = max(margins["most_alone"], first)
        margins["most_alone_later"] = max([margins["most_alone_later"], *later])
        margins["most_leading"] = max(margins["most_leading"], seen.leading)
        for name, strength, whole, sent in crafted(attacks, model, server.state):
            client = clients[round % CLIENTS]
            batch = client.examples.batch(client.indices[: guard.examples])
            shown[f"{name} {strength}"] += 1
            true[f"{name} {strength}"] += guard.refusal(whole, sent, batch, kept[client.id]) is not None
        asked = server.select(round)
        started = time.process_time()
        replies = {k: clients[k].update(server.state, ClientState(), round=round).upload for k in asked}
        training += (time.process_time() - started) / len(asked) * CLIENTS
        server.receive(replies)
    return {
        "honest_looks": options.rounds * CLIENTS,
        "false_alarms": false,
        "malicious_looks": sum(shown.values()),
        "true_alarms": sum(true.values()),
        "missed": {name: f"{number - true[name]} of {number}" for name, number in shown.items() if true[name] < number},
        "false_reasons": dict(reasons.most_common(3)),
        "accuracy": evaluate_model(model, server.state, data.test).accuracy,
        **margins,
        "share_of_time": looking / training,
        "milliseconds": 1000 * looking / (options.rounds * CLIENTS),
    }


def crafted(
    attacks: list[ServerAttack], model: nn.Module, state: ModelState
) -> Iterator[tuple[str, str, nn.Module, ModelState]]:
    """Yield each attack's crafted model at full and at half strength."""
    for attack in attacks:
        whole = attack.architecture(model, tuple(attack.public.shape[1:]), CLIENTS)
        fresh = ModelState.of(whole)
        honest = ModelState({**fresh.parameters, **state.parameters}, {**fresh.buffers, **state.buffers})
        full = attack.craft(whole, honest, 0)
        for strength, sent in (("full", full), ("half", weakened(full, honest))):
            yield type(attack).__name__, strength, whole, sent


def tuned(data: Dataset, fires: float, share: float) -> Row:
    """Craft trap weights in a ``share`` of the rows; return whether clients refuse, and the scores."""
    base = network(data, "mlp", widths=(1000, 100))
    client = Client(id=0, examples=data.train, indices=torch.arange(1000), model=base, plan=LocalPlan(), seed=0)
    attack, honest = TrapWeights(fires=fires).informed(public(data)), ModelState.of(base)
    sent = attack.craft(base, honest, 0)
    rows = round(share * 1000)
    mixed = {
        name: torch.cat([tensor[:rows], honest.parameters[name][rows:]]) if len(tensor) == 1000 else tensor
        for name, tensor in sent.parameters.items()
    }
    sent = replace(sent, parameters=mixed)
    batch = client.examples.batch(client.indices[:16])
    reason = ModelGuard().refusal(base, sent, batch, {})
    pairs = []
    for number in range(4):
        upload = client.probe(sent, ClientState(), round=1, probe=number, batch_size=100).upload
        pairs.append((attack.read(observed(data, base, sent, upload, client)), client.victim_batch(number, 100)))
    return {"passes": reason is None, "reason": reason, **scored(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--rounds", type=int, default=17)
    parser.add_argument("--networks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--out", type=Path, default=Path("runs/guard_alarms"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path, data = options.out / "rows.jsonl", load_data(options.data)
    jobs: list[tuple[Row, Any]] = [
        ({"tuned": "trap_weights", "fires": fires, "share": share}, lambda f=fires, s=share: tuned(data, f, s))
        for fires in (0.01, 0.02, 0.05, 0.1)
        for share in (1.0, 0.5, 0.25, 0.15)
    ]
    jobs += [
        (
            {"network": kind, "partition": partition, "rounds": options.rounds, "data": options.data},
            lambda k=kind, p=partition: looked_at(data, k, p, options),
        )
        for kind in options.networks
        for partition in ("iid", "dirichlet")
    ]
    for key, measure in jobs:
        if any(key.items() <= row.items() for row in read(path)):
            continue
        row = {**key, **measure()}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]), flush=True)
    print(f"\nAll rows of {path}:\n{table(read(path))}")


if __name__ == "__main__":
    main()
