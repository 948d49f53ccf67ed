"""Modules answer to the names that they had."""

import importlib
import subprocess
import sys
import warnings

import pytest

from fl_privacy._moved import IN_SETTINGS, MOVED, new_name


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_module_is_one_module_under_both_names(old: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert importlib.import_module(f"fl_privacy.{old}") is importlib.import_module(f"fl_privacy.{MOVED[old]}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fl_privacy.gate.policy", "fl_privacy.site.gate.policy"),
        ("fl_privacy.experiment.run", "fl_privacy.runs.run"),
        ("fl_privacy.results.readings", "fl_privacy.runs.folder.leakage"),
        ("fl_privacy.metrics.images", "fl_privacy.measure.images"),
        ("fl_privacy.attacks", None),
        ("fl_privacy.gateway", None),
        ("other.gate", None),
    ],
)
def test_what_a_package_holds_moved_with_it(old: str, new: str | None) -> None:
    assert new_name(old) == new
    if new is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert importlib.import_module(old) is importlib.import_module(new)


def test_an_old_name_is_one_line_of_warning_and_names_in_settings_are_none() -> None:
    def warned(*modules: str) -> list[str]:
        run = [sys.executable, "-W", "always", "-c", f"import {', '.join(modules)}"]
        said = subprocess.run(run, capture_output=True, text=True, check=True).stderr
        return [line for line in said.splitlines() if "fl_privacy" in line and "now" in line]

    (line,) = warned("fl_privacy.metrics")
    assert "fl_privacy.measure now" in line
    assert not warned(*(f"fl_privacy.{name}" for name in IN_SETTINGS))
