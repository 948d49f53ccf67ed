"""The papers' tables as ``docs/published/*.yaml`` has them, and what kept rows say of each.

A file is a paper, or measurements of our own: ``name``, ``title``, ``about``, ``drawings`` (what shows no figure) and
``tables``. A table says where it stands, what was published in which setting, how ours differs, the commands that make
its rows, which of these each line is (``where``: fields of a row or settings of the run behind it), which figures are
shown (``columns``), the paper's settings beyond ``docs/papers_settings.yaml`` (``paper``), what counts as agreement
(``verdict``, see ``verdicts.Rule``) and, for an outcome, ``why``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kept_rows import NOT_RUN, Kept, Measured, Row, choose, measured, value_of
from paper_settings import Difference, differences, published_of, read_yaml
from verdicts import Column as Judged, Line, Verdict, judge, rule_of

PUBLISHED = Path(__file__).resolve().parent / "published"

SETTLED = {
    "setting": "comes with another setting, shown",
    "needs": "comes with something else, shown",
    "program": "the authors' program gives ours",
    "contradiction": "the published figures do not fit together, shown",
    "open": "open",
}
"""How an answer to what is not reproduced ends."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A figure that a table has: where it stands in a row and how it is written."""

    title: str
    of: str
    digits: str = ".1f"
    times: float = 1.0
    interval: Sequence[str] = ()
    n: str | None = None
    share: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    over: Mapping[str, Any] | None = None
    """Chooses the row whose figure this one is a multiple of."""

    def row(self, rows: Sequence[Row], where: Mapping[str, Any]) -> Row | None:
        """Find the row that ``where`` chooses, if it has this column's figure."""
        row = choose(rows, {**where, **self.where})
        return row if row and value_of(row, self.of) is not None else None

    def read(self, rows: Sequence[Row], where: Mapping[str, Any]) -> Measured | None:
        """Compute this column's figure from the row that ``where`` chooses."""
        found = self._of(rows, {**where, **self.where})
        if found is None or self.over is None:
            return found and found.times(self.times)
        base = self._of(rows, self.over)
        return base and Measured(mean=self.times * found.mean / base.mean, n=found.n)

    def _of(self, rows: Sequence[Row], where: Mapping[str, Any]) -> Measured | None:
        row = choose(rows, where)
        return row and measured(row, self.of, interval=self.interval, n=self.n, share=self.share)

    def told(self, ours: Measured | None) -> str:
        """Format a figure with its interval; a mark stands in for one that was not run."""
        if ours is None:
            return NOT_RUN
        ends = [format(end, self.digits) for end in (ours.low, ours.high) if end is not None]
        return format(ours.mean, self.digits) + (f" [{', '.join(ends)}]" if len(ends) == 2 else "")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper, or a measurement of our own, with the rows that are ours."""

    name: str
    at: str
    title: str
    command: Sequence[str]
    rows: str
    setting: str = ""
    ours: str = ""
    columns: Mapping[str, Column] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    verdict: Mapping[str, Any] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    settled: Literal["setting", "needs", "program", "contradiction", "open", ""] = ""
    """How a table that is not reproduced ends, see ``SETTLED``."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """The paper's settings of these rows, by the rows' names; ``null``: not recorded there."""
    shown: Literal["lines", "rows", "attacks", "pairs"] = "lines"
    """``rows`` shows all rows instead of lines, ``attacks`` a column for each attack, ``pairs`` kinds by data sets."""
    only: Sequence[str] = ()
    """Of rows, these columns."""
    of: str = ""
    """Name of the paper."""

    def read(self, kept: Kept, line: str, column: str) -> Measured | None:
        """Compute our figure for a line and a column of the table."""
        told = self.lines[line]
        rows = kept[told.get("rows", self.rows)]
        return self.columns[column].read(rows, {**self.where, **told.get("where", {})})

    def _settings(self, kept: Kept) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Yield each row behind a judged line, and the paper's settings of it except those that the line varies."""
        asked = self.verdict or {}
        pairs = [*asked.get("above", ()), *asked.get("alike", ())]
        compared = {name for pair in pairs for name in pair}
        for name, line in self.lines.items():
            for column in self.judged_columns if self.verdict else ():
                if name not in compared if pairs else self.published(name, column) is None:
                    continue
                rows, varied = kept[line.get("rows", self.rows)], line.get("where", {})
                row = self.columns[column].row(rows, {**self.where, **varied})
                if row is not None:
                    published = {**published_of(self.of, partial(value_of, row)), **self.paper}
                    yield row, {name: value for name, value in published.items() if name not in varied}

    def compared(self, kept: Kept) -> bool:
        """Say whether the paper's settings are known of each judged row."""
        return all(published for _, published in self._settings(kept))

    def differences(self, kept: Kept) -> list[Difference]:
        """List the settings of judged rows that are not the paper's, each once."""
        found: dict[str, Difference] = {}
        for row, published in self._settings(kept):
            for one in differences(published, partial(value_of, row), absent="not recorded"):
                found.setdefault(one.name if one.ours is None else one.told, one)
        return list(found.values())

    def judged(self, kept: Kept) -> Verdict | None:
        """Judge whether our figures reproduce the table; ``None`` where nothing is published."""
        if not self.verdict:
            return None
        columns = [
            Judged(
                lines=[
                    Line(name=name, published=self.published(name, c), ours=self.read(kept, name, c))
                    for name in self.lines
                ],
                rule=rule_of(self.verdict, c),
            )
            for c in self.judged_columns
        ]
        if self.verdict.get("across"):
            columns = [Judged(lines=[line for column in columns for line in column.lines], rule=columns[0].rule)]
        return judge(columns, "; ".join(self.columns[c].title for c in self.judged_columns))

    @property
    def judged_columns(self) -> list[str]:
        """Return the names of the figures that are judged; ``across`` compares them with each other."""
        figure = self.verdict["figure"]
        return [figure] if isinstance(figure, str) else list(figure)

    def published(self, line: str, column: str) -> float | None:
        """Look up the paper's figure for a line and a column."""
        return self.lines[line].get("published", {}).get(column)

    def is_void(self, line: str, column: str) -> bool:
        """Say whether a cell of the table has nothing to measure."""
        return column in self.lines[line].get("void", ())


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Whose tables they are."""

    name: str
    title: str
    about: str = ""
    drawings: str = ""
    tables: Sequence[Table] = ()


def load_papers(folder: Path = PUBLISHED) -> list[Paper]:
    """Load all papers' tables, in the order of their files."""
    return [_paper(read_yaml(path)) for path in sorted(folder.glob("*.yaml"))]


def _paper(told: Mapping[str, Any]) -> Paper:
    return Paper(**{**told, "tables": [_table({**table, "of": told["name"]}) for table in told["tables"]]})


def _table(told: Mapping[str, Any]) -> Table:
    columns = {name: Column(**column) for name, column in told.get("columns", {}).items()}
    lines = {str(name): line for name, line in told.get("lines", {}).items()}
    return Table(**{**told, "columns": columns, "lines": lines})
