"""Hold the share of public names whose types are known, from pyright's JSON, to what was reached."""

import json
import sys
from pathlib import Path

LEAST = 0.95


def main(file: Path) -> int:
    """Print the share; status 1 below ``LEAST``."""
    found = json.loads(file.read_text(encoding="utf-8"))["typeCompleteness"]
    share, counts = found["completenessScore"], found["exportedSymbolCounts"]
    print(f"{share:.1%} of {sum(counts.values())} public names have known types; at least {LEAST:.0%} are expected")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
