"""Every defense under every malicious server: who is still protected.

    python experiments/defenses_under_malice.py

A row for each server and defense, at the defense's settings in ``conf/``: the share of images that the server proves
to be single ones, the share of those recognized (PSNR of at least 15 dB) and the mean PSNR; for membership traps the
shares of right and wrong answers; for inconsistent models the relative error of the one client's update. Each row is a
line of ``rows.jsonl`` in the folder ``--out`` as soon as it is known, and is not measured again. Defenses that train on
condensed images are left out: these are of no single image; so is RecUP-FL, which is for data with an attribute.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from malicious_server import means, member, network, observed, probed, public, read, scored, table

from fl_privacy.attacks import AnalyticInversion
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
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.federation import Failure, attempt, public_state
from fl_privacy.runs.build import build_defense, prepare_defense
from fl_privacy.runs.config import compose_run
from fl_privacy.types import LocalPlan, ModelState, Observation

Row = dict[str, Any]

DEFENSES = (
    "none",
    "dp_noise",
    "local_dp",
    "dp_sgd",
    "ppdl",
    "pruning",
    "selective_sharing",
    "quantization",
    "soteria",
    "soteria_mixing",
    "instahide",
    "ats",
    "split_fed",
    "spn",
    "fdl_pp",
    "refiner",
)
STEPS = LocalPlan(shares="delta", lr=0.01, steps=4, batch_size=8)


def read_batch(data: Dataset, defense: Defense, attack: ServerAttack, kind: str, options: Any, *, size: int) -> Row:
    """Let a malicious server attack one batch and score what it reconstructs."""
    seen, truth = probed(data, attack.informed(public(data)), network(data, kind, **options), size, 0, defense=defense)
    found = attack.informed(public(data)).read(seen)
    if isinstance(found, Observation):
        (found,) = AnalyticInversion()([found], seed=0)
    return scored([(found, truth)]) if found.batch is not None else {"failure": found.failure}


def read_mean(data: Dataset, defense: Defense) -> Row:
    """Let LOKI attack the mean of four clients and score what it reconstructs."""
    attack = Loki(bins=128).informed(public(data))
    model = attack.architecture(network(data, "lenet", activation="relu"), data.train.input_shape, 4)
    members = {k: replace(member(data, model, STEPS, k, 32), defense=defense) for k in range(4)}
    seen = means(attack, model, members, "loop", argparse.Namespace())
    return scored([(attack.read(o), members[o.id.client].examples.batch(members[o.id.client].indices)) for o in seen])


def read_one_client(data: Dataset, defense: Defense) -> Row:
    """Measure the error of the one client's update that inconsistent models isolate.

    It is relative to the update as it would be without the others and undefended.
    """
    attack, model = Inconsistent(client=1).informed(public(data)), network(data, "lenet", activation="relu")
    plain = {k: member(data, model, STEPS, k, 32) for k in range(4)}
    members = {k: replace(client, defense=defense) for k, client in plain.items()}
    seen = next(o for o in means(attack, model, members, "loop", argparse.Namespace()) if o.id.client == 1)
    isolated = attack.read(seen)
    assert isinstance(isolated, Observation)
    truth = plain[1].update(ModelState.of(model), ClientState(), round=1).upload.tensors
    pairs = [(tensor, truth[name]) for name, tensor in isolated.upload.tensors.items()]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return {"relative_error": (apart / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5}


def members_of(data: Dataset, defense: Defense) -> Row:
    """Measure membership traps: 32 images of the client, 30 others, one step on 500 images."""
    mine, others = data.train.batch(torch.arange(32)).inputs, public(data, 300)
    attack = MembershipTrap().informed(torch.cat([mine, others]))
    model = network(data, "mlp", widths=(500, 62))
    client = replace(member(data, model, LocalPlan(), 0, 500), defense=defense)
    sent = attack.craft(model, public_state(model, defense), 0)
    upload = client.update(sent, ClientState(), round=1).upload
    told = attack.members(observed(data, model, sent, upload, client))
    return {
        "true_positives": float(told[:32].double().mean()),
        "false_positives": float(told[32:].double().mean()),
    }


SERVERS: Mapping[str, Callable[[Dataset, Defense], Row]] = {
    "imprint": lambda data, defense: read_batch(data, defense, Imprint(), "lenet", {"activation": "relu"}, size=64),
    "loki": read_mean,
    "trap_weights": lambda data, defense: read_batch(
        data, defense, TrapWeights(), "mlp", {"widths": (1000, 100)}, size=64
    ),
    "fishing": lambda data, defense: read_batch(data, defense, Fishing(), "mlp", {"widths": (256, 128)}, size=64),
    "membership_trap": members_of,
    "inconsistent": read_one_client,
}


def measured(data: Dataset, server: str, name: str, evaluator: Path | None) -> Row:
    """Measure a server's attack on a defense; where one can't be set up, return the reason."""

    def measure() -> Row:
        chosen, _, rest = name.partition(":")
        settings = [f"defense={chosen}", *(f"defense.{setting}" for setting in rest.split(",") if setting)]
        if chosen == "refiner" and evaluator is not None:
            settings.append(f"defense.evaluator={evaluator.absolute()}")
        if chosen == "spn" and server in ("imprint", "loki"):  # whose layers come last in the model
            settings.append("defense.layer=classifier")
        defense = build_defense(compose_run(settings).defense)
        prepare_defense(defense, data, torch.nn.Identity())  # a model matters to texts alone
        return SERVERS[server](data, defense)

    found = attempt(measure)
    return {"not_measured": found.reason} if isinstance(found, Failure) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=list(SERVERS))
    parser.add_argument("--defenses", nargs="+", default=list(DEFENSES), metavar="NAME[:SETTING=VALUE,...]")
    parser.add_argument("--out", type=Path, default=Path("runs/defenses_under_malice"))
    parser.add_argument("--evaluator", type=Path, help="of Refiner, made by fl-privacy train-evaluator")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path, data = options.out / "rows.jsonl", load_data(options.data)
    for name in options.defenses:
        for server in options.servers:
            key = {"server": server, "defense": name, "data": options.data}
            if any(key.items() <= row.items() for row in read(path)):
                continue
            row = {**key, **measured(data, server, name, options.evaluator)}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(table([row]), flush=True)
    print(f"\nAll rows of {path}:\n{table(read(path))}")


if __name__ == "__main__":
    main()
