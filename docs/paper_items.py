"""Items of the five papers, from ``docs/papers_items.yaml``: how many are there, which are not, and why.

Statuses are derived: for a table or figure from the verdict and the settings of its rows, for everything else from the
settings of its place or from a test. Settings are compared with the paper's by ``paper_settings``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path

from kept_rows import Kept, markdown
from paper_settings import is_preset, of_place, read_yaml, told_settings, unnamed_numbers
from paper_tables import Table, load_papers
from verdicts import Outcome, Verdict

DOCS = Path(__file__).resolve().parent
BEGIN, END = "<!-- items -->", "<!-- end of items -->"


class Status(StrEnum):
    """How the package has an item; of tables and figures the later ones count as worse."""

    EQUAL = "as published"
    OPTION = "by option"
    REPRODUCED = "reproduced, in other settings"
    ORDER = "in order"
    PART = "in part"
    NOT_RUN = "not run"
    NOT = "not reproduced"
    MISSING = "not here"


@dataclass(frozen=True, kw_only=True)
class Item:
    """What a paper has, and where it is here.

    Attributes:
        item: with the place in the paper.
        place: settings, ``module:attribute``, ``file:``, or one or more ``table:``, apart by spaces.
        test: test that compares the place's code with what is printed; without a place, of a statement.
        fails: what the test shows not to hold.
        named: ``True`` if no preset of the paper takes that code.
        values: lines that the place's file has to hold.
        why: reason for not having it.
        open: what of it has not been run.
        was: ``unlike`` or ``missing`` where the papers' first reading found it so.
    """

    item: str
    place: str | None = None
    test: str | None = None
    fails: str | None = None
    named: bool = False
    values: Sequence[str] = ()
    why: str | None = None
    open: str | None = None
    was: str | None = None

    @property
    def claim(self) -> str:
        """Return what is said of the paper, without its place there."""
        return self.item.partition(": ")[2]

    @property
    def places(self) -> list[str]:
        """Return all places that the item names."""
        if not self.place:
            return []
        return self.place.split() if self.place.startswith("table:") else [self.place]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is derived of an item: its status, and what it rests on."""

    status: Status
    facts: Sequence[str] = ()


def load_items(file: Path = DOCS / "papers_items.yaml") -> dict[str, tuple[str, list[Item]]]:
    """Name of each paper -> title and items, in the order of the file."""
    known = {field.name for field in fields(Item)}
    found = {}
    for name, paper in read_yaml(file).items():
        told = [{("why" if key == "not" else key): value for key, value in item.items()} for item in paper["items"]]
        for item in told:
            if not {"place", "why", "open", "test"} & item.keys() or not item.keys() <= known:
                raise ValueError(f"{item} is expected to have a place or a reason (not, open), and nothing unknown.")
        found[name] = (paper["title"], [Item(**item) for item in told])
    return found


@cache
def _tables() -> Mapping[str, Table]:
    return {f"{paper.name}/{table.name}": table for paper in load_papers() for table in paper.tables}


def derive(paper: str, item: Item, kept: Kept) -> Found:
    """Derive the status of an item of ``paper``, and say what it rests on."""
    place = item.place or ""
    if item.why or item.open:
        return Found(status=Status.MISSING if item.why else Status.NOT_RUN, facts=[item.why or item.open or ""])
    if place.startswith("table:"):
        found = [_of_table(_tables()[each.removeprefix("table:")], kept) for each in item.places]
        worst = max(found, key=lambda one: list(Status).index(one.status))
        return Found(status=worst.status, facts=[fact for one in found for fact in one.facts])
    if item.test:
        return _of_test(item)
    return _of_file(item, place) if ":" in place else _of_settings(paper, item, place)


def _of_test(item: Item) -> Found:
    if item.fails:
        return Found(status=Status.NOT, facts=[item.fails, f"shown by `{item.test}`"])
    return Found(status=Status.OPTION if item.named else Status.EQUAL, facts=[f"compared by `{item.test}`"])


def _of_file(item: Item, place: str) -> Found:
    lines = " ".join((DOCS.parent / place.removeprefix("file:")).read_text().split()) if item.values else ""
    equal = item.values and all(value in lines for value in item.values)
    facts = [f"`{value}`" for value in item.values] or ["no fact is compared"]
    return Found(status=Status.EQUAL if equal else Status.OPTION, facts=facts)


def _of_settings(paper: str, item: Item, place: str) -> Found:
    published, differing = of_place(paper, place)
    unnamed = unnamed_numbers(item.claim, published)
    if published and not differing and not unnamed and is_preset(place):
        return Found(status=Status.EQUAL, facts=[f"equal: {told_settings(published)}"])
    facts = [
        *([f"ours: {', '.join(each.told for each in differing)}"] if differing else []),
        *([f"not compared: {', '.join(unnamed)}"] if published and unnamed else []),
        *([] if published else ["no setting is compared"]),
    ]
    return Found(status=Status.OPTION, facts=facts or [f"chosen by hand; equal: {told_settings(published)}"])


def _of_table(table: Table, kept: Kept) -> Found:
    verdict = table.judged(kept)
    if verdict is None:
        return Found(status=Status.PART if kept[table.rows] else Status.NOT_RUN, facts=["shown, not judged"])
    differing = table.differences(kept)
    facts = [verdict.told, *([f"ours: {', '.join(each.told for each in differing)}"] if differing else [])]
    return Found(status=_of_verdict(verdict, alike=table.compared(kept) and not differing), facts=facts)


def _of_verdict(verdict: Verdict, *, alike: bool) -> Status:
    """Translate a verdict; ``alike`` says that the rows have the paper's settings."""
    if verdict.outcome is Outcome.NOT_RUN:
        return Status.NOT_RUN
    if verdict.outcome is Outcome.NOT:
        return Status.NOT
    if verdict.measured < verdict.total:
        return Status.PART
    if verdict.outcome is Outcome.ORDERING:
        return Status.ORDER
    return Status.EQUAL if alike else Status.REPRODUCED


def derive_all(kept: Kept) -> dict[str, list[Found]]:
    """Name of each paper -> what is derived of its items."""
    return {name: [derive(name, item, kept) for item in items] for name, (_, items) in load_items().items()}


def counts_table(kept: Kept, *, before: bool = False) -> str:
    """Render the counts of statuses: a line for each paper and one for all; ``before``: as first read, too."""
    papers, found = load_items(), derive_all(kept)
    lines = [_counts(title, items, found[name], before) for name, (title, items) in papers.items()]
    every = [item for _, items in papers.values() for item in items]
    lines.append(_counts("**all**", every, [one for each in found.values() for one in each], before))
    heads = ["", "items", *Status, *(["before: there and alike", "unlike", "missing"] if before else [])]
    return markdown(heads, lines)


def _counts(title: str, items: Sequence[Item], found: Sequence[Found], before: bool) -> list[str]:
    now = [one.status for one in found]
    line = [title, str(len(items)), *(str(now.count(status)) for status in Status)]
    if before:
        was = [item.was or ("missing" if item.why else "alike") for item in items]
        line += [str(was.count(status)) for status in ("alike", "unlike", "missing")]
    return line


def with_counts(page: str, kept: Kept) -> str:
    """Replace the table of present counts between the marks of ``page``."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{counts_table(kept)}\n{END}{rest.partition(END)[2]}"


def items_page(made: str, kept: Kept) -> str:
    """Render all items of the papers with their places and what their status rests on."""
    told = (DOCS / "published" / "items.md").read_text().strip()
    parts, found = [made, "# Item by item", told, counts_table(kept, before=True)], derive_all(kept)
    for name, (title, items) in load_items().items():
        rows = [[item.item, str(one.status), _told(item, one)] for item, one in zip(items, found[name], strict=True)]
        parts += [f"## {title}", markdown(["", "", ""], rows)]
    return "\n\n".join(parts) + "\n"


def _told(item: Item, found: Found) -> str:
    places = ", ".join(f"`{place}`" for place in item.places)
    if item.why or item.open:
        return f"{item.why or item.open}{f' ({places})' if places else ''}"
    return "; ".join(filter(None, (places, *found.facts))).replace("|", "\\|")


def body_of_test(name: str, root: Path) -> str:
    """Return the source of ``path::test``; empty if there is no such test."""
    path, _, test = name.partition("::")
    text = (root / path).read_text() if (root / path).is_file() else ""
    found = re.search(rf"^def {re.escape(test)}\(.*?(?=^(?:def |class |@)|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""
