"""Claims of differential privacy whose truth is known: planted faults, bounds by draws, Flower's.

python experiments/epsilon_claims.py --part faults --out experiments/rows/epsilon_faults
python experiments/epsilon_claims.py --part draws --out experiments/rows/epsilon_draws
python experiments/epsilon_claims.py --part flower --out experiments/rows/epsilon_flower
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from epsilon_mechanisms import DELTA, ONE, THREE, claim, clipped, copies, gaussian, std_for
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from row_file import Row, RowFile, takes_rows

from fl_privacy.dp_check import Claim, Facts, Neighbors, check_mechanism, recompute
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.draws import ManyAtOnce
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.flower.dp_mechanisms import mechanism_of_mod, verdicts_on
from fl_privacy.types import Tensors

Many = Callable[[Tensors, int], Tensors]


def noised(std: float, *, clip: Callable[[Tensors], Tensors] = clipped, bare: tuple[str, ...] = ()) -> Many:
    rng = torch.Generator().manual_seed(3)

    def many(update: Tensors, n: int) -> Tensors:
        kept = copies(clip(update), n)
        return {k: v if k in bare else v + std * torch.randn(v.shape, generator=rng) for k, v in kept.items()}

    return many


def after_noise(update: Tensors, n: int) -> Tensors:
    rows = noised(std_for(1), clip=lambda u: u)(update, n)
    lengths = torch.stack([v.flatten(1).square().sum(1) for v in rows.values()]).sum(0).sqrt().clamp_min(1)
    return {name: v / lengths.view(-1, *[1] * (v.dim() - 1)) for name, v in rows.items()}


def same_each_round(update: Tensors, n: int) -> Tensors:
    rng = torch.Generator().manual_seed(5)
    return {k: (v + std_for(1) * torch.randn(v.shape, generator=rng)).expand(n, *v.shape) for k, v in
            clipped(update).items()}  # fmt: skip


SHARED = torch.Generator().manual_seed(6)


def same_for_all_clients(update: Tensors, n: int) -> Tensors:
    value = clipped(update)["weight"]
    noise = std_for(1) * torch.randn(n, *value.shape, generator=SHARED)
    return {"weight": value + noise, "weight of another client": noise}


def noise_on_metrics(update: Tensors, n: int) -> Tensors:
    kept = copies(clipped(update), n)
    loss = kept["weight"].flatten(1)[:, :1] + std_for(1) * torch.randn(n, 1, generator=SHARED)
    return {**kept, "train_loss": loss}


def local_dp_mod(sensitivity: float) -> Many:
    def many(update: Tensors, n: int) -> Tensors:
        return mechanism_of_mod(LocalDpMod(math.sqrt(n), sensitivity, 1.0, DELTA))(copies(update, n))

    return many


def nvflare_svt(update: Tensors, n: int) -> Tensors:
    """Apply the sparse vector technique at NVFlare's defaults, rewritten from its source's description.

    What is above a noisy threshold is a candidate; a tenth of the values is chosen of these with replacement and gets
    noise; a candidate that is not chosen leaves as it is.
    """
    gamma, tau, epsilon, noise_budget = 1e-5, 1e-6, 0.1, 0.1
    rng = np.random.default_rng(int(torch.randint(1 << 31, (1,), generator=SHARED)))
    value = update["weight"].double().numpy().ravel()
    number = math.ceil(len(value) / 10)
    per_query = gamma * 4 * number / (epsilon * (2 * number) ** (2 / 3))
    rows = np.empty((n, len(value)))
    for row in rows:
        row[:] = value
        threshold = tau + rng.laplace(scale=2 * gamma / epsilon)
        left, accepted = np.arange(len(value)), np.array([], dtype=int)
        while len(accepted) < number:
            above = (
                np.abs(np.clip(value[left], -gamma, gamma)) + rng.laplace(scale=per_query, size=len(left)) >= threshold
            )
            accepted, left = np.concatenate([accepted, left[above]]), left[~above]
        chosen = rng.choice(accepted, size=number)
        row[chosen] = np.clip(row[chosen] + rng.laplace(scale=2 * gamma / noise_budget, size=number), -gamma, gamma)
        row[left] = 0.0
    return {"weight": torch.from_numpy(rows)}


def per_array(update: Tensors) -> Tensors:
    return {name: clipped({name: value})[name] for name, value in update.items()}


BATCH_NORM = {"fc.weight": torch.zeros(5, 8), "bn.running_mean": torch.zeros(4), "bn.running_var": torch.zeros(4)}
FAULTS: dict[str, tuple[Many, Claim, Tensors]] = {
    "sensitivity 0 (Flower's LocalDpMod)": (local_dp_mod(0.0), claim(1.0), ONE),
    "sensitivity half the clipping norm (Flower's LocalDpMod)": (local_dp_mod(0.5), claim(1.0), ONE),
    "no clipping": (noised(std_for(1), clip=lambda u: u), claim(1.0), THREE),
    "clipping of each array, claimed as global": (noised(std_for(1), clip=per_array), claim(1.0), THREE),
    "noise for a mean of 32 on the sum": (noised(std_for(3) / 32), claim(3.0), THREE),
    "noise divided by ten clients, though each reply is seen": (noised(std_for(8) / 10), claim(8.0), THREE),
    "the same seed in each round": (same_each_round, claim(1.0), THREE),
    "the same seed on all clients": (same_for_all_clients, claim(1.0), ONE),
    "noise on metrics only": (noise_on_metrics, claim(1.0), ONE),
    "batch-norm statistics left out": (noised(std_for(1), bare=("bn.running_mean", "bn.running_var")), claim(1.0),
                                       BATCH_NORM),
    "the last layer's bias left out": (noised(std_for(8), bare=("fc.bias",)), claim(8.0), THREE),
    "one round's epsilon claimed for fifty": (noised(std_for(1)), claim(1.0, rounds=50), THREE),
    "clipping after noise": (after_noise, claim(1.0), THREE),
    "sparse vector at NVFlare's defaults": (nvflare_svt, Claim(epsilon=0.1, delta=0.0), ONE),
}  # fmt: skip


def faults(rows: RowFile) -> None:
    for name, (many, made, like) in FAULTS.items():
        np.random.seed(1)
        noise = "other" if made.delta == 0 else "gaussian"
        found = check_mechanism(ManyAtOnce(many=many), claimed=made, like=like, clip_norm=1.0, noise=noise)
        figures = {
            "claimed": made.epsilon,
            "lower": "nothing bounds it"
            if math.isinf(found.lower_bound) or found.bare
            else round(found.lower_bound, 2),
            "found": found.contradicted,
            "reason": found.reason,
            "draws": found.draws,
        }
        print(json.dumps(rows.add({"fault": name}, figures)), flush=True)
    _by_figures(rows)


def _by_figures(rows: RowFile) -> None:
    """Check an accountant that counts batches as sampled at a rate that the loader does not have."""
    by_poisson = recompute(Facts(noise_multiplier=1.0, sample_rate=0.01, sampling="poisson", rounds=1000), delta=DELTA)
    assert by_poisson.epsilon is not None
    made = claim(by_poisson.epsilon, unit="example", rounds=1000)
    for name, facts in {
        "an accountant at a tenth of the loader's rate": Facts(
            noise_multiplier=1.0, sample_rate=0.1, sampling="poisson", rounds=1000
        ),
        "an accountant of Poisson samples over a shuffled set": Facts(
            noise_multiplier=1.0, sample_rate=0.01, sampling="shuffle", rounds=1000
        ),
    }.items():
        found = ClaimVerdict(subject=name, claim=made, recomputed=recompute(facts, delta=DELTA))
        figures = {
            "claimed": round(made.epsilon, 2),
            "lower": f"recomputed {found.recomputed.epsilon:.3g}",  # type: ignore[union-attr]
            "found": found.status == "contradicted",
            "reason": found.reason or f"{found.status}: {found.recomputed.caveats[0]}",  # type: ignore[union-attr]
            "draws": 0,
        }
        print(json.dumps(rows.add({"fault": name}, figures)), flush=True)


def draws(rows: RowFile) -> None:
    """Check the Gaussian mechanism: lower bounds beside the true epsilon."""
    for epsilon in (0.5, 1.0, 3.0, 8.0):
        for number in (500, 1000, 2000, 5000, 10_000, 20_000):
            subject = gaussian(epsilon, number)
            found = check_mechanism(subject.mechanism, draws=number, **{**subject.asked(), "claimed": claim(math.inf)})
            figures = {
                "any_shape": round(found.epsilon, 3),
                "if_gaussian": round(found.epsilon_if_gaussian or 0.0, 3),
                "showable": round(found.showable, 2),
            }
            print(json.dumps(rows.add({"epsilon": epsilon, "draws": number}, figures)), flush=True)


def adaptive(kind: type, *mods: object) -> ManyAtOnce:
    """Run one round of a strategy with adaptive clipping n times, one draw after the other.

    Its noise goes by a norm that is drawn itself.
    """

    def many(update: Tensors, n: int) -> Tensors:
        from fl_privacy.flower.dp_mechanisms import mechanism_of_strategy  # noqa: PLC0415

        def fresh() -> object:
            return kind(FedAvg(), 1.0, 1, initial_clipping_norm=1.0, clipped_count_stddev=0.6)

        mechanism = mechanism_of_strategy(fresh, clients=1, mods=mods)  # type: ignore[arg-type]
        drawn = [mechanism(update) for _ in range(n)]
        return {name: torch.stack([one[name] for one in drawn]) for name in drawn[0]}

    return ManyAtOnce(many=many)


def flower(rows: RowFile) -> None:
    """Check Flower's own mod and strategies against the epsilon that they state."""
    for sensitivity in (0.0, 0.5, 1.0):
        mod = LocalDpMod(1.0, sensitivity, 1.0, DELTA)
        np.random.seed(2)
        check = check_mechanism(ManyAtOnce(many=local_dp_mod(sensitivity)), claimed=claim(1.0), like=ONE, clip_norm=1.0)
        recomputed = verdicts_on(mod, DpCheckRequest(draws=200, parameters=20))[0].recomputed
        _add(rows, f"LocalDpMod, sensitivity {sensitivity:g}", ClaimVerdict(subject="", claim=claim(1.0), check=check,
                                                                           recomputed=recomputed))  # fmt: skip
    for name, kind, mods in (
        ("server-side fixed", DifferentialPrivacyServerSideFixedClipping, ()),
        ("client-side fixed", DifferentialPrivacyClientSideFixedClipping, (fixedclipping_mod,)),
    ):
        from epsilon_mechanisms import fixed  # noqa: PLC0415

        subject = fixed(kind, *mods)(gaussian_epsilon(1.0, DELTA), 2)
        check = check_mechanism(subject.mechanism, **subject.asked())
        stated = recompute(Facts(noise_multiplier=1.0), delta=DELTA)
        _add(rows, name, ClaimVerdict(subject="", claim=subject.claim, check=check, recomputed=stated))
    for name, kind, mods in (
        ("server-side adaptive", DifferentialPrivacyServerSideAdaptiveClipping, ()),
        ("client-side adaptive", DifferentialPrivacyClientSideAdaptiveClipping, (adaptiveclipping_mod,)),
    ):
        np.random.seed(2)
        first = {"weight": torch.ones(20) * 10}
        pair = Neighbors(first=first, second={"weight": torch.zeros(20)}, what="a large update against none")
        made = claim(gaussian_epsilon(1.0, DELTA))
        check = check_mechanism(adaptive(kind, *mods), claimed=made, neighbors=pair, clip_norm=1.0, draws=1000)
        own = (1 / (1 - 1 / 1.2**2)) ** 0.5
        stated = recompute(Facts(noise_multiplier=(own**-2 + 0.6**-2) ** -0.5), delta=DELTA)
        _add(rows, name, ClaimVerdict(subject="", claim=made, check=check, recomputed=stated))


def _add(rows: RowFile, name: str, found: ClaimVerdict) -> None:
    assert found.claim is not None and found.check is not None
    spent = found.recomputed.epsilon if found.recomputed else None
    figures: Row = {
        "claimed": round(found.claim.epsilon, 3),
        "recomputed": None if spent is None else "∞" if math.isinf(spent) else round(spent, 3),
        "lower": "nothing bounds it" if found.check.bare else round(found.check.lower_bound, 3),
        "noticed_from": None if found.check.noticed is None else round(found.check.noticed, 2),
        "contradicted": found.status == "contradicted",
        "by_draws": found.check.contradicted,
        "draws": found.check.draws,
        "reason": found.check.reason or found.reason,
    }
    print(json.dumps(rows.add({"part": name}, figures)), flush=True)


PARTS = {"faults": faults, "draws": draws, "flower": flower}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    takes_rows(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    PARTS[options.part](RowFile(options.out))


if __name__ == "__main__":
    main()
