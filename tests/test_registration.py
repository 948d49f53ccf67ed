"""A part registers where it is written: a defense and an attack are two files, a metric is one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from omegaconf import OmegaConf

from fl_privacy import attacks, defenses
from fl_privacy.attacks.attack import no_progress
from fl_privacy.checks.packages import registered_files
from fl_privacy.files import user_cache_folder
from fl_privacy.measure import METRICS
from fl_privacy.runs.config import options
from tests import timing

ROOT = Path(__file__).resolve().parents[1]
NO_PARTS = {"compose": defenses, "reconstruct": attacks, no_progress.__name__: attacks}
"""Functions that are exported next to defenses and attacks."""


@pytest.mark.parametrize("package", [attacks, defenses], ids=["attack", "defense"])
def test_files_exports_options_and_pages_name_the_same_parts(package: ModuleType) -> None:
    kind = package.__name__.rpartition(".")[2].removesuffix("s")
    made = {name for name in package.__all__ if name[0].islower() and name not in NO_PARTS}
    targets = {str(OmegaConf.load(path).get("_target_")): name for name, path in options(kind).items()}
    assert registered_files(package.__name__).keys() - NO_PARTS.keys() <= made
    lacking = [name for name in made if f"{package.__name__}.{name}" not in targets]
    assert not lacking, f"write conf/{kind}/NAME.yaml of {lacking}"
    entries = yaml.safe_load((ROOT / "docs" / "methods.yaml").read_text())[kind]
    shown = [option for entry in entries.values() for option in entry["options"]]
    assert len(shown) == len(set(shown)) and set(shown) <= set(options(kind)), f"docs/methods.yaml: {sorted(shown)}"


def test_metrics_of_files_are_measured() -> None:
    assert registered_files("fl_privacy.measure").keys() <= METRICS.keys()


FILES = {
    "fl_privacy/defenses/_halved.py": """
from fl_privacy.defenses.defense import Defense
from fl_privacy.effects import Part


def halved(*, share: float = 0.5) -> Defense:
    \"\"\"Upload a share of every update.

    Args:
        share: factor of each element.
    \"\"\"
    hook = lambda tensors, state, rng: {name: share * tensor for name, tensor in tensors.items()}
    return Defense(parts=(Part("halved", {"share": share}, strength="share"),), upload=(hook,))
""",
    "conf/defense/halved.yaml": "# Half of every update.\n_target_: fl_privacy.defenses.halved\n",
    "fl_privacy/attacks/_slow_dlg.py": """
from fl_privacy.attacks import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.optimizers import Adam
from fl_privacy.attacks.preset_options import GradientOptions, takes, vary


@takes(GradientOptions)
def slow_dlg(*, lr: float = 0.01, **options) -> GradientInversion:
    \"\"\"Minimize the squared distance of the gradients in small steps.\"\"\"
    return vary(GradientInversion(objective=L2(), optimizer=Adam(lr=lr)), options)
""",
    "conf/attack/slow_dlg.yaml": "# DLG in small steps.\n_target_: fl_privacy.attacks.slow_dlg\n",
    "fl_privacy/measure/_largest_error.py": """
from fl_privacy.measure.registry import Metric


def _largest(guesses, truths):
    small = guesses.shape[-1] < 3
    found = (guesses - truths).abs().flatten(1).amax(1).double()
    return found * float("nan") if small else found


largest_error = Metric(
    function=_largest, leaks="low", range=(0.0, 1.0), title="Largest error", description="Of any pixel."
)
""",
}
CHECK = """
import sys
from fl_privacy.cli.main import run_command_line

status = run_command_line(["list", "defense", "attack", "metrics"])
assert "torch" not in sys.modules
from fl_privacy import attacks, defenses
assert defenses.halved().name == "halved" and "slow_dlg" in attacks.__all__
sys.path.insert(0, "docs")
import pages
page = pages.method_page("defense", "halved", pages.methods()["defense"]["halved"])
assert "Upload a share of every update." in page and "| `defense.share` | `0.5` | factor of each element. |" in page
sys.exit(status or run_command_line([
    "run", "defense=halved", "attack=slow_dlg", "attack.iterations=2", "federation.clients=2", "federation.rounds=1",
    "victims=1", "candidates=40", "baseline=false", "out=found",
]))
"""


@pytest.fixture(scope="module")
def enlarged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository's code, with what is compiled of it, and add ``FILES`` alone."""
    copy = tmp_path_factory.mktemp("enlarged")
    for folder in ("fl_privacy", "conf", "docs", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.pyc.*", "*.png", "published"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name, text in FILES.items():
        (copy / name).write_text(text)
    (copy / "cache").mkdir()
    for trained in user_cache_folder().glob("evaluator-digits-*"):
        shutil.copy(trained, copy / "cache")
    return copy


def done(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "FL_PRIVACY_CACHE": str(copy / "cache"), timing.FILE: ""}
    run = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.long
def test_two_files_are_listed_shown_and_run(enlarged: Path) -> None:
    said = done(enlarged, "-c", CHECK)
    for line in (
        "halved",
        "Half of every update.",
        "slow_dlg",
        "DLG in small steps.",
        "largest_error",
        "Of any pixel.",
    ):
        assert line in said
    (records,) = enlarged.glob("found/*/metrics.jsonl")
    assert '"largest_error"' in records.read_text() and "-halved-slow_dlg-" in records.parent.name


@pytest.mark.fuzz
def test_two_files_are_kept_to_the_contract(enlarged: Path) -> None:
    contracts = ("defenses/test_contract.py", "attacks/presets", "metrics/test_contract.py", "test_registration.py")
    asked = "halved or slow_dlg or largest_error or same_parts"
    options = ("-q", "-p", "no:cacheprovider", "-rA", "-k", asked)
    said = done(enlarged, "-m", "pytest", *options, *(f"tests/{name}" for name in contracts))
    for case in ("test_update_differs_as_specified[halved]", "test_contract[slow_dlg]", "[1-largest_error]"):
        assert case in said
