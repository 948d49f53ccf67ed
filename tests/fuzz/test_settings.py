"""Settings that are none: every one of them, of every option, with values of other types and out of range."""

import time
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

import pytest
from omegaconf import DictConfig, OmegaConf

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.build import build_attack, build_defense, build_plan
from fl_privacy.runs.config import RunSettings, compose_run, expand_sweep, options
from fl_privacy.runs.config.compose import complete
from fl_privacy.runs.config.settings import declared_settings
from tests.fuzz.judge import SECONDS, Case, cases, refused, wrong_for

CORPUS = Path(__file__).with_name("corpus") / "commands.txt"
BUILDERS = {"attack": build_attack, "defense": build_defense}
LENIENT = {("policies", int), ("policies", list), ("private", str), ("features_at", int), ("lr", bool), ("budget", int)}
"""Settings that may be of that type as well: names and lists of them, numbers or true."""


def typed() -> Iterator[tuple[str, tuple[str, str]]]:
    """Each setting of a run, with text for what it can't be."""
    for name, declared in declared_settings():
        for value in () if "group" in declared.metadata else wrong_texts(declared.type):
            yield f"{name}={value}", (name, value)


def wrong_texts(annotation: Any) -> list[str]:
    parts = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    parts = tuple(part for part in parts if part is not NoneType)
    texts = ["{a: 1}"]
    if not any(part is str for part in parts):
        texts.append("nonsense")
    if not any(typing.get_origin(part) is list for part in parts):
        texts.append("[1, a]")
    if all(part in (int, bool) or typing.get_origin(part) is Literal for part in parts):
        texts.append("1.5")
    if float in parts:
        texts.append("nan")
    if bool not in parts and str not in parts:
        texts.append("true")
    return texts


def beyond() -> Iterator[tuple[str, tuple[str, str]]]:
    """Each limited number, just below and far above."""
    limits = {name: of for name, declared in declared_settings() if (of := declared.metadata.get("within"))}
    for group, declared in declared_settings():
        limits |= {f"{group}.{name}": of for name, of in declared.metadata.get("limits", {}).items()}
    for name, (least, most) in limits.items():
        for value in (least - 1, 10 * most):
            yield f"{name}={value:g}", (name, str(value) if isinstance(value, float) else str(int(value)))


@pytest.mark.parametrize("case", cases([*typed(), *beyond()], sampled=24))
def test_a_setting_of_the_run(case: Case) -> None:
    name, value = case.content
    option = ["secure_aggregation=secagg"] if name == "secure_aggregation.levels" else []
    option += ["attack=dlg"] if name == "attack.history" else []
    refused(lambda: compose_run([*option, f"{name}={value}"]))


@cache
def composed(override: str) -> RunSettings:
    return compose_run([override])


def settings_of_options() -> Iterator[tuple[str, tuple[str, str, Any]]]:
    """Each setting of each attack and defense, with values of other types than its default."""
    for group in BUILDERS:
        for option, path in options(group).items():
            config = DictConfig({group: OmegaConf.load(path)})
            complete(config)
            for key, value in OmegaConf.to_container(config[group]).items():
                if key in ("_target_", "defaults", "name") or value is None:
                    continue
                for wrong in wrong_for(value):
                    if (key, type(wrong)) not in LENIENT:
                        yield f"{group}={option} {key}={wrong}", (f"{group}={option}", str(key), wrong)


@pytest.mark.parametrize("case", cases(settings_of_options(), sampled=60))
def test_a_setting_of_an_attack_or_defense(case: Case) -> None:
    override, key, value = case.content
    group = override.partition("=")[0]
    refused(lambda: BUILDERS[group](getattr(composed(override).changed({f"{group}.{key}": value}), group)))


def settings_of_the_plan() -> Iterator[tuple[str, tuple[str, Any]]]:
    plan = compose_run(["federation=fedavg"]).federation.plan
    plain = plan.plain()
    for key, value in plain.items():
        for wrong in wrong_for(value):
            yield f"plan.{key}={wrong}", (str(key), wrong)


@pytest.mark.parametrize("case", cases(settings_of_the_plan()))
def test_a_setting_of_the_plan(case: Case) -> None:
    key, value = case.content
    config = composed("federation=fedavg").changed({f"federation.plan.{key}": value})
    refused(lambda: build_plan(config.federation.plan, config.model))


@pytest.mark.parametrize(
    "override",
    ["seed=range(0,1e9)", "seed=range(0,5,0)", "seed=interval(0,1)", "model=glob(*)", "seed=shuffle(range(0,1e10))"],
)
def test_values_that_cannot_be_listed(override: str) -> None:
    refused(lambda: expand_sweep([override]))


def test_a_sweep_of_a_million() -> None:
    refused(lambda: expand_sweep(["seed=range(0,1000)", "victims=range(1,1001)"]))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Lines of the corpus: a command and its arguments."""
    for line in CORPUS.read_text().splitlines():
        if line and not line.startswith("#"):
            yield line, line.split(" ")


@pytest.mark.parametrize("case", cases(commands(), sampled=40))
def test_a_command_line(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = [] if case.content[0] in ("report", "list") else [f"out={tmp_path}/out"]
    started = time.process_time()
    status = run_command_line([*case.content, *own])
    assert time.process_time() - started < SECONDS
    written = capfd.readouterr()
    errors = [line for line in written.err.splitlines() if line.startswith("error: ")]
    assert (status == 3 or len(errors) == 1) and status in (2, 3), (status, written)
    assert "Traceback" not in written.err + written.out
