"""One page on a run for people who have to decide: what came of it, what it rests on, and what stays open."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.foreign_files import expect_file_name
from fl_privacy.metrics import share_at_most
from fl_privacy.metrics.epsilon_bounds import balanced_accuracy_bound
from fl_privacy.report.attacked import what_was_done
from fl_privacy.report.glossary import glossary_of
from fl_privacy.report.headline import Verdict, bound_in_words, verdict
from fl_privacy.report.inferred import HEADINGS, HEADLINE, MEASURES, TOLD, sentence, strongest, told_apart
from fl_privacy.report.numbers import interval, metric, percent, points, ratio, title
from fl_privacy.report.page import render
from fl_privacy.report.readings import (
    Reading,
    kind_of,
    most_exposed,
    most_recognized,
    readings_of,
    recognized_otherwise,
    worst_by,
)
from fl_privacy.report.settings import batch_norm_in_words
from fl_privacy.results import Run, read_run
from fl_privacy.results.sentences import SENTENCE_FILES
from fl_privacy.results.summary import Spent
from fl_privacy.victim_ids import Certainty

NOT_TESTED = ("Not tested:", "Captured but not attacked:")
"""How sentences of a threat model begin that say so."""

_UNTRIED = (
    "Attacks that are not in this package, or that take longer; one that read more may be published tomorrow.",
    "Ways around the updates: the finished model, logs, checkpoints, traffic and its timing.",
)


@dataclass(frozen=True)
class Fact:
    """A figure: what it is, its value, and what it is of."""

    name: str
    value: str
    note: str


def write_brief(run_dir: Path, out: Path | None = None) -> Path:
    """One page over the run in ``run_dir``, to print or to pass on: figures and words, no client's data.

    Args:
        run_dir: folder that a run has written.
        out: where to write it instead of ``<run_dir>/brief.html``.

    Returns:
        Path of the page.

    Raises:
        UserError: the folder is not that of a run, or the page can't be written.
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
    """The HTML of the page; pictures, texts and paths of the run are not in it."""
    found = readings_of(run.summary, undefended=run.identity.undefended)
    texts = any((run.path / "reconstructions").glob(SENTENCE_FILES))
    kind = "text" if texts else kind_of(found)
    said = verdict(run.summary, kind, undefended=run.identity.undefended)
    facts, meaning = _facts(run, found, kind), _meaning(run, said, kind)
    attacked = " ".join(filter(None, [what_was_done(run), batch_norm_in_words([run.summary])]))
    assumptions = [line for line in run.threat_model if not line.startswith(NOT_TESTED)]
    untested, risks = _untested(run, found, kind), _risks(run, found, said, kind)
    words = [said.text, said.basis, meaning, attacked, *assumptions, *untested, *risks]
    words += [f"{fact.name} {fact.value} {fact.note}" for fact in facts]
    return render(
        "brief.html.j2",
        run=run,
        verdict=said,
        date=_date(run),
        facts=facts,
        meaning=meaning,
        attacked=attacked,
        assumptions=assumptions,
        untested=untested,
        risks=risks,
        glossary=glossary_of(words),
    )


def _date(run: Run) -> str:
    """Of the run, such as ``22 November 2026``; empty where it was not recorded."""
    try:
        day = datetime.fromisoformat(str(run.environment.get("date", "")))
    except ValueError:
        return ""
    return f"{day.day} {day:%B %Y}"


def _meaning(run: Run, said: Verdict, kind: str) -> str:
    """The verdict for people who know nothing of metrics: the first of these sentences that is true."""
    found, told = readings_of(run.summary), " and ".join(told_apart(run.summary.inferred))
    most, proven = most_recognized(found), _proven(found)
    made = any(reading.failures < reading.leakage.images for reading in found)
    cases = (
        (
            most is not None and most.recognized > 0,
            f"Whoever runs the server can make out {kind}s of clients by what they upload{told and ', and tell '}{told}"
            f". Such uploads deserve the care that the {kind}s themselves get.",
        ),
        (bool(told), f"Whoever runs the server can tell {told} from what clients upload, better than by guessing."),
        (
            said.tone == "private",
            f"Of the {kind}s that these uploads were computed from none came out recognizable, and enough were attacked"
            " to say so. That is evidence against the attackers below, not a proof against all.",
        ),
        (
            not found and not run.summary.inferred,
            "Nothing was attacked. That says nothing about what the uploads give away.",
        ),
        (
            not found,
            "What was asked could not be told from chance here. A stronger attack may tell it; this is no clearance.",
        ),
        (
            most is None and proven > 0,
            f"{kind.capitalize()}s were reconstructed, and the attacker can prove of {proven} that they are what the"
            " model was given, though the originals are not known here. Such uploads deserve the care that the"
            f" {kind}s themselves get.",
        ),
        (
            most is None and made,
            f"{kind.capitalize()}s were reconstructed, but the originals are not known here, so that nothing says how"
            " near they are. Whoever has the originals decides by the pictures of the run's own page.",
        ),
        (most is None, "The attack came to no result. That says nothing about what another one reads: no clearance."),
        (
            recognized_otherwise(found) is not None,
            f"By one measure no {kind} came out recognizable, by another some did. What a person sees in them no figure"
            " says: look at the run's own page before you call these uploads private.",
        ),
        (
            most_exposed(found) is not None,
            f"No {kind} came out recognizable, but what the defense put in their place did. What that shows of the"
            f" {kind}s no figure says: look at the run's own page before you call these uploads private.",
        ),
        (
            run.identity.undefended,
            f"No {kind} came out recognizable, though clients did not defend themselves. That tells of this attack,"
            " not of a protection: a stronger one may read them.",
        ),
    )
    few = (
        f"No {kind} came out recognizable, but too few were attacked, they came too close to the bound, the attack"
        " failed on some, or the originals of some are not known. That is too little to call the uploads private."
    )
    return next((words for applies, words in cases if applies), few)


def _facts(run: Run, found: Sequence[Reading], kind: str) -> list[Fact]:
    """What was measured, each figure by who read most, in whichever round."""
    facts, summary = [], run.summary
    if (most := most_recognized(found)) is not None and (bound := most.recognized_by()) is not None:
        facts.append(
            Fact("Recognizable", f"{bound.recognizable} of {bound.n}", _of(most, found, bound_in_words(bound)))
        )
    for name in dict.fromkeys([*(reading.main for reading in found), "label_correct"]):
        worst = worst_by(name, found)
        statistic = worst.statistic(name) if worst else None
        if worst is None or statistic is None:
            continue
        spread = f"95 % CI {interval(statistic, name)}, " if statistic.ci95 else ""
        note = _of(worst, found, f"{spread}n = {statistic.n}")
        named = "Labels found" if name == "label_correct" else f"Mean {title(name)}"
        facts.append(Fact(named, metric(statistic.mean, name), note))
    if proven := _proven(found):
        facts.append(Fact("Proven exact", str(proven), f"{kind}s that the attacker is sure of, without the truth"))
    for about in TOLD:
        if (told := strongest(summary.inferred, about)) is not None:
            shown, (finding, measure) = MEASURES[HEADLINE[about]], told
            note = f"{shown.title} by {finding.title}, {shown.show(measure.chance)} by guessing"
            facts.append(Fact(HEADINGS[about][0], shown.show(measure.value), note))
    if summary.final_accuracy is not None:
        kept = f"{points(summary.pmm)} of the undefended accuracy (PMM)" if summary.pmm is not None else "test accuracy"
        facts.append(Fact("Accuracy", percent(summary.final_accuracy), kept))
    if summary.privacy and summary.privacy.epsilon is not None:
        little = ", which promises little" * summary.privacy.promises_little
        note = f"at delta {ratio(summary.privacy.delta)}{little}"
        facts.append(Fact("Epsilon", ratio(summary.privacy.epsilon), note))
    return facts


def _proven(found: Sequence[Reading]) -> int:
    """Examples that one attacker is sure of, at most."""
    return max((reading.leakage.certainties.get(Certainty.PROVEN, 0) for reading in found), default=0)


def _of(reading: Reading, others: Sequence[Reading], words: str) -> str:
    who = reading.among(others)
    return f"{words}; {who}" if who else words


def _untested(run: Run, found: Sequence[Reading], kind: str) -> list[str]:
    """What the run leaves open by how it was set up, then what every run leaves open."""
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
        lines.append(f"What else the uploads tell: {', '.join(open_questions)}.")
    return [*lines, *_UNTRIED]


def _risks(run: Run, found: Sequence[Reading], said: Verdict, kind: str) -> list[str]:
    """What may still happen where the page is believed, with the figures that bound it."""
    lines = [said.basis] if said.basis else []
    most = most_recognized(found)
    bound, statistic = (most.recognized_by(), most.statistic(most.main)) if most else (None, None)
    if bound is not None and statistic is not None and bound.recognizable:
        share = percent(share_at_most(bound.recognizable, bound.n, groups=statistic.groups))
        lines.append(f"Of all such {kind}s, up to {share} may be recognizable (95 % confidence).")
    for name in dict.fromkeys(reading.main for reading in found):
        if measured := [s.max for reading in found if (s := reading.statistic(name)) is not None]:
            lines.append(f"The {kind} that was read best came to {title(name)} {metric(max(measured), name)}.")
    lines += [words for about in TOLD if (words := sentence(run.summary.inferred, about))]
    lines.append(_guaranteed(run.summary.privacy))
    lines.append(
        "It holds for this model, these data, this way of training and this number of examples in an upload: test again"
        " when one of them changes."
    )
    return lines


def _guaranteed(privacy: Spent | None) -> str:
    """What differential privacy holds every attacker to, where its epsilon is small enough to hold one to anything."""
    if privacy is None or privacy.epsilon is None:
        return "No guarantee stands behind this: there is no epsilon, so that all of it is observation."
    spent = f"epsilon {ratio(privacy.epsilon)} at delta {ratio(privacy.delta)} by the end of the training"
    if privacy.promises_little:
        return f"No guarantee that is worth the name stands behind this: {spent} lets an attacker learn all there is."
    right = percent(balanced_accuracy_bound(epsilon=privacy.epsilon, delta=privacy.delta))
    return (
        f"Differential privacy bounds every attacker: {spent}, by which at most {right} of guesses are right whether"
        " what is protected was there or was not."
    )
