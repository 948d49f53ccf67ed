"""Condensation: defaults for a minute on a CPU, the papers' settings by name."""

import inspect
from typing import Any

import pytest

from fl_privacy import defenses
from fl_privacy.runs.build import build_defense
from fl_privacy.runs.config import compose_run

PUBLISHED: dict[str, dict[str, Any]] = {
    "dc": {"images_per_class": 50, "networks": 1000, "outer_steps": 50, "inner_steps": 10, "real_batch": 256},
    "dsa": {"images_per_class": 50, "networks": 1000, "outer_steps": 50, "inner_steps": 10, "real_batch": 256},
    "dm": {"images_per_class": 50, "iterations": 20000, "real_batch": 256},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_settings_by_name(name: str) -> None:
    public = build_defense(compose_run([f"defense={name}_paper"]).defense).parts[0].settings
    assert {key: public[key] for key in PUBLISHED[name]} == PUBLISHED[name]
    assert public["width"] == 128


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_defaults_are_those_of_the_function_and_take_few_steps(name: str) -> None:
    public = build_defense(compose_run([f"defense={name}"]).defense).parts[0].settings
    parameters = inspect.signature(getattr(defenses, name)).parameters
    assert {key: public[key] for key in parameters} == {key: p.default for key, p in parameters.items()}
    images = public["images_per_class"] * public.get(
        "iterations", public.get("networks", 1) * public.get("outer_steps", 1)
    )
    assert images <= 250
