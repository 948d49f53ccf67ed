"""Train Refiner's evaluation network or an image generator on public data."""

import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fl_privacy.checks import one_of, whole
from fl_privacy.cli.console import progress_bar
from fl_privacy.data import LabelledExamples, TextExamples, expect_images, texts_of
from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder
from fl_privacy.files.foreign import expanded, expect_writable
from fl_privacy.models import TextModel
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.models.pretrained import evaluator as networks, evaluator_files as files, generator as generators
from fl_privacy.models.pretrained.evaluator import (
    TEXTS,
    EvaluationNetwork,
    EvaluatorPlan,
    Progress,
    random_word_curve,
    train_word_evaluator,
)
from fl_privacy.models.pretrained.evaluator_files import Evaluator
from fl_privacy.models.pretrained.generator_training import GeneratorPlan, GeneratorTraining
from fl_privacy.progress import ShareLines
from fl_privacy.runs.build import build_dataset, build_network
from fl_privacy.runs.config import compose_file
from fl_privacy.runs.config.building import check_arguments
from fl_privacy.runs.config.parse import expect_type

SHOWN = 1000  # number of images or texts of the other split behind the table of predictions
RATIOS = torch.linspace(0, 1, 11)  # true noise ratios in that table


def train(overrides: Sequence[str], *, console: Console) -> Path:
    """Train the network of ``conf/evaluator.yaml``, which estimates a reconstruction's share of noise; return its file.

    ``UserError`` if the file exists and was trained with other settings.
    """
    settings = checked_settings("evaluator", overrides)
    dataset = build_dataset(settings["data"])
    texts = texts_of(dataset.train) is not None
    teacher = None if settings["teacher"] is None else _teacher(settings["teacher"], texts=texts)
    usual = TEXTS if texts else EvaluatorPlan() if teacher is None else networks.student_plan(EvaluatorPlan(), teacher)
    chosen = {name: settings[name] for name in EvaluatorPlan.__dataclass_fields__ if settings[name] is not None}
    if "widths" in chosen:
        chosen["widths"] = tuple(chosen["widths"])
    check_arguments(EvaluatorPlan, chosen, "evaluator")
    plan, device = replace(usual, **chosen), resolve_device(settings["device"])
    split, seed = settings["split"], settings["seed"]
    one_of("split", split, ("train", "test"))
    splits = (dataset.train, dataset.test) if split == "train" else (dataset.test, dataset.train)
    if texts:
        model = build_network(settings["model"], dataset, seed=seed)
        key, facts, learn, curve = _words(splits, settings["images"], plan, seed=seed, model=model)
    else:
        key, facts, learn, curve = _images(splits, settings["images"], plan, seed=seed, teacher=teacher)
    cached = f"evaluator-{dataset.name.replace('/', '--')}-{key}.safetensors"
    file, found = place_of(settings, cached, key, files.read_about, console)
    if not found:
        with progress_bar(console, "Training, loss {task.fields[loss]:.4f}") as bar:
            show = partial(bar.update, bar.add_task("", total=None, loss=float("nan")))
            tell = lambda done, total, loss: show(completed=done, total=total, loss=loss)  # noqa: E731
            network = learn(device=device, progress=tell)
        about = {"key": key, "data": dataset.name, "settings": json.dumps(settings)}
        files.save_evaluator(network, file, {**about, **facts})
    trained = files.load_evaluator(file)
    table = Table("true noise ratio", *(f"{r:.1f}" for r in RATIOS.tolist()), box=None)
    for name, each in {"predicted, other split": trained, "teacher": teacher}.items():
        if each is not None:
            table.add_row(name, *(f"{p:.2f}" for p in curve(each).mean(1).tolist()))
    console.print(table)
    if isinstance(teacher, EvaluationNetwork) and isinstance(trained, EvaluationNetwork):
        share = trained.multiply_adds / teacher.multiply_adds
        console.print(f"{share:.2f} of the teacher's operations", highlight=False)
    return file


def checked_settings(kind: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of ``conf/KIND.yaml`` with ``overrides``; ``UserError`` for a wrong type or seed."""
    settings = compose_file(kind, overrides)
    types = {"out": str | None, "overwrite": bool, "images": int | None, "seed": int, "teacher": str | None}
    for name in types.keys() & settings.keys():
        expect_type(name, settings[name], types[name])
    whole("seed", settings["seed"], at_least=0, example=1)
    return settings


def place_of(
    settings: Mapping[str, Any], cached: str, key: str, about: Callable[[Path], Mapping[str, str]], console: Console
) -> tuple[Path, bool]:
    """Return the output file, and ``True`` if it already holds the result identified by ``key``.

    The file is ``settings["out"]``, else ``cached`` in the cache folder. ``about``: function that reads a file's
    metadata. ``UserError`` if the file holds another result and ``overwrite`` is not set.
    """
    file = user_cache_folder() / cached if settings["out"] is None else expanded(settings["out"])
    if settings["overwrite"] or not file.exists():
        expect_writable(file)
        return file, False
    if about(file).get("key") != key:
        what = "generator" if cached.startswith("generator") else "network"
        raise UserError(
            f"out={file} is expected to be free or to hold this very {what}, but holds another;"
            " name another file or set overwrite=true."
        )
    console.print(f"Found it trained: {file}", highlight=False)
    return file, True


def _teacher(path: str, *, texts: bool) -> EvaluationNetwork:
    if texts:
        raise UserError("teacher is expected with data of images, but got texts; leave it out.")
    teacher = files.load_evaluator(expanded(path))
    if not isinstance(teacher, EvaluationNetwork):
        raise UserError(f"teacher is expected to be a network of images, but {path} is one of texts; name another.")
    return teacher


Splits = tuple[LabelledExamples, LabelledExamples]  # split to train on, and the other one


Curve = Callable[[Any], Tensor]  # network -> (R, N) predictions for the other split at each of :data:`RATIOS`
Work = tuple[str, Mapping[str, str], Callable[..., Evaluator], Curve]  # key, facts, training and curve


def _images(
    splits: Splits, number: int | None, plan: EvaluatorPlan, *, seed: int, teacher: EvaluationNetwork | None
) -> Work:
    ours, others = (expect_images(split, "train-evaluator").images for split in splits)
    public, shown = ours[thinned(len(ours), number)], others[thinned(len(others), SHOWN)]

    def learn(device: torch.device, progress: Progress) -> EvaluationNetwork:
        on_device = None if teacher is None else copy.deepcopy(teacher).to(device)
        return networks.train_evaluator(public, plan, seed=seed, device=device, progress=progress, teacher=on_device)

    taught = hashlib.sha256()
    for value in () if teacher is None else teacher.state_dict().values():
        taught.update(value.cpu().contiguous().numpy().tobytes())
    key = key_of(plan, seed, public, more=[] if teacher is None else [taught.hexdigest()])
    return key, {}, learn, lambda network: networks.noise_curve(network, shown, RATIOS)


def _words(splits: Splits, number: int | None, plan: EvaluatorPlan, *, seed: int, model: nn.Module) -> Work:
    ours, others = splits
    assert isinstance(ours, TextExamples) and isinstance(others, TextExamples) and isinstance(model, TextModel)
    table = model.words.weight.detach()
    public = ours.tokens[thinned(len(ours), number)]
    shown = others.tokens[thinned(len(others), SHOWN)]
    learn = partial(train_word_evaluator, public, table, plan, seed=seed)
    words = files.name_of_words(table)
    curve: Curve = lambda network: random_word_curve(network, shown, table, RATIOS)  # noqa: E731
    return key_of(plan, seed, public, more=[words]), {"words": words}, learn, curve


def thinned(there: int, number: int | None, *, at_least: int = 1) -> slice:
    """Return a slice of ``number`` evenly spaced of ``there`` (``None``: all); ``UserError`` below ``at_least``."""
    if number is None:
        return slice(None)
    whole("images", number, at_least=at_least, example=1000)
    step = max(1, there // number)
    return slice(0, step * number, step)


def key_of(plan: EvaluatorPlan | GeneratorPlan, seed: int, *examples: Tensor, more: Sequence[str] = ()) -> str:
    """Return a hash of all that determines a training's result, including the texts ``more``."""
    content = hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in examples))
    content.update(json.dumps([examples[0].shape, seed, asdict(plan), *more]).encode())
    return content.hexdigest()[:16]


SECONDS_BETWEEN_STATES = 60.0  # interval at which the state of the training is saved


def make_generator(overrides: Sequence[str], *, console: Console) -> Path:
    """Train the generator of ``conf/generator.yaml``; ``UserError`` if its file was trained with other settings."""
    settings = checked_settings("generator", overrides)
    chosen = {name: settings[name] for name in GeneratorPlan.__dataclass_fields__}
    check_arguments(GeneratorPlan, chosen, "generator")
    plan, seed, split, number = GeneratorPlan(**chosen), settings["seed"], settings["split"], settings["images"]
    dataset = build_dataset(settings["data"])
    one_of("split", split, ("train", "test"))
    public = expect_images(dataset.train if split == "train" else dataset.test, "train-generator")
    public = public.subset(torch.arange(len(public))[thinned(len(public), number, at_least=2)])
    device = resolve_device(settings["device"])
    # without the number of steps: a training that was stopped may be extended
    training_key = key_of(replace(plan, steps=1), seed, public.images, public.labels)
    key, shape = f"{training_key}-{plan.steps}", "x".join(map(str, public.input_shape))
    name = f"generator-{dataset.name.replace('/', '--')}-{split}-{shape}-{key}.safetensors"
    file, trained = place_of(settings, name, key, generators.read_generator_header, console)
    if trained:
        return file
    training = GeneratorTraining(public.images, public.labels, public.num_classes, plan, seed=seed, device=device)
    cached = user_cache_folder() / f"generator-{training_key}.training"
    state = cached if settings["out"] is None else file.with_name(f"{file.name}.training")
    if not settings["overwrite"] and state.exists() and generators.load_training(state, training_key) is None:
        raise UserError(
            f"{state} is expected to be of this very training, but is of another that was stopped; name another out, go"
            " on with its settings, or set overwrite=true."
        )
    _train(training, state, training_key, console)
    marks = generators.image_fingerprints(public.images)
    data = {"data": dataset.name, "split": split, "images": len(public)}
    about = generators.Provenance(**data, seed=seed, steps=plan.steps, fingerprints=marks)
    generators.save_generator(training.result(), about, file, {"key": key, "settings": json.dumps(settings)})
    state.unlink(missing_ok=True)
    return file


def _train(training: GeneratorTraining, state: Path, key: str, console: Console) -> None:
    if (before := generators.load_training(state, key)) is not None:
        training.load(before)
        if training.done > training.plan.steps:
            raise UserError(
                f"steps is expected to be at least {training.done}, which are done already, but got"
                f" {training.plan.steps}; set steps={training.done}, or remove {state}."
            )
        console.print(f"Going on after {training.done} of {training.plan.steps} steps.", highlight=False)
    kept, kept_at, losses = training.done, time.monotonic(), ""
    lines = ShareLines(partial(console.print, highlight=False), "Training", lambda: f", losses {losses}")
    with progress_bar(console, "Training, losses {task.fields[losses]}") as bar:
        task = bar.add_task("", total=None, losses="")

        def tell(done: int, total: int, discriminator: float, generator: float) -> None:
            nonlocal kept, kept_at, losses
            losses = f"{discriminator:.2f} and {generator:.2f}"
            bar.update(task, completed=done, total=total, losses=losses)
            if not console.is_terminal:
                lines(done, total)
            if time.monotonic() - kept_at > SECONDS_BETWEEN_STATES:
                generators.save_training(training.state(), state, key)
                kept, kept_at = done, time.monotonic()

        try:
            training.run(tell)
        finally:
            if training.done > kept:
                generators.save_training(training.state(), state, key)
