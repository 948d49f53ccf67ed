"""Save and load ``claim.json``, the checked claims of differential privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fl_privacy.checks import each, made
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.runs.folder.records import dump_json, parse_json

if TYPE_CHECKING:
    from fl_privacy.dp_check.verdict import ClaimVerdict

CLAIM = "claim.json"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """Outcome of one claim of differential privacy; see ``dp_check.verdict.ClaimVerdict``."""

    subject: str
    status: Literal["contradicted", "doubted", "unsupported", "open", "untested", "unclaimed"]
    headline: str
    sentence: str
    meaning: str
    reason: str
    claimed: float | None
    delta: float | None
    unit: str
    neighbors: str | None
    rounds: int | None
    rdp: float | None  # epsilon recomputed by Renyi divergences
    pld: float | None  # epsilon recomputed by the privacy loss distribution
    lower: float | None  # lower bound by tests
    confidence: float | None
    noticed: float | None  # least epsilon that the test would have noticed, or largest that it could have shown
    estimate: float | None  # estimate from one training, no bound
    missing: Sequence[str]
    notes: Sequence[str]
    estimate_least: float | None = None  # its lower limit of 95 %, if the scores look Gaussian

    @property
    def tone(self) -> Literal["leak", "open"]:
        return "leak" if self.is_false else "open"

    @property
    def is_false(self) -> bool:
        return self.status == "contradicted"

    @property
    def footnotes(self) -> list[str]:
        return [*(f"Nobody states: {fact}." for fact in self.missing), *self.notes]

    @property
    def recomputed(self) -> float | None:
        known = [value for value in (self.rdp, self.pld) if value is not None]
        return min(known) if known else None


_ORDER = ("contradicted", "doubted", "unsupported", "open", "untested", "unclaimed")


def records_of(verdicts: Sequence[ClaimVerdict]) -> tuple[ClaimRecord, ...]:
    """Convert ``verdicts`` to records, false claims first."""
    return in_order([ClaimRecord(**verdict.as_plain()) for verdict in verdicts])


def in_order(records: Sequence[ClaimRecord]) -> tuple[ClaimRecord, ...]:
    """Sort records, false claims first."""
    return tuple(sorted(records, key=lambda record: _ORDER.index(record.status)))


def as_json(records: Sequence[ClaimRecord]) -> str:
    """Return ``records`` as the text of a ``claim.json``."""
    return dump_json({"claims": [asdict(record) for record in records]}, indent=1)


def write_claims(folder: Path, records: Sequence[ClaimRecord]) -> Path:
    """Write ``claim.json`` into ``folder``."""
    write_whole(folder / CLAIM, as_json(records))
    return folder / CLAIM


def read_claims(folder: Path) -> tuple[ClaimRecord, ...]:
    """Load the claims of ``folder``, if any; ``UserError`` if the file is damaged."""
    path = folder / CLAIM
    if not path.is_file():
        return ()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        claims = parse_json(path.read_text())["claims"]
        known = [field.name for field in fields(ClaimRecord)]  # a later version may have more
        given = [{name: claim[name] for name in known if name in claim} for claim in claims]
        return each(lambda claim, where: made(ClaimRecord, claim, where), given, "a claim")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is expected to be as `fl-privacy check-dp` wrote it, but is damaged; remove it."
        ) from error
