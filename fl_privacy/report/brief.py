"""Render one page on a run for decision makers: result, evidence and open questions."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import expect_file_name
from fl_privacy.measure.intervals import LEAST_SPLIT
from fl_privacy.measure.roc import balanced_accuracy_bound
from fl_privacy.report.headline import headline_of, read_in_words
from fl_privacy.report.inferred import HEADINGS, MEASURES, sentence
from fl_privacy.report.mechanisms import claim_views
from fl_privacy.report.page import render
from fl_privacy.report.run_page import what_was_done
from fl_privacy.report.settings import batch_norm_in_words
from fl_privacy.report.words import glossary_of, interval, metric, percent, points, ratio, title_within
from fl_privacy.runs.folder import LeakageResult, Run, Verdict, read_run, verdict_of
from fl_privacy.runs.folder.defense_choice import HEADLINE, TOLD, strongest
from fl_privacy.runs.folder.leakage import worst_by
from fl_privacy.runs.folder.pictures import ROW_FILES, SENTENCE_FILES
from fl_privacy.runs.folder.summary import Spent
from fl_privacy.runs.folder.verdict import Ground
from fl_privacy.types.modality import ROWS, TEXTS

NOT_TESTED = ("Not tested:", "Captured but not attacked:")
"""Prefixes of threat model sentences on untested attacks."""

_UNTRIED = (
    "Attacks that are not in this package, or that take longer; a stronger one may be published tomorrow.",
    "Ways around the updates: the finished model, logs, checkpoints, traffic and its timing.",
)


@dataclass(frozen=True)
class Fact:
    """A figure: its name, value and scope."""

    name: str
    value: str
    note: str


def write_brief(run_dir: Path, out: Path | None = None) -> Path:
    """Write a printable page on the run in ``run_dir``, without client data, to ``out`` or ``<run_dir>/brief.html``.

    Raises:
        UserError: the folder is not a run's, or the page is not writable.
    """
    if out is not None:
        expect_file_name(out)
    run = read_run(run_dir)
    page = out or run.path / "brief.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(page, render_brief(run))
    except OSError as error:
        raise UserError(f"{page} can't be written ({error.strerror}); choose another place with --out.") from error
    return page


def render_brief(run: Run) -> str:
    """Render the HTML of the page, without pictures, texts and paths of the run."""
    verdict = verdict_of(run)
    found = verdict.readings
    folder = run.path / "reconstructions"
    kept = {TEXTS: SENTENCE_FILES, ROWS: ROW_FILES}
    kind = next((modality for modality, files in kept.items() if any(folder.glob(files))), verdict.modality).one
    said = headline_of(verdict, kind)
    facts, meaning = _facts(run, verdict, kind), _meaning(verdict, kind)
    attacked = " ".join(filter(None, [what_was_done(run), batch_norm_in_words([run.summary])]))
    assumptions = [line for line in run.threat_model if not line.startswith(NOT_TESTED)]
    untested, risks = _untested(run, found, kind), _risks(run, verdict, said.basis, kind)
    words = [claim.sentence for claim in run.claims]
    words += [said.text, said.basis, meaning, attacked, *assumptions, *untested, *risks]
    words += [f"{fact.name} {fact.value} {fact.note}" for fact in facts]
    date = ""
    with suppress(ValueError):
        day = datetime.fromisoformat(str(run.environment.get("date", "")))
        date = f"{day.day} {day:%B %Y}"
    return render(
        "brief.html.j2",
        run=run,
        verdict=said,
        claims=claim_views(run.claims),
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
    told = " and ".join(TOLD.get(about, about) for about in verdict.told)
    care = f"Such uploads deserve the care that the {kind}s themselves get."
    if verdict.ground is Ground.NO_TRUTH and verdict.proven:
        return (
            f"{kind.capitalize()}s were reconstructed, and the attacker can prove that {verdict.proven} of them are"
            f" what the model was given, though the originals are not known here. {care}"
        )
    return {
        Ground.READ: f"Whoever runs the server can reconstruct clients' {kind}s from their"
        f" uploads{told and ', and infer '}{told}. {care}",
        Ground.TOLD: f"Whoever runs the server can infer {told} from clients' uploads, better than by guessing.",
        Ground.REHEARSED: "No client's upload was attacked, so nothing is known about what clients leak. An undefended"
        f" upload of one {kind}, which the server made itself, leaks it.",
        Ground.BOUNDED: f"Differential privacy bounds what any attacker can learn about one {kind}, those below and all"
        " others, as long as clients draw their noise as they say.",
        Ground.NOTHING: "Nothing was attacked, so nothing is known about what the uploads leak.",
        Ground.UNTOLD: "The answers were no better than chance here. A stronger attack may do better; this is no"
        " clearance.",
        Ground.OLDER: "An older version judged this run by a measure that empty pictures pass and recognizable ones"
        " fail. Run it again before you rely on it.",
        Ground.NO_TRUTH: f"The attack guessed {kind}s, but most originals are not known here, so nothing says how close"
        " the guesses are. The owner of the originals can judge by the pictures on the run's own page.",
        Ground.FAILED: f"The attack ended without a result. Another one may reconstruct {kind}s: no clearance.",
        Ground.BY_CHANCE: f"The attack identified no more {kind}s than guessing would. This describes the attack, not a"
        " protection: a stronger one may reconstruct them.",
        Ground.UNREAD: f"The attack reconstructed no {kind}. This describes the attack, not a protection: a stronger"
        " one may succeed, and no guarantee bounds it.",
    }[verdict.ground]


def _facts(run: Run, verdict: Verdict, kind: str) -> list[Fact]:
    facts, summary, found = [], run.summary, verdict.readings
    if verdict.most is not None:
        counts, ways = verdict.counts, "95 % confidence"
        if counts.read:
            ways = f"{counts.exact} exactly, {counts.identified} identified, {counts.recognizable} recognizable"
        facts.append(Fact("Reconstructed", read_in_words(counts), _of(verdict.most, found, ways)))
    for name in dict.fromkeys([*(reading.main for reading in found), "label_correct"]):
        worst = worst_by(name, found)
        statistic = worst.statistic(name) if worst else None
        if worst is None or statistic is None:
            continue
        spread = f"{interval(statistic, name)}, " * bool(statistic.ci95 or statistic.groups >= LEAST_SPLIT)
        spread = f"{'95 % CI ' if statistic.ci95 else ''}{spread}"
        note = _of(worst, found, f"{spread}n = {statistic.n}")
        named = "Labels found" if name == "label_correct" else f"Mean {title_within(name)}"
        facts.append(Fact(named, metric(statistic.mean, name), note))
    if verdict.proven:
        sure = f"{kind}s that the attacker is sure of, without the truth"
        facts.append(Fact("Proven exact", str(verdict.proven), sure))
    for about in TOLD:
        if (told := strongest(summary.inferred, about)) is not None:
            shown, (finding, measure) = MEASURES[HEADLINE[about]], told
            note = f"{shown.title} by {finding.title}, {shown.show(measure.chance)} by guessing"
            facts.append(Fact(HEADINGS[about][0], shown.show(measure.value), note))
    if summary.final_accuracy is not None:
        kept = f"{points(summary.pmm)} of the undefended accuracy" if summary.pmm is not None else "test accuracy"
        facts.append(Fact("Accuracy", percent(summary.final_accuracy), kept))
    if summary.privacy and summary.privacy.epsilon is not None:
        little = ", which promises little" * summary.privacy.promises_little
        note = f"at delta {ratio(summary.privacy.delta)}{little}"
        facts.append(Fact("Epsilon", ratio(summary.privacy.epsilon), note))
    return facts


def _of(reading: LeakageResult, others: Sequence[LeakageResult], words: str) -> str:
    who = reading.among(others)
    return f"{words}; {who}" if who else words


def _untested(run: Run, found: Sequence[LeakageResult], kind: str) -> list[str]:
    lines = [line for line in run.threat_model if line.startswith(NOT_TESTED[1:])]
    servers = [line.removeprefix(NOT_TESTED[0]).strip() for line in run.threat_model if line.startswith(NOT_TESTED[0])]
    lines += [line[0].upper() + line[1:] for line in servers if line]
    if not servers:
        lines.append("Servers that break the protocol, by crafted or inconsistent models, and clients of their own.")
    if found and run.defenses and run.summary.adaptive is None:
        lines.append("An attacker that knows the defense (threat_model=adaptive).")
    if not found:
        lines.append(f"Whether {kind}s can be reconstructed.")
    rounds = sorted({reading.round for reading in found})
    trained = len(run.of_kind("round"))
    if rounds and trained > len(rounds):
        told = ", ".join(map(str, rounds)) if len(rounds) < 7 else f"{len(rounds)} of them"
        lines.append(f"Rounds other than {told}, of {trained}.")
    asked = {finding.about for finding in run.summary.inferred}
    if open_questions := [words for about, words in TOLD.items() if about not in asked]:
        lines.append(f"What else the uploads reveal: {', '.join(open_questions)}.")
    return [*lines, *_UNTRIED]


def _risks(run: Run, verdict: Verdict, basis: str, kind: str) -> list[str]:
    lines, found = [basis] if basis else [], verdict.readings
    if verdict.most is not None:
        lines.append(
            f"Up to {100 * verdict.counts.at_most:.0f} % of all such {kind}s may be reconstructed (95 % confidence)."
        )
    for name in dict.fromkeys(reading.main for reading in found):
        if measured := [s.max for reading in found if (s := reading.statistic(name)) is not None]:
            lines.append(f"The best reconstruction has {title_within(name)} {metric(max(measured), name)}.")
    lines += [words for about in TOLD if (words := sentence(run.summary.inferred, about))]
    lines.append(_guaranteed(run.summary.privacy))
    lines.append(
        "It holds for this model, these data, this way of training and this number of examples in an upload: test again"
        " when one of them changes."
    )
    return lines


def _guaranteed(privacy: Spent | None) -> str:
    if privacy is None or privacy.epsilon is None:
        return "No guarantee supports this: there is no epsilon, so all of it is observation."
    spent = f"epsilon {ratio(privacy.epsilon)} at delta {ratio(privacy.delta)} by the end of the training"
    if privacy.promises_little:
        return f"No meaningful guarantee supports this: {spent} lets an attacker learn everything."
    right = percent(balanced_accuracy_bound(epsilon=privacy.epsilon, delta=privacy.delta))
    return (
        f"Differential privacy bounds every attacker: {spent}, by which at most {right} of guesses are right on"
        " whether the protected data were there."
    )
