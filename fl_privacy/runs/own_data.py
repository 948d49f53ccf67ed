"""Build a client that trains on a folder of its node instead of the run's data."""

from functools import lru_cache

import torch

from fl_privacy.data import load_data
from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.runs.build import build_defense, build_network, build_plan, prepare_defense
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.config.building import plain_settings


class OpenSettingError(UserError):
    """The configuration lacks a setting that all nodes must share."""


@lru_cache(maxsize=4)
def client_of_folder(config: RunSettings, folder: str, client: int) -> Client:
    """Build client ``client`` of ``config`` on the images in ``folder``, cached in this process only.

    Without a test split, every fifth image is used for testing only.

    Raises:
        UserError: the configuration lacks a setting that all nodes' images must share.
    """
    settings = plain_settings(config.data)
    if open_still := [key for key in ("image_size", "channels", "classes") if settings.get(key) is None]:
        raise OpenSettingError(
            "Nodes with folders of their own are expected to be told what their images have in common, but"
            f" data.{open_still[0]} is open; set data=image_folder data.image_size=32 data.channels=3"
            " data.classes=[cat,dog] in the overrides."
        )
    settings = {key: value for key, value in settings.items() if key not in ("_target_", "name", "root", "keep")}
    dataset = load_data("image_folder", root=folder, keep=False, **settings)
    defense, model = build_defense(config.defense), build_network(config.model, dataset, seed=config.seed)
    prepare_defense(defense, dataset, model)
    return Client(
        id=client,
        examples=dataset.train,
        indices=torch.arange(len(dataset.train)),
        model=model,
        plan=build_plan(config.federation.plan, config.model),
        defense=defense,
        seed=config.seed,
        device=resolve_device(config.device),
        threads=config.client_threads,
        test=dataset.test,
    )
