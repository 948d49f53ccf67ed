"""Table of what the strongest attacker reads behind each defense, from experiments/rows/red_team."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kept_rows import NOT_RUN, ROWS, markdown, read_rows

Row = Mapping[str, Any]
KIND = ("version", "attacker", "uploads", "public")

FEWEST = 8
"""Defenses that an attacker was tried on, for a column of its own."""


FEEDBACK = "sum"
"""Attacker of top-k with feedback alone, by its number of uploads."""


def red_team_table(name: str, folder: Path = ROWS) -> str:
    """Render a line for each kind of images and defense, a column for each attacker; none without rows."""
    rows = read_rows(name, folder)
    if not rows:
        return f"{NOT_RUN.capitalize()}."
    fed_back = "; ".join(f"{_cell(row)} for {row['uploads']}" for row in rows if row["attacker"] == FEEDBACK)
    rows = [row for row in rows if row["attacker"] != FEEDBACK]
    tried_of = Counter(map(_kind, rows))
    kinds = sorted((kind for kind, tried in tried_of.items() if tried >= FEWEST), key=_order)
    lines = []
    tried = dict.fromkeys((row["data"], row["defense"]) for row in rows)
    for data, defense in sorted(tried, key=lambda pair: -len(pair[0])):
        own = {_kind(row): row for row in rows if (row["data"], row["defense"]) == (data, defense)}
        best = max((row["control_psnr"] for row in own.values() if row["control_psnr"] is not None), default=None)
        control = "" if best is None else f"{best:.1f}"
        lines.append(
            [defense + (", CIFAR-10" if "cifar" in data else ""), *(_cell(own.get(k)) for k in kinds), control]
        )
    table = markdown(["defense", *(_title(kind) for kind in kinds), "control, at most"], lines)
    said = "The largest hundredth of each upload, with error feedback, by the sum of the uploads"
    return f"{table}\n\n{said}: {fed_back}." if fed_back else table


def _kind(row: Row) -> tuple[Any, ...]:
    return tuple(row[field] for field in KIND)


def _order(kind: Sequence[Any]) -> tuple[Any, ...]:
    version, attacker, uploads, public = kind
    return version != "before", attacker, uploads, public


def _title(kind: Sequence[Any]) -> str:
    version, attacker, uploads, public = kind
    when = ", before" if version == "before" else ""
    return f"{attacker}{when}, {uploads} upload{'s' * (uploads > 1)}, {'prior' if public else 'no prior'}"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["psnr"] is None:
        return "failed"
    wrong = f", control {row['control_read']}" if row["control_read"] else ""
    return f"{row['psnr']:.1f}, {row['read']} of {row['images']}{wrong} ({row['cpu_seconds']:.0f} s)"
