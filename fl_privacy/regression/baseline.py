"""The file that a build compares with: measurements by the names of their tests, in JSON that a person can review."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.metrics import METRICS
from fl_privacy.regression.measurement import Measurement

FORMAT = 1
MOST_BYTES = 1 << 24

_KINDS: Mapping[str, Any] = {
    "metric": str,
    "attack": str,
    "values": list[float],
    "uploads": list[int],
    "victims": str,
    "versions": Mapping[str, str],
}


def read_baseline(path: Path) -> dict[str, Measurement]:
    """The measurements in the file ``path`` by name; none where there is no file.

    Raises:
        UserError: it is damaged, or of another format.
    """
    if not path.is_file():
        return {}
    wrong = UserError(
        f"{path} is expected to be a baseline as `pytest --fl-privacy-update` or `fl-privacy check-leakage --update`"
        " write it, but is damaged; write it anew."
    )
    if path.stat().st_size > MOST_BYTES:
        raise wrong
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise wrong from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("tests"), dict):
        raise wrong
    return {name: _read(entry, wrong) for name, entry in content["tests"].items()}


def write_baseline(path: Path, measurements: Mapping[str, Measurement]) -> None:
    """Inverse of ``read_baseline``; mean and interval stand beside the values for who reads the file."""
    tests = {}
    for name, measurement in sorted(measurements.items()):
        found = measurement.statistic
        seen = {"mean": found.mean, "ci95": found.ci95, "images": found.n, "independent_uploads": found.groups}
        tests[name] = {**seen, **asdict(measurement)}
    write_whole(path, json.dumps({"format": FORMAT, "tests": tests}, indent=1) + "\n")


def _read(entry: Any, wrong: UserError) -> Measurement:
    if not isinstance(entry, dict) or any(not fits(entry.get(name), kind) for name, kind in _KINDS.items()):
        raise wrong
    if not entry["values"] or len(entry["values"]) != len(entry["uploads"]) or entry["metric"] not in METRICS:
        raise wrong
    chosen: dict[str, Any] = {name: entry[name] for name in _KINDS} | {"read": entry.get("read")}
    if not fits(chosen["read"], int | None) or not 0 <= (chosen["read"] or 0) <= len(entry["values"]):
        raise wrong
    chosen |= {name: tuple(entry[name]) for name in ("values", "uploads")}
    return Measurement(**chosen)
