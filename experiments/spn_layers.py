"""SPN's private gradient beside that of the cross entropy, layer by layer (Fan et al. 2020, Figures 4 and 27).

    python experiments/spn_layers.py --data cifar10
    python experiments/spn_layers.py --data cifar10 --draws 12 --trained 0 300 3000

At the initial values of DLNet: cosine of both gradients for each weight, their norms, and ||B|| / ||E|| of the whole
update for codes of 32, 64 and 128 bits. With ``--draws`` the cosines alone, over draws of the initial values and of the
private head, after each number of ``--trained`` steps of SPN's own training.
"""

import argparse
from dataclasses import asdict, replace

import torch
from row_file import RowFile, takes_rows
from torch.nn.functional import cosine_similarity

from fl_privacy.data import Examples, load_data
from fl_privacy.defenses import ClientState, none, spn
from fl_privacy.federation import Client
from fl_privacy.measure.distortion import distortion_of
from fl_privacy.measure.intervals import aggregate
from fl_privacy.models import DLNet, build_model
from fl_privacy.types import LocalPlan, ModelState, Tensors

STEPS = LocalPlan(shares="delta", optimizer="adam", lr=1e-3, batch_size=32, steps=1)


def gradients(
    client: Client, batches: int, batch_size: int, sent: ModelState | None = None, state: ClientState | None = None
) -> tuple[list[Tensors], list[Tensors]]:
    """Compute gradients of the cross entropy and of the whole loss, for each batch."""
    sent, state = sent or ModelState.of(client.model), state or ClientState()
    plain = replace(client, defense=none())
    pairs = [
        [p.probe(sent, state, round=1, probe=k, batch_size=batch_size).upload.tensors for p in (plain, client)]
        for k in range(batches)
    ]
    return [clean for clean, _ in pairs], [whole for _, whole in pairs]


def cosines(clean: list[Tensors], whole: list[Tensors]) -> dict[str, float]:
    """Compute the mean cosine of both gradients by tensor."""
    found = {}
    for name in clean[0]:
        b = torch.stack([g[name].flatten() for g in clean])
        e = torch.stack([g[name].flatten() for g in whole]) - b
        found[name] = float(cosine_similarity(b, e, dim=1).mean())
    return found


def client_of(examples: Examples, options: argparse.Namespace, seed: int) -> Client:
    """Build a client with all examples, by one draw of the initial values and of the private head."""
    channels, size, _ = examples.input_shape
    shape = {"in_channels": channels, "image_size": size, "num_classes": examples.num_classes}
    return Client(
        id=0,
        examples=examples,
        indices=torch.arange(options.batches * options.batch_size),
        model=build_model(DLNet, seed=seed, init="uniform_0.3", **shape),
        plan=LocalPlan(),
        defense=spn(alpha2=options.alpha2),
        seed=seed,
    )


def over_draws(examples: Examples, options: argparse.Namespace, kept: RowFile) -> None:
    """Keep the cosines after each stage of training, with their mean and range over draws."""
    found: dict[tuple[int, str], list[float]] = {}
    for seed in range(options.draws):
        client = client_of(examples, options, seed)
        sent, state, done = ModelState.of(client.model), ClientState(), 0
        for steps in options.trained:
            if steps > done:
                plan = replace(STEPS, steps=steps - done)
                trainer = replace(client, indices=torch.arange(len(examples)), plan=plan)
                delta = trainer.update(sent, state, round=steps).upload.tensors
                sent, done = ModelState({n: p + delta[n] for n, p in sent.parameters.items()}, sent.buffers), steps
            pairs = gradients(client, options.batches, options.batch_size, sent, state)
            for name, cosine in cosines(*pairs).items():
                found.setdefault((steps, name), []).append(cosine)
        print(f"draw {seed}", flush=True)
    for (steps, name), values in found.items():
        ends = {"least": min(values), "most": max(values), "of_draws": values}
        figure = asdict(aggregate(values))  # type: ignore[arg-type]
        kept.add({"tensor": name, "data": options.data, "steps": steps}, {"cosine": figure, **ends})
        print(f"{steps} steps, {name}: {figure['mean']:.3f}, from {min(values):.3f} to {max(values):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--alpha2", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, help="of the initial values and the private head; one if not given")
    parser.add_argument("--trained", nargs="+", type=int, default=[0, 300, 3000], help="steps, of each draw")
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    examples = load_data(options.data).train
    if options.draws:
        over_draws(examples, options, kept)
        return
    client = client_of(examples, options, options.seed)
    clean, whole = gradients(client, options.batches, options.batch_size)
    print("| tensor | cosine | norm, cross entropy | norm, private |\n|---|---|---|---|")
    for name in clean[0]:
        b = torch.stack([g[name].flatten() for g in clean])
        e = torch.stack([g[name].flatten() for g in whole]) - b
        cosine = float(cosine_similarity(b, e, dim=1).mean())
        norms = {"norm": float(b.norm(dim=1).mean()), "private_norm": float(e.norm(dim=1).mean())}
        kept.add({"tensor": name, "data": options.data}, {"cosine": cosine, "n": options.batches, **norms})
        print(f"| {name} | {cosine:.4f} | {b.norm(dim=1).mean():.3g} | {e.norm(dim=1).mean():.3g} |")
    print("\n| bits | norm of B over norm of E |\n|---|---|")
    for bits in (32, 64, 128):
        longer = replace(client, defense=spn(alpha2=options.alpha2, bits=bits))
        found = [
            distortion_of(b, g) for b, g in zip(*gradients(longer, options.batches, options.batch_size), strict=True)
        ]
        ratio = sum(p.signal_to_distortion for p in found) / len(found)
        kept.add({"bits": bits, "data": options.data}, {"signal_to_distortion": ratio, "n": len(found)})
        print(f"| {bits} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
