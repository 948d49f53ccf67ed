"""The table of FDL-PP: accuracy, Bayesian privacy under two attacks, seconds (Table 1; Figures 2 to 5).

    python experiments/fdl_pp.py --rounds 10 --victims 3 --runs 3 --out runs/fdl_pp_mnist
    python experiments/fdl_pp.py --data cifar10 --attacked cifar10_exact --model alexnet --override model.hidden=null \
        model.width=16 model.init=default --examples 2000 --tested 1000 --out runs/fdl_pp_cifar10

Trains ten clients without protection (DL), with noise (DLDP-A, DLDP-B), with private first layers (SplitFed) and with
passports (FDL-PP). Then attacks victims that no client trained on: each is sent through the defended update of a client
behind the model of the last round, and server and another client collude. Every attack is run ``--runs`` times from
different starts.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fl_privacy.attacks import ReconstructionAttack, dlg, inverting_gradients, model_inversion
from fl_privacy.config import compose
from fl_privacy.config.build import Federation, build_dataset, build_federation
from fl_privacy.data import Examples
from fl_privacy.defenses import ClientState
from fl_privacy.defenses.passport import passport_layers
from fl_privacy.federation import (
    Audit,
    Evaluation,
    Insider,
    Interceptor,
    Probe,
    RoundReport,
    evaluate_model,
    run_rounds,
)
from fl_privacy.metrics.bayesian_privacy import bpki
from fl_privacy.metrics.pixel import mse
from fl_privacy.metrics.private_layers import effective_rank, mean_squared_distance
from fl_privacy.types import Observation, Reconstruction

METHODS = {
    "DL": ["defense=none"],
    "DLDP-A": ["defense=dp_noise", "defense.scale=0.002"],
    "DLDP-B": ["defense=dp_noise", "defense.scale=0.128"],
    "SplitFed": ["defense=split_fed"],
    "FDL-PP": ["defense=fdl_pp"],
}
COLLUDER, VICTIM = 9, 0
WEIGHT = "private/features.0.weight"


@dataclass
class Course:
    """Watches the clients' private layers at the beginning of each round."""

    federation: Federation
    rows: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, observation: Observation, *, states: Callable[[int], ClientState], **_: Any) -> Observation:
        self.look({client: states(client) for client in self.federation.participants})
        return observation

    def look(self, states: Mapping[int, ClientState]) -> None:
        if any(WEIGHT not in state.tensors for state in states.values()):
            return
        weights = torch.stack([state.tensors[WEIGHT] for state in states.values()])
        row = {"distance": mean_squared_distance(weights), "rank": mean(effective_rank(w) for w in weights)}
        gammas = [gamma for client, state in states.items() for gamma in self._gammas(client, state)]
        if gammas:
            row["gamma"] = mean(float(g.norm()) for g in gammas)
        self.rows.append(row)

    def _gammas(self, client: int, state: ClientState) -> list[Tensor]:
        sent = self.federation.server.state
        model, own = self.federation.participants[client].private_part(sent, state)
        model.load_state_dict({**own.parameters, **own.buffers}, strict=False)
        return [layer.affine()[0].detach() for layer in passport_layers(model).values()]


def some(number: int, most: int | None) -> Tensor:
    """Indices of up to ``most`` of ``number`` examples."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(0))[:most]


def federation_of(options: argparse.Namespace, method: str) -> Federation:
    settings = [
        f"data={options.data}",
        f"model={options.model}",
        f"partition={options.partition}",
        "federation=fedavg",
        f"federation.rounds={options.rounds}",
        "federation.clients=10",
        "federation.plan.lr=0.01",
        "federation.plan.lr_decay=0.99",
        "federation.plan.batch_size=10",
        "attack=none",
        f"evaluate_every={options.rounds}",
        f"seed={options.seed}",
        *options.override,
        *METHODS[method],
    ]
    federation = build_federation(compose(settings))
    if options.examples is None and options.tested is None:
        return federation
    each = None if options.examples is None else options.examples // 10
    test = federation.dataset.test.subset(some(len(federation.dataset.test), options.tested))
    participants = {
        client: replace(p, indices=p.indices[some(len(p.indices), each)], test=test)
        for client, p in federation.participants.items()
    }
    return replace(federation, participants=participants, dataset=replace(federation.dataset, test=test))


def tested(federation: Federation) -> Evaluation:
    return evaluate_model(federation.model, federation.server.state, federation.dataset.test)


def captured(
    federation: Federation, kept: Mapping[int, ClientState], victims: Examples, options: argparse.Namespace
) -> tuple[list[Observation], Tensor]:
    """Observations of victims behind the last model, with features that are shown, and the true images."""
    owner = replace(
        federation.participants[VICTIM], examples=victims, indices=torch.arange(len(victims)), seed=options.seed
    )
    found: list[Observation] = []
    inside = Insider(
        participants={**federation.participants, VICTIM: owner},
        colluder=COLLUDER if federation.server.personal else None,
        knows_features=True,
        features_at=options.features_at,
    )
    interceptor = Interceptor(
        model=federation.model,
        plan=owner.plan,
        input_shape=victims.input_shape,
        num_classes=victims.num_classes,
        sink=found.append,
        insider=inside,
    )
    sent = federation.server.state
    for victim in range(options.victims):
        upload = owner.probe(sent, kept[VICTIM], round=options.rounds, victim=victim, batch_size=1).upload
        interceptor.capture(
            round=options.rounds,
            client=VICTIM,
            sent=sent,
            upload=upload,
            probe=Probe(VICTIM, victim),
            states=kept.__getitem__,
        )
    return found, torch.cat([owner.victim_batch(victim, 1).inputs for victim in range(options.victims)])


def attacks(options: argparse.Namespace) -> dict[str, tuple[ReconstructionAttack, bool]]:
    """By name, and whether the attacker knows of the defense."""
    search = {"iterations": options.inversion_iterations, "lr": 1.0, "line_search": "strong_wolfe"}
    chosen: dict[str, tuple[ReconstructionAttack, bool]] = {
        "DLG": (dlg(iterations=options.dlg_iterations, total_variation=1e-4), False),
        "cosine": (inverting_gradients(iterations=options.cosine_iterations), False),
        "MI": (model_inversion(**search, total_variation=1e-4), False),
        "MI, joint": (model_inversion(**search, total_variation=1e-4), True),
    }
    if options.recovered:
        matching = {"matching": "l2", "matching_iterations": options.dlg_iterations}
        chosen["MI, recovered"] = (
            model_inversion(**search, **matching, total_variation=1e-4, features="recovered"),
            False,
        )
    return chosen


def scores(found: Sequence[Reconstruction], truth: Tensor) -> dict[str, list[float]]:
    guesses = torch.cat([r.batch.inputs for r in found if r.batch is not None])
    truth = truth[[r.batch is not None for r in found]]
    return {"bpmse": mse(guesses, truth).tolist(), "bpki": bpki(guesses, truth).tolist()}


def attacked(
    method: str, observations: list[Observation], truth: Tensor, federation: Federation, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    results, pictures = {}, {}
    for name, (attack, informed) in attacks(options).items():
        if informed and not federation.server.personal:
            continue
        views = [o.told(defense=federation.defense.description) for o in observations] if informed else observations
        started, runs = time.perf_counter(), []
        for seed in range(options.runs):
            found = attack(views, seed=seed)
            runs.append(scores(found, truth))
            if seed == 0 and found[0].batch is not None:
                pictures[name] = found[0].batch.inputs[0]
        results[name] = {"seconds": time.perf_counter() - started}
        for metric in ("bpmse", "bpki"):
            means = [mean(run[metric]) for run in runs]
            results[name] |= {metric: mean(means), f"{metric}_std": stdev(means) if len(means) > 1 else 0.0}
        print(f"{method}, {name}: BPMSE {results[name]['bpmse']:.2e}, BPKI {results[name]['bpki']:.2f}", flush=True)
    return results, pictures


def measure(method: str, options: argparse.Namespace, victims: Examples) -> tuple[dict[str, Any], dict[str, Tensor]]:
    federation = federation_of(options, method)
    course, reports = Course(federation), list[RoundReport]()
    interceptor = Interceptor(
        model=federation.model,
        plan=federation.server.local_plan,
        input_shape=victims.input_shape,
        num_classes=victims.num_classes,
        sink=lambda observation: None,
        insider=course,  # type: ignore[arg-type]
    )
    watched = Audit(rounds=frozenset(range(1, options.rounds + 1)), probes=(Probe(VICTIM, 0),))
    kept = run_rounds(
        federation.server,
        federation.participants,
        rounds=options.rounds,
        audit=watched if federation.server.personal else Audit(),
        interceptor=interceptor,
        on_round=reports.append,
    )
    course.look(kept)
    accuracy = (reports[-1].evaluation or tested(federation)).accuracy
    seconds = sorted(report.seconds for report in reports)[len(reports) // 2]
    print(f"{method}: accuracy {accuracy:.1%}, {seconds:.2f} s a round", flush=True)
    observations, truth = captured(federation, kept, victims, options)
    found, pictures = attacked(method, observations, truth, federation, options)
    size = sum(t.numel() * t.element_size() for t in observations[0].upload.tensors.values())
    row = {"accuracy": accuracy, "seconds": seconds, "bytes": size, "attacks": found, "course": course.rows}
    return row, {"original": truth[0], **pictures}


def draw_pictures(pictures: Mapping[str, Mapping[str, Tensor]], table: Mapping[str, Any], file: Path) -> None:
    """Figure 2: a row for each attack, a column for each method."""
    names = list(dict.fromkeys(name for shown in pictures.values() for name in shown))
    figure = Figure(figsize=(1.5 * len(pictures) + 1, 1.5 * len(names)), dpi=150, layout="constrained")
    axes = figure.subplots(len(names), len(pictures), squeeze=False)
    for row, name in zip(axes, names, strict=True):
        row[0].set_ylabel(name)
        for axis, (method, shown) in zip(row, pictures.items(), strict=True):
            axis.set(xticks=[], yticks=[], title=method if name == names[0] else "")
            if name in shown:
                axis.imshow(shown[name].permute(1, 2, 0), cmap="gray", vmin=0, vmax=1)
            if name in table[method]["attacks"]:
                axis.set_xlabel(f"{table[method]['attacks'][name]['bpmse']:.1e}", fontsize=7)
    figure.savefig(file)


def draw_scatter(table: Mapping[str, Any], file: Path) -> None:
    """Figure 3: accuracy against BPMSE."""
    figure = Figure(figsize=(8, 3), dpi=150, layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("DLG", "MI"), strict=True):
        for method, row in table.items():
            axis.scatter(row["accuracy"], row["attacks"][name]["bpmse"], label=method)
        axis.axhline(0.05, color="gray", linestyle=":")
        axis.set(xlabel="accuracy", ylabel="BPMSE", title=name)
        axis.legend(fontsize=6)
    figure.savefig(file)


def draw_courses(table: Mapping[str, Any], file: Path) -> None:
    """Figures 4 and 5: private weights over the rounds."""
    figure = Figure(figsize=(10, 3), dpi=150, layout="constrained")
    for axis, name in zip(figure.subplots(1, 3), ("distance", "rank", "gamma"), strict=True):
        for method, row in table.items():
            if values := [point[name] for point in row["course"] if name in point]:
                axis.plot(values, label=method)
        axis.set(xlabel="round", title=name)
        if axis.lines:
            axis.legend(fontsize=6)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist_mini")
    parser.add_argument("--attacked", help="data set whose test images are attacked; that of --data by default")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--override", nargs="*", default=[], help="of the configuration, such as model.width=16")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--examples", type=int, help="of all clients together")
    parser.add_argument("--tested", type=int, help="test examples")
    parser.add_argument("--victims", type=int, default=3)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--dlg-iterations", type=int, default=100)
    parser.add_argument("--cosine-iterations", type=int, default=1000)
    parser.add_argument("--inversion-iterations", type=int, default=60)
    parser.add_argument("--features-at", help="module whose input is shown; the first public layer by default")
    parser.add_argument("--recovered", action="store_true", help="also recover features from the public gradients")
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time, each in a process of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fdl_pp"))
    options = parser.parse_args()
    victims = build_dataset(compose([f"data={options.attacked or options.data}"])).test
    options.out.mkdir(parents=True, exist_ok=True)
    table, pictures = {}, {}
    work = partial(measure, options=options, victims=victims)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        for method, (row, shown) in zip(options.methods, pool.map(work, options.methods), strict=True):
            table[method], pictures[method] = row, shown
            (options.out / "table.json").write_text(json.dumps(table, indent=1))
    draw_pictures(pictures, table, options.out / "figure_2.png")
    draw_scatter(table, options.out / "figure_3.png")
    draw_courses(table, options.out / "figures_4_5.png")
    print(options.out)


if __name__ == "__main__":
    main()
