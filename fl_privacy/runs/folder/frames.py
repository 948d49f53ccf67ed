"""Convert scores and runs to pandas tables and CSV files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy.errors import UserError
from fl_privacy.files import UNENCODABLE
from fl_privacy.measure.scores import VictimScore
from fl_privacy.runs.folder.read import Run, read_run
from fl_privacy.runs.folder.records import image_record
from fl_privacy.types import Reconstruction

if TYPE_CHECKING:
    from pandas import DataFrame

_EXAMPLES = ("image", "text", "row")  # kinds of records of one attacked example each
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of spreadsheet formulas
Tabled = VictimScore | Run | Path | str  # result of ``evaluate`` or ``read_run``, or the folder of a run


def to_dataframe(found: Tabled | Iterable[Tabled], *, kind: str | None = None) -> DataFrame:
    """Turn scores, runs or run folders (one or several) into a table with a row for each attacked example.

    If ``kind`` is given, such as ``round``, the table has a row for each record of that kind in a run, see ``RECORDS``
    in :mod:`fl_privacy.runs.folder.records`. ``UserError`` if there are no records, or ``found`` has another type.
    """
    import pandas as pd  # noqa: PLC0415  (not needed by the core)

    several = [found] if isinstance(found, VictimScore | Run | Path | str | Reconstruction) else list(found)
    rows = [row for one in several for row in _rows(one, kind)]
    if not rows:
        raise UserError(f"Records of the kind {kind or 'image'} are expected, but there are none; name another kind.")
    return pd.DataFrame(rows)


def write_csv(runs: Sequence[Path], file: Path) -> Path:
    """Write a row for each attacked example of ``runs`` to ``file``, and return ``file``."""
    table = to_dataframe(runs).map(_inert).rename(columns=_inert)
    try:
        table.to_csv(file, index=False, errors=UNENCODABLE)
    except OSError as error:
        raise UserError(f"{file} is expected to be writable ({error.strerror or error}); change --csv.") from error
    return file


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _rows(found: Tabled, kind: str | None) -> list[dict[str, Any]]:
    if isinstance(found, VictimScore):
        return [image_record(found, one, guess=one.guess) for one in found.images]
    if isinstance(found, Path | str):
        found = read_run(Path(found))
    if not isinstance(found, Run):
        raise UserError(
            f"Scores of evaluate, runs or their folders are expected, but got {type(found).__name__}; judge a"
            " reconstruction by evaluate(found, Batch(images, labels)) first."
        )
    kinds = _EXAMPLES if kind is None else (kind,)
    return [
        {"run": found.name, **{name: value for name, value in record.items() if name != "kind"}}
        for record in found.records
        if record.get("kind") in kinds
    ]
