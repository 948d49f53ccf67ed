"""Numbers that no float holds, letters that no UTF-8 holds, and names that no file has, wherever they may stand."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fl_privacy import checks
from fl_privacy.cli import main
from fl_privacy.errors import UserError, visible
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import expanded
from fl_privacy.report import write_report
from fl_privacy.runs.folder import read_run
from fl_privacy.runs.folder.frames import write_csv
from fl_privacy.runs.folder.ongoing import read_guesses, read_ongoing
from fl_privacy.runs.folder.pictures import read_films, read_rows
from fl_privacy.site.gate.policy import parse_policy
from tests.fuzz.judge import refused

HUGE = 10**400
"""A whole number that JSON spells out and no float holds."""

HALF = "\ud800"
"""Half of a surrogate pair, which JSON spells as an escape and UTF-8 has no bytes for."""


def rewritten(folder: Path, kind: str, **values: object) -> None:
    """Change the first record of ``kind``."""
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    next(record for record in records if record["kind"] == kind).update(values)
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.parametrize("number", [HUGE, -HUGE])
def test_a_whole_number_that_is_no_float_is_none(number: int, copied: Callable[[], Path]) -> None:
    assert not checks.fits(number, float) and not checks.fits([number], list[float | None])
    assert checks.fits(number, int) and checks.fits(float("inf"), float)
    refused(lambda: checks.number("lr", number, example=0.1))
    folder = copied()
    rewritten(folder, "round", seconds=number)
    assert "seconds" in refused(lambda: read_run(folder))


ENDLESS: tuple[tuple[str, str, object], ...] = (
    ("round", "seconds", "inf"),
    ("round", "seconds", -1.0),
    ("round", "upload_bytes", "-inf"),
    ("attack", "seconds", 1e308),
    ("attack", "batch_norm", 5),
    ("image", "candidates", "inf"),
    ("image", "candidates", -1),
    ("image", "candidates", "x"),
)


@pytest.mark.parametrize(("kind", "name", "wrong"), ENDLESS)
def test_amounts_that_are_none(kind: str, name: str, wrong: object, copied: Callable[[], Path]) -> None:
    folder = copied()
    rewritten(folder, kind, **{name: wrong})
    assert name in refused(lambda: read_run(folder))


@pytest.mark.parametrize("wrong", ["inf", "x", [1], HUGE])
@pytest.mark.parametrize("key", ["batch_size", "federation.plan.batch_size"])
def test_sizes_of_batches_that_are_none(key: str, wrong: object, copied: Callable[[], Path]) -> None:
    folder = copied()
    identity = json.loads((folder / "run.json").read_text())
    *above, last = key.split(".")
    section = identity["config"]
    for part in above:
        section = section[part]
    section[last] = wrong
    (folder / "run.json").write_text(json.dumps(identity))
    assert key in refused(lambda: read_run(folder))


def test_rows_and_progress_of_such_numbers_are_left_out(tmp_path: Path) -> None:
    row = {"id": "round-1/client-0", "image": 0, "original": ["1"], "guess": ["1"], "right": [True], "certain": [HUGE]}
    (tmp_path / "rows-0001.json").write_text(json.dumps({"attacker": "plain", "columns": ["a"], "rows": [row]}))
    found, problems = read_rows(tmp_path)
    assert not found and len(problems) == 1
    (tmp_path / "progress.json").write_text(json.dumps({"what": "x", "share": HUGE, "seconds": 1.0}))
    assert read_ongoing(tmp_path) is None


def test_half_a_letter_is_spelled_out_on_pages_and_in_tables(copied: Callable[[], Path], tmp_path: Path) -> None:
    folder = copied()
    rewritten(folder, "privacy", accountant=f"{HALF}rdp")
    rewritten(folder, "image", failure=f"=1+1{HALF}")
    assert "\\ud800" in write_report([folder]).read_text(encoding="utf-8").lower()
    table = write_csv([folder], tmp_path / "table.csv").read_text(encoding="utf-8")
    failure = next(csv.DictReader(io.StringIO(table)))["failure"]
    assert failure == "'=1+1\\ud800", "a spreadsheet would run what begins by ="
    write_whole(tmp_path / "file.json", json.dumps([HALF], ensure_ascii=False))
    assert json.loads((tmp_path / "file.json").read_text()) == [HALF], "it is the escape that JSON has for it"


def test_the_command_line_prints_what_the_terminal_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(main, "run_command_line", lambda arguments: print(f"ä{HALF}") or 0)
    monkeypatch.delenv("_FL_PRIVACY_COMPLETE", raising=False)
    with pytest.raises(SystemExit):
        main.main()
    sys.stdout.flush()
    assert written.getvalue() == b"\\xe4\\ud800\n"


def test_what_is_printed_moves_no_cursor(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert visible("a\x1b[31mb\r\nc\u202e") == "a [31mb  c "
    (tmp_path / "run\x1b[2J").mkdir()
    assert main.run_command_line(["report", str(tmp_path / "run\x1b[2J")]) == 2
    assert "\x1b" not in capfd.readouterr().err


@pytest.mark.parametrize("place", ["~nobody-of-this-name/x", "a\0b"])
def test_places_that_are_none(place: str, tmp_path: Path) -> None:
    refused(lambda: expanded(place))
    policy = f"version: 1\nbudget: {{ledger: {json.dumps(place)}}}\n"
    refused(lambda: parse_policy(policy.encode(), "site.yaml", tmp_path))
    if "\0" not in place:
        assert main.run_command_line(["review", place]) == 2


def test_a_guess_that_is_no_image_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images: dict[str, Any] = {
        "a": torch.zeros(3, 4, 4, dtype=torch.bfloat16),
        "b": torch.zeros(3, 4, 4, dtype=torch.float8_e4m3fn),
        "c": torch.zeros(3, 4, 4, dtype=torch.uint8),
    }
    save_file(images, tmp_path / "progress.safetensors")
    assert len(read_guesses(tmp_path)) == 1
    monkeypatch.setattr("fl_privacy.runs.folder.ongoing._MOST_BYTES", 40)
    assert read_guesses(tmp_path) == [], "its size is known before it is loaded"


def test_films_of_numbers_that_numpy_lacks_are_left_out(tmp_path: Path) -> None:
    told = {"attacker": "plain", "films": [{"id": "round-1/client-0", "image": 0, "member": "", "at": [0]}]}
    frames = torch.zeros(1, 3, 4, 4, dtype=torch.float8_e4m3fn)
    save_file({"film-00": frames}, tmp_path / "film-0001-plain.safetensors", {"told": json.dumps(told)})
    found, problems = read_films(tmp_path)
    assert not found and len(problems) == 1


def test_a_home_folder_is_still_found() -> None:
    assert expanded("~/x") == Path.home() / "x"
    with pytest.raises(UserError, match="whole path"):
        expanded(Path("~nobody-of-this-name"))
