"""Training of a generator on public images, resumed if it was stopped, unless it is already trained."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console

from fl_privacy.checks import one_of, whole
from fl_privacy.cli.console import SECONDS_BETWEEN_LINES, progress_bar
from fl_privacy.data import Dataset, Examples, expect_images
from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder
from fl_privacy.files.foreign import expanded, expect_writable
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.models.pretrained.generator import (
    Provenance,
    image_fingerprints,
    load_training,
    read_generator_header,
    save_generator,
    save_training,
)
from fl_privacy.models.pretrained.generator_training import GeneratorPlan, GeneratorTraining, Told
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config import compose_file
from fl_privacy.runs.config.building import check_arguments
from fl_privacy.runs.config.parse import expect_type

SECONDS_BETWEEN_STATES = 60.0
"""Interval at which the state of the training is saved."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    plan: GeneratorPlan
    seed: int
    data: str
    split: str
    public: Examples
    device: torch.device

    @cached_property
    def training_key(self) -> str:
        """Hash everything that decides a step, without their number: a stopped training may be extended."""
        images, labels = self.public.images, self.public.labels
        content = hashlib.sha256(images.contiguous().numpy().tobytes())
        content.update(labels.contiguous().numpy().tobytes())
        content.update(json.dumps([images.shape, self.seed, asdict(replace(self.plan, steps=1))]).encode())
        return content.hexdigest()[:16]

    @property
    def key(self) -> str:
        return f"{self.training_key}-{self.plan.steps}"

    def training(self) -> GeneratorTraining:
        own = self.public
        return GeneratorTraining(own.images, own.labels, own.num_classes, self.plan, seed=self.seed, device=self.device)

    def provenance(self) -> Provenance:
        return Provenance(
            data=self.data,
            split=self.split,
            images=len(self.public),
            seed=self.seed,
            steps=self.plan.steps,
            fingerprints=image_fingerprints(self.public.images),
        )


def make_generator(overrides: Sequence[str], *, console: Console) -> Path:
    """Train the generator that ``overrides`` of ``conf/generator.yaml`` describe, and return its file.

    Raises:
        UserError: a setting is wrong, or the file holds another generator.
    """
    settings = compose_file("generator", overrides)
    for name, annotation in (("out", str | None), ("overwrite", bool), ("images", int | None), ("seed", int)):
        expect_type(name, settings[name], annotation)
    whole("seed", settings["seed"], at_least=0, example=1)
    chosen = {name: settings[name] for name in GeneratorPlan.__dataclass_fields__}
    check_arguments(GeneratorPlan, chosen, "generator")
    dataset = build_dataset(settings["data"])
    order = _Order(
        plan=GeneratorPlan(**chosen),
        seed=settings["seed"],
        data=dataset.name,
        split=settings["split"],
        public=_public(dataset, settings["split"], settings["images"]),
        device=resolve_device(settings["device"]),
    )
    key, shape = order.key, "x".join(map(str, order.public.input_shape))
    name = f"generator-{order.data.replace('/', '--')}-{order.split}-{shape}-{key}.safetensors"
    file = user_cache_folder() / name if settings["out"] is None else expanded(settings["out"])
    if not settings["overwrite"] and file.exists():
        if read_generator_header(file).get("key") != key:
            raise UserError(
                f"out={file} is expected to be free or to hold this very generator, but holds another;"
                " name another file or set overwrite=true."
            )
        console.print(f"Found it trained: {file}", highlight=False)
        return file
    training = order.training()
    expect_writable(file)
    cached = user_cache_folder() / f"generator-{order.training_key}.training"
    state = cached if settings["out"] is None else file.with_name(f"{file.name}.training")
    if not settings["overwrite"] and state.exists() and load_training(state, order.training_key) is None:
        raise UserError(
            f"{state} is expected to be of this very training, but is of another that was stopped; name another out, go"
            " on with its settings, or set overwrite=true."
        )
    _train(training, state, order.training_key, console)
    save_generator(training.result(), order.provenance(), file, {"key": key, "settings": json.dumps(settings)})
    state.unlink(missing_ok=True)
    return file


def _public(dataset: Dataset, split: str, number: int | None) -> Examples:
    one_of("split", split, ("train", "test"))
    examples = expect_images(dataset.train if split == "train" else dataset.test, "train-generator")
    if number is None:
        return examples
    whole("images", number, at_least=2, example=1000)
    return examples.subset(torch.arange(len(examples))[:: max(1, len(examples) // number)][:number])


def _train(training: GeneratorTraining, state: Path, key: str, console: Console) -> None:
    if (before := load_training(state, key)) is not None:
        training.load(before)
        if training.done > training.plan.steps:
            raise UserError(
                f"steps is expected to be at least {training.done}, which are done already, but got"
                f" {training.plan.steps}; set steps={training.done}, or remove {state}."
            )
        console.print(f"Going on after {training.done} of {training.plan.steps} steps.", highlight=False)
    kept, kept_at = training.done, time.monotonic()
    with _shown(console) as show:

        def tell(done: int, total: int, discriminator: float, generator: float) -> None:
            nonlocal kept, kept_at
            show(done, total, discriminator, generator)
            if time.monotonic() - kept_at > SECONDS_BETWEEN_STATES:
                save_training(training.state(), state, key)
                kept, kept_at = done, time.monotonic()

        try:
            training.run(tell)
        finally:
            if training.done > kept:
                save_training(training.state(), state, key)


@contextmanager
def _shown(console: Console) -> Iterator[Told]:
    told_at = time.monotonic()
    with progress_bar(console, "Training, losses {task.fields[losses]}") as bar:
        task = bar.add_task("", total=None, losses="")

        def show(done: int, total: int, discriminator: float, generator: float) -> None:
            nonlocal told_at
            losses = f"{discriminator:.2f} and {generator:.2f}"
            bar.update(task, completed=done, total=total, losses=losses)
            if not console.is_terminal and time.monotonic() - told_at > SECONDS_BETWEEN_LINES:
                told_at = time.monotonic()
                console.print(f"Training: {done}/{total} steps, losses {losses}", highlight=False)

        yield show
