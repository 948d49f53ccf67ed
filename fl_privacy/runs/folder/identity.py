"""Identify equal experiments by a hash of the settings that determine results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fl_privacy.files import PACKAGE
from fl_privacy.runs.config.parse import LATER, select
from fl_privacy.runs.config.settings import Role, keys_of

RUNTIME = keys_of(Role.RUNTIME)
FORMAT = 1  # format of a run's folder; raised if older readers would misread it


def run_hash(config: Mapping[str, Any], ignore: Collection[str] = RUNTIME) -> str:
    """Return eight hexadecimal digits that are equal for configurations that differ only in the keys ``ignore``."""
    unchanged = [key for key, value in LATER.items() if select(config, key) == value]
    text = json.dumps(_without(config, (*ignore, *unchanged)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def training_hash(config: Mapping[str, Any]) -> str:
    """Return a hash that is the same for runs whose trainings differ only in the defense."""
    return run_hash(config, (*RUNTIME, *keys_of(Role.DEFENSE), *keys_of(Role.ATTACK)))


def attacked_hash(config: Mapping[str, Any]) -> str:
    """Return a hash that is the same for runs that differ only in the attack."""
    return run_hash(config, (*RUNTIME, *keys_of(Role.ATTACK)))


def repeat_hash(config: Mapping[str, Any]) -> str:
    """Return a hash that is the same for runs that differ only in the seed."""
    return run_hash(config, (*RUNTIME, "seed"))


def _without(config: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in dropped:
            continue
        below = [name.removeprefix(f"{key}.") for name in dropped if name.startswith(f"{key}.")]
        kept[key] = _without(value, below) if below and isinstance(value, Mapping) else value
    return kept


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Content of ``run.json``, with the hashes of ``run_hash``, ``training_hash`` and ``repeat_hash``."""

    label: str
    hash: str
    training: str
    repeat: str
    undefended: bool
    config: Mapping[str, Any]

    @classmethod
    def of(cls, label: str, config: Mapping[str, Any], *, undefended: bool) -> Identity:
        hashes = {"hash": run_hash(config), "training": training_hash(config), "repeat": repeat_hash(config)}
        return cls(label=label, undefended=undefended, config=config, **hashes)


PACKAGES = ["fl-privacy", "torch", "torchvision", "numpy", "scipy", "flwr", "ray", "flwr-datasets", "datasets"]
PACKAGES += ["lpips", "opacus", "hydra-core", "safetensors"]


def describe_environment(*, seed: int) -> dict[str, Any]:
    """Return date, versions, hardware and seed, for ``environment.json``."""
    import torch  # noqa: PLC0415  (not needed to load folders)

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "seed": seed,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": next(models, "") or platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "code": code_hash(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


@cache
def code_hash() -> str:
    """Return the SHA-256 of this package's sources, which are read at the first call."""
    content = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content.update(path.relative_to(PACKAGE).as_posix().encode())
        content.update(hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
