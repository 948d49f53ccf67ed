"""Items of the five papers, from ``docs/papers_items.yaml``: how many are there, which are not, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml
from kept_rows import markdown

DOCS = Path(__file__).resolve().parent
BEGIN, END = "<!-- items -->", "<!-- end of items -->"


@dataclass(frozen=True, kw_only=True)
class Item:
    """What a paper has, and where it is here.

    Attributes:
        item: with the place in the paper.
        equal: a place that has what the paper prints; ``None`` where none does by default.
        option: a named option that has it.
        why: reason for not having it.
        was: ``unlike`` or ``missing`` where the papers' first reading found it so.
        place: where there is something of it nevertheless.
    """

    item: str
    equal: str | None = None
    option: str | None = None
    why: str | None = None
    was: str | None = None
    place: str | None = None

    @property
    def status(self) -> str:
        """Return ``equal``, ``option`` or ``not``: how the package has the item."""
        return "equal" if self.equal else "option" if self.option else "not"

    @property
    def places(self) -> list[str]:
        """Return all places that the item names."""
        return [place for place in (self.equal, self.option, self.place) if place]


def load_items(file: Path = DOCS / "papers_items.yaml") -> dict[str, tuple[str, list[Item]]]:
    """Name of each paper -> title and items, in the order of the file."""
    known = {field.name for field in fields(Item)}
    found = {}
    for name, paper in yaml.safe_load(file.read_text()).items():
        told = [{("why" if key == "not" else key): value for key, value in item.items()} for item in paper["items"]]
        for item in told:
            chosen = {"equal", "option", "why"} & item.keys()
            if len(chosen) != 1 or not item.keys() <= known:
                raise ValueError(f"{item} is expected to have one of equal, option and not, and nothing unknown.")
        found[name] = (paper["title"], [Item(**item) for item in told])
    return found


def counts_table(columns: int | None = None) -> str:
    """Render the first ``columns`` (``None``: all) of the table of counts: a line for each paper and one for all."""
    papers = load_items()
    lines = [[title, *_counts(items)][:columns] for title, items in papers.values()]
    lines.append(["**all**", *_counts([item for _, items in papers.values() for item in items])][:columns])
    heads = ["", "items", "as published", "by a named option", "not", "before: there and alike", "unlike", "missing"]
    return markdown(heads[:columns], lines)


def _counts(items: Sequence[Item]) -> list[str]:
    now = [item.status for item in items]
    before = [item.was or ("missing" if item.status == "not" else "alike") for item in items]
    return [
        str(len(items)),
        *(str(now.count(status)) for status in ("equal", "option", "not")),
        *(str(before.count(status)) for status in ("alike", "unlike", "missing")),
    ]


def with_counts(page: str) -> str:
    """Replace the table of present counts between the marks of ``page``."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{counts_table(5)}\n{END}{rest.partition(END)[2]}"


def items_page(made: str) -> str:
    """Render all items of the papers with their places, or the reason why one is not here."""
    parts = [made, "# Item by item", (DOCS / "published" / "items.md").read_text().strip(), counts_table()]
    for title, items in load_items().values():
        rows = [
            [item.item, {"equal": "as published", "option": "by option", "not": "not"}[item.status], _told(item)]
            for item in items
        ]
        parts += [f"## {title}", markdown(["", "", ""], rows)]
    return "\n\n".join(parts) + "\n"


def _told(item: Item) -> str:
    places = ", ".join(f"`{place}`" for place in item.places)
    return f"{item.why}{f' ({places})' if places else ''}" if item.why else places
