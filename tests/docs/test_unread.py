"""A page says that nothing is read somewhere only if rows of the present version say so."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS, ROWS = ROOT / "docs", ROOT / "experiments" / "rows"
WHO = r"none of (?:the|these|our) (?:ideas|attacks|attackers)|no (?:attack|attacker)|nothing|nobody"
CLAIM = re.compile(rf"\b(?:{WHO})\s+(?:reads|read anything)\b[^.|]*", re.IGNORECASE)
MARK = re.compile(r"\s*\.?\s*<!-- unread: (\w+) (.*?) -->")
"""``<!-- unread: EXPERIMENT field=value ... -->`` behind a claim: the rows that it is of."""


def unfounded(text: str, folder: Path = ROWS, version: str = version_of("fl_privacy")) -> Iterator[str]:
    """Yield the claims of a page that no row of ``version`` bears out."""
    for claim in CLAIM.finditer(text):
        mark = MARK.match(text, claim.end())
        asked = dict(pair.split("=", 1) for pair in mark.group(2).split()) | {"version": version} if mark else {}
        lines = (folder / mark.group(1) / "rows.jsonl").read_text(encoding="utf-8").splitlines() if mark else []
        rows = [row for row in map(json.loads, lines) if asked.items() <= row.items()]
        if not rows or any(row["read"] > row["control_read"] for row in rows):
            yield claim.group()


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_that_nothing_is_read_comes_from_rows_of_this_version(page: Path) -> None:
    assert list(unfounded(page.read_text(encoding="utf-8"))) == []


def test_a_claim_is_borne_out_by_its_row_alone(tmp_path: Path) -> None:
    (tmp_path / "tried").mkdir()
    row = '{"version": "1", "model": "vit", "read": %d, "control_read": 0}'
    text = "None of the ideas read anything behind a ViT. <!-- unread: tried model=vit -->"
    for read, version, left in ((0, "1", 0), (4, "1", 1), (0, "2", 1)):
        (tmp_path / "tried" / "rows.jsonl").write_text(row % read, encoding="utf-8")
        assert len(list(unfounded(text, tmp_path, version))) == left
    assert len(list(unfounded(text.partition("<")[0], tmp_path, "1"))) == 1
