"""``make results``: the papers' tables and figures beside ours, and findings, from kept rows.

    python docs/results.py             # writes experiments/RESULTS.md, docs/findings.md, papers.md, papers/
    python docs/results.py --check     # says whether they are what the rows give

What is published, in which setting, which rows are ours and what counts as agreement stands in ``docs/published``, a
file a paper; rows are in ``experiments/rows``. No figure of ours is written by hand: one without rows is "not run".
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from finding_pictures import FOLDER, draw_all, drawable
from kept_rows import NOT_RUN, ROWS, Kept, attacks_table, markdown, rows_table
from paper_items import items_page, with_counts
from paper_tables import PUBLISHED, SETTLED, Paper, Table, load_papers
from scale_pictures import NAME, draw_scales, there
from verdict_table import pairs_table
from verdicts import COUNTED, Outcome

DOCS = Path(__file__).resolve().parent
PAGES = {"RESULTS.md": DOCS.parent / "experiments" / "RESULTS.md", "findings.md": DOCS / "findings.md"}
LETTERS = PUBLISHED / "letters"
MADE = "<!-- Made by `make results` from kept rows; write into docs/published and experiments/rows instead. -->"
BLOCKS = re.compile(r"(\n\n+|\n(?=- ))")
PICTURE = re.compile(r"!\[[^\]]*\]\(assets/findings/(\w+)\.png\)")
SLOT = re.compile(r"\{\{ *(verdict )?([^}]+?) *\}\}")


def render(papers: Sequence[Paper], kept: Kept) -> str:
    """Render the page of all tables."""
    parts = [MADE, (PUBLISHED / "results.md").read_text().strip(), _overview(papers, kept)]
    for paper in papers:
        parts += [f"## {paper.title}", paper.about.strip(), _contents(paper, kept)]
        parts += [f"Sketches and pictures without figures: {paper.drawings}." if paper.drawings else ""]
        before: dict[tuple[str, ...], str] = {}
        for table in paper.tables:
            parts += _section(table, kept, before.setdefault(tuple(table.command), table.title))
    return Slots(papers, kept).filled("\n\n".join(part for part in parts if part) + "\n")


def _overview(papers: Sequence[Paper], kept: Kept) -> str:
    """Count the verdicts of each paper's tables, a line for each paper."""
    found = {paper.title: [v.counts_as for table in paper.tables if (v := table.judged(kept))] for paper in papers}
    found = {title: verdicts for title, verdicts in found.items() if verdicts}
    found["**all**"] = [verdict for verdicts in found.values() for verdict in verdicts]
    lines = [[title, *(str(verdicts.count(each)) for each in COUNTED)] for title, verdicts in found.items()]
    return markdown(["tables and figures", *COUNTED], lines)


def _contents(paper: Paper, kept: Kept) -> str:
    """List the verdicts on the tables of a paper; empty where none has one."""
    lines = []
    for table in paper.tables:
        if verdict := table.judged(kept):
            lines.append([table.at, table.title, f"{verdict.measured} of {verdict.total}", f"**{verdict.told}**"])
    return markdown(["", "", "figures measured", "verdict"], lines) if lines else ""


def _section(table: Table, kept: Kept, commanded: str) -> Iterator[str]:
    """Yield the parts of a table's section: verdict, settings, commands and figures.

    ``commanded`` is the title of the paper's first table that has these commands.
    """
    yield f"### {table.at}: {table.title}" if table.at else f"### {table.title}"
    if verdict := table.judged(kept):
        reason = verdict.reason[:1].upper() + verdict.reason[1:]
        said = (f"**{verdict.told.capitalize()}.**", reason, table.why.get(verdict.outcome, "").strip())
        yield " ".join(filter(None, said))
    if table.setting:
        yield f"Published: {table.setting.strip()}"
    differing = ", ".join(each.told for each in table.differences(kept))
    if ours := " ".join(filter(None, (table.ours.strip(), f"Not the paper's: {differing}." if differing else ""))):
        yield f"Ours: {ours}"
    yield (
        "```sh\n" + "\n".join(table.command) + "\n```"
        if commanded == table.title
        else f"Commands as for *{commanded}*."
    )
    match table.shown:
        case "rows":
            yield rows_table(table.rows, kept.folder, table.only)
        case "attacks":
            yield attacks_table(table.rows, kept.folder)
        case "pairs":
            yield pairs_table(table.rows, kept.folder)
        case _:
            yield _figures(table, kept)


def _figures(table: Table, kept: Kept) -> str:
    """Render the published and the measured figures side by side."""
    heads, sides = [""], [list(table.lines)]
    for name, column in table.columns.items():
        published = [table.published(line, name) for line in table.lines]
        ours = [table.read(kept, line, name) for line in table.lines]
        if any(theirs is not None for theirs in published):
            heads += [f"{column.title}: published", "ours"]
            sides.append(["" if theirs is None else f"{theirs:g}" for theirs in published])
        else:
            heads.append(column.title)
        sides.append(
            ["" if table.is_void(line, name) else column.told(one) for line, one in zip(table.lines, ours, strict=True)]
        )
        sizes = {one.n for one in ours if one and one.n is not None}
        if len(sizes) == 1:
            heads[-1] += f" (n = {sizes.pop()})"
        elif sizes:
            heads.append("n")
            sides.append([f"{one.n}" if one and one.n is not None else "" for one in ours])
    return markdown(heads, list(zip(*sides, strict=True)))


class Slots:
    """Fills ``{{paper/table/line/column}}`` and ``{{verdict paper/table}}`` with what the rows give."""

    def __init__(self, papers: Sequence[Paper], kept: Kept) -> None:
        self._tables = {f"{paper.name}/{table.name}": table for paper in papers for table in paper.tables}
        self._kept = kept

    def figure(self, slot: re.Match[str]) -> str:
        """Format the figure that one slot of the text asks for."""
        paper, name, *rest = slot[2].split("/")
        table = self._tables[f"{paper}/{name}"]
        if slot[1]:
            verdict = table.judged(self._kept)
            return verdict.told if verdict else NOT_RUN
        line, column = rest
        return table.columns[column].told(table.read(self._kept, line, column))

    def filled(self, text: str) -> str:
        """Fill in all slots of a text."""
        return SLOT.sub(self.figure, text)

    def told(self, block: str) -> str:
        """Fill in a paragraph or list item; if a figure was not measured, show its command in place of it."""
        missing = [slot for slot in SLOT.finditer(block) if self.figure(slot) == NOT_RUN]
        if not missing or block.startswith("|"):
            return self.filled(block)
        paper, name, *_ = missing[0][2].split("/")
        start = "- " if block.startswith("- ") else ""
        return f"{start}*Not run:* `{self._tables[f'{paper}/{name}'].command[0]}`"


def render_findings(papers: Sequence[Paper], kept: Kept) -> str:
    """Render the page of findings."""
    slots, drawn = Slots(papers, kept), {*drawable(papers, kept), *([NAME] if there(papers, kept) else [])}
    text = (PUBLISHED / "findings.md").read_text().replace("{{not reproduced}}", _not_reproduced(papers, kept))
    blocks = [
        block for block in BLOCKS.split(text.strip()) if not (found := PICTURE.search(block)) or found[1] in drawn
    ]
    return f"{MADE}\n\n" + "".join(slots.told(block) for block in blocks) + "\n"


def _not_reproduced(papers: Sequence[Paper], kept: Kept) -> str:
    """List every table that was not reproduced, and why, as far as that is known."""
    lines = []
    for paper in papers:
        for table in paper.tables:
            verdict = table.judged(kept)
            if verdict and verdict.outcome is Outcome.NOT:
                why = " ".join(table.why.get(verdict.outcome, verdict.reason).split())
                lines.append([paper.title, f"{table.at}: {table.title}", SETTLED.get(table.settled, ""), why])
    ends = [f"{told}: {number}" for told in SETTLED.values() if (number := sum(line[2] == told for line in lines))]
    return f"How they end, as far as it is shown: {'; '.join(ends)}.\n\n" + markdown(
        ["paper", "table or figure", "how it ends", "why"], lines
    )


def pages(folder: Path = ROWS) -> dict[Path, str]:
    """Return the content of each generated page, by its path."""
    papers, kept = load_papers(), Kept(folder)
    slots, papers_page = Slots(papers, kept), DOCS / "papers.md"
    return {
        PAGES["RESULTS.md"]: render(papers, kept),
        PAGES["findings.md"]: render_findings(papers, kept),
        papers_page: with_counts(papers_page.read_text(), kept),
        DOCS / "papers" / "items.md": items_page(MADE, kept),
        **{DOCS / "papers" / f.name: slots.filled(f"{MADE}\n\n{f.read_text()}") for f in sorted(LETTERS.glob("*.md"))},
    }


def main() -> None:
    """Write the pages, or check them."""
    for path, content in pages().items():
        if "--check" not in sys.argv:
            path.write_text(content)
        elif not path.is_file() or path.read_text() != content:
            raise SystemExit(f"{path} is not what the rows give; run `make results`.")
    if "--check" not in sys.argv:
        draw_all(load_papers(), Kept())
        draw_scales(load_papers(), Kept(), FOLDER)


if __name__ == "__main__":
    main()
