"""What FDL-PP and its competitors keep of accuracy and privacy: one row of its tables for each method.

    python experiments/fdl_pp.py --methods SplitFed FDL-PP --rounds 40 --out runs/fdl_pp_mnist
    python experiments/fdl_pp_table.py runs/fdl_pp_mnist --rows experiments/rows/fdl_pp

Trains ten clients without protection (DL), with noise (DLDP-A, DLDP-B), with private first layers (SplitFed), with
passports (FDL-PP), and under secure aggregation. Then attacks victims that no client trained on: each is sent through
the defended update of a client behind the model of the last round, and server and another client collude. Under
SecAgg+ the server sees the sum of the updates of ten clients with one image each, and the ten are attacked in it; under
CKKS it sees nothing. Every attack is run ``--runs`` times from different starts.

Each method leaves a file of its own, so that methods can be run apart, and the same command goes on with what is
missing; ``fdl_pp_table.py`` makes rows of them.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from kept_training import Done, KeptTraining
from measures import effective_rank, mean_squared_distance, scale_norm
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_privacy.attacks import ReconstructionAttack, dlg, inverting_gradients, model_inversion
from fl_privacy.data import Examples
from fl_privacy.defenses import ClientState, none
from fl_privacy.defenses._fdl_pp import passport_layers
from fl_privacy.defenses.privacy import epsilon, noise_multiplier_for
from fl_privacy.effects import Noise
from fl_privacy.federation import Audit, Client, Probe, evaluate_model, plain_rounds, private_names, run_all
from fl_privacy.federation.ckks import encrypted_rounds
from fl_privacy.federation.interception import States
from fl_privacy.federation.server import weighted_mean
from fl_privacy.flower.secagg import secure_rounds
from fl_privacy.measure.images import bpki, mse
from fl_privacy.measure.matching import match
from fl_privacy.runs.attacker_knowledge import side_information_of
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import Setup, build_setup
from fl_privacy.types import Batch, Observation, Reconstruction, Upload, VictimId

CLIENTS, COLLUDER, VICTIM = 10, 9, 0
COLLUDING = f"threat_model.colluder={COLLUDER}"
METHODS = {
    "DL": ["defense=none"],
    "DLDP-A": ["defense=dp_noise", "defense.scale=0.002"],
    "DLDP-B": ["defense=dp_noise", "defense.scale=0.128"],
    "SplitFed": ["defense=split_fed", COLLUDING],
    "FDL-PP": ["defense=fdl_pp", COLLUDING],
    "SecAgg+": ["defense=none"],
    "CKKS": ["defense=none"],
}
SPLIT = ("SplitFed", "FDL-PP")
SECURE: dict[str, Callable[..., Any]] = {"SecAgg+": secure_rounds, "CKKS": encrypted_rounds}
DELTA, PUBLISHED_EPSILON = 1e-5, 15.8


@dataclass
class Course:
    """Watches the clients' private layers at the beginning of each round (Figures 4 and 5)."""

    federation: Setup
    rows: list[dict[str, float]] = field(default_factory=list)

    @property
    def clients(self) -> Mapping[int, Client]:
        return self.federation.clients

    def __call__(
        self,
        observation: Observation,
        *,
        states: States,
    ) -> Observation:
        self.look({client: states(client) for client in self.clients})
        return observation

    def look(self, states: Mapping[int, ClientState]) -> None:
        sent = self.federation.server.state
        parts = [self.clients[client].private_part(sent, state) for client, state in states.items()]
        kept = private_names(self.federation.model, self.federation.defense)
        row: dict[str, float] = {}
        for name in (n for n, p in parts[0][1].parameters.items() if n in kept and p.ndim > 1):
            weights = torch.stack([own.parameters[name] for _, own in parts])
            row[f"distance of {name}"] = mean_squared_distance(weights)
            row[f"rank of {name}"] = mean(effective_rank(w) for w in weights)
        for model, own in parts:
            model.load_state_dict({**own.parameters, **own.buffers}, strict=False)
        for name in passport_layers(parts[0][0]):
            gammas = [passport_layers(model)[name].affine()[0] for model, _ in parts]
            row[f"norm of gamma in {name}"] = mean(float(gamma.detach().norm()) for gamma in gammas)
            row[f"largest of gamma in {name}"] = mean(scale_norm(gamma) for gamma in gammas)
        for name in norms_behind(parts[0][0], kept):
            row[f"largest of gamma in {name}"] = mean(scale_norm(own.parameters[f"{name}.weight"]) for _, own in parts)
        self.rows.append(row)


def norms_behind(model: nn.Module, kept: Collection[str]) -> list[str]:
    """Name the private batch norms that scale channels where no passport does."""
    if passport_layers(model):
        return []
    found = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    return [name for name in found if f"{name}.weight" in kept]


def some(number: int, most: int | None) -> Tensor:
    """Draw the indices of up to ``most`` of ``number`` examples."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(0))[:most]


def federation_of(options: argparse.Namespace, method: str) -> Setup:
    settings = [
        f"data={options.data}",
        f"model={options.model}",
        "model.mean=null",
        "model.std=null",
        "partition=iid",
        "federation=fedavg",
        f"federation.rounds={max(1, options.rounds)}",
        f"federation.clients={CLIENTS}",
        "federation.plan.lr=0.01",
        "federation.plan.lr_decay=0.99",
        "federation.plan.batch_size=10",
        "attack=none",
        "batch_size=1",
        "threat_model.knows_features=true",
        f"threat_model.features_at={options.features_at or 'null'}",
        f"evaluate_every={max(1, options.rounds)}",
        f"seed={options.seed}",
        *options.override,
        *METHODS[method],
        *([f"defense.start={options.start}"] if method in SPLIT else []),
    ]
    federation = build_setup(compose_run(settings))
    each = None if options.examples is None else options.examples // CLIENTS
    test = federation.dataset.test.subset(some(len(federation.dataset.test), options.tested))
    clients = {
        client: replace(p, indices=p.indices[some(len(p.indices), each)], test=test)
        for client, p in federation.clients.items()
    }
    return replace(federation, clients=clients, dataset=replace(federation.dataset, test=test))


def trained(federation: Setup, method: str, options: argparse.Namespace) -> Done:
    """Train by a method, or go on where training was stopped before."""
    nothing = Done(states={client: ClientState() for client in federation.clients})
    if method in SECURE:
        started = time.process_time()
        reports, _ = run_all(SECURE[method](federation.server, federation.clients, rounds=options.rounds))
        spent = time.process_time() - started
        return replace(nothing, round=options.rounds, report=reports[-1] if reports else None, cpu_seconds=spent)
    kept = KeptTraining(options.out / f"{method}.training")
    done = kept.load(federation.server) if kept.exists else nothing
    while done.round < options.rounds:
        done = further(federation, done, last=min(options.rounds, done.round + options.kept_every))
        kept.save(federation.server, done)
    return done


def further(federation: Setup, done: Done, *, last: int) -> Done:
    """Continue the training up to round ``last``."""
    course, started = Course(federation, list(done.course)), time.process_time()
    watched = Audit(rounds=frozenset(range(1, last + 1)), probes=(Probe(VICTIM, 0),))
    rounds = plain_rounds(
        federation.server,
        federation.clients,
        first=done.round + 1,
        states=done.states,
        rounds=last,
        audit=watched if federation.server.personal else Audit(),
        interceptor=replace(federation.interceptor(), side_information=course),
    )
    reports, states = run_all(rounds)
    spent = done.cpu_seconds + time.process_time() - started
    return Done(round=last, states=states, course=course.rows, report=reports[-1], cpu_seconds=spent)


def captured(
    federation: Setup, kept: Mapping[int, ClientState], victims: Examples, options: argparse.Namespace
) -> tuple[list[Observation], list[Batch]]:
    """Observe victims on the last model, with the features that are shared, and return the truth too."""
    owner = replace(federation.clients[VICTIM], examples=victims, indices=torch.arange(len(victims)))
    experiment = replace(
        federation,
        clients={**federation.clients, VICTIM: owner},
        audit=Audit(probes=tuple(Probe(VICTIM, victim) for victim in range(options.victims)), batch_size=1),
        states=defaultdict(ClientState, kept),
    )
    found = experiment.observe(federation.server.state, round=options.rounds)
    if options.features_of == "trained":  # by what the clients train on, not by the victims, whom nobody trained on
        inside = side_information_of(experiment.config.threat_model, experiment.clients, batch_size=1, seed=0)
        assert inside is not None
        inside = replace(inside, trainers=federation.clients, features_of="trained", colluder=COLLUDER)
        found = [inside(observation, states=experiment.states.__getitem__) for observation in found]
    truth = experiment.ground_truth()
    return found, [truth.batch(observation.id) for observation in found]


def summed(federation: Setup, victims: Examples, options: argparse.Namespace) -> tuple[list[Observation], list[Batch]]:
    """Observe the mean update of all clients, one image each, which is all that masks leave visible."""
    every, sent = torch.arange(len(victims)), federation.server.state
    owners = [replace(p, examples=victims, indices=every) for p in federation.clients.values()]
    probes = [o.probe(sent, ClientState(), round=options.rounds, probe=0, batch_size=1).upload for o in owners]
    upload = Upload(
        tensors=weighted_mean([p.tensors for p in probes], [1] * len(probes)),
        buffers=weighted_mean([p.buffers for p in probes], [1] * len(probes)),
        num_examples=len(probes),
    )
    observation = Observation(
        id=VictimId(options.rounds, 0, part="sum"),
        model=federation.model,
        sent=sent,
        upload=upload,
        plan=replace(owners[0].plan.in_round(options.rounds, probe=True), batch_size=len(probes)),
        input_shape=victims.input_shape,
        num_classes=victims.num_classes,
    )
    own = [owner.victim_batch(0, 1) for owner in owners]
    return [observation], [Batch(torch.cat([b.inputs for b in own]), torch.cat([b.labels for b in own]))]


def attacks(options: argparse.Namespace) -> dict[str, tuple[ReconstructionAttack, bool]]:
    """Return the attacks by name, and whether each knows the defense."""
    search = {"iterations": 60, "lr": 1.0, "line_search": "strong_wolfe"}
    inversion = model_inversion(**search, total_variation=1e-4)
    chosen: dict[str, tuple[ReconstructionAttack, bool]] = {
        "DLG": (dlg(iterations=100, relative=True), False),
        "cosine": (inverting_gradients(iterations=1000), False),
        "MI": (inversion, False),
        "MI, published loss": (model_inversion(**search, form="published", total_variation=0.1), False),
        "MI, published steps": (model_inversion(lr=options.inversion_lr), False),
        "MI, joint": (inversion, True),
    }
    return {name: chosen[name] for name in options.attacks}


def scores(found: Sequence[Reconstruction], truth: Sequence[Batch]) -> dict[str, list[float]]:
    """Score each image that has a guess, and its negative too, which attacks on layers may find."""
    guesses, originals = list[Tensor](), list[Tensor]()
    for reconstruction, batch in zip(found, truth, strict=True):
        matched = match(reconstruction, batch)
        guesses.append(matched.guesses[matched.found])
        originals.append(matched.originals[matched.found])
    guess, original = torch.cat(guesses), torch.cat(originals)
    plain, negative = mse(guess, original), mse(1 - guess, original)
    return {
        "bpmse": plain.tolist(),
        "bpmse of image or negative": torch.minimum(plain, negative).tolist(),
        "bpki": bpki(guess, original).tolist(),
    }


def attacked(
    method: str,
    observations: Sequence[Observation],
    truth: Sequence[Batch],
    federation: Setup,
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run all attacks on a method; return the scores and the first picture of each."""
    results, pictures = {}, {}
    for name, (attack, informed) in attacks(options).items():
        if (informed and not federation.server.personal) or (method in SECURE and name.startswith("MI")):
            continue
        views = [o.given(defense=federation.defense.parts) for o in observations] if informed else observations
        started = time.process_time()
        again = [replace(view, id=replace(view.id, part=f"run-{run}")) for run in range(options.runs) for view in views]
        found = attack(again, seed=options.seed)
        runs = [scores(found[k : k + len(views)], truth) for k in range(0, len(found), len(views))]
        results[name] = {
            "seconds": time.process_time() - started,
            "failures": sorted({r.failure for r in found if r.failure}),
        }
        for metric in runs[0]:
            means = [mean(run[metric]) for run in runs if run[metric]]
            if means:
                results[name] |= {metric: mean(means), f"{metric}_of_runs": means}
        shown = match(found[0], truth[0])
        if len(shown.found):
            pictures[name] = shown.guesses[0]
        print(f"{method}, {name}: {results[name]}", flush=True)
    return results, pictures


def accounted(federation: Setup, scale: float, rounds: int) -> dict[str, float]:
    """Compute the privacy that noise of ``scale`` guarantees if no update exceeds the last model's norms."""
    clean = [replace(p, defense=none()) for p in federation.clients.values()]
    uploads = [p.update(federation.server.state, ClientState(), round=rounds).upload for p in clean]
    norm = max(float(torch.cat([t.flatten() for t in u.tensors.values()]).norm()) for u in uploads)
    releases: dict[str, Any] = {"sample_rate": 1.0, "steps": rounds, "delta": DELTA}
    needed = noise_multiplier_for(epsilon=PUBLISHED_EPSILON, **releases)
    return {
        "norm": norm,
        "epsilon": epsilon(noise_multiplier=scale / norm, **releases),
        "norm_for_published": scale / needed,
    }


def outcome(federation: Setup, done: Done, options: argparse.Namespace) -> dict[str, Any]:
    """Collect a training's results: accuracy, cost, private layers over rounds, epsilon under noise."""
    if done.report is None:
        return {}
    server, tested, course = federation.server, done.report.evaluation, list(done.course)
    if server.personal:
        last = Course(federation)
        last.look(done.states)
        course += last.rows
    row = {
        "rounds": done.round,
        "start": options.start if server.personal else None,
        "features_of": options.features_of,
        "examples": sum(len(client.indices) for client in federation.clients.values()),
        "accuracy": (tested or evaluate_model(federation.model, server.state, federation.dataset.test)).accuracy,
        "cpu_seconds": done.cpu_seconds / done.round,
        "bytes": done.report.upload_bytes,
        "course": course,
    }
    scale = sum(part.effect.std or 0 for part in federation.defense.parts if isinstance(part.effect, Noise))
    return {**row, "privacy": accounted(federation, float(scale), options.rounds)} if scale else row


def measure(method: str, options: argparse.Namespace, victims: Examples) -> tuple[dict[str, Any], dict[str, Tensor]]:
    federation = federation_of(options, method)
    done = trained(federation, method, options)
    row = outcome(federation, done, options)
    print(method, {name: value for name, value in row.items() if name != "course"}, flush=True)
    if method == "CKKS" or not options.attacks:
        return {**row, "attacks": {}}, {}
    observations, truth = (
        summed(federation, victims, options)
        if method == "SecAgg+"
        else captured(federation, done.states, victims, options)
    )
    found, pictures = attacked(method, observations, truth, federation, options)
    return {**row, "attacks": found}, {"original": truth[0].inputs[0], **pictures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist_mini")
    parser.add_argument("--attacked", help="data set whose test images are attacked; that of --data by default")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--override", nargs="*", default=[], help="of the configuration, such as model.width=16")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--start",
        default="shared",
        choices=["shared", "own"],
        help="of private layers, as in Algorithm 1 or apart",
    )
    parser.add_argument("--kept-every", type=int, default=5, help="rounds after which the training is kept")
    parser.add_argument("--rounds", type=int, default=10, help="0 attacks the initial values")
    parser.add_argument("--examples", type=int, help="of all clients together")
    parser.add_argument("--tested", type=int, help="test examples")
    parser.add_argument("--attacks", nargs="*", default=["DLG", "cosine", "MI", "MI, joint"])
    parser.add_argument("--victims", type=int, default=3)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--inversion-lr", type=float, default=0.01, help="of MI, published steps")
    parser.add_argument("--features-at", default="activation", help="module whose input is shown")
    parser.add_argument(
        "--features-of", default="trained", choices=["trained", "sent"], help="as in Algorithm 3, or of the model sent"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fdl_pp"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    victims = build_dataset(compose_run([f"data={options.attacked or options.data}"]).data).test
    options.out.mkdir(parents=True, exist_ok=True)
    for method in options.methods:
        file = options.out / f"{method}.json"
        if file.exists() and json.loads(file.read_text()).get("asked") == options.attacks:
            continue
        row, pictures = measure(method, options, victims)
        save_file({name: p.contiguous() for name, p in pictures.items()}, options.out / f"{method}.safetensors")
        file.write_text(json.dumps({**row, "asked": options.attacks}, indent=1))
    print(options.out)


if __name__ == "__main__":
    main()
