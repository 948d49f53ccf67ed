"""Compare a brief, and figures for programs, with the records that they follow from."""

import html
import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.files.foreign import expanded, files_digest, read_text
from fl_privacy.report.audit_file import APP_DIGEST, RECORD, plain_app, read_audit
from fl_privacy.report.brief import audit_folder_of, brief_of
from fl_privacy.runs.folder import read_run, verdict_of
from fl_privacy.runs.folder.ongoing import SUMMARY
from fl_privacy.runs.folder.read import run_folder_of
from fl_privacy.runs.folder.records import dump_json, parse_json

LARGEST_BRIEF, MOST_SHOWN, LONGEST_LINE = 1 << 20, 20, 200
"""Limits: bytes of a brief, and shown differences of a file and letters of a line."""

BRIEF = "brief.html"


def verified(place: Path, *, app: Path | None = None) -> tuple[str, list[str]]:
    """Recompute the figures of a run's or an audit's folder, and its brief if there is one.

    ``place`` is the folder, or the brief in it; files of the folder ``app`` are compared with the digest of the audited
    app. The result is the compared files in words, and a line for each difference.

    Raises:
        UserError: a file is missing or damaged.
    """
    place = expanded(place)
    folder = audit_folder_of(place) or run_folder_of(place)
    brief, compared, wrong = place if place.is_file() else folder / BRIEF, list[str](), list[str]()
    if audit_folder_of(folder) is not None:
        record, compared = read_audit(folder), [RECORD]
        wrong = _differ(RECORD, _entries(folder / RECORD), json.dumps(plain_app(record), indent=1, default=str))
        if app is not None:
            digest, known = files_digest(app), dict(record.environment).get(APP_DIGEST, "not recorded")
            compared.append("the app's files")
            if not digest or digest != known:
                wrong.append(f"{APP_DIGEST} is {known}, but {app} has {digest or 'too many files'}")
    elif app is not None:
        raise UserError(f"--app is expected with the audit of an app, but {folder} holds none.")
    elif (folder / SUMMARY).is_file():
        run, compared = read_run(folder), [SUMMARY]
        again: Any = parse_json(dump_json({"verdict": verdict_of(run).as_plain(), **run.summary.as_json()}))
        wrong = _differ(SUMMARY, _entries(folder / SUMMARY), json.dumps(again, indent=1))
    if brief.is_file():
        compared, text, expected = [*compared, brief.name], read_text(brief, LARGEST_BRIEF), brief_of(folder)[1]
        found = _differ(brief.name, _words(text), _words(expected))
        wrong += found or [f"{brief.name}: its words are right, but not its markup"] * (text != expected)
    elif not compared:
        read_run(folder)  # raises what is missing, if it is no run
        raise UserError(f"{folder} is expected to hold {BRIEF} or a finished run, but has neither.")
    return " and ".join(compared), wrong


def _differ(name: str, there: str, expected: str) -> list[str]:
    pairs = enumerate(zip_longest(there.split("\n"), expected.split("\n"), fillvalue="nothing"), start=1)
    wrong = [(number, *(line.strip()[:LONGEST_LINE] for line in pair)) for number, pair in pairs if len(set(pair)) > 1]
    said = [
        f"{name}: {told!r} in line {number} is expected to be {right!r}" for number, told, right in wrong[:MOST_SHOWN]
    ]
    return [*said, *([f"{name}: {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else [])]


def _entries(file: Path) -> str:
    try:
        return json.dumps(parse_json(read_text(file)), indent=1)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is expected to hold JSON, but is damaged: {error}.") from error


def _words(page: str) -> str:
    plain = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", "\n", page, flags=re.DOTALL)
    return "\n".join(text for line in html.unescape(plain).split("\n") if (text := " ".join(line.split())))
