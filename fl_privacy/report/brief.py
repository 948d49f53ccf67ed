"""Render the brief, a one-page summary of a run or an app's audit, or verify one."""

import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy.errors import UserError
from fl_privacy.files import shipped, write_whole
from fl_privacy.files.foreign import expanded, expect_file_name, files_digest, open_regular, read_text
from fl_privacy.measure.answer import QUESTIONS, Answer
from fl_privacy.measure.intervals import LEAST_SPLIT
from fl_privacy.measure.roc import balanced_accuracy_bound
from fl_privacy.report.bars import bars_of, bars_of_questions, paired
from fl_privacy.report.headline import VERDICTS, Headline, capital, headline_of, read_in_words
from fl_privacy.report.inferred import HEADINGS, MEASURES, sentence
from fl_privacy.report.page import render, writable
from fl_privacy.report.run_page import what_was_done
from fl_privacy.report.settings import batch_norm_in_words
from fl_privacy.report.words import glossary_of, interval, metric, percent, points, ratio, share_interval, title_within
from fl_privacy.runs.folder import LeakageResult, Run, Verdict, read_run, verdict_of
from fl_privacy.runs.folder.defense_choice import CAN_INFER, HEADLINE, strongest
from fl_privacy.runs.folder.leakage import worst_by
from fl_privacy.runs.folder.ongoing import IDENTITY, SUMMARY
from fl_privacy.runs.folder.pictures import ROW_FILES, SENTENCE_FILES
from fl_privacy.runs.folder.read import read_json, run_folder_of
from fl_privacy.runs.folder.records import dump_json, parse_json
from fl_privacy.runs.folder.verdict import LEAK, OPEN, Ground
from fl_privacy.types.modality import ROWS, TEXTS

if TYPE_CHECKING:
    from fl_privacy.report.audit_page import AuditRecord

NOT_TESTED = ("Not tested:", "Captured but not attacked:")  # prefixes of threat model sentences on untested attacks

_SENTENCES: Mapping[str, Any] = shipped(__file__, "brief.yaml")


LONGEST_REASON = 160  # most letters of a reason why a scenario was not attacked


def write_brief(run_dir: Path, out: Path | None = None) -> Path:
    """Write a one-page summary of a run or an app's audit, without client data (default ``<run_dir>/brief.html``).

    ``UserError`` for another kind of folder, or if writing fails.
    """
    if out is not None:
        expect_file_name(out)
    folder, page = brief_of(run_dir)
    page_file = out or folder / "brief.html"
    with writable(page_file):
        write_whole(page_file, page)
    return page_file


def brief_of(folder: Path) -> tuple[Path, str]:
    """Return the folder of a run or an app's audit, and its one-page summary as HTML; ``UserError`` if neither."""
    if (audited := audit_folder_of(folder)) is not None:
        return audited, render_audit_brief(audited)
    run = read_run(folder)
    return run.path, render_brief(run)


def audit_folder_of(path: Path) -> Path | None:
    """Return the folder of an app's audit, given this folder or its page; ``None`` for anything else."""
    from fl_privacy.report.audit_file import WHOLE  # noqa: PLC0415  (PyTorch)

    folder = path.parent if path.suffix == ".html" else path
    return folder if (folder / WHOLE).is_file() and not (folder / IDENTITY).is_file() else None


def _versions(known: Mapping[str, Any]) -> str:
    recorded = [f"{name} {known[name]}" for name in ("fl-privacy", "flwr", "torch") if name in known]
    return f"{', '.join(recorded) or 'not recorded'}; page by fl-privacy {metadata.version('fl-privacy')}"


def hashes_of(folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, SHA-256) of the regular files among ``names`` that ``folder`` holds."""
    found = []
    for name in names:
        if (folder / name).is_file():
            with os.fdopen(open_regular(folder / name), "rb") as file:
                found.append((f"SHA-256 of {name}", hashlib.file_digest(file, "sha256").hexdigest()))
    return found


def render_audit_brief(folder: Path) -> str:
    """Render the one-page summary of an app's audit as HTML, with rates recomputed from the saved counts."""
    from fl_privacy.report.audit_file import APP_DIGEST, PAGE, RECORD, WHOLE, read_audit  # noqa: PLC0415  (PyTorch)

    record = read_audit(folder)
    known = dict(record.environment)
    kinds = {step.kind for step in record.steps if step.counts is not None}
    kind = next(iter(sorted(kinds)), "example").replace("other", "example")
    attacked = record.uploads_attacked
    rounds = record.rounds or 0
    why: dict[str, list[str]] = {}
    for one in record.answers:
        if one.counts is None and one.estimate is None:
            title = one.scenario.title if one.question == "examples" else QUESTIONS[one.question].title
            why.setdefault(f"{one.reason[:LONGEST_REASON]}{'…' * (len(one.reason) > LONGEST_REASON)}", []).append(title)
    untested = [f"{'; '.join(dict.fromkeys(titles))}: {reason}." for reason, titles in why.items()]
    untested += [
        _SENTENCES["other_servers"],
        f"Rounds after the first{f' {rounds}' * (rounds > 1)}, other data, and another number of clients.",
    ]
    lede = record.lede or f"{record.app}, run without a change."
    sides = (record.answers, (record.before or record).answers)
    bars, without = ([*bars_of(answers), *bars_of_questions(answers)] for answers in sides)
    return render(
        "brief.html.j2",
        run=None,
        name=record.app,
        verdict=Headline(text=record.headline, basis="", tone=OPEN if record.network_alone else record.tone),
        claims=[],
        date=known.get("Date", ""),
        facts=[],
        figures=[bar for bar in paired(bars, without, record.defense) if bar.share is not None],
        interrupted=bool(record.broken or record.going_on),
        meaning=_audit_meaning(record, attacked, kind),
        attacked=f"{lede} Attack: {known.get('Attack', 'not recorded')}.",
        assumptions=_who(record, kind),
        untested=[*untested, *_SENTENCES["untried"]],
        risks=_audit_risks(record, attacked, kind),
        glossary=[],
        record=RECORD,
        any_attacked=bool(attacked or record.measured),
        versions=_versions(known),
        hashes=[(APP_DIGEST, known.get(APP_DIGEST) or "not recorded"), *hashes_of(folder, (RECORD, WHOLE, PAGE))],
    )


def _audit_meaning(record: "AuditRecord", attacked: Sequence[Answer], kind: str) -> str:
    if record.network_alone:
        return "The app's own training was not audited. Figures are those of its network alone. This is no clearance."
    if record.tone == LEAK:
        return f"Whoever runs the server can learn this from clients' uploads, so protect uploads like the {kind}s."
    if record.broken or record.going_on:
        return "The audit did not end, so this is no clearance."
    if not attacked and record.measured:
        return f"No attack on single {kind}s has a result; the others found no more than chance would. No clearance."
    if not attacked:
        return "No attack on an upload has a result, so nothing is known about what clients leak. This is no clearance."
    return (
        f"The attacks tried reconstructed no more {kind}s than chance would. This describes these attacks, not a"
        " protection: a stronger one may succeed."
    )


def _who(record: "AuditRecord", kind: str) -> list[str]:
    lines = [
        f"Whoever runs the server, or can look into its memory, disks or logs: it receives each client's upload and"
        f" could reconstruct {kind}s of that client's people.",
        "The attacker follows the protocol, knows the app's code, and sees the model that each client got.",
    ]
    clear = [finding for finding in record.findings if finding.severity != "look"]
    return lines + [f"Sent in the clear: {one.what}, in {one.times} of {one.of} replies." for one in clear[:3]]


def _audit_risks(record: "AuditRecord", attacked: Sequence[Answer], kind: str) -> list[str]:
    lines = [line.removesuffix("; everything that is sent is listed below") for line in record.further[:3]]
    if attacked and (worst := max(attacked, key=attrgetter("share")).counts) is not None and worst.judged:
        lines.append(
            f"Share of {kind}s reconstructed from the worst uploads: {share_interval(worst.interval)} (95 % interval)"
        )
    epsilons = ", ".join(f"{name} {max(values):.3g}" for name, values in record.stated.items() if values)
    guarantee = f"Clients state differential privacy ({epsilons}), which this page does not check"
    lines.append(f"{guarantee}." if epsilons else "There is no guarantee: all figures are observations.")
    return [*(f"{line.rstrip('.')}." for line in lines), _SENTENCES["again"]]


def render_brief(run: Run) -> str:
    """Render a run's one-page summary as HTML, without pictures, texts and paths."""
    verdict = verdict_of(run)
    found = verdict.readings
    folder = run.path / "reconstructions"
    kept = {TEXTS: SENTENCE_FILES, ROWS: ROW_FILES}
    kind = next((modality for modality, files in kept.items() if any(folder.glob(files))), verdict.modality).one
    said = headline_of(verdict, kind)
    facts, meaning = _facts(run, verdict, kind), _meaning(verdict, kind)
    attacked = " ".join(filter(None, [what_was_done(run), batch_norm_in_words([run.summary])]))
    assumptions = [line for line in run.threat_model if not line.startswith(NOT_TESTED)]
    untested, risks = _untested(run, verdict, kind), _risks(run, verdict, said.basis, kind)
    words = [claim.sentence for claim in run.claims]
    words += [said.text, said.basis, meaning, attacked, *assumptions, *untested, *risks]
    words += [" ".join(fact) for fact in facts]
    date = ""
    with suppress(ValueError):
        day = datetime.fromisoformat(str(run.environment.get("date", "")))
        date = f"{day.day} {day:%B %Y}"
    return render(
        "brief.html.j2",
        run=run,
        name=run.name,
        figures=[],
        interrupted=not run.finished,
        record="run.json and metrics.jsonl",
        any_attacked=bool(found or verdict.asked),
        versions=_versions(run.environment.get("packages") or {}),
        hashes=hashes_of(run.path, ("run.json", "metrics.jsonl", "report.html")),
        verdict=said,
        claims=run.claims,
        date=date,
        facts=facts,
        meaning=meaning,
        attacked=attacked,
        assumptions=assumptions,
        untested=untested,
        risks=risks,
        glossary=glossary_of(words),
    )


def _meaning(verdict: Verdict, kind: str) -> str:
    learned = " and ".join(CAN_INFER.get(about, about) for about in verdict.inferred)
    care = f"Such uploads need the same protection as the {kind}s themselves."
    if verdict.ground is Ground.NO_TRUTH and verdict.proven:
        return (
            f"{kind.capitalize()}s were reconstructed, and the attacker can prove that {verdict.proven} of them are"
            f" what the model was given, though the originals are not known here. {care}"
        )
    inferred = f", and infer {learned}" if learned else ""
    return VERDICTS[verdict.ground]["meaning"].format(kind=kind, learned=learned, inferred=inferred, care=care)


def _facts(run: Run, verdict: Verdict, kind: str) -> list[tuple[str, str, str]]:
    facts, summary, found = list[tuple[str, str, str]](), run.summary, verdict.readings
    if verdict.most is not None:
        counts, ways = verdict.counts, "95 % confidence"
        if counts.read:
            ways = f"{counts.exact} exactly, {counts.identified} identified, {counts.recognizable} recognizable"
        facts.append(("Reconstructed", read_in_words(counts), _of(verdict.most, found, ways)))
    for name in dict.fromkeys([*(reading.main for reading in found), "label_correct"]):
        worst = worst_by(name, found)
        statistic = worst.statistic(name) if worst else None
        if worst is None or statistic is None:
            continue
        spread = f"{interval(statistic, name)}, " * bool(statistic.ci95 or statistic.groups >= LEAST_SPLIT)
        spread = f"{'95 % CI ' if statistic.ci95 else ''}{spread}"
        note = _of(worst, found, f"{spread}n = {statistic.n}")
        named = "Labels found" if name == "label_correct" else f"Mean {title_within(name)}"
        facts.append((named, metric(statistic.mean, name), note))
    if verdict.proven:
        sure = f"{kind}s that the attacker is sure of, without the truth"
        facts.append(("Proven exact", str(verdict.proven), sure))
    for about in CAN_INFER:
        if (most := strongest(summary.inferred, about)) is not None:
            shown, (finding, measure) = MEASURES[HEADLINE[about]], most
            note = f"{shown.title} by {finding.title}, {shown.show(measure.chance)} by guessing"
            facts.append((HEADINGS[about][0], shown.show(measure.value), note))
    if summary.final_accuracy is not None:
        kept = f"{points(summary.pmm)} of the undefended accuracy" if summary.pmm is not None else "test accuracy"
        facts.append(("Accuracy", percent(summary.final_accuracy), kept))
    if summary.privacy and summary.privacy.epsilon is not None:
        little = ", which promises little" * summary.privacy.promises_little
        note = f"at delta {ratio(summary.privacy.delta)}{little}"
        facts.append(("Epsilon", ratio(summary.privacy.epsilon), note))
    return facts


def _of(reading: LeakageResult, others: Sequence[LeakageResult], words: str) -> str:
    who = reading.among(others)
    return f"{words}; {who}" if who else words


def _untested(run: Run, verdict: Verdict, kind: str) -> list[str]:
    found = verdict.readings
    lines = [line for line in run.threat_model if line.startswith(NOT_TESTED[1:])]
    servers = [line.removeprefix(NOT_TESTED[0]).strip() for line in run.threat_model if line.startswith(NOT_TESTED[0])]
    lines += [capital(line) for line in servers if line]
    if not servers:
        lines.append(_SENTENCES["other_servers"])
    if found and run.defenses and run.summary.adaptive is None:
        lines.append("An attacker that knows the defense (threat_model=adaptive).")
    if not found:
        lines.append(f"Whether {kind}s can be reconstructed.")
    rounds = sorted({reading.round for reading in found})
    trained = len(run.of_kind("round"))
    if rounds and trained > len(rounds):
        attacked = f" (attacked: {', '.join(map(str, rounds))})" if len(rounds) < 7 else ""
        lines.append(f"{trained - len(rounds)} of {trained} rounds{attacked}.")
    asked = {finding.about for finding in verdict.asked}
    if open_questions := [words for about, words in CAN_INFER.items() if about not in asked]:
        lines.append(f"What else the uploads reveal: {', '.join(open_questions)}.")
    return [*lines, *_SENTENCES["untried"]]


def _risks(run: Run, verdict: Verdict, basis: str, kind: str) -> list[str]:
    lines, found = [basis] if basis else [], verdict.readings
    if verdict.most is not None and not verdict.counts.read:
        within = share_interval(verdict.counts.interval)
        lines.append(f"Share of such {kind}s that this attack reconstructs: {within} (95 % interval).")
    for name in dict.fromkeys(reading.main for reading in found):
        if measured := [s.max for reading in found if (s := reading.statistic(name)) is not None]:
            lines.append(f"The best reconstruction has {title_within(name)} {metric(max(measured), name)}.")
    lines += [words for about in CAN_INFER if (words := sentence(run.summary.inferred, about))]
    if (privacy := run.summary.privacy) is None or privacy.epsilon is None:
        return [*lines, "There is no guarantee: without an epsilon, all figures are observations.", _SENTENCES["again"]]
    spent = f"epsilon {ratio(privacy.epsilon)} at delta {ratio(privacy.delta)} by the end of the training"
    right = percent(balanced_accuracy_bound(epsilon=privacy.epsilon, delta=privacy.delta))
    bounds = (
        f"Differential privacy bounds every attacker: {spent}. At most {right} of guesses at whether the protected"
        " data were there are right."
    )
    nothing = f"There is no meaningful guarantee: {spent} allows an attacker to learn everything."
    return [*lines, nothing if privacy.promises_little else bounds, _SENTENCES["again"]]


LARGEST_BRIEF, MOST_SHOWN, LONGEST_LINE = 1 << 20, 20, 200  # bytes, shown differences of a file, letters of a line
BRIEF = "brief.html"


def verified(place: Path, *, app: Path | None = None) -> tuple[str, list[str]]:
    """Recompute the figures and the one-page summary of a run or an audit, and compare both with the files.

    ``place``: folder, or the summary in it. ``app``: folder whose digest is compared with the audited app's. Return the
    names of the compared files, and a line for each difference; ``UserError`` for damaged files.
    """
    from fl_privacy.report.audit_file import APP_DIGEST, RECORD, plain_app, read_audit  # noqa: PLC0415  (PyTorch)

    place = expanded(place)
    folder = audit_folder_of(place) or run_folder_of(place)
    brief, compared, wrong = place if place.is_file() else folder / BRIEF, list[str](), list[str]()
    if audit_folder_of(folder) is not None:
        record, compared = read_audit(folder), [RECORD]
        there = json.dumps(read_json(folder / RECORD), indent=1)
        wrong = _differ(RECORD, there, json.dumps(plain_app(record), indent=1, default=str))
        if app is not None:
            digest, known = files_digest(app), dict(record.environment).get(APP_DIGEST, "not recorded")
            compared.append("the app's files")
            if not digest or digest != known:
                wrong.append(f"{APP_DIGEST} is {known}, but {app} has {digest or 'too many files'}")
    elif app is not None:
        raise UserError(f"--app is expected with the audit of an app, but {folder} holds none; leave --app out.")
    elif (folder / SUMMARY).is_file():
        run, compared = read_run(folder), [SUMMARY]
        again: Any = parse_json(dump_json({"verdict": verdict_of(run).as_plain(), **run.summary.as_json()}))
        wrong = _differ(SUMMARY, json.dumps(read_json(folder / SUMMARY), indent=1), json.dumps(again, indent=1))
    if brief.is_file():
        compared, text, expected = [*compared, brief.name], read_text(brief, LARGEST_BRIEF), brief_of(folder)[1]
        found = _differ(brief.name, _words(text), _words(expected))
        wrong += found or [f"{brief.name}: its words are right, but not its markup"] * (text != expected)
    elif not compared:
        read_run(folder)  # raises what is missing, if it is no run
        raise UserError(f"{folder} is expected to hold {BRIEF} or a finished run, but has neither; run it again.")
    return " and ".join(compared), wrong


def _differ(name: str, there: str, expected: str) -> list[str]:
    pairs = enumerate(zip_longest(there.split("\n"), expected.split("\n"), fillvalue="nothing"), start=1)
    wrong = [(number, *(line.strip()[:LONGEST_LINE] for line in pair)) for number, pair in pairs if len(set(pair)) > 1]
    said = [
        f"{name}: {got!r} in line {number} is expected to be {right!r}" for number, got, right in wrong[:MOST_SHOWN]
    ]
    return [*said, *([f"{name}: {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else [])]


def _words(page: str) -> str:
    plain = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", "\n", page, flags=re.DOTALL)
    return "\n".join(text for line in html.unescape(plain).split("\n") if (text := " ".join(line.split())))
