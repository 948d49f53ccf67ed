"""What runs elsewhere is pinned: actions by commit, since a tag may be moved; what they install by version."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_what_runs_elsewhere_is_pinned() -> None:
    files = [ROOT / "action.yml", *(ROOT / ".github" / "workflows").glob("*.yml")]
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    used = [line for line in lines if re.match(r"(- )?uses:", line)]
    installed = [line for line in lines if "pip install" in line and not line.startswith("description")]
    assert used and installed
    assert all(re.search(r"@[0-9a-f]{40}\b", line) for line in used)
    assert all("--constraint" in line for line in installed)
