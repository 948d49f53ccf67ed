"""Trains Refiner's evaluation network on public images, or finds it trained."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from fl_privacy.checks import whole
from fl_privacy.config import compose_file
from fl_privacy.config.reading import expect_type
from fl_privacy.config.targets import check_arguments, plain_settings
from fl_privacy.data import Examples, expect_images
from fl_privacy.errors import UserError
from fl_privacy.evaluator import (
    EvaluationNetwork,
    EvaluatorPlan,
    load_evaluator,
    noise_curve,
    read_about,
    save_evaluator,
    train_evaluator,
)
from fl_privacy.experiment.build import build_dataset, resolve_device
from fl_privacy.files import user_cache_folder

SHOWN = 1000
"""Images of the test split that the table of predictions is made from."""


def train(overrides: Sequence[str], *, console: Console) -> Path:
    """The file with the network that ``overrides`` of ``conf/evaluator.yaml`` describe.

    Raises:
        UserError: a setting is wrong, or the file holds another network.
    """
    config = compose_file("evaluator", overrides)
    settings = plain_settings(config)
    for name, annotation in (("out", str | None), ("overwrite", bool), ("images", int | None), ("seed", int)):
        expect_type(name, settings[name], annotation)
    whole("seed", settings["seed"], at_least=0, example=1)
    chosen = {name: settings[name] for name in EvaluatorPlan.__dataclass_fields__}
    check_arguments(EvaluatorPlan, {**chosen, "widths": tuple(chosen["widths"])}, "evaluator")
    plan, device = EvaluatorPlan(**chosen | {"widths": tuple(chosen["widths"])}), resolve_device(config.device)
    dataset = build_dataset(config)
    train, test = (expect_images(split, "train-evaluator") for split in (dataset.train, dataset.test))
    public = _thinned(train, settings["images"])
    key = _key(plan, settings["seed"], public)
    file = _target(settings["out"], dataset.name, key)
    if not settings["overwrite"] and file.exists():
        if read_about(file).get("key") != key:
            raise UserError(
                f"out={file} is expected to be free or to hold this very network, but holds another;"
                " name another file or set overwrite=true."
            )
        console.print(f"Found it trained: {file}", highlight=False)
    else:
        network = _train(public, plan, settings["seed"], device, console)
        save_evaluator(network, file, {"key": key, "data": dataset.name, "settings": json.dumps(settings)})
    console.print(_table(load_evaluator(file, device), test))
    return file


def _thinned(examples: Examples, number: int | None) -> Tensor:
    """(N, C, H, W) so many images of ``examples``."""
    if number is None:
        return examples.images
    whole("images", number, at_least=1, example=1000)
    return examples.images[:: max(1, len(examples) // number)][:number]


def _key(plan: EvaluatorPlan, seed: int, images: Tensor) -> str:
    """Hash of what decides the network."""
    content = hashlib.sha256(images.contiguous().numpy().tobytes())
    content.update(json.dumps([images.shape, seed, asdict(plan)]).encode())
    return content.hexdigest()[:16]


def _target(out: str | None, data: str, key: str) -> Path:
    if out is not None:
        return Path(out).expanduser()
    return user_cache_folder() / f"evaluator-{data.replace('/', '--')}-{key}.safetensors"


def _train(images: Tensor, plan: EvaluatorPlan, seed: int, device: torch.device, console: Console) -> EvaluationNetwork:
    columns = (TextColumn("Training, loss {task.fields[loss]:.4f}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task("", total=None, loss=float("nan"))
        return train_evaluator(
            images,
            plan,
            seed=seed,
            device=device,
            progress=lambda done, total, loss: bar.update(task, completed=done, total=total, loss=loss),
        )


def _table(network: EvaluationNetwork, test: Examples) -> Table:
    ratios = torch.linspace(0, 1, 11)
    predicted = noise_curve(network, _thinned(test, SHOWN), ratios).mean(1)
    table = Table("true noise ratio", *(f"{r:.1f}" for r in ratios.tolist()), box=None)
    table.add_row("predicted, test split", *(f"{p:.2f}" for p in predicted.tolist()))
    return table
