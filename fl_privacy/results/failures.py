"""Whether an attack came to anything."""

from collections import Counter
from pathlib import Path

from fl_privacy.results.records import Attacker, read_records, records_of


def failed_attackers(path: Path) -> dict[Attacker, str]:
    """Those that failed on every image in the run in folder ``path``, with their most common reason."""
    records, _ = read_records(path / "metrics.jsonl")
    found: dict[Attacker, str] = {}
    for attacker in Attacker:
        reasons = [record.get("failure") for record in records_of(records, "victim", attacker)]
        if reasons and all(reasons):
            found[attacker] = Counter(map(str, reasons)).most_common(1)[0][0]
    return found
