"""Rows that an experiment keeps as they come, in ``rows.jsonl`` of the folder ``--out``: what ``make results`` reads.

Not a command of its own.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fl_privacy.cli.faults import EXIT_NOTHING
from fl_privacy.files import write_whole

Row = dict[str, Any]


class RowFile:
    """One row for each key; without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "rows.jsonl" if folder else None
        self.rows = self._kept()

    def _kept(self) -> list[Row]:
        lines = self.path.read_text().splitlines() if self.path is not None and self.path.is_file() else []
        return [json.loads(line) for line in lines]

    def find(self, key: Row) -> Row | None:
        """Find the row whose fields include all of ``key``."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def add(self, key: Row, figures: Row) -> Row:
        """Keep a row; one of the same key is replaced."""
        row = {**key, **figures}
        kept = self.rows if self.path is None else self._kept()  # with those of commands that ran at the same time
        self.rows = [other for other in kept if not key.items() <= other.items()] + [row]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, "".join(json.dumps(each) + "\n" for each in self.rows))
        return row


def takes_rows(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``."""
    parser.add_argument("--out", type=Path, help="folder in which rows.jsonl keeps the figures")


def attack_failed(status: int) -> bool:
    """Return whether a command's attack failed on all victims; ``SystemExit`` for a run that gives no figures.

    Args:
        status: exit status of the command; other faults and signals give no row.
    """
    if status not in (0, EXIT_NOTHING):
        raise SystemExit(f"a run ended with status {status}, which is no figure; start the same command again")
    return status == EXIT_NOTHING
