"""Check what `make wheel` built: one wheel and one sdist of one version, with what they need and nothing else."""

import argparse
import sys
import tarfile
import zipfile
from pathlib import Path

IN_WHEEL = (
    "fl_privacy/py.typed",
    "fl_privacy/_moved.json",
    "fl_privacy/conf/config.yaml",
    "fl_privacy/report/templates/base.html.j2",
)
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY.md", "tests/conftest.py", "constraints.txt")
SUFFIXES = (".pyc", ".safetensors", ".parquet", ".pt", ".key")
MOST_BYTES = 25 << 20


def faults(wheel: Path, sdist: Path) -> list[str]:
    """List what is missing or should not be there."""
    with zipfile.ZipFile(wheel) as opened:
        built = opened.namelist()
    with tarfile.open(sdist) as archive:
        source = [name.partition("/")[2] for name in archive.getnames()]
    found = [f"{wheel.name} lacks {name}" for name in IN_WHEEL if name not in built]
    found += [f"{sdist.name} lacks {name}" for name in IN_SDIST if name not in source]
    found += [f"{wheel.name} holds {name}" for name in built if not name.startswith(("fl_privacy/", "fl_privacy-"))]
    found += [f"{name} is in it" for name in (*built, *source) if name.endswith(SUFFIXES)]
    found += [
        f"{file.name} is larger than {MOST_BYTES >> 20} MiB"
        for file in (wheel, sdist)
        if file.stat().st_size > MOST_BYTES
    ]
    return found


def main() -> int:
    """Print what is wrong with the files in a folder; status 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="the tag that is released, such as v0.2.0")
    asked = parser.parse_args()
    wheels, sdists = (sorted(asked.folder.glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        print(f"One wheel and one sdist are expected in {asked.folder}, but got {len(wheels)} and {len(sdists)}.")
        return 1
    version = wheels[0].name.split("-")[1]
    found = faults(wheels[0], sdists[0])
    found += [f"{sdists[0].name} is of another version than the wheel's {version}"] * (version not in sdists[0].name)
    found += [f"the tag {asked.tag} is not v{version}"] * (asked.tag is not None and asked.tag != f"v{version}")
    print("\n".join(found) or f"fl_privacy {version}: a wheel and an sdist, nothing missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
