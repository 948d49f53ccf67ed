"""What malicious servers read of real images, one row a measurement.

    python experiments/malicious_server.py imprint loki fishing trap_weights membership_trap inconsistent double_listing

Each row is a line of ``rows.jsonl`` in the folder ``--out`` as soon as it is known, and is not measured again; the
table of all rows is printed at the end. Images are those of ``--data`` (lossless CIFAR-10 by default), public ones
those of its test split. ``Alone`` counts images that the server itself knows to be single ones, by their pixels
being whole 255ths; ``shared`` those that fell into a bin with another. Published figures: Robbing the Fed 70.94 dB at
batch 64 with 128 bins; LOKI 76 to 87.5 % and 41.05 dB.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

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
from fl_privacy.attacks.presets import inverting_gradients
from fl_privacy.data import Dataset, load_data
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.federation import Audit, Client, Server, ServerPlan, plain_rounds, public_state, run_all
from fl_privacy.federation.interception import Interceptor
from fl_privacy.flower.secagg import secure_rounds
from fl_privacy.measure import evaluate
from fl_privacy.models import MLP, LeNet, build_model
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.runs.server_attack import hand_over
from fl_privacy.types import Batch, Certainty, LocalPlan, ModelState, Observation, Reconstruction, Upload, VictimId
from tests.flower.secagg_check import try_double_listing

Row = dict[str, Any]

RECOGNIZED, CAPPED = 15.0, 150.0
"""PSNR in dB from which an image counts as recognized, and at which means are capped: an exact image has no end."""


def network(data: Dataset, kind: str, seed: int = 0, **options: Any) -> nn.Module:
    channels, side, _ = data.train.input_shape
    shape = {"in_channels": channels, "image_size": side, "num_classes": data.train.num_classes}
    return build_model({"lenet": LeNet, "mlp": MLP}[kind], seed=seed, mean=[0.5], std=[0.25], **shape, **options)


def public(data: Dataset, number: int = 1000) -> torch.Tensor:
    return data.test.batch(torch.arange(min(number, len(data.test)))).inputs


def member(data: Dataset, model: nn.Module, plan: LocalPlan, id: int, images: int) -> Client:
    mine = torch.arange(id * images, (id + 1) * images)
    return Client(id=id, examples=data.train, indices=mine, model=model, plan=plan, seed=0)


def observed(data: Dataset, model: nn.Module, sent: ModelState, upload: Upload, client: Client) -> Observation:
    return Observation(
        id=VictimId(1, client.id, 0),
        model=model,
        sent=sent,
        upload=upload,
        plan=client.plan,
        input_shape=data.train.input_shape,
        num_classes=data.train.num_classes,
    )


def probed(
    data: Dataset, attack: ServerAttack, base: nn.Module, size: int, number: int, *, defense: Defense | None = None
) -> tuple[Observation, Batch]:
    """Attack the ``number``-th batch of ``size`` images; return what was reconstructed and the truth."""
    model = attack.architecture(base, data.train.input_shape, 1)
    client = member(data, model, LocalPlan(batch_norm="eval"), 0, size * (number + 1))
    client, state = replace(client, defense=defense or Defense()), ClientState()

    def ask(values: ModelState) -> Upload:
        return client.probe(values, state, round=1, probe=number, batch_size=size).upload

    sent, upload = attack.question(model, public_state(model, client.defense), 0, ask)
    return observed(data, model, sent, upload, client), client.victim_batch(number, size)


def scored(pairs: Sequence[tuple[Reconstruction, Batch]]) -> Row:
    """Score the images of all ``pairs`` together."""
    images = [image for found, truth in pairs for image in evaluate(found, truth).images]
    psnr = {c: [i.values["psnr"] for i in images if i.values and i.certainty is c] for c in Certainty}
    alone, mixed = psnr[Certainty.PROVEN], psnr[Certainty.APPROXIMATE]
    recognized = sum(value >= RECOGNIZED for value in alone + mixed)
    return {
        "images": len(images),
        "alone": len(alone) / len(images),
        "alone_psnr": float(np.mean(np.minimum(alone, CAPPED))) if alone else None,
        "alone_least": min(alone, default=None),
        "recognized": recognized / len(images),
        "mixed_psnr": float(np.mean(mixed)) if mixed else None,
    }


def imprint(data: Dataset, todo: Callable[[Row], bool], options: argparse.Namespace) -> Iterator[Row]:
    for bins in (128, 256, 512):
        for activation in ("relu", "hardtanh"):
            key = {"server": "imprint", "batch": 64, "bins": bins, "activation": activation, "batches": options.batches}
            if not todo(key):
                continue
            attack = Imprint(bins=bins, activation=activation).informed(public(data))
            base, edges, pairs, shared = network(data, "lenet", activation="tanh"), attack.edges(), [], 0
            for number in range(options.batches):
                seen, truth = probed(data, attack, base, 64, number)
                found = attack.read(seen)
                pairs.append((found, truth))
                bins_of = torch.bucketize(truth.inputs.double().flatten(1).mean(1), edges)
                _, which, counts = bins_of.unique(return_inverse=True, return_counts=True)
                shared += int((counts[which] > 1).sum())
            yield {**key, **scored(pairs), "shared": shared / (64 * options.batches)}


def loki(data: Dataset, todo: Callable[[Row], bool], options: argparse.Namespace) -> Iterator[Row]:
    for clients, images in options.federations:
        for steps in (8, 4):
            for aggregation in options.aggregations:
                key = {"server": "loki", "clients": clients, "images_each": images, "steps": steps, "lr": options.lr}
                key |= {"aggregation": aggregation, "bins": 4 * images, "data": options.data}
                needed = 16 * clients**2 * 4 * images * data.train.images[0].numel()
                if not todo(key):
                    continue
                if aggregation == "secagg" and needed > options.memory * 2**30:
                    yield {**key, "not_measured": f"masked uploads of {needed / 2**30:.0f} GiB; see --memory"}
                else:
                    yield {**key, **loki_row(data, key, options)}


def loki_row(data: Dataset, key: Row, options: argparse.Namespace) -> Row:
    clients, images, steps, aggregation = (key[n] for n in ("clients", "images_each", "steps", "aggregation"))
    attack = Loki(bins=4 * images).informed(public(data))
    model = attack.architecture(network(data, "lenet", activation="tanh"), data.train.input_shape, clients)
    plan = LocalPlan(shares="delta", lr=options.lr, steps=steps, batch_size=images // steps)
    members = {k: member(data, model, plan, k, images) for k in range(clients)}
    seen = means(attack, model, members, aggregation, options)
    pairs = [(attack.read(o), members[o.id.client].examples.batch(members[o.id.client].indices)) for o in seen]
    return scored(pairs)


def means(
    attack: ServerAttack,
    model: nn.Module,
    members: Mapping[int, Client],
    aggregation: str,
    options: argparse.Namespace,
) -> Iterator[Observation]:
    """Yield the server's observation of a round's mean, for each client that it attacks."""
    first = members[0]
    if aggregation == "plain":
        state, total = ModelState.of(model), dict[str, torch.Tensor]()
        for client in members.values():  # added up as they come: a hundred of them do not fit into memory
            sent = attack.craft(model, state, client.id)
            for name, tensor in client.update(sent, ClientState(), round=1).upload.tensors.items():
                total[name] = total[name].add_(tensor) if name in total else tensor.clone()
        for client in members.values():
            upload = Upload(tensors=total, num_examples=len(client.indices))
            sent = attack.craft(model, state, client.id)
            shape, classes = first.examples.input_shape, first.examples.num_classes
            yield Observation(
                id=VictimId(1, client.id),
                model=model,
                sent=sent,
                upload=upload,
                plan=client.plan,
                input_shape=shape,
                num_classes=classes,
            )
        return
    interceptor = Interceptor(
        model=model,
        plan=first.plan,
        input_shape=first.examples.input_shape,
        num_classes=first.examples.num_classes,
    )
    server = Server(
        state=public_state(model, first.defense),
        local_plan=first.plan,
        plan=ServerPlan(),
        clients=sorted(members),
        seed=0,
    )
    audit = Audit(rounds=frozenset([1]), uploads="update", clients=frozenset(members))
    rest, of_means = hand_over(server, attack, audit, interceptor)
    if aggregation == "secagg":
        shares = min(1.0, 7 / len(members)) if len(members) > 20 else 1.0
        run_all(secure_rounds(server, members, rounds=1, clip=options.clip, shares=shares))
    else:
        for observations in plain_rounds(server, members, rounds=1, audit=rest, interceptor=interceptor):
            yield from observations
    yield from of_means


def fishing(data: Dataset, todo: Callable[[Row], bool], options: argparse.Namespace) -> Iterator[Row]:
    """Fish one image of 64 by the attack that suits the network; compare it with the image attacked alone."""
    for kind, attack_name in (("mlp", "analytic"), ("lenet", "inverting_gradients")):
        key = {"server": "fishing", "batch": 64, "model": kind, "attack": attack_name, "batches": options.batches}
        if not todo(key):
            continue
        attack = Fishing().informed(public(data))
        base = network(data, kind, activation="relu")
        inner = AnalyticInversion() if kind == "mlp" else inverting_gradients(iterations=options.iterations)
        fished: list[float] = []
        single: list[float] = []
        for number in range(options.batches):
            seen, truth = probed(data, attack, base, 64, number)
            alone = attack.read(seen)
            if isinstance(alone, Reconstruction):
                continue
            (found,) = inner([alone], seed=0)
            image = next(i for i in evaluate(found, truth).images if i.values)
            fished.append(image.values["psnr"])
            own = Client(
                id=0,
                examples=data.train,
                indices=member(data, base, seen.plan, 0, 64 * (number + 1)).indices,
                model=base,
                plan=seen.plan,
                seed=0,
            )
            batch = Batch(truth.inputs[image.image][None], truth.labels[image.image][None])
            (lone,) = inner([as_if_alone(data, base, own, batch)], seed=0)
            single.append(evaluate(lone, batch).images[0].values["psnr"])
        mean = {"fished_psnr": np.minimum(fished, CAPPED), "alone_psnr": np.minimum(single, CAPPED)}
        yield {**key, "isolated": len(fished) / options.batches, **{k: float(np.mean(v)) for k, v in mean.items()}}


def as_if_alone(data: Dataset, model: nn.Module, client: Client, batch: Batch) -> Observation:
    state = ModelState.of(model)
    gradients = loss_gradients(model, state, batch, batch_norm="eval").gradients
    return observed(data, model, state, Upload(tensors=gradients, num_examples=1), client)


def trap_weights(data: Dataset, todo: Callable[[Row], bool], options: argparse.Namespace) -> Iterator[Row]:
    for width in (1000,):
        for crafted in (True, False):
            key = {"server": "trap_weights" if crafted else "honest", "batch": 100, "width": width}
            key["batches"] = options.batches
            if not todo(key):
                continue
            attack = TrapWeights().informed(public(data))
            base, pairs = network(data, "mlp", widths=(width, 100)), []
            for number in range(options.batches):
                if crafted:
                    seen, truth = probed(data, attack, base, 100, number)
                else:
                    client = member(data, base, LocalPlan(), 0, 100 * (number + 1))
                    state = ModelState.of(base)
                    upload = client.probe(state, ClientState(), round=1, probe=number, batch_size=100).upload
                    seen, truth = observed(data, base, state, upload, client), client.victim_batch(number, 100)
                pairs.append((attack.read(seen), truth))
            yield {**key, **scored(pairs)}


def membership_trap(data: Dataset, todo: Callable[[Row], bool], options: argparse.Namespace) -> Iterator[Row]:
    key = {"server": "membership_trap", "asked": 1000, "batch": 2000}
    if not todo(key):
        return
    members, others = data.train.batch(torch.arange(500)).inputs, public(data, 500)
    asked = torch.stack([members, others], 1).flatten(0, 1)
    truth = torch.arange(1000) % 2 == 0
    base = network(data, "mlp", widths=(2000, 250))
    client, told = member(data, base, LocalPlan(), 0, 2000), torch.zeros(1000, dtype=torch.bool)
    for first in range(0, 1000, 250):
        attack = MembershipTrap(first=first).informed(asked)
        sent = attack.craft(base, ModelState.of(base), 0)
        upload = client.update(sent, ClientState(), round=1).upload
        told[first : first + 250] = attack.members(observed(data, base, sent, upload, client))
    right, wrong = told[truth].double().mean(), told[~truth].double().mean()
    yield {**key, "questions": 4, "true_positives": float(right), "false_positives": float(wrong)}


def inconsistent(data: Dataset, todo: Callable[[Row], bool], options: argparse.Namespace) -> Iterator[Row]:
    key = {"server": "inconsistent", "clients": 10, "aggregation": "secagg", "clip": options.clip}
    if not todo(key):
        return
    attack = Inconsistent(client=3).informed(public(data))
    model = network(data, "lenet", activation="relu")
    plan = LocalPlan(shares="delta", lr=0.01, steps=4, batch_size=16)
    members = {k: member(data, model, plan, k, 64) for k in range(10)}
    seen = next(o for o in means(attack, model, members, "secagg", options) if o.id.client == 3)
    isolated = attack.read(seen)
    assert isinstance(isolated, Observation)
    truth = members[3].update(ModelState.of(model), ClientState(), round=1).upload.tensors
    pairs = [(tensor, truth[name]) for name, tensor in isolated.upload.tensors.items()]
    largest = max(float((a - b).abs().max()) for a, b in pairs)
    apart = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    whole = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    values = sum(b.numel() for _, b in pairs) / sum(t.numel() for t in truth.values())
    yield {**key, "share_of_values": values, "largest_error": largest, "relative_error": apart / whole}


def double_listing(data: Dataset, todo: Callable[[Row], bool], options: argparse.Namespace) -> Iterator[Row]:
    for guarded in (False, True):
        key = {"server": "double_listing", "flwr": version("flwr"), "clients": 10, "guarded": guarded}
        if not todo(key):
            continue
        model = network(data, "lenet", activation="relu")
        members = [member(data, model, LocalPlan(shares="delta", steps=1), k, 16) for k in range(10)]
        updates = [m.update(ModelState.of(model), ClientState(), round=1).upload.tensors for m in members]
        uploads = [torch.cat([t.flatten() for t in u.values()]).double().numpy() for u in updates]
        found = try_double_listing(uploads, victim=3, guarded=guarded)
        refused = {"refusal": found.refusals[0]} if found.refusals else {}
        yield {
            **key,
            "values": len(uploads[0]),
            "has_it": found.recovered is not None,
            "largest_error": None if found.recovered is None else found.error,
            "seconds": found.seconds,
            **refused,
        }


MEASURES = {
    f.__name__: f for f in (imprint, loki, fishing, trap_weights, membership_trap, inconsistent, double_listing)
}


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Row]) -> str:
    """Render a line of figures for each row."""

    def told(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "\n".join(", ".join(f"{k} {told(v)}" for k, v in row.items() if v is not None) for row in rows)


def federation(text: str) -> tuple[int, int]:
    clients, images = text.split("x")
    return int(clients), int(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", choices=[*MEASURES, []], help="all if not given")
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--batches", type=int, default=4, help="attacked in each row, where it is batches")
    parser.add_argument("--federations", type=federation, nargs="+", default=[(10, 64), (100, 16)], metavar="NxIMAGES")
    parser.add_argument("--aggregations", nargs="+", default=["plain", "secagg"], choices=["plain", "secagg"])
    parser.add_argument("--lr", type=float, default=1e-4, help="of the local steps under LOKI")
    parser.add_argument("--clip", type=float, default=0.01, help="largest value under SecAgg+")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB that masked uploads may take")
    parser.add_argument("--iterations", type=int, default=1000, help="of the attack on what was fished")
    parser.add_argument("--out", type=Path, default=Path("runs/malicious_server"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    data = load_data(options.data)

    def todo(key: Row) -> bool:
        return not any(key.items() <= row.items() for row in read(path))

    for name in options.measures or MEASURES:
        started = time.process_time()
        for row in MEASURES[name](data, todo, options):
            row["cpu_seconds"], started = time.process_time() - started, time.process_time()
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(table([row]), flush=True)
    print(f"\nAll rows of {path}:\n{table(read(path))}")


if __name__ == "__main__":
    main()
