"""How near canaries of one run come to a known epsilon, and whether faults are contradicted and honest mechanisms not.

python experiments/epsilon_true.py --part table --out experiments/rows/epsilon_true
python experiments/epsilon_true.py --part trained --out experiments/rows/epsilon_true
python experiments/epsilon_true.py --part faults --out experiments/rows/epsilon_true_faults
python experiments/epsilon_true.py --part honest --out experiments/rows/epsilon_true_honest

Stopped and started again, a command goes on with the rows that are missing. ``fl-privacy check-dp epsilon_true:NAME``
in this folder checks one of the faults.
"""

import argparse
import contextlib
import io
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epsilon_mechanisms import DELTA, HONEST, clipped, norm, std_for
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp.strategy import FedAvg
from row_file import Row, RowFile, takes_rows

from fl_privacy.cli.main import run_command_line
from fl_privacy.dp_check import check_mechanism
from fl_privacy.dp_check.bounds import best_one_run_epsilon, gaussian_mu
from fl_privacy.dp_check.canaries import canary_test
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.flower.opacus_watch import watched_opacus
from fl_privacy.types import Tensors

EPSILONS, CANARIES, STEPS, TRIALS = (1.0, 2.0, 4.0, 8.0), (500, 2000), (1, 20, 200), 200
TRAININGS = 5
CLAIMED, OTHERS, EVERY = 3.0, 8, 5
"""Claimed epsilon of the faults, number of other examples in a batch or of clients, and calls with the same noise."""


def table(rows: RowFile) -> None:
    """Bound and estimate epsilon of the Gaussian mechanism, over seeds."""
    for canaries in CANARIES:
        for epsilon in EPSILONS:
            key = {"mechanism": "Gaussian mechanism", "epsilon": epsilon, "canaries": canaries, "steps": 1}
            if rows.find(key) is None:
                print(json.dumps(rows.add(key, _simulated(epsilon, canaries))), flush=True)


def trained(rows: RowFile) -> None:
    """Bound and estimate epsilon of DP-SGD trainings on MNIST."""
    for canaries in CANARIES:
        for steps in STEPS:
            for epsilon in EPSILONS:
                key = {"mechanism": "dp_sgd", "epsilon": epsilon, "canaries": canaries, "steps": steps}
                if rows.find(key) is None:
                    print(json.dumps(rows.add(key, _trained(epsilon, canaries, steps))), flush=True)


def _simulated(epsilon: float, canaries: int) -> Row:
    found, others = [], []
    for seed in range(TRIALS):
        rng = np.random.default_rng(seed)
        taken = rng.random(canaries) < 0.5
        scores = rng.normal(size=canaries) + gaussian_mu(epsilon, DELTA) * taken
        found.append(canary_test(scores[taken], scores[~taken], delta=DELTA, unit="example"))
        others.append(best_one_run_epsilon(scores[taken], scores[~taken], delta=DELTA)[0])
    limits = [test.estimate_least for test in found if test.estimate_least is not None]
    return {
        "any_noise": _mean(others),
        "bound": _mean(test.bound for test in found),
        "bound_above": sum(test.bound > epsilon for test in found) / TRIALS,
        "limit": _mean(limits),
        "limit_above": sum(limit > epsilon for limit in limits) / TRIALS,
        "estimate": _mean(test.estimate or 0.0 for test in found),
        "trials": TRIALS,
    }


def _mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 2)


def _trained(epsilon: float, canaries: int, steps: int) -> Row:
    """Train with DP-SGD on whole batches, so that epsilon is that of the Gaussian mechanism, composed."""
    noise = math.sqrt(steps) / gaussian_mu(epsilon, DELTA)
    asked = (
        "run data=mnist_mini model=mlp federation=fedavg federation.clients=2 federation.rounds=1 holdout=3980"
        " federation.plan.batch_size=10 federation.plan.momentum=0 federation.plan.epochs=null"
        f" federation.plan.steps={steps} attack=none baseline=false intercept.rounds=all"
        f" defense=dp_sgd defense.noise_multiplier={noise} privacy.delta={DELTA}"
        f" inference=canaries inference.canaries.number={canaries}"
    )
    started, claims = time.process_time(), []
    for trial in range(TRAININGS):
        seed = 1000 * trial + round(100 * epsilon) + steps  # other noise in each cell
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.redirect_stdout(io.StringIO()):
                status = run_command_line([*asked.split(), f"seed={seed}", f"out={folder}/run"])
            assert status == 0
            claims += json.loads(next(Path(folder).rglob("claim.json")).read_text())["claims"]
    limits = [claim["estimate_least"] for claim in claims if claim["estimate_least"] is not None]
    return {
        "bound": _mean(claim["lower"] for claim in claims),
        "bound_above": sum(claim["lower"] > epsilon for claim in claims) / TRAININGS,
        "limit": _mean(limits),
        "limit_above": sum(limit > epsilon for limit in limits) / TRAININGS,
        "estimate": _mean(claim["estimate"] for claim in claims),
        "trials": TRAININGS,
        "accused": sum(claim["status"] == "contradicted" for claim in claims),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def _others(update: Tensors) -> list[Tensors]:
    """Return the gradients of the other examples of a batch, the same in each call."""
    rng = torch.Generator().manual_seed(11)
    drawn = [{name: torch.randn(value.shape, generator=rng) for name, value in update.items()} for _ in range(OTHERS)]
    return [clipped(gradient) for gradient in drawn]


RANDOM = torch.Generator().manual_seed(12)


def _noised(update: Tensors, std: float, rng: torch.Generator = RANDOM) -> Tensors:
    return {name: value + std * torch.randn(value.shape, generator=rng) for name, value in update.items()}


def clipping_per_batch(update: Tensors) -> Tensors:
    """Clip the mean gradient of a batch of nine, and add the noise of a mean of clipped gradients."""
    batch = [update, *_others(update)]
    mean = {name: torch.stack([gradient[name] for gradient in batch]).mean(0) for name in update}
    return _noised(clipped(mean), std_for(CLAIMED) / len(batch))


class _Once:
    """Noise of several rounds, drawn once."""

    def __init__(self) -> None:
        self.calls = 0
        self.noise: dict[str, np.ndarray] = {}


ONCE = _Once()


def noise_once_for_five_rounds(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Clip a reply and add noise that a mod draws anew in each fifth round only."""
    reply = call_next(message, context)
    sent = {name: torch.from_numpy(array.numpy()) for name, array in reply.content["arrays"].items()}
    if ONCE.calls % EVERY == 0:
        ONCE.noise = {
            name: std_for(CLAIMED) * torch.randn(value.shape, generator=RANDOM).numpy() for name, value in sent.items()
        }
    ONCE.calls += 1
    reply.content["arrays"] = ArrayRecord({n: v + torch.from_numpy(ONCE.noise[n]) for n, v in clipped(sent).items()})
    return reply


def seed_reused(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Clip a reply and add noise of a generator with the same seed in each round."""
    reply = call_next(message, context)
    sent = {name: torch.from_numpy(array.numpy()) for name, array in reply.content["arrays"].items()}
    noised = _noised(clipped(sent), std_for(CLAIMED), torch.Generator().manual_seed(20_260_712))
    reply.content["arrays"] = ArrayRecord(dict(noised))
    return reply


def noise_over_batch_size(update: Tensors) -> Tensors:
    """Sum the clipped gradients of a batch of nine, and divide their noise by nine."""
    batch = [clipped(gradient) for gradient in (update, *_others(update))]
    total = {name: torch.stack([gradient[name] for gradient in batch]).sum(0) for name in update}
    return _noised(total, std_for(CLAIMED) / len(batch))


class ClippingAfterTheMean(FedAvg):
    """Average updates as they are, clip the mean, and add the noise of a mean of clipped updates."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = list(replies)
        mean, metrics = super().aggregate_train(server_round, found)
        assert mean is not None
        sent = {name: torch.from_numpy(array.numpy()) for name, array in mean.items()}
        return ArrayRecord(dict(_noised(clipped(sent), std_for(CLAIMED) / len(found)))), metrics


def clipping_after_the_mean() -> ClippingAfterTheMean:
    return ClippingAfterTheMean(min_train_nodes=OTHERS, min_available_nodes=OTHERS)


MOMENTUM: dict[str, torch.Tensor] = {}


def momentum_counted_once(update: Tensors) -> Tensors:
    """Release a momentum of .9 over all calls with the noise of one clipped update."""
    for name, value in clipped(update).items():
        MOMENTUM[name] = 0.9 * MOMENTUM.get(name, torch.zeros_like(value)) + value
    return _noised(MOMENTUM, std_for(CLAIMED))


def seed_of_the_client(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Clip a reply and add noise of a generator seeded by the client's number, as a simulation makes it each round."""
    reply = call_next(message, context)
    rng = torch.Generator().manual_seed(10**9 + int(context.node_config["partition-id"]))
    sent = {name: torch.from_numpy(array.numpy()) for name, array in reply.content["arrays"].items()}
    reply.content["arrays"] = ArrayRecord(dict(_noised(clipped(sent), std_for(CLAIMED), rng)))
    return reply


def norm_among_the_metrics(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Clip and noise a reply, and send the norm before clipping as a metric."""
    reply = call_next(message, context)
    sent = {name: torch.from_numpy(array.numpy()) for name, array in reply.content["arrays"].items()}
    reply.content["arrays"] = ArrayRecord(dict(_noised(clipped(sent), std_for(CLAIMED))))
    reply.content["metrics"]["update_norm"] = norm(sent)
    return reply


def noise_on_the_gradient(update: Tensors) -> Tensors:
    """Clip the update, but add the noise to the gradient, which the learning rate .1 shrinks."""
    return _noised(clipped(update), 0.1 * std_for(CLAIMED))


def noise_on_the_last_layer(update: Tensors) -> Tensors:
    """Clip all arrays together, and noise the last alone."""
    *others, last = clipped(update)
    kept = clipped(update)
    return {**{name: kept[name] for name in others}, **_noised({last: kept[last]}, std_for(CLAIMED))}


def clipping_each_value(update: Tensors) -> Tensors:
    """Cut each value to the clipping norm, as if the largest one was the norm."""
    return _noised({name: value.clamp(-1, 1) for name, value in update.items()}, std_for(CLAIMED))


def sensitivity_of_another_norm(update: Tensors) -> Tensors:
    """Clip the Euclidean norm, and add Laplace noise, whose scale goes by the sum of magnitudes."""
    made = torch.distributions.Laplace(0.0, 1 / CLAIMED)
    return {name: value + made.sample(value.shape) for name, value in clipped(update).items()}


class NoiseOverClientsTwice(FedAvg):
    """Average clipped updates, and divide the noise of their sum by the number of clients twice."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = list(replies)
        for reply in found:
            sent = {name: torch.from_numpy(array.numpy()) for name, array in reply.content["arrays"].items()}
            reply.content["arrays"] = ArrayRecord(dict(clipped(sent)))
        mean, metrics = super().aggregate_train(server_round, found)
        assert mean is not None
        sent = {name: torch.from_numpy(array.numpy()) for name, array in mean.items()}
        return ArrayRecord(dict(_noised(sent, std_for(CLAIMED) / len(found) ** 2))), metrics


def noise_over_clients_twice() -> NoiseOverClientsTwice:
    return NoiseOverClientsTwice(min_train_nodes=OTHERS, min_available_nodes=OTHERS)


def noise_in_half_precision(update: Tensors) -> Tensors:
    """Add noise that was rounded to 16 bits, whose grid an update of 32 bits leaves."""
    drawn = _noised({name: torch.zeros_like(value) for name, value in update.items()}, std_for(CLAIMED))
    return {name: value + drawn[name].half().float() for name, value in clipped(update).items()}


def noise_cut_at_two_deviations(update: Tensors) -> Tensors:
    """Bound the noise, so that values beyond the bound exist with the update alone."""
    std = std_for(CLAIMED)
    drawn = _noised({name: torch.zeros_like(value) for name, value in update.items()}, std)
    return {name: value + drawn[name].clamp(-2 * std, 2 * std) for name, value in clipped(update).items()}


def noise_of_one_sign(update: Tensors) -> Tensors:
    """Add the magnitude of the noise."""
    drawn = _noised({name: torch.zeros_like(value) for name, value in update.items()}, std_for(CLAIMED))
    return {name: value + drawn[name].abs() for name, value in clipped(update).items()}


def noise_where_the_update_is(update: Tensors) -> Tensors:
    """Add noise to the values that an update has, and leave its zeros."""
    noised = _noised(clipped(update), std_for(CLAIMED))
    return {name: value * (update[name] != 0) for name, value in noised.items()}


FAULTS: tuple[Callable[..., Any], ...] = (
    clipping_per_batch,
    noise_once_for_five_rounds,
    seed_reused,
    noise_over_batch_size,
    clipping_after_the_mean,
    momentum_counted_once,
    seed_of_the_client,
    norm_among_the_metrics,
    noise_on_the_gradient,
    noise_on_the_last_layer,
    clipping_each_value,
    sensitivity_of_another_norm,
    noise_over_clients_twice,
    noise_in_half_precision,
    noise_cut_at_two_deviations,
    noise_of_one_sign,
    noise_where_the_update_is,
)


def faults(rows: RowFile) -> None:
    """Check each fault as a user would, by ``fl-privacy check-dp``."""
    for fault in FAULTS:
        key = {"fault": fault.__name__.replace("_", " ")}
        if rows.find(key) is not None:
            continue
        started, said = time.process_time(), io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
            delta, draws = ("0", 4000) if fault is sensitivity_of_another_norm else ("1e-5", 1000)
            given = f"epsilon_true:{fault.__name__} --epsilon {CLAIMED} --clip-norm 1 --draws {draws} --json"
            more = ["--delta", delta, f"clients={OTHERS}", "--out", f"{folder}/claim.html"]
            status = run_command_line(["check-dp", *given.split(), *more])
        (claim,) = json.loads(said.getvalue())["claims"]
        figures = {
            "claimed": CLAIMED,
            "lower": None if claim["lower"] is None or math.isinf(claim["lower"]) else round(claim["lower"], 2),
            "contradicted": claim["status"] == "contradicted" and status == 1,
            "reason": claim["reason"],
            "cpu_seconds": round(time.process_time() - started, 1),
        }
        print(json.dumps(rows.add(key, figures)), flush=True)


def honest(rows: RowFile) -> None:
    """Check honest mechanisms at five seeds each."""
    for name, subject in HONEST.items():
        key = {"mechanism": name}
        if rows.find(key) is not None:
            continue
        started, accused, doubted, runs = time.process_time(), 0, 0, 5
        for seed in range(runs):
            made = subject.make(EPSILONS[seed % len(EPSILONS)], 1000 + seed)
            torch.manual_seed(seed)
            found = check_mechanism(made.mechanism, draws=min(subject.draws, 2000), seed=seed, **made.asked())
            accused, doubted = accused + found.contradicted, doubted + found.doubted
        figures = {"runs": runs, "accused": accused, "doubted": doubted}
        print(
            json.dumps(rows.add(key, {**figures, "cpu_seconds": round(time.process_time() - started, 1)})), flush=True
        )
    for poisson in (True, False):
        key = {"mechanism": f"training by Opacus, {'Poisson samples' if poisson else 'shuffled'}"}
        if rows.find(key) is None:
            started = time.process_time()
            found = [_opacus_training(EPSILONS[seed % len(EPSILONS)], seed, poisson=poisson) for seed in range(5)]
            figures = {
                "runs": len(found),
                "accused": sum(each.status == "contradicted" for each in found),
                "doubted": sum(each.status == "doubted" for each in found),
                "unsupported": sum(each.status == "unsupported" for each in found),
                "cpu_seconds": round(time.process_time() - started, 1),
            }
            print(json.dumps(rows.add(key, figures)), flush=True)


def _opacus_training(epsilon: float, seed: int, *, poisson: bool) -> ClaimVerdict:
    """Train three epochs on random data by Opacus, as a client would, and check what its accountant claims."""
    from opacus import PrivacyEngine  # noqa: PLC0415

    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(torch.randn(200, 30), torch.randint(5, (200,)))
    with watched_opacus() as watch:
        model = torch.nn.Linear(30, 5)
        engine = PrivacyEngine()
        module, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=torch.utils.data.DataLoader(data, batch_size=20, shuffle=True),
            target_epsilon=epsilon,
            target_delta=DELTA,
            epochs=3,
            max_grad_norm=1.0,
            poisson_sampling=poisson,
        )
        for _ in range(3):
            for inputs, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(module(inputs), labels).backward()
                optimizer.step()
        engine.get_epsilon(DELTA)
    (found,) = watch.verdicts(DpCheckRequest(draws=500, seed=seed), rounds=1)
    return found


PARTS = {"table": table, "trained": trained, "faults": faults, "honest": honest}


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
