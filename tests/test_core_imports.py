"""The core runs where nothing but PyTorch, torchvision, numpy and safetensors is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BARE = """
import importlib, importlib.abc, pkgutil, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

OWN = {"fl_privacy", "tests", "torch", "torchgen", "torchvision", "numpy", "safetensors"}
THEIRS = {
    "typing_extensions", "sympy", "mpmath", "jinja2", "markupsafe", "networkx", "filelock", "fsspec", "PIL",
    "setuptools", "pkg_resources", "_distutils_hack", "functorch", "triton", "nvidia", "packaging",
}

class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in OWN | THEIRS | sys.stdlib_module_names or top.startswith("_")
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Bare()]
for name in ("flwr", "hydra", "scipy", "matplotlib", "lpips", "pandas"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} was not blocked")
"""

IMPORT_ALL = """
for name in (
    "types", "gradients", "rng", "errors", "models", "attacks", "inference", "defenses", "metrics", "pretrained",
    "transformations", "policy_search", "data",
):
    module = importlib.import_module(f"fl_privacy.{name}")
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
        importlib.import_module(found.name)
        print(found.name)
"""

ATTACK = """
import torch
torch.set_num_threads(1)
from fl_privacy.attacks import idlg
from fl_privacy.measure.images import psnr
from tests.attacks.victims import examples, observations, smooth_net

guess, = idlg(iterations=40, dtype="float64")(observations(smooth_net(), 1), seed=0)
print(psnr(guess.batch.inputs.clamp(0, 1), examples(1).inputs).item())
"""

EVALUATE = """
import torch
from fl_privacy import Batch, Reconstruction, VictimId, evaluate

batch = Batch(torch.rand(1, 1, 16, 16), torch.tensor([0]))
score = evaluate(Reconstruction(id=VictimId(0, 0), batch=batch), batch)
print(*score.images[0].values)
"""


ALL = """
import contextlib, io, json, traceback

said = {}
for name, program in json.loads(sys.argv[1]).items():
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(program, {"importlib": importlib, "pkgutil": pkgutil})
        said[name] = out.getvalue()
    except Exception:
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Collect what the programs print in a process of their own, where other packages can't be imported."""
    programs = {"imports": IMPORT_ALL, "attack": ATTACK, "evaluate": EVALUATE}
    done = subprocess.run(
        [sys.executable, "-c", BARE + ALL, json.dumps(programs)],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_of_the_core_imports(said: dict[str, str]) -> None:
    expected = {"fl_privacy.attacks.presets", "fl_privacy.defenses._soteria", "fl_privacy.data.datasets"}
    assert "Traceback" not in said["imports"], said["imports"]
    assert expected <= set(said["imports"].split())


def test_an_attack_runs_from_end_to_end(said: dict[str, str]) -> None:
    assert float(said["attack"]) > 30


def test_metrics_of_other_packages_are_left_out(said: dict[str, str]) -> None:
    found = set(said["evaluate"].split())
    assert {"psnr", "ssim", "mse", "bpki", "label_correct"} <= found
    assert "lpips" not in found


def test_import_contracts_are_kept() -> None:
    """In a process of its own: the linter turns off the loggers that there are."""
    pytest.importorskip("importlinter")
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
