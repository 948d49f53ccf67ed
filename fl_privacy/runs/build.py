"""Build the parts of a run from its settings; only this file instantiates targets that a user names."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fl_privacy import defenses
from fl_privacy.attacks import GradientInversion, ReconstructionAttack
from fl_privacy.attacks.gradient_inversion.word_order import NO_PUBLIC_TEXTS
from fl_privacy.attacks.inference import About, AttributeInference, Inference
from fl_privacy.attacks.inference.attribute import ADAPTIVE, AdaptiveAttributeInference
from fl_privacy.checks import whole
from fl_privacy.data import Dataset, LabelledExamples, expect_images, texts_of
from fl_privacy.defenses import Defense
from fl_privacy.defenses.defense import UNNAMED
from fl_privacy.defenses.guard import ModelGuard
from fl_privacy.effects import MutedFeatures, SlicedNoise
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.federation import Audit, Client, Probe, audited_rounds, spread_probes
from fl_privacy.federation.parallel import ShardedAttack
from fl_privacy.measure import MetricFunction, bayesian_privacy_loss, noise_ratio
from fl_privacy.models import ADAPTED, build_fitting, check_model, check_table_model, check_text_model
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.config.building import check_arguments, instantiate, instantiate_as, locate_target, plain_settings
from fl_privacy.runs.config.parse import CUSTOM, called, options
from fl_privacy.runs.config.settings import BpkiSettings, register_plugin_metrics
from fl_privacy.runs.server_attack import build_server_attack, expect_named
from fl_privacy.types import LocalPlan
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS, Modality

DEFENDERS = 1000  # most public examples that clients hold


def held_out(number: int, examples: int, *, seed: int) -> torch.Tensor:
    """Return a boolean mask (``examples``,) of ``number`` random examples that no client gets."""
    if number >= examples:
        raise UserError(
            f"holdout is expected to be below {examples}, the number of training examples, but got {number};"
            " leave some to train on."
        )
    chosen = torch.zeros(examples, dtype=torch.bool)
    if number:
        chosen[torch.randperm(examples, generator=derive_generator(seed, "holdout"))[:number]] = True
    return chosen


def defenders_examples(unattacked: LabelledExamples) -> torch.Tensor:
    """Return the indices of the ``unattacked`` examples with which clients prepare defenses, at most ``DEFENDERS``."""
    return torch.arange(3, len(unattacked), 4)[:DEFENDERS]


ANY_MODEL = ("init", "mean", "std", "lora_rank", "lora_alpha")  # options that ``build_model`` accepts for every model


def build_network(section: Mapping[str, Any], dataset: Dataset, *, seed: int) -> nn.Module:
    """Build the model of ``section``, initialized from ``seed``, and check that it fits the data."""
    train = dataset.train
    model = _network(section, train.architecture, seed)
    return _CHECKS[train.modality](model, train) or model


_CHECKS: Mapping[Modality, Callable[[nn.Module, Any], nn.Module | None]] = {
    IMAGES: lambda model, train: check_model(model, train.input_shape, train.num_classes),
    TEXTS: lambda model, train: check_text_model(model, train.input_shape[0], train.num_classes),
    ROWS: lambda model, train: check_table_model(model, train.schema, train.num_classes),
}
"""Modality -> check that a model fits the examples; it may return a replacement."""


def build_network_for(
    section: Mapping[str, Any], input_shape: tuple[int, ...], num_classes: int, *, seed: int, **more: Any
) -> nn.Module:
    """Build the model of ``section`` for images (C, H, W); ``more``: defaults for settings that ``section`` lacks."""
    channels, height, _ = input_shape
    facts = {"in_channels": channels, "image_size": height, "num_classes": num_classes}
    model = _network(section, facts, seed, **more)
    check_model(model, input_shape, num_classes)
    return model


def _network(section: Mapping[str, Any], architecture: Mapping[str, Any], seed: int, **more: Any) -> nn.Module:
    settings = {**more, **plain_settings(section)}
    settings.pop("_target_", None)
    target = locate_target(section, "model")
    known = [] if not callable(target) else inspect.signature(target).parameters
    own = {key: value for key, value in settings.items() if key in known or key not in ANY_MODEL}
    check_arguments(target, own, "model")
    return build_fitting(target, architecture, seed=derive_seed(seed, "model"), **settings)


def audit_of(config: RunSettings, rounds: int, clients: Mapping[int, Client]) -> Audit:
    """Return the plan of which uploads are intercepted; ``UserError`` if rounds, clients or examples do not exist."""
    inferences = build_inferences(config.inference)
    reads_images = "_target_" in config.attack or config.intercept.save
    if not reads_images and not inferences:
        return Audit()
    chosen = config.intercept.rounds
    audited = audited_rounds(chosen if isinstance(chosen, str | int) else list(chosen), rounds)
    asked = set(clients if config.intercept.clients == "all" else config.intercept.clients)
    if not asked:
        raise UserError(
            "intercept.clients is expected to name clients, but got an empty list; take intercept.clients=all, or"
            " attack=none to attack none."
        )
    colluder = config.threat_model.colluder
    if colluder is not None:
        whole("threat_model.colluder", colluder, at_least=0, at_most=len(clients) - 1, example=0)
    if unknown := sorted(asked - clients.keys()):
        raise UserError(f"intercept.clients is expected within 0..{len(clients) - 1}, but got {unknown}; omit them.")
    attack = build_server_attack(config.server)
    asked = (asked - {colluder, *config.sites}) & (
        set(clients) if attack is None or attack.only is None else {attack.only}
    )
    sizes = {client: p.number_of_examples for client, p in clients.items() if client in asked}
    if config.sites and attack is not None:
        raise UserError(
            "threat_model.observer=another_site is expected with server=honest in a training, but got"
            f" server={config.choices['server']}; use `fl-privacy attack`, where a site poisons its update instead."
        )
    if config.sites and reads_images and config.intercept.uploads == "probe":
        raise UserError(
            "intercept.uploads=update is expected with threat_model.observer=another_site, which sees no probes, but"
            " got intercept.uploads=probe; set it to update."
        )
    probes: tuple[Probe, ...] = ()
    about = {inference.about for inference in inferences.values()}
    if config.intercept.uploads == "probe" and (reads_images or About.ATTRIBUTE in about):
        probes = spread_probes(config.victims, config.batch_size, sizes)
    return Audit(
        rounds=audited,
        uploads=config.intercept.uploads,
        probes=probes,
        clients=frozenset(asked),
        batch_size=config.batch_size,
        listens=bool(about - {About.ATTRIBUTE}),
    )


def clients_of(config: RunSettings) -> Mapping[int, Client]:
    """Build the clients of ``config``, cached."""
    return data_and_clients(config)[1]


def build_dataset(section: Mapping[str, Any]) -> Dataset:
    """Build the data of ``section``; ``UserError`` unless its ``_target_`` returns a :class:`Dataset`."""
    return instantiate_as(Dataset, section, "data")


def agreed_network(config: RunSettings, dataset: Dataset, clients: int) -> nn.Module:
    """Build the model that clients train, as changed by a malicious server, if any; ``clients``: their number."""
    model = build_network(config.model, dataset, seed=config.seed)
    attack = build_server_attack(config.server)
    if attack is None:
        return model
    return attack.architecture(model, expect_images(dataset.train, "A malicious server").input_shape, clients)


def build_guard(config: RunSettings, dataset: Dataset) -> ModelGuard | None:
    """Build the check by which clients compare received models with the configured one; ``None`` for ``guard=off``."""
    if "_target_" not in config.guard:
        expect_named(config.guard, "guard")
        return None
    guard = instantiate_as(ModelGuard, config.guard, "guard")
    return guard.agreeing_on(build_network(config.model, dataset, seed=config.seed))


def build_defense(section: Mapping[str, Any]) -> Defense:
    """Build the defense of ``section``; ``UserError`` unless its ``_target_`` returns a :class:`Defense`."""
    made = instantiate_as(Defense, section, "defense")
    return replace(made, parts=(replace(UNNAMED, name=called(CUSTOM, section)),)) if made.parts == (UNNAMED,) else made


NO_ATTRIBUTE = (
    "{} is expected with data that have an attribute in addition to the class, but {} has none; use"
    " data=cifar10_animals or mnist_parity, or load_with_attribute."
)


def prepare_defense(defense: Defense, dataset: Dataset, model: nn.Module) -> None:
    """Prepare ``defense`` for the examples of ``dataset``; ``UserError`` if it does not fit them."""
    kind = dataset.train.modality
    if not _SUITS[kind](defense):
        # name the package's defenses that suit examples of ``kind`` as they are, without an attribute to hide
        names = [name for name in dir(defenses) if name in options("defense") and name != "none"]
        made: Mapping[str, Defense] = {name: getattr(defenses, name)() for name in names}
        *most, last = [name for name, defense in made.items() if _SUITS[kind](defense) and not defense.informed]
        raise UserError(
            f"A defense of {kind.data} is expected, but {defense.name} is of images; take {', '.join(most)} or {last}."
        )
    texts = texts_of(dataset.test) if defense.texts else None
    tokens = None if texts is None else texts.subset(defenders_examples(texts)).tokens
    with blamed_on(f"Defense {defense.name}, preparing for {kind.one}s,"):
        defense.prepare_for(model, dataset.train.input_shape, tokens)
    for inform in defense.informed:
        public = dataset.test
        if public.attributes is None:
            raise UserError(NO_ATTRIBUTE.format(f"defense={defense.name}", dataset.name))
        rows = defenders_examples(public)
        with blamed_on(f"Defense {defense.name}, learning from public examples,"):
            inform(public.batch(rows), public.attributes[rows])


_SUITS: Mapping[Modality, Callable[[Defense], bool]] = {
    IMAGES: lambda defense: True,
    TEXTS: lambda defense: (
        not (
            any(isinstance(part.effect, MutedFeatures | SlicedNoise) for part in defense.parts)
            or len(defense.texts) < len(defense.prepare)
            or (defense.data or defense.examples or defense.model)
        )
    ),
    ROWS: lambda defense: not (defense.prepare or defense.data or defense.examples or defense.model),
}
"""Modality -> test of whether a defense can protect such examples."""

_MOST_OF_PRIOR = 1000  # number of public images, from the first, whose pixels are counted


def build_metrics(
    bpki: BpkiSettings, evaluator: str | None, dataset: Dataset, public: LabelledExamples
) -> dict[str, MetricFunction]:
    """Return name -> metric: the Bayesian privacy loss ``bpki`` and, with ``evaluator``, ``noise_ratio``.

    ``public``: images whose pixels are the prior of ``bpki``, if set. ``evaluator``: file of a network that judges
    noise.
    """
    register_plugin_metrics()
    known = None
    if bpki.prior is not None:
        images = expect_images(public, "The setting bpki.prior, a histogram of pixels,")
        known = images.images[:_MOST_OF_PRIOR].float() / 255
    functions = {"bpki": bayesian_privacy_loss(bins=bpki.bins, smoothing=bpki.smoothing, public=known)}
    if evaluator is not None:
        expect_images(dataset.train, "The setting evaluator, whose network judges noise in images,")
        functions["noise_ratio"] = noise_ratio(evaluator, dataset.train.input_shape)
    return functions


def build_attack(section: Mapping[str, Any], *, device: str = "auto", threads: int = 1) -> ReconstructionAttack | None:
    """Build the attack of a run's section ``attack``, if any; each of its processes uses ``threads`` CPU threads."""
    if "_target_" not in section:
        return None
    shards = whole("attack.shards", section.get("shards", 1), at_least=1, example=1)
    section = {key: value for key, value in section.items() if key != "shards"}
    where = resolve_device(section.get("device") or device)
    arguments = {"device": str(where)} if "device" in section else {}
    attack: ReconstructionAttack = instantiate(section, "attack", **arguments)
    if not callable(attack):
        raise UserError(
            f"attack._target_={section['_target_']} is expected to return an attack, which can be called, but got"
            f" {type(attack).__name__}; name a function or class that does."
        )
    return attack if shards == 1 else ShardedAttack(attack=attack, shards=shards, threads=threads, device=where)


def attack_of_run(config: RunSettings) -> ReconstructionAttack | None:
    """Build the attack of ``config``; ``UserError`` if it needs public texts that the threat model excludes."""
    attack = build_attack(config.attack, device=config.device, threads=config.attack_threads)
    inner = attack.attack if isinstance(attack, ShardedAttack) else attack
    asks = isinstance(inner, GradientInversion) and inner.moves is not None and inner.moves.prior > 0
    if asks and config.threat_model.public_images == 0:
        raise UserError(NO_PUBLIC_TEXTS)
    return attack


def build_plan(section: Mapping[str, Any], model: Mapping[str, Any]) -> LocalPlan:
    """Build the settings of clients' training; if ``model`` has adapters, only these and the head are trained."""
    settings = plain_settings(section)
    adapted = model.get("lora_rank") is not None or model.get("peft") is not None
    if adapted and not (settings.get("trained") or settings.get("frozen")):
        settings["trained"] = list(ADAPTED)
    check_arguments(LocalPlan, settings, "federation.plan")
    return LocalPlan(**settings)


def build_parts(
    section: Mapping[str, Any], examples: LabelledExamples, number: int, *, seed: int
) -> list[torch.Tensor]:
    """Divide ``examples`` among ``number`` clients by the scheme in ``section``; return indices (N_i,) by client."""
    partition, target = instantiate(section, "partition"), f"partition._target_={section.get('_target_')}"
    with blamed_on(target):
        parts: Any = partition(examples, num_clients=number, seed=derive_seed(seed, "partition"))
    wrong = None
    if not isinstance(parts, Sequence) or isinstance(parts, str) or len(parts) != number:
        wrong = f"got {type(parts).__name__}"
    elif not all(isinstance(p, torch.Tensor) and p.dtype == torch.int64 and p.dim() == 1 and len(p) for p in parts):
        wrong = f"got {', '.join(sorted({type(p).__name__ for p in parts}))} of other types or shapes"
    elif not torch.cat(list(parts)).ge(0).all() or not torch.cat(list(parts)).lt(len(examples)).all():
        wrong = f"some are beyond 0..{len(examples) - 1}"
    elif len(torch.cat(list(parts)).unique()) != sum(map(len, parts)):
        wrong = "some examples have two owners"
    if wrong:
        raise UserError(
            f"{target} is expected to return indices (N,) int64 for each of {number} clients, but {wrong}; correct it."
        )
    return list(parts)


def prepared_client(
    config: RunSettings, plan: LocalPlan, dataset: Dataset, model: nn.Module, examples: LabelledExamples | None = None
) -> Client:
    """Build client 0 with all of ``examples`` (default: training split), and prepare its defense for model and data."""
    defense, examples = build_defense(config.defense), dataset.train if examples is None else examples
    prepare_defense(defense, dataset, model)
    return Client(
        id=0,
        examples=examples,
        indices=torch.arange(len(examples)),
        model=model,
        plan=plan,
        defense=defense,
        seed=config.seed,
        device=resolve_device(config.device),
        threads=config.client_threads,
    )


@lru_cache(maxsize=1)
def data_and_clients(config: RunSettings) -> tuple[Dataset, Mapping[int, Client]]:
    """Build the data and the clients of ``config``; the result of the last call is cached."""
    plan, number = build_plan(config.federation.plan, config.model), config.federation.clients
    dataset = build_dataset(config.data)
    first = prepared_client(config, plan, dataset, agreed_network(config, dataset, number))
    kept = ~held_out(config.holdout, len(dataset.train), seed=config.seed)
    places = kept.nonzero().flatten()
    shared = dataset.train if kept.all() else dataset.train.subset(places)
    return dataset, {
        id: replace(first, id=id, indices=places[part], test=dataset.test, guard=build_guard(config, dataset))
        for id, part in enumerate(build_parts(config.partition, shared, number, seed=config.seed))
    }


def attack_called(attack: str | ReconstructionAttack) -> tuple[ReconstructionAttack | None, str]:
    """Return (attack, name) for an attack or text such as ``idlg attack.iterations=50``; ``none`` gives ``None``."""
    if not isinstance(attack, str):
        if not callable(attack):
            raise UserError(
                f"attack is expected to be a name or an attack, but got {type(attack).__name__}; try attack='auto'."
            )
        return attack, type(attack).__name__
    from fl_privacy.runs.config import compose_run  # noqa: PLC0415

    name, *settings = attack.split() or [""]
    config = compose_run([f"attack={name}", *settings])
    return build_attack(config.attack, device=config.device, threads=config.attack_threads), name


def build_inferences(settings: Mapping[str, Any]) -> dict[str, Inference]:
    """Build the attacks of the section ``inference`` by name; ``UserError`` if a target or setting is wrong."""
    found = {}
    for name, section in settings.items():
        if not isinstance(section, Mapping) or "_target_" not in section:
            continue
        made = instantiate(section, f"inference.{name}")
        if not isinstance(getattr(made, "about", None), About) or not callable(getattr(made, "begin", None)):
            raise UserError(
                f"inference.{name}._target_={section['_target_']} is expected to return an Inference, but got"
                f" {type(made).__name__}; name a class that is one."
            )
        found[name] = made
    return found


def with_adaptive(inferences: Mapping[str, Inference]) -> dict[str, Inference]:
    """Add, for each attribute inference, a variant of the attack that knows the defense, named NAME + ``ADAPTIVE``."""
    found = dict(inferences)
    for name, inference in inferences.items():
        if isinstance(inference, AttributeInference) and not inference.adaptive:
            found[f"{name}{ADAPTIVE}"] = AdaptiveAttributeInference(methods=inference.methods, public=inference.public)
    return found
