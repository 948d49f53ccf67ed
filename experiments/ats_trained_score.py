"""How ATS's privacy score goes with what is read behind a network that was trained to its end (ATS, Figure 5: 0.755).

    python experiments/ats_trained_score.py DATA --out experiments/rows/ats_trained_score

DATA is that of `ats_trained_weights.py`. For each of some random policies, the score behind He et al.'s ResNet-20, and
what Adam with the cosine reads behind the same weights, trained on under the policy where ``--epochs`` says so. Images
that are scored are not attacked. Policies that have a row are not attacked again, and `--minutes` stops in between; the
correlation is that over all that are there.
"""

import argparse
import time
from argparse import Namespace
from collections.abc import Sequence

import torch
from ats_correlation import compared, correlate, images_of_all_classes, transformed_as
from ats_trained_weights import add_options, network_of, observe, trained_on
from row_file import Row, RowFile
from torch import nn

from fl_privacy.data import load_data
from fl_privacy.data.transformations import Policy, random_policies
from fl_privacy.defenses.policy_search.scores import GradientSimilarity, PrivacyPlan, privacy_scores
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_attack
from fl_privacy.runs.config import compose_run
from fl_privacy.types import Batch, ModelState

VARIANTS = ("paper", "code")


def key_of(policy: str, options: Namespace) -> Row:
    """Return the fields that name a policy's row."""
    names = ("network", "victims", "iterations", "epochs", "examples", "scored")
    return {"attacked": policy, **{name: getattr(options, name) for name in names}}


def scores_of(model: nn.Module, batch: Batch, policies: Sequence[str]) -> dict[str, dict[str, float]]:
    """Score policies as the paper says and as its authors' program does."""
    similarity = GradientSimilarity(model, ModelState.of(model), tuple(batch.inputs.shape[1:]))
    parsed = [Policy.parse(name, "paper") for name in policies]
    found = {}
    for variant in VARIANTS:
        scored = privacy_scores(similarity, batch, parsed, plan=PrivacyPlan.named(variant), seed=0)
        found[variant] = {name: one.score for name, one in zip(policies, scored, strict=True)}
    return found


def add_rows(policies: Sequence[str], options: Namespace, kept: RowFile) -> None:
    """Score and attack policies, some at a time, and keep a row for each."""
    data = load_data("cifar10_exact", root=str(options.data))
    every = images_of_all_classes(data.test, options.victims + options.scored)
    attacked = Batch(every.inputs[: options.victims], every.labels[: options.victims])
    scored = Batch(every.inputs[options.victims :], every.labels[options.victims :])
    model, until = network_of(options), time.monotonic() + 60 * options.minutes
    given = ["attack=ats_adam_cosine", "attack.compile=off", f"attack.iterations={options.iterations}"]
    attack = build_attack(compose_run(given).attack, device="cpu")
    for begin in range(0, len(policies), options.together):
        if time.monotonic() > until:
            break
        some = policies[begin : begin + options.together]
        goals = {name: transformed_as(attacked.inputs, name, "paper") for name in some}
        states = {name: trained_on(model, data.train, name, options) for name in some}
        seen = [one for name in some for one in observe(model, states[name], goals[name], attacked.labels, name)]
        found, scores = attack(seen, seed=0), scores_of(model, scored, some)
        for place, name in enumerate(some):
            own = found[place * options.victims : (place + 1) * options.victims]
            guesses = torch.cat([one.batch.inputs for one in own if one.batch is not None]).clamp(0, 1)
            told = {variant: scores[variant][name] for variant in VARIANTS}
            kept.add(key_of(name, options), {**told, **compared(guesses, goals[name], attacked.inputs)})
        print(f"{begin + len(some)} of {len(policies)} policies", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, victims=4, iterations=200, epochs=0)
    parser.add_argument("--policies", type=int, default=40)
    parser.add_argument("--scored", type=int, default=20, help="images")
    parser.add_argument("--together", type=int, default=4, help="policies attacked in one batch")
    parser.add_argument("--minutes", type=float, default=1e9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    drawn = random_policies(options.policies, derive_generator(0, "experiment", "policies"))
    names = [str(policy) for policy in drawn]
    add_rows([name for name in names if kept.find(key_of(name, options)) is None], options, kept)
    rows = [row for name in names if (row := kept.find(key_of(name, options)))]
    for variant in VARIANTS:
        key: Row = {"score": variant, **key_of("", options)}
        del key["attacked"]
        correlate(
            {row["attacked"]: row[variant] for row in rows},
            [{**row, "policy": row["attacked"]} for row in rows],
            kept,
            key,
        )


if __name__ == "__main__":
    main()
