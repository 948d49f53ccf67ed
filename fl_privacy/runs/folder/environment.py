"""Describe the environment of a run."""

import hashlib
import os
import platform
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fl_privacy.files import PACKAGE

PACKAGES = (
    "fl-privacy",
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "flwr",
    "ray",
    "flwr-datasets",
    "datasets",
    "lpips",
    "opacus",
    "hydra-core",
    "safetensors",
)


def describe_environment(*, seed: int) -> dict[str, Any]:
    """Return date, versions, hardware and seed, for ``environment.json``."""
    import torch  # noqa: PLC0415  (not needed to load folders)

    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "seed": seed,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "code": code_hash(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


@cache
def code_hash() -> str:
    """Return the SHA-256 of this package's sources, as of the first call."""
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


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
