"""The configuration files name things that exist, with settings that they take."""

import importlib
import inspect
from pathlib import Path

import pytest

from fl_privacy.models import build_fitting, build_model, check_model, check_table_model, check_text_model
from fl_privacy.runs.config import compose_run
from tests.tables.tables import dataset

yaml = pytest.importorskip("yaml")
CONF = Path(__file__).parents[2] / "conf"


def read(file):
    settings = yaml.safe_load(file.read_text())
    module, _, name = settings.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), name), settings


def files(*groups):
    """List the options of ``groups``, except ``custom``, which a user fills in."""
    found = [(group, file) for group in groups for file in sorted((CONF / group).glob("*.yaml"))]
    return [pytest.param(file, id=f"{group}/{file.stem}") for group, file in found if file.stem != "custom"]


@pytest.mark.parametrize("file", files("data", "partition", "model"))
def test_a_file_holds_settings_that_exist_and_only_what_differs(file):
    target, settings = read(file)
    parameters = inspect.signature(target).parameters
    of_any_text_model = {"lora_rank", "lora_alpha"} if "vocabulary_size" in parameters else set()
    assert set(settings) <= {*parameters, *of_any_text_model}
    if file.parent.name != "model":
        same = {key for key, value in settings.items() if key != "name" and value == parameters[key].default}
        assert not same
        assert set(compose_run([f"{file.parent.name}={file.stem}"]).plain()[file.parent.name]) == {
            "_target_",
            *parameters,
        }


@pytest.mark.long
@pytest.mark.parametrize("file", files("model"))
def test_every_model_is_built_and_fits(file):
    target, settings = read(file)
    if file.stem in ("hf", "minilm"):
        pytest.skip("its weights are of other packages; the tests of texts load some")
    if "vocabulary_size" in inspect.signature(target).parameters:
        texts = {"vocabulary_size": 50, "max_length": 10, "num_classes": 50, "next_token": True}
        check_text_model(build_fitting(target, texts, seed=0, **settings), 10, 50)
        return
    if "width" in settings:
        settings["width"] = 8
    if "schema" in inspect.signature(target).parameters:
        rows = dataset().train
        check_table_model(build_fitting(target, rows.architecture, seed=0, **settings), rows.schema, 2)
        return
    size = 32 if settings.get("patch_size") == 16 else 28  # whole patches
    model = build_model(target, seed=0, in_channels=1, image_size=size, num_classes=10, **settings)
    check_model(model, (1, size, size), 10)
