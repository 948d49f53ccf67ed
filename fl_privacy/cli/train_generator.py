"""Training of a generator on public images, resumed if it was stopped, unless it is already trained."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from fl_privacy.checks import one_of
from fl_privacy.cli.console import SECONDS_BETWEEN_LINES, progress_bar
from fl_privacy.cli.train_evaluator import checked_settings, key_of, place_of, thinned
from fl_privacy.data import expect_images
from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.models.pretrained import generator as files
from fl_privacy.models.pretrained.generator_training import GeneratorPlan, GeneratorTraining
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config.building import check_arguments

SECONDS_BETWEEN_STATES = 60.0
"""Interval at which the state of the training is saved."""


def make_generator(overrides: Sequence[str], *, console: Console) -> Path:
    """Train the generator of ``conf/generator.yaml`` and ``overrides``, and return its file.

    ``UserError`` if a setting is wrong, or the file holds another generator.
    """
    settings = checked_settings("generator", overrides)
    chosen = {name: settings[name] for name in GeneratorPlan.__dataclass_fields__}
    check_arguments(GeneratorPlan, chosen, "generator")
    plan, seed, split, number = GeneratorPlan(**chosen), settings["seed"], settings["split"], settings["images"]
    dataset = build_dataset(settings["data"])
    one_of("split", split, ("train", "test"))
    public = expect_images(dataset.train if split == "train" else dataset.test, "train-generator")
    if number is not None:
        public = public.subset(torch.arange(len(public))[thinned(len(public), number, at_least=2)])
    device = resolve_device(settings["device"])
    # without the number of steps: a training that was stopped may be extended
    training_key = key_of(replace(plan, steps=1), seed, public.images, public.labels)
    key, shape = f"{training_key}-{plan.steps}", "x".join(map(str, public.input_shape))
    name = f"generator-{dataset.name.replace('/', '--')}-{split}-{shape}-{key}.safetensors"
    file, trained = place_of(settings, name, key, files.read_generator_header, console)
    if trained:
        return file
    training = GeneratorTraining(public.images, public.labels, public.num_classes, plan, seed=seed, device=device)
    cached = user_cache_folder() / f"generator-{training_key}.training"
    state = cached if settings["out"] is None else file.with_name(f"{file.name}.training")
    if not settings["overwrite"] and state.exists() and files.load_training(state, training_key) is None:
        raise UserError(
            f"{state} is expected to be of this very training, but is of another that was stopped; name another out, go"
            " on with its settings, or set overwrite=true."
        )
    _train(training, state, training_key, console)
    marks = files.image_fingerprints(public.images)
    data = {"data": dataset.name, "split": split, "images": len(public)}
    about = files.Provenance(**data, seed=seed, steps=plan.steps, fingerprints=marks)
    files.save_generator(training.result(), about, file, {"key": key, "settings": json.dumps(settings)})
    state.unlink(missing_ok=True)
    return file


def _train(training: GeneratorTraining, state: Path, key: str, console: Console) -> None:
    if (before := files.load_training(state, key)) is not None:
        training.load(before)
        if training.done > training.plan.steps:
            raise UserError(
                f"steps is expected to be at least {training.done}, which are done already, but got"
                f" {training.plan.steps}; set steps={training.done}, or remove {state}."
            )
        console.print(f"Going on after {training.done} of {training.plan.steps} steps.", highlight=False)
    kept, kept_at, printed_at = training.done, time.monotonic(), time.monotonic()
    with progress_bar(console, "Training, losses {task.fields[losses]}") as bar:
        task = bar.add_task("", total=None, losses="")

        def tell(done: int, total: int, discriminator: float, generator: float) -> None:
            nonlocal kept, kept_at, printed_at
            losses = f"{discriminator:.2f} and {generator:.2f}"
            bar.update(task, completed=done, total=total, losses=losses)
            if not console.is_terminal and time.monotonic() - printed_at > SECONDS_BETWEEN_LINES:
                printed_at = time.monotonic()
                console.print(f"Training: {done}/{total} steps, losses {losses}", highlight=False)
            if time.monotonic() - kept_at > SECONDS_BETWEEN_STATES:
                files.save_training(training.state(), state, key)
                kept, kept_at = done, time.monotonic()

        try:
            training.run(tell)
        finally:
            if training.done > kept:
                files.save_training(training.state(), state, key)
