"""Old module names, for code and settings that still import them."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "checkpointing": "models.unwrap_model",
    "config": "runs.config",
    "cores": "federation.cores",
    "deploy": "site.deploy",
    "experiment": "runs",
    "film": "types.film",
    "fitted": "attacks.fitted",
    "flower.canary_mod": "flower.mods.canary_mod",
    "flower.probe": "flower.mods.probe",
    "flower.untouched": "auditing.app",
    "foreign_files": "files.foreign",
    "gate": "site.gate",
    "gradients": "models.gradients",
    "guard": "defenses.guard",
    "inference": "attacks.inference",
    "interception": "federation.interception",
    "losses": "models.losses",
    "malicious": "attacks.malicious",
    "metrics": "measure",
    "metrics.controls": "measure.distractors",
    "modality": "types.modality",
    "network_files": "files.networks",
    "packages": "checks.packages",
    "parallel": "federation.parallel",
    "pieces": "data.token_display",
    "plain_models": "models.unwrap_model",
    "plan": "types.plan",
    "policy_search": "defenses.policy_search",
    "pretrained": "models.pretrained",
    "processes": "federation.processes",
    "regression": "auditing.regression",
    "results": "runs.folder",
    "results.readings": "runs.folder.leakage",
    "results.rule": "measure.rule",
    "schema": "types.schema",
    "shared_gradients": "types.user_gradients",
    "shared_updates": "types.user_updates",
    "tally": "federation.tally",
    "tapping": "auditing.instrument",
    "tied_weights": "models.unwrap_model",
    "transformations": "data.transformations",
    "trees": "attacks.trees",
    "victim_ids": "types.victim_ids",
}
"""Old name -> new one, within this package; what a package holds moved with it, unless it is named itself."""

IN_SETTINGS = ("guard", "inference", "malicious")
"""Their old names stay in settings, so that a run keeps its hash: no warning."""


class MovedFinder(MetaPathFinder):
    """Finder of moved modules: old names import the same module, with one warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (new := new_name(fullname)) is None:
            return None
        if fullname.split(".")[1] not in IN_SETTINGS:
            warnings.warn(
                f"{fullname} is {new} now; the old name goes with version 0.4.", DeprecationWarning, stacklevel=2
            )
        return ModuleSpec(fullname, _Alias(new), origin=new, is_package=True)


class _Alias(Loader):
    def __init__(self, new: str) -> None:
        self.new = new

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.new)


def new_name(fullname: str) -> str | None:
    """Return the new name of module ``fullname``; ``None`` if it never moved."""
    package, _, name = fullname.partition(".")
    if package != __package__ or not name:
        return None
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (new := MOVED.get(".".join(parts[:length]))) is not None:
            return ".".join([package, new, *parts[length:]])
    return None


def answer_to_old_names() -> None:
    """Let ``import`` find moved modules, once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())  # before what would load a moved package's modules a second time
