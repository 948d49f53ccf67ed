"""The commands that the papers' tables name, as a shell expands them."""

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "published"
PAPERS = ("refiner", "spn", "fdl_pp", "ats", "sapag")

RECORDED = """#!/usr/bin/env bash
printf '%s\\037' "$0" "$@" >> "$RECORD"
printf '\\n' >> "$RECORD"
"""


@cache
def published() -> dict[str, Any]:
    """File of a paper's tables -> what it holds."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {path.name: yaml.load(path.read_text(), loader) for path in sorted(PUBLISHED.glob("*.yaml"))}


def expanded_calls(folder: Path) -> list[list[str]]:
    """List every call that the commands make, its program first, by running them with programs that only note it."""
    for name in ("fl-privacy", "python", "cp"):
        (folder / name).write_text(RECORDED)
        (folder / name).chmod(0o755)
    lines: dict[str, None] = {}
    for paper in published().values():
        if paper["name"] in PAPERS:
            lines |= dict.fromkeys(command for table in paper["tables"] for command in table["command"])
    environment = {"PATH": f"{folder}{os.pathsep}/usr/bin:/bin", "RECORD": str(folder / "record")}
    ran = subprocess.run(
        ["bash", "-euc", "\n".join(lines)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = (folder / "record").read_text().splitlines()
    every = [[Path(line.split("\037")[0]).name, *line.split("\037")[1:-1]] for line in told]
    return [list(call) for call in dict.fromkeys(map(tuple, every))]
