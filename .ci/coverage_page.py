"""Write the page of how much of each folder the tests run, from the JSON of coverage.py."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def main(measured: Path, page: Path) -> None:
    """Write a row a folder, lines and branches, and one of all."""
    folders: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for name, file in json.loads(measured.read_text(encoding="utf-8"))["files"].items():
        folder = Path(name).parent.as_posix()
        for count in COUNTS:
            folders[folder][count] += file["summary"][count]
            folders["all"][count] += file["summary"][count]
    rows = [
        f"| {folder} | {found['num_statements']:,} | {_share(found['covered_lines'], found['num_statements'])}"
        f" | {_share(found['covered_branches'], found['num_branches'])} |"
        for folder, found in sorted(folders.items(), key=lambda item: (item[0] != "all", item[0]))
    ]
    head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True).stdout
    page.write_text(
        f"# Coverage\n\nWhat `make test` runs of the package at `{head.strip()}`, counted by `make coverage`.\n\n"
        "| folder | statements | lines | branches |\n|---|---|---|---|\n" + "\n".join(rows) + "\n",
        encoding="utf-8",
    )


def _share(covered: int, of: int) -> str:
    return f"{covered / of:.1%}" if of else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
