"""The network of a run, made from its settings to fit its data."""

import inspect
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from torch import nn

from fl_privacy.config.targets import check_arguments, locate_target, plain_settings
from fl_privacy.data import Dataset, TextExamples
from fl_privacy.models import build_fitting, check_model, check_text_model
from fl_privacy.rng import derive_seed

ANY_MODEL = ("init", "mean", "std", "lora_rank", "lora_alpha")
"""Options of every model, whether or not it knows them; see ``build_model``."""


def build_network(section: DictConfig, dataset: Dataset, *, seed: int) -> nn.Module:
    """The model that ``section`` names with the initial values of a run's ``seed``, shown to fit the data."""
    train = dataset.train
    if not isinstance(train, TextExamples):
        return build_network_for(section, train.input_shape, train.num_classes, seed=seed)
    model = _network(section, train.architecture, seed)
    check_text_model(model, train.input_shape[0], train.num_classes)
    return model


def build_network_for(
    section: DictConfig, input_shape: tuple[int, ...], num_classes: int, *, seed: int, **more: Any
) -> nn.Module:
    """Likewise, for images (C, H, W) of ``num_classes`` classes; ``more`` are options that ``section`` may lack."""
    channels, height, _ = input_shape
    facts = {"in_channels": channels, "image_size": height, "num_classes": num_classes}
    model = _network(section, facts, seed, **more)
    check_model(model, input_shape, num_classes)
    return model


def _network(section: DictConfig, architecture: Mapping[str, int], seed: int, **more: Any) -> nn.Module:
    settings = {**more, **plain_settings(section)}
    settings.pop("_target_", None)
    target = locate_target(section, "model")
    known = [] if not callable(target) else inspect.signature(target).parameters
    own = {key: value for key, value in settings.items() if key in known or key not in ANY_MODEL}
    check_arguments(target, own, "model")
    return build_fitting(target, architecture, seed=derive_seed(seed, "model"), **settings)
