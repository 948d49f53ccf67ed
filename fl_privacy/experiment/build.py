"""The objects of a run, made from its configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from fl_privacy.attacks import GradientInversion, ReconstructionAttack
from fl_privacy.attacks.gradient_inversion.rearranging import NO_PUBLIC_TEXTS
from fl_privacy.checks import whole
from fl_privacy.config import RunSettings, to_yaml
from fl_privacy.config.groups import CUSTOM, called
from fl_privacy.config.plugins import register_plugin_metrics
from fl_privacy.config.settings import BpkiSettings
from fl_privacy.config.targets import check_arguments, instantiate, plain_settings
from fl_privacy.data import Dataset, TextExamples, expect_images
from fl_privacy.defenses import Defense
from fl_privacy.defenses.defense import UNNAMED
from fl_privacy.effects import MutedFeatures, SlicedNoise
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.experiment.audited import audit_of
from fl_privacy.experiment.network import build_network
from fl_privacy.experiment.partitions import defenders_examples, expect_parts, held_out
from fl_privacy.experiment.server_reading import build_server_attack, expect_named
from fl_privacy.experiment.weights import starting_values
from fl_privacy.federation import (
    Audit,
    Client,
    Server,
    ServerPlan,
    private_names,
    public_state,
)
from fl_privacy.inspection import ModelGuard
from fl_privacy.malicious import ServerAttack
from fl_privacy.metrics import MetricFunction, bayesian_privacy_loss, noise_ratio
from fl_privacy.models import ADAPTED, TextModel
from fl_privacy.parallel.sharded import ShardedAttack
from fl_privacy.rng import derive_seed
from fl_privacy.types import LocalPlan

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation:
    """A federation ready to run.

    Attributes:
        config: what it was built from.
        dataset: what the clients share and what the server tests on.
        model: the global architecture, holding the initial values.
        clients: by id.
        server: at the initial values, or those in ``config.weights``.
        rounds: how many.
        audit: what is intercepted.
        defense: of every client.
        device: of clients and attack.
        server_attack: what the server does beyond the protocol; ``None`` for an honest one.
    """

    config: RunSettings
    dataset: Dataset
    model: nn.Module
    clients: Mapping[int, Client]
    server: Server
    rounds: int
    audit: Audit
    defense: Defense
    device: torch.device
    server_attack: ServerAttack | None = None


def build_federation(config: RunSettings) -> Federation:
    """Data, clients and server of ``config``.

    Raises:
        UserError: a setting is out of its range, or parts do not fit each other.
    """
    dataset, clients = _clients(to_yaml(config))
    section, rounds, every = config.federation, config.federation.rounds, config.evaluate_every
    model, plan, defense = clients[0].model, clients[0].plan, clients[0].defense
    server = Server(
        state=starting_values(config.weights, public_state(model, defense)),
        local_plan=plan,
        plan=ServerPlan(
            aggregation=section.aggregation,
            fraction=section.fraction,
            lr=section.server_lr,
            norm_factor=section.norm_factor,
        ),
        clients=sorted(clients),
        seed=config.seed,
        personal=bool(private_names(model, defense)),
        tested=frozenset({*range(every, rounds + 1, every), rounds}),
    )
    return Federation(
        config=config,
        dataset=dataset,
        model=model,
        clients=clients,
        server=server,
        rounds=rounds,
        audit=audit_of(config, rounds, clients),
        defense=defense,
        device=resolve_device(config.device),
        server_attack=build_server_attack(config.server, dataset.test, dataset.train),
    )


def clients_of(config_text: str) -> Mapping[int, Client]:
    """The clients of a configuration given as text; built once in a process."""
    return _clients(config_text)[1]


def build_dataset(section: DictConfig) -> Dataset:
    """The data that ``section`` names; ``UserError`` if its target makes something else."""
    return _expect_made(instantiate(section, "data"), Dataset, section, "data")


def agreed_network(config: RunSettings, dataset: Dataset, clients: int) -> nn.Module:
    """What ``clients`` clients train: ``build_network``, with what a malicious server put into it."""
    model = build_network(config.model, dataset, seed=config.seed)
    attack = build_server_attack(config.server)
    return model if attack is None else attack.architecture(model, dataset.train.input_shape, clients)


def build_guard(config: RunSettings, dataset: Dataset) -> ModelGuard | None:
    """What clients look at a model with, who agreed on that of ``config``; ``None`` for ``guard=off``."""
    if "_target_" not in config.guard:
        expect_named(config.guard, "guard")
        return None
    guard = _expect_made(instantiate(config.guard, "guard"), ModelGuard, config.guard, "guard")
    return guard.agreeing_on(build_network(config.model, dataset, seed=config.seed))


def build_defense(section: DictConfig) -> Defense:
    """The defense that ``section`` names; ``UserError`` if its target makes something else.

    One that names no part of itself goes by the name of what made it.
    """
    made = _expect_made(instantiate(section, "defense"), Defense, section, "defense")
    return replace(made, parts=(replace(UNNAMED, name=called(CUSTOM, section)),)) if made.parts == (UNNAMED,) else made


def prepare_defense(defense: Defense, dataset: Dataset, model: nn.Module) -> None:
    """Let ``defense`` get what it needs for the examples of ``dataset``; ``UserError`` if it can't, or if those are
    texts, which it can't change."""
    if isinstance(dataset.train, TextExamples):
        _prepare_for_texts(defense, dataset, model)
    else:
        for prepare in defense.prepare:
            with blamed_on(f"Defense {defense.name}, preparing for images,"):
                prepare(dataset.train.input_shape)
    for inform in defense.informed:
        public = dataset.test
        if public.attributes is None:
            raise UserError(
                f"defense={defense.name} is expected with data that have an attribute beside the class, but"
                f" {dataset.name} has none; use data=cifar10_animals or mnist_parity, or load_with_attribute."
            )
        rows = defenders_examples(public)
        with blamed_on(f"Defense {defense.name}, learning from public examples,"):
            inform(public.batch(rows), public.attributes[rows])


def _prepare_for_texts(defense: Defense, dataset: Dataset, model: nn.Module) -> None:
    of_pixels = any(isinstance(part.effect, MutedFeatures | SlicedNoise) for part in defense.parts)
    of_images = defense.prepare and len(defense.texts) < len(defense.prepare)
    if of_pixels or of_images or defense.data or defense.examples or defense.model:
        raise UserError(
            f"Defense {defense.name} is of images, but the data are text; take dp_noise, dp_sgd, local_dp, pruning,"
            " quantization, selective_sharing, ppdl or refiner."
        )
    assert isinstance(model, TextModel) and isinstance(dataset.test, TextExamples)
    public = dataset.test.subset(defenders_examples(dataset.test)).tokens if defense.texts else None
    for prepare in defense.texts:
        with blamed_on(f"Defense {defense.name}, preparing for texts,"):
            prepare(model, public)


def build_metrics(bpki: BpkiSettings, evaluator: str | None, dataset: Dataset) -> dict[str, MetricFunction]:
    """The metrics that need settings of a run, by name; those of plugins are registered.

    Args:
        bpki: how the Bayesian privacy loss is estimated.
        evaluator: file of the network that judges noise; ``None`` leaves that out.
        dataset: what the clients share.
    """
    register_plugin_metrics()
    functions = {"bpki": bayesian_privacy_loss(bins=bpki.bins, smoothing=bpki.smoothing)}
    if evaluator is not None:
        expect_images(dataset.train, "The setting evaluator, whose network judges noise in images,")
        functions["noise_ratio"] = noise_ratio(evaluator, dataset.train.input_shape)
    return functions


def build_attack(section: DictConfig, *, device: str = "auto", threads: int = 1) -> ReconstructionAttack | None:
    """The attack that ``section`` names; ``None`` for ``attack=none``.

    Args:
        section: ``attack`` of a run.
        device: where it computes, unless ``section`` says.
        threads: of the CPU, in each process where it is cut into shards.
    """
    if "_target_" not in section:
        return None
    shards = whole("attack.shards", section.get("shards", 1), at_least=1, example=1)
    section = OmegaConf.masked_copy(section, [str(key) for key in section if key != "shards"])
    where = resolve_device(section.get("device") or device)
    arguments = {"device": str(where)} if "device" in section else {}
    attack: ReconstructionAttack = instantiate(section, "attack", **arguments)
    if not callable(attack):
        raise UserError(
            f"attack._target_={section._target_} is expected to return an attack, which can be called, but got"
            f" {type(attack).__name__}."
        )
    return attack if shards == 1 else ShardedAttack(attack=attack, shards=shards, threads=threads, device=where)


def attack_of_run(config: RunSettings) -> ReconstructionAttack | None:
    """That of ``config``; ``UserError`` where it would ask for what the threat model does not give it."""
    attack = build_attack(config.attack, device=config.device, threads=config.attack_threads)
    inner = attack.attack if isinstance(attack, ShardedAttack) else attack
    asks = isinstance(inner, GradientInversion) and inner.moves is not None and inner.moves.prior > 0
    if asks and not config.threat_model.public_images:
        raise UserError(NO_PUBLIC_TEXTS)
    return attack


def build_plan(section: DictConfig, model: DictConfig) -> LocalPlan:
    """The clients' local plan as ``section`` says; of a ``model`` with adapters they train these and its head."""
    settings = plain_settings(section)
    if model.get("lora_rank") is not None and not (settings.get("trained") or settings.get("frozen")):
        settings["trained"] = list(ADAPTED)
    check_arguments(LocalPlan, settings, "federation.plan")
    return LocalPlan(**settings)


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"device is expected to be auto, cpu or cuda, but got {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda is expected to find a GPU, but PyTorch sees none; use device=cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name} is expected to be a GPU that PyTorch sees, counted from 0; use device=cuda.")
    return device


@lru_cache(maxsize=1)
def _clients(config_text: str) -> tuple[Dataset, Mapping[int, Client]]:
    """The data and the clients of a configuration, as text: that can be sent to other processes and be cached by."""
    config = RunSettings.of(OmegaConf.create(config_text))
    number = config.federation.clients
    plan, device = build_plan(config.federation.plan, config.model), resolve_device(config.device)
    dataset, defense = build_dataset(config.data), build_defense(config.defense)
    model = agreed_network(config, dataset, number)
    prepare_defense(defense, dataset, model)
    partition = instantiate(config.partition, "partition")
    kept = ~held_out(config.holdout, len(dataset.train), seed=config.seed)
    shared = dataset.train if kept.all() else dataset.train.subset(kept.nonzero().flatten())
    with blamed_on(f"partition._target_={config.partition.get('_target_')}"):
        parts = partition(shared, num_clients=number, seed=derive_seed(config.seed, "partition"))
    expect_parts(parts, number, len(shared), config.partition)
    places = kept.nonzero().flatten()
    return dataset, {
        client: Client(
            id=client,
            examples=dataset.train,
            indices=places[indices],
            model=model,
            plan=plan,
            defense=defense,
            seed=config.seed,
            device=device,
            threads=config.client_threads,
            test=dataset.test,
            guard=build_guard(config, dataset),
        )
        for client, indices in enumerate(parts)
    }


def _expect_made(made: Any, kind: type[T], section: DictConfig, name: str) -> T:
    if not isinstance(made, kind):
        raise UserError(
            f"{name}._target_={section._target_} is expected to return a {kind.__name__}, but got"
            f" {type(made).__name__}."
        )
    return made
