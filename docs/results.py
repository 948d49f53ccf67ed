"""``make results``: the papers' tables and figures beside ours, and findings, from kept rows.

    python docs/results.py             # writes experiments/RESULTS.md and docs/findings.md
    python docs/results.py --check     # says whether they are what the rows give

What is published, in which setting, which rows are ours and what counts as agreement stands in ``docs/published``, a
file a paper; rows are in ``experiments/rows``. No figure of ours is written by hand: one without rows is "not run".
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from finding_pictures import draw_all
from kept_rows import NOT_RUN, ROWS, Kept, attacks_table, markdown, rows_table
from paper_tables import PUBLISHED, Paper, Table, load_papers
from verdicts import Outcome

DOCS = Path(__file__).resolve().parent
PAGES = {"RESULTS.md": DOCS.parent / "experiments" / "RESULTS.md", "findings.md": DOCS / "findings.md"}
MADE = "<!-- Made by `make results` from kept rows; write into docs/published and experiments/rows instead. -->"
SLOT = re.compile(r"\{\{ *(verdict )?([^}]+?) *\}\}")


def render(papers: Sequence[Paper], kept: Kept) -> str:
    """The page of all tables."""
    parts = [MADE, (PUBLISHED / "results.md").read_text().strip(), _overview(papers, kept)]
    for paper in papers:
        parts += [f"## {paper.title}", paper.about.strip()]
        parts += [f"Sketches and pictures without figures: {paper.drawings}." if paper.drawings else ""]
        for table in paper.tables:
            parts += _section(table, kept)
    return filled("\n\n".join(part for part in parts if part) + "\n", papers, kept)


def _overview(papers: Sequence[Paper], kept: Kept) -> str:
    """A line for each table of a paper, and how many came to what."""
    lines, counted = [], Counter()
    for paper in papers:
        for table in paper.tables:
            if verdict := table.judged(kept):
                counted[verdict.outcome] += 1
                there, of = table.coverage(kept)
                lines.append([paper.title, f"{table.at}: {table.title}", f"{there} of {of}", f"**{verdict.outcome}**"])
    total = ", ".join(f"{counted[outcome]} {outcome}" for outcome in Outcome)
    table = markdown(["paper", "table or figure", "figures measured", "verdict"], lines)
    return f"Of {len(lines)} tables and figures: {total}.\n\n{table}"


def _section(table: Table, kept: Kept) -> Iterator[str]:
    """Verdict, settings, commands and figures."""
    yield f"### {table.at}: {table.title}" if table.at else f"### {table.title}"
    if verdict := table.judged(kept):
        reason = verdict.reason[:1].upper() + verdict.reason[1:]
        said = (f"**{verdict.outcome.capitalize()}.**", reason, table.why.get(verdict.outcome, "").strip())
        yield " ".join(filter(None, said))
    for what, told in (("Published", table.setting), ("Ours", table.ours)):
        if told:
            yield f"{what}: {told.strip()}"
    yield "```sh\n" + "\n".join(table.command) + "\n```"
    match table.shown:
        case "rows":
            yield rows_table(table.rows, kept.folder, table.only)
        case "attacks":
            yield attacks_table(table.rows, kept.folder)
        case _:
            yield _figures(table, kept)


def _figures(table: Table, kept: Kept) -> str:
    """Published and measured side by side."""
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


def filled(text: str, papers: Sequence[Paper], kept: Kept) -> str:
    """``text`` with figures and verdicts in its slots: ``{{paper/table/line/column}}``, ``{{verdict paper/table}}``."""
    tables = {f"{paper.name}/{table.name}": table for paper in papers for table in paper.tables}

    def slot(found: re.Match[str]) -> str:
        paper, name, *rest = found[2].split("/")
        table = tables[f"{paper}/{name}"]
        if found[1]:
            verdict = table.judged(kept)
            return str(verdict.outcome) if verdict else NOT_RUN
        line, column = rest
        return table.columns[column].told(table.read(kept, line, column))

    return SLOT.sub(slot, text)


def pages(folder: Path = ROWS) -> dict[Path, str]:
    """Where each page is kept, and what stands in it."""
    papers, kept = load_papers(), Kept(folder)
    findings = filled((PUBLISHED / "findings.md").read_text(), papers, kept)
    return {PAGES["RESULTS.md"]: render(papers, kept), PAGES["findings.md"]: f"{MADE}\n\n{findings}"}


def main() -> None:
    """Write the pages, or check them."""
    for path, content in pages().items():
        if "--check" not in sys.argv:
            path.write_text(content)
        elif not path.is_file() or path.read_text() != content:
            raise SystemExit(f"{path} is not what the rows give; run `make results`.")
    if "--check" not in sys.argv:
        draw_all(load_papers(), Kept())


if __name__ == "__main__":
    main()
