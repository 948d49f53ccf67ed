"""Every threat model has a definition, a command that composes, and what is not tested."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.runs.config import compose_run, options
from tests.experiment.runs import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "threat_models.md"
GIVEN: Mapping[str, set[str]] = {
    "Honest but curious": set(),
    "Knows the labels": {"knows_labels"},
    "Public data": {"public_images"},
    "Adaptive": {"knows_defense"},
    "Colluding": {"colluder"},
    "Insider": {"knows_defense", "colluder", "knows_features"},
    "Malicious": {"server"},
    "Secure aggregation": {"secure_aggregation", "server"},
}
"""Heading -> what differs from an honest-but-curious server that sees every update."""


@pytest.fixture(scope="module")
def sections() -> Mapping[str, str]:
    """Heading -> what stands below it."""
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {name: part for part in parts if (name := part.partition("\n")[0]) in GIVEN}


def overrides_of(section: str) -> list[str]:
    (command,) = re.findall(r"^fl-privacy (?:run|attack) (.+)$", section, re.MULTILINE)
    return shlex.split(command, comments=True)


def given_by(overrides: list[str]) -> set[str]:
    composed, least = compose_run(overrides), compose_run([])
    threat, base = (asdict(config.threat_model) for config in (composed, least))
    found = {name for name, value in threat.items() if value != base[name]}
    choices: dict[str, Any] = {"server": "honest", "secure_aggregation": "none"}
    return found | {group for group, usual in choices.items() if composed.choices[group] != usual}


def test_every_threat_model_has_a_command_that_asks_for_it(sections: Mapping[str, str]) -> None:
    assert list(sections) == list(GIVEN)
    for name, section in sections.items():
        assert given_by(overrides_of(section)) == GIVEN[name], name
        assert "*Not tested" in section, name


@pytest.mark.long
@pytest.mark.parametrize("name", GIVEN)
def test_every_command_runs(name: str, sections: Mapping[str, str], tmp_path: Path) -> None:
    (command,) = re.findall(r"^fl-privacy (run|attack) ", sections[name], re.MULTILINE)
    small = ["model=lenet_dlg", "federation.rounds=1", "federation.clients=3", "federation.plan.batch_size=4"]
    asked = overrides_of(sections[name])
    steps = "attack.evaluations=5" if "attack=auto" in asked else "attack.iterations=2"
    done = run(command, *asked, *small, steps, "victims=1", "page=false", "baseline=false", out=tmp_path)
    assert done.status == 0


def test_the_table_names_every_setting(sections: Mapping[str, str]) -> None:
    page = PAGE.read_text()
    rows = dict(re.findall(r"^\| \[(.+?)\]\(#.*?\) \| .* \| (.+) \|$", page, re.MULTILINE))
    assert list(rows) == list(sections)
    for name, setting in rows.items():
        if named := re.search(r"`(threat_model=\w+)`", setting):
            assert given_by([named[1]]) == GIVEN[name]
    assert set(re.findall(r"threat_model=(\w+)", page)) == set(options("threat_model"))
    shown = set(re.findall(r"`(\w+)`", sections["Malicious"])) | set(re.findall(r"server=(\w+)", page))
    assert set(options("server")) - {"honest"} <= shown
