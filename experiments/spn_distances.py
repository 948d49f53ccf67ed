"""What SPN's published distances measure (Fan et al. 2020, Tables 7 and 8, Figures 12, 16), beside this package's own.

    python experiments/spn_distances.py --data mnist --victims 4 --out experiments/rows/spn_distances

The paper's attacker (deep leakage from a pattern) on single gradients of the untrained DLNet. Of the same guesses the
error is measured as they come, and as ``rmse`` has it, brought to [0, 1] first; of batches the labels by their place in
the batch, and in the order that finds most. Guesses of noise from N(0, 1) are the control that never saw an update.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace

import torch
from measures import chance_label_distance, published_label_distance, published_rmse
from row_file import RowFile, takes_rows
from torch import Tensor

from fl_privacy.attacks import dlg
from fl_privacy.attacks.attack import ReconstructionAttack
from fl_privacy.data import load_data
from fl_privacy.defenses import ClientState, Defense, dp_noise, none, spn
from fl_privacy.federation import Client
from fl_privacy.measure.images import rmse
from fl_privacy.measure.matching import assign, hard_labels, label_correct, pair_labels
from fl_privacy.models import DLNet, build_model
from fl_privacy.types import LocalPlan, ModelState, Observation, VictimId

DEFENSES: Mapping[str, Defense] = {
    "none": none(),
    "DP-0.5": dp_noise(at="gradient", scale=0.5),
    "DP-0.1": dp_noise(at="gradient", scale=0.1),
    "SPN-0.5": spn(alpha2=0.5),
    "SPN-0.1": spn(alpha2=0.1),
}


def attacked(client: Client, attack: ReconstructionAttack, probe: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Attack one upload; return images (B, C, H, W) as they come, and classes (B,)."""
    sent = ModelState.of(client.model)
    upload = client.probe(sent, ClientState(), round=1, probe=probe, batch_size=batch_size).upload
    seen = Observation(
        id=VictimId(1, 0, probe),
        model=client.model,
        sent=sent,
        upload=upload,
        plan=client.plan,
        input_shape=tuple(client.examples.input_shape),
        num_classes=client.examples.num_classes,
    )
    (found,) = attack([seen], seed=probe)
    assert found.batch is not None, found.failure
    return found.batch.inputs.detach().cpu(), hard_labels(found.batch.labels.detach().cpu())


def mean(values: list[Tensor]) -> float:
    """Average all finite values."""
    every = torch.cat([value.flatten().double() for value in values])
    return float(every[every.isfinite()].mean())


def figures(pairs: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> dict[str, float]:
    """Compute distances between guessed and true images and labels of each batch, as published and as ours."""
    matched = [(g[assign(g, x)], x) for g, _, x, _ in pairs]
    return {
        "as_they_come": mean([published_rmse(g, x) for g, _, x, _ in pairs]),
        "clamped": mean([rmse(g.clamp(0, 1), x) for g, x in matched]),
        "label_by_place": mean([published_label_distance(y, t) for _, y, _, t in pairs]),
        "label_of_batch": mean([1 - label_correct(pair_labels(y, t), t) for _, y, _, t in pairs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="*", default=[1])
    parser.add_argument("--iterations", type=int, default=12, help="rounds of L-BFGS of 20 moves each")
    parser.add_argument("--seed", type=int, default=0)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, examples = RowFile(options.out), load_data(options.data).train
    channels, size, _ = examples.input_shape
    shape = {"in_channels": channels, "image_size": size, "num_classes": examples.num_classes}
    model = build_model(DLNet, seed=options.seed, init="uniform_0.3", **shape)
    attack = replace(dlg(start="pattern", iterations=options.iterations), as_they_come=True)
    for batch_size in options.batches:
        rng, several = torch.Generator().manual_seed(options.seed), options.victims
        client = Client(
            id=0, examples=examples, indices=torch.arange(8 * several), model=model, plan=LocalPlan(),
            seed=options.seed, defense=none(),
        )  # fmt: skip
        truths = [client.victim_batch(number, batch_size) for number in range(several)]
        chance = chance_label_distance(batch_size, examples.num_classes)
        control = []
        for batch in truths:
            noise = torch.randn(batch.inputs.shape, generator=rng)
            shuffled = batch.labels[torch.randperm(batch_size, generator=rng)]
            control.append((noise, shuffled, batch.inputs, batch.labels))
        results = {"guesses of noise, labels known but shuffled": figures(control)}
        for name, defense in DEFENSES.items():
            defended = Client(
                id=0, examples=examples, indices=client.indices, model=model, plan=LocalPlan(), seed=options.seed,
                defense=defense,
            )  # fmt: skip
            found = [attacked(defended, attack, number, batch_size) for number in range(several)]
            results[name] = figures([(*f, b.inputs, b.labels) for f, b in zip(found, truths, strict=True)])
        for name, read in results.items():
            key = {"data": options.data, "batch_size": batch_size, "of": name}
            kept.add(key, {**read, "label_by_chance": chance, "n": several * batch_size})
            print(name, {figure: round(value, 3) for figure, value in read.items()}, flush=True)


if __name__ == "__main__":
    main()
