"""Attacks by their names in ``conf/attack``."""

import importlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fl_privacy.attacks.attack import ReconstructionAttack
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR

Make = Callable[..., ReconstructionAttack]

_FOLDER = CONFIG_DIR / "attack"
_EXPONENT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$")
_TARGET = re.compile(r"_target_:\s*fl_privacy\.attacks\.(\w+)")


def attack_names() -> list[str]:
    """List the names of all attacks that need no other setting, sorted."""
    return [path.stem for path in sorted(_FOLDER.glob("*.yaml")) if path.stem not in ("none", "custom")]


def attack_named(name: str) -> Make:
    """Return the factory of the attack ``name``, with the settings of its file in ``conf/attack``.

    Raises:
        UserError: the file has settings, but PyYAML is not installed.
    """
    settings = dict(_settings(_FOLDER / f"{name}.yaml"))
    target = _TARGET.fullmatch(f"_target_: {settings.pop('_target_', None)}")
    if target is None:
        raise UserError(f"conf/attack/{name}.yaml is expected to have a _target_ in fl_privacy.attacks; restore it.")
    make: Make = getattr(importlib.import_module("fl_privacy.attacks"), target[1])
    return partial(make, **settings) if settings else make


def _settings(file: Path) -> Mapping[str, Any]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    if len(lines) == 1 and (found := _TARGET.fullmatch(lines[0])):
        return {"_target_": f"fl_privacy.attacks.{found[1]}"}
    try:
        import yaml  # noqa: PLC0415  (the core goes without)
    except ImportError as error:
        raise UserError(
            f"The attack {file.stem} is expected to find the package PyYAML, which reads its settings, but it is not"
            " installed; run `pip install PyYAML`."
        ) from error

    class Loader(yaml.SafeLoader):
        """Takes 1.0e6 for a number, as YAML 1.2 and OmegaConf do."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    content = yaml.load("\n".join(lines), Loader)
    extended = [entry.partition("@")[0] for entry in content.pop("defaults", []) if entry != "_self_"]
    settings: dict[str, Any] = {}
    for base in extended:
        settings |= _settings(file.with_name(f"{base}.yaml"))
    settings |= content
    return settings
