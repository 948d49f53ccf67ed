"""Search transformation policies on the configured data and model; an interrupted search resumes."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from fl_privacy.checks import number, whole
from fl_privacy.data import Dataset
from fl_privacy.data.transformations import POLICY_FILE, TABLES, UNTRANSFORMED, Policy, Table, random_policies
from fl_privacy.defenses import policy_search as search
from fl_privacy.defenses.policy_search import PrivacyPlan, Scored, Selection, TrainingPlan
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import read_text
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.report.policy_search import Findings, render_search
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.runs.build import build_dataset, build_network, build_parts
from fl_privacy.runs.config import Options, to_yaml
from fl_privacy.runs.config.building import check_arguments
from fl_privacy.runs.config.parse import plain_value, read_section
from fl_privacy.runs.folder import folder_name
from fl_privacy.runs.folder.ongoing import CONFIG, hold, move_aside
from fl_privacy.runs.folder.records import RecordWriter, dump_json, read_records
from fl_privacy.runs.run_location import Monitor
from fl_privacy.runs.weights import load_weights, write_weights
from fl_privacy.types import Batch, ModelState


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of ``conf/policy_search.yaml``, which explains them."""

    data: Options
    partition: Options
    model: Options
    client: int | None
    clients: int
    policies: int
    table: Table
    keep: int
    variant: search.Variant
    points: int | None
    images_per_class: int
    alpha: float
    beta: float
    accuracy_draws: int
    accuracy_images: int
    accuracy_at_least: float | None
    accuracy_share: float
    altered_at_least: float
    fsim_at_least: float | None
    weights: str | None
    training: Options
    together: int
    seed: int
    device: str
    out: str
    name: str | None
    overwrite: bool
    choices: Options


class PolicyScorer:
    """Scores augmentation policies by privacy and accuracy; ``semi_trained``: file to keep the partly trained model."""

    def __init__(
        self,
        config: SearchSettings,
        *,
        privacy: PrivacyPlan,
        training: TrainingPlan,
        semi_trained: Path,
        monitor: Monitor,
    ) -> None:
        dataset, self._device = _searched_data(config), resolve_device(config.device)
        self._total: search.Total = "mean" if config.variant == "paper" else "sum"
        self._privacy, self._seed, self._asks_fsim = privacy, config.seed, config.fsim_at_least is not None
        self._model = build_network(config.model, dataset, seed=config.seed).to(self._device)
        order = torch.randperm(len(dataset.train), generator=derive_generator(config.seed, "search", "split"))
        number = max(1, round(config.training["share"] * len(dataset.train)))
        if config.weights is not None:
            state = load_weights(Path(config.weights), ModelState.of(self._model))
        else:
            seen = dataset.train.batch(order[:number], self._device)
            state = _semi_trained(self._model, seen, training, config.seed, file=semi_trained, monitor=monitor)
        self._similarity = search.GradientSimilarity(self._model, state, dataset.train.input_shape, device=self._device)
        rest = dataset.train.subset(order[number:])
        rows = [
            (rest.labels == label).nonzero().flatten()[: config.images_per_class] for label in range(rest.num_classes)
        ]
        self._batch = rest.batch(torch.cat(rows), self._device)
        draws = range(config.accuracy_draws)
        seeds = [derive_seed(config.seed, "search", "model", draw) for draw in draws]
        fresh = (ModelState.of(build_network(config.model, dataset, seed=seed)) for seed in seeds)
        self._fresh = [state.to(self._device) for state in fresh]
        streams = [derive_generator(config.seed, "search", "batch", draw) for draw in draws]
        self._draws = [
            rest.batch(torch.randperm(len(rest), generator=rng)[: config.accuracy_images]).inputs.to(self._device)
            for rng in streams
        ]

    def __call__(self, policies: Sequence[Policy]) -> list[Scored]:
        private = search.privacy_scores(self._similarity, self._batch, policies, plan=self._privacy, seed=self._seed)
        accurate = search.accuracy_scores(
            self._model, self._fresh, self._draws, policies, seed=self._seed, total=self._total
        )
        altered = search.altered_shares(self._batch.inputs, policies, seed=self._seed)
        alike: Sequence[float | None] = [None] * len(policies)
        if self._asks_fsim:
            alike = search.fsim_scores(self._batch.inputs, policies, seed=self._seed)
        rows = zip(policies, private, accurate, altered, alike, strict=True)
        found = [(Scored(policy=p, privacy=s.score, accuracy=a, altered=c, fsim=f), s) for p, s, a, c, f in rows]
        normalized = self._privacy.normalized
        return [replace(one, mean=s.mean, variance=s.variance) if normalized else one for one, s in found]


def _searched_data(config: SearchSettings) -> Dataset:
    dataset = build_dataset(config.data)
    if config.client is None:
        return dataset
    own = build_parts(config.partition, dataset.train, config.clients, seed=config.seed)[config.client]
    if len(own) < _LEAST_IMAGES:
        raise UserError(
            f"A client with at least {_LEAST_IMAGES} images is expected, to train on one and score on another, but"
            f" client={config.client} has {len(own)}; take another client, or fewer clients."
        )
    return replace(dataset, train=dataset.train.subset(own))


_LEAST_IMAGES = 2


def _semi_trained(
    model: nn.Module, batch: Batch, plan: TrainingPlan, seed: int, *, file: Path, monitor: Monitor
) -> ModelState:
    if not file.is_file():
        with monitor.counting("Training the model that policies are scored on", plan.epochs) as count:
            state = search.train_model(model, batch, plan, seed=seed, progress=lambda done, total, loss: count(done))
        write_weights(file, state)
    return load_weights(file, ModelState.of(model))


SCORES, PAGE, SEMI_TRAINED = "scores.jsonl", "search.html", "semi_trained.safetensors"


def search_policies(settings: Mapping[str, Any], monitor: Monitor) -> Path:
    """Search augmentation policies, and return the folder of results; ``UserError`` if no policy is good enough."""
    config = read_section(SearchSettings, settings)
    plans = privacy, selection, _ = _plans_of(config)
    folder = _folder_of(config)
    if not config.overwrite and (folder / POLICY_FILE).is_file() and _selected_by(folder) == asdict(selection):
        monitor.say("Finished already; overwrite=true searches again.")
        return folder
    lock = _claim(folder, overwrite=config.overwrite)
    try:
        (folder / POLICY_FILE).unlink(missing_ok=True)
        write_whole(folder / CONFIG, to_yaml(plain_value(config)))
        plain, *scored = found = _score_all(config, plans, folder, monitor)
        if privacy.normalized:
            means, variances = ([getattr(s, name) for s in found] for name in ("mean", "variance"))
            scores = search.normalized_scores(means, variances, privacy)
            plain, *scored = [replace(s, privacy=score) for s, score in zip(found, scores, strict=True)]
        _write_results(config, selection, folder, scored, plain)
    finally:
        lock.release()
    return folder


Plans = tuple[PrivacyPlan, Selection, TrainingPlan]


def _plans_of(config: SearchSettings) -> Plans:
    whole("seed", config.seed, at_least=0, example=1)
    for name in ("policies", "images_per_class", "accuracy_draws", "accuracy_images", "together", "clients"):
        whole(name, getattr(config, name), at_least=1, example=100)
    if config.client is not None:
        last, remedy = config.clients - 1, "raise clients, or take another"
        whole("client", config.client, at_least=0, at_most=last, example=remedy)
    training = config.training.plain()
    share = training.pop("share")
    number("training.share", share, above=0, below=1, example="the paper's is 0.1")
    check_arguments(TrainingPlan, training, "training")
    selection = Selection(**{field.name: getattr(config, field.name) for field in fields(Selection)})
    if selection.fsim_at_least is not None:
        search.require_fsim()
    privacy = PrivacyPlan.named(config.variant, points=config.points, alpha=config.alpha, beta=config.beta)
    return privacy, selection, TrainingPlan(**training)


def _folder_of(config: SearchSettings) -> Path:
    plain = plain_value(config)
    front = [] if config.name is None else [str(config.name)]
    own = [] if config.client is None else [f"client{config.client}"]
    label = "-".join([*front, "search", config.choices["data"], config.choices["model"], *own])
    unscored = {"together", *(field.name for field in fields(Selection))}
    settings = {key: value for key, value in plain.items() if key not in unscored}
    settings["fsim"] = config.fsim_at_least is not None
    if config.client is None:  # the same folder as in versions without clients' own searches
        settings = {key: value for key, value in settings.items() if key not in ("client", "clients", "partition")}
        settings["choices"] = {**settings["choices"], "partition": None}
    return Path(config.out) / folder_name(label, {"command": "search-policies", **settings})


def _claim(folder: Path, *, overwrite: bool) -> FileLock:
    try:
        lock = hold(folder)
        if overwrite and folder.exists():
            move_aside(folder, "previous" if (folder / POLICY_FILE).is_file() else "interrupted")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out is expected to be a folder that can be written, but {folder.parent} can't ({error.strerror});"
            " set out=FOLDER."
        ) from error
    return lock


def _selected_by(folder: Path) -> object:
    try:
        return json.loads(read_text(folder / POLICY_FILE)).get("selection")
    except (UserError, ValueError, AttributeError, RecursionError):
        return None


def _score_all(config: SearchSettings, plans: Plans, folder: Path, monitor: Monitor) -> list[Scored]:
    drawn = random_policies(config.policies, derive_generator(config.seed, "search", "policies"), table=config.table)
    singles = (Policy((index,), config.table) for index in range(len(TABLES[config.table])))  # explain the others
    wanted = list(dict.fromkeys([UNTRANSFORMED, *singles, *drawn]))
    file = folder / SCORES
    known, _ = read_records(file)
    write_whole(file, "".join(f"{dump_json(record)}\n" for record in known))
    found = dict[Policy, Scored]()
    for record in known:
        figures, name = {f.name: record[f.name] for f in fields(Scored) if f.name in record}, record["policy"]
        policy = UNTRANSFORMED if name == str(UNTRANSFORMED) else Policy.parse(name, config.table)
        found[policy] = Scored(**{**figures, "policy": policy})
    missing = [policy for policy in wanted if policy not in found]
    if missing:
        privacy, _, training = plans
        semi_trained = folder / SEMI_TRAINED
        scorer = PolicyScorer(config, privacy=privacy, training=training, semi_trained=semi_trained, monitor=monitor)
        with closing(RecordWriter(file)) as records, monitor.counting("Scoring policies", len(wanted)) as count:
            for start in range(0, len(missing), config.together):
                for scored in scorer(missing[start : start + config.together]):
                    found[scored.policy] = scored
                    records.append(_as_record(scored))
                count(len(found))
    return [found[policy] for policy in wanted]


def _write_results(
    config: SearchSettings, selection: Selection, folder: Path, scored: Sequence[Scored], untransformed: Scored
) -> None:
    chosen = selection.chosen(scored, untransformed.privacy)
    found = Findings(
        scored=scored,
        untransformed=untransformed,
        accepted=selection.accepted(scored, untransformed.privacy),
        chosen=chosen,
        threshold=selection.threshold(scored),
        without_effect=[s for s in scored if not selection.has_effect(s)],
    )
    of = "" if config.client is None else f" (images of client {config.client} of {config.clients} alone)"
    page = render_search(found, data=config.choices["data"] + of, model=config.choices["model"], seed=config.seed)
    write_whole(folder / PAGE, page)
    content = {
        "table": config.table,
        "policies": [str(s.policy) for s in chosen],
        "scores": [_as_record(s) for s in chosen],
        "selection": asdict(selection),
        "accuracy_threshold": found.threshold,
        "untransformed": _as_record(untransformed),
        "without_effect": [str(s.policy) for s in found.without_effect],
        "accepted": [_as_record(s) for s in found.accepted[:100]],
        "single_operations": [_as_record(s) for s in found.singles],
    }
    write_whole(folder / POLICY_FILE, dump_json(content, indent=1))


def _as_record(scored: Scored) -> dict[str, Any]:
    left_out = () if scored.mean is not None else ("mean", "variance")
    figures = {name: value for name, value in vars(scored).items() if name not in left_out}
    return {"kind": "policy", **figures, "policy": str(scored.policy)}
