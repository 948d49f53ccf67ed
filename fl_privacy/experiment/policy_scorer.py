"""Scores of policies on the data and the model of a configuration."""

from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from fl_privacy.data import Dataset, LabelledExamples
from fl_privacy.experiment.build import build_dataset, resolve_device
from fl_privacy.experiment.network import build_network
from fl_privacy.experiment.protocols import Monitor
from fl_privacy.experiment.weights import load_weights, write_weights
from fl_privacy.policy_search import (
    GradientSimilarity,
    PrivacyPlan,
    Scored,
    Total,
    TrainingPlan,
    accuracy_scores,
    altered_shares,
    fsim_scores,
    privacy_scores,
    train_model,
)
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.transformations import Policy
from fl_privacy.types import Batch, ModelState


class PolicyScorer:
    """Everything that policies are scored on, prepared once.

    Args:
        config: of ``conf/policy_search.yaml``.
        privacy: how privacy is scored.
        training: of the semi-trained model.
        semi_trained: file of its values, written if it is not there.
        monitor: told of the training.
    """

    def __init__(
        self, config: DictConfig, *, privacy: PrivacyPlan, training: TrainingPlan, semi_trained: Path, monitor: Monitor
    ) -> None:
        dataset, self._device = build_dataset(config.data), resolve_device(config.device)
        self._total: Total = "sum" if config.variant == "code" else "mean"
        self._privacy, self._seed, self._asks_fsim = privacy, config.seed, config.fsim_at_least is not None
        self._model = build_network(config.model, dataset, seed=config.seed).to(self._device)
        order = torch.randperm(len(dataset.train), generator=derive_generator(config.seed, "search", "split"))
        number = max(1, round(config.training.share * len(dataset.train)))
        if config.weights is not None:
            state = load_weights(Path(config.weights), ModelState.of(self._model))
        else:
            seen = dataset.train.batch(order[:number], self._device)
            state = _semi_trained(self._model, seen, training, config.seed, file=semi_trained, monitor=monitor)
        self._similarity = GradientSimilarity(self._model, state, dataset.train.input_shape, device=self._device)
        rest = dataset.train.subset(order[number:])
        self._batch = rest.batch(_of_each_class(rest, config.images_per_class), self._device)
        draws = range(config.accuracy_draws)
        seeds = [derive_seed(config.seed, "search", "model", draw) for draw in draws]
        self._fresh = [_fresh(config.model, dataset, seed).to(self._device) for seed in seeds]
        streams = [derive_generator(config.seed, "search", "batch", draw) for draw in draws]
        self._draws = [_draw(rest, config.accuracy_images, rng).to(self._device) for rng in streams]

    def __call__(self, policies: Sequence[Policy]) -> list[Scored]:
        """In their order; the company of a policy changes no score beyond rounding."""
        private = privacy_scores(self._similarity, self._batch, policies, plan=self._privacy, seed=self._seed)
        accurate = accuracy_scores(self._model, self._fresh, self._draws, policies, seed=self._seed, total=self._total)
        altered = altered_shares(self._batch.inputs, policies, seed=self._seed)
        alike: Sequence[float | None] = [None] * len(policies)
        if self._asks_fsim:
            alike = fsim_scores(self._batch.inputs, policies, seed=self._seed)
        rows = zip(policies, private, accurate, altered, alike, strict=True)
        return [Scored(policy=p, privacy=s.score, accuracy=a, altered=c, fsim=f) for p, s, a, c, f in rows]


def _semi_trained(
    model: nn.Module, batch: Batch, plan: TrainingPlan, seed: int, *, file: Path, monitor: Monitor
) -> ModelState:
    if not file.is_file():
        with monitor.counting("Training the model that policies are scored on", plan.epochs) as count:
            state = train_model(model, batch, plan, seed=seed, progress=lambda done, total, loss: count(done))
        write_weights(file, state)
    return load_weights(file, ModelState.of(model))


def _of_each_class(examples: LabelledExamples, number: int) -> torch.Tensor:
    """Indices of the first ``number`` examples of every class."""
    rows = [(examples.labels == label).nonzero().flatten()[:number] for label in range(examples.num_classes)]
    return torch.cat(rows)


def _fresh(model: DictConfig, dataset: Dataset, seed: int) -> ModelState:
    """Initial values of a draw's own."""
    return ModelState.of(build_network(model, dataset, seed=seed))


def _draw(examples: LabelledExamples, number: int, rng: torch.Generator) -> torch.Tensor:
    return examples.batch(torch.randperm(len(examples), generator=rng)[:number]).inputs
