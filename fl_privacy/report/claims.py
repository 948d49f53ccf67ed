"""Render the page on claims of differential privacy: claimed, recomputed and tested epsilon."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import expect_file_name
from fl_privacy.report.numbers import MISSING, percent, ratio
from fl_privacy.report.page import render
from fl_privacy.runs.folder.claims import ClaimRecord


@dataclass(frozen=True, kw_only=True)
class ClaimView:
    """One claim on a page, and the rows of its figures."""

    record: ClaimRecord
    rows: Sequence[tuple[str, str]]


def claim_views(records: Sequence[ClaimRecord]) -> list[ClaimView]:
    """Make a view of each claim."""
    return [ClaimView(record=r, rows=_rows(r)) for r in records]


def _rows(record: ClaimRecord) -> list[tuple[str, str]]:
    sure = f", with {percent(record.confidence)} confidence" if record.confidence is not None else ""
    over = "" if record.rounds in (None, 1) else f" over {record.rounds} rounds"
    most = record.estimate is not None or (record.noticed or 0.0) <= (record.claimed or 0.0)
    recomputed = MISSING
    if record.rdp is not None and record.pld is not None:
        recomputed = f"{ratio(record.rdp)} (Renyi), {ratio(record.pld)} (privacy loss distribution)"
    rows = [
        ("Promised", MISSING if record.claimed is None else f"epsilon {ratio(record.claimed)}{over}"),
        ("Recomputed from what is stated", recomputed),
        ("Shown by tests", MISSING if record.lower is None else f"at least {ratio(record.lower)}{sure}"),
        (
            "Such a test can show at most" if most else "A false claim would have been noticed from",
            MISSING if record.noticed is None else ratio(record.noticed),
        ),
    ]
    if record.estimate is not None:
        rows.append(("Estimated of one training, no bound", f"about {ratio(record.estimate)}"))
    return rows


def render_claims(records: Sequence[ClaimRecord], *, title: str) -> str:
    """Render the page on ``records``, false claims first."""
    return render("claims.html.j2", claims=claim_views(records), title=title, first=records[0].headline)


def write_claims_page(records: Sequence[ClaimRecord], page: Path, *, title: str) -> Path:
    """Write the page on ``records``; ``UserError`` if it is not writable."""
    expect_file_name(page)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(page, render_claims(records, title=title))
    except OSError as error:
        raise UserError(f"{page} can't be written ({error.strerror}); choose another place with --out.") from error
    return page
