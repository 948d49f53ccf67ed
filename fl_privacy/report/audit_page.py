"""Define the record of an audit, and render an app's page."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from fl_privacy.files import shipped
from fl_privacy.measure.answer import QUESTIONS, Answer, Scenario, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.advice import noise_to_try
from fl_privacy.report.audit_parts import UP, Captured, CountedLeak, Line, Severity, Volume, members_said
from fl_privacy.report.bars import SHORT, Bar, bars_of, bars_of_questions, best_of, by_reality, paired
from fl_privacy.report.gallery import data_uri
from fl_privacy.report.headline import UPLOADS
from fl_privacy.report.page import render
from fl_privacy.report.words import share_interval, uncapital
from fl_privacy.runs.folder import Verdict
from fl_privacy.runs.folder.leakage import AttackedUploads
from fl_privacy.runs.folder.verdict import LEAK, OPEN, Tone

MOST_LINES = 60  # lines of the inventory shown initially
MOST_CLEAR, MOST_FIGURES = 3, 4  # bars of data in the clear at the head of the page, and compared figures of the app
KINDS = {"image": "image", "row": "row", "node": "node", "graph": "node", "text": "text", "other": "example"}
MEMBERSHIP = ("members", "participants")  # questions on who took part
_DRAWN = "What was missing here was made up: the app's own data may leak more or less"
NOT_TESTED = "The app's protections, such as differential privacy or secure aggregation, were not tested"
_NO_GUARANTEE = "; other attacks may reconstruct more"


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """Content of an audit's page: figures and sentences on a strategy or an unmodified app."""

    app: str  # name of the app, of the strategy's class, or of an update's file
    subject: Literal["app", "update"] = "app"  # ``update`` for files of any framework
    lede: str = ""
    findings: Sequence[CountedLeak] = ()
    # results of attacks by scenario, then the aggregate leakage of the training's uploads
    answers: Sequence[Answer] = ()
    lines: Sequence[Line] = ()
    volumes: Sequence[Volume] = ()
    facts: Sequence[tuple[str, str]] = ()
    stated: Mapping[str, Sequence[float]] = field(default_factory=dict)  # differential privacy stated by clients
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()  # sentences on the app, or on how its run differs from its own
    going_on: str = ""  # pending work and time of an unfinished page; empty if all is done
    broken: str = ""  # reason why the audit ended early
    silence: str = ""  # reason why no client sent anything, or none trained, if known
    environment: Sequence[tuple[str, str]] = ()
    nodes: int | None = None
    rounds: int | None = None
    network_alone: str = ""  # network that was trained in place of the app, and how
    not_audited: str = ""  # reason why the app's own training was not audited, if a network alone was
    drawn: bool = False  # ``True`` if drawn examples or networks stand for the app's own
    models: Mapping[str, int] = field(default_factory=dict)  # name of a network -> number of replies with it
    seconds: Mapping[str, float] = field(default_factory=dict)
    captured: Captured | None = None  # facts on captured uploads; ``None`` for an app
    # what the app reports of its last evaluation, by name and origin
    figures: Mapping[str, float] = field(default_factory=dict)
    defense: str = ""  # defense on replies, if ``before`` has the same app without it
    covers: str = ""  # replies that the defense was put on, as `` on 3 of 6 replies``; empty for all
    before: "AuditRecord | None" = None

    @property
    def tone(self) -> Tone:
        return LEAK if self._of("data") or any(answer.leaks for answer in self.answers) else OPEN

    @property
    def steps(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.question == "examples"]

    @property
    def aggregate(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.question != "examples"]

    @property
    def silent(self) -> bool:
        return all(line.direction != UP for line in self.lines)

    @property
    def further(self) -> list[str]:
        drawn = [self.why_alone, NOT_TESTED] if self.network_alone else [_DRAWN] * self.drawn
        leaks = self._own_not_attacked and any(step.leaks for step in self.steps)
        return [*drawn, *self.also, *([self.when] if leaks else [])]

    @property
    def why_alone(self) -> str:
        why = re.split(r": |\. (?=[A-Z])|; --debug", self.not_audited, maxsplit=1)[0].rstrip(".")
        return f"The app's own training was not audited{': ' * bool(why)}{re.sub('^The ', 'the ', why)}"

    @property
    def also(self) -> list[str]:
        """Return the findings that the headline does not name, as sentences without full stops."""
        read, clear = [step for step in self.steps if step.leaks], self._of("data")
        found = [_read(step) for step in read if clear or step is not max(read, key=attrgetter("share"))]
        leaking = [one for one in self.aggregate if one.leaks]
        found += [self._own_not_attacked] if self._own_not_attacked else []
        if leaking and (read or clear):
            found += _revealed(leaking, server="The training's own uploads reveal")
        if self._of("facts") and not read and not leaking:
            found.append(self._nothing_read())
        return found

    @property
    def _own_not_attacked(self) -> str:
        own = next((step for step in self.steps if step.scenario.name == "all"), None)
        if own is None or own.counts is not None or not own.reason:
            return ""
        what = "No single example of your real training was" if self.measured else "Your real training was not"
        return f"{what} attacked: {own.reason}"

    @property
    def when(self) -> str:
        """Say why the main finding matters in training; empty without one."""
        step = self.shown_first
        observers = {one.observer for one in self.aggregate if one.leaks}
        if self._of("data"):
            return "The app's replies hold clients' data in the clear, so no attack is needed"
        if step is not None and step.leaks and self.network_alone:
            return "Uploads were made for this audit by plain SGD"
        if step is not None and step.leaks and step.scenario.asked and not observers:
            return "A client with little data may upload what can be reconstructed, and the app does not prevent it"
        if step is not None and step.leaks and not step.scenario.asked:
            return "" if self.subject == "update" else "The training itself sends such uploads"
        own = "Some attacks succeed on the training's own uploads, with all their examples and steps"
        return "" if not observers else own if "server" in observers else OTHERS[max(observers)]["needs"]

    @property
    def officer(self) -> list[tuple[str, str]]:
        """Return (question, answer without the full stop) for two questions of a data protection officer."""
        members = [one for one in self.aggregate if one.question in MEMBERSHIP and one.estimate]
        person = ["Yes: data are sent in the clear"] if self._of("data") else []
        if self.network_alone:
            result = uncapital(self._own_headline.removesuffix(_NO_GUARANTEE))
            only = "Not tested: neither the app's training nor its data were used"
            person.append(f"{only}. Its network alone, on random inputs: {result}")
        elif self._unjudged:
            person.append("Not known: compare the guesses with your own records")
        else:
            first, *rest = self._reconstructed or [""]
            real = [*filter(None, [first]), *members_said(members)]
            person += [*sorted(real, key=lambda said: not said.startswith("Yes")), *rest]
        if any(one.question == "continued" and one.leaks for one in self.aggregate):
            person.append("Yes: the final model completes texts of clients word for word")
        person += [_DRAWN] if self.drawn and person and not self.network_alone else []
        found_none = "these attacks found no leak, but others may reconstruct more"
        approval = f"Not by this page alone: {found_none}"
        if self.network_alone:
            approval = "Not by this page: the app's own training was not audited"
        elif self.tone == LEAK:
            approval = (
                f"Not as it is{': ' * bool(self.when)}{uncapital(self.when)}. Defend the clients, and audit again"
            )
            approval = f"Not even with {self.defense}, whose uploads still leak" if self.defense else approval
        elif self.broken or self.going_on or not (self.uploads_attacked or members):
            shown = "nothing was tested" if self.silent else "no attack on single examples has a result"
            approval = f"Not by this page: {shown}"
        elif self.before is not None and self.before.tone == LEAK:
            approval = f"Not without {self.defense}; with it{self.covers}, {found_none}"
        elif self._of("facts"):
            approval = f"Not before the facts sent in the clear are judged; {found_none}"
        asked = ("Can anyone find out whether a person is in the data?", "Can this training be approved?")
        untested = f"Not tested{', but facts about the data are sent in the clear' * bool(self._of('facts'))}"
        return list(zip(asked, (". ".join(person) or untested, approval), strict=True))

    @property
    def _reconstructed(self) -> list[str]:
        own, asked = ([step for step in self.steps if step.scenario.asked is made] for made in (False, True))
        said = list[str]()
        for steps, yes in ((own, "Yes"), (asked, "Yes, from uploads made for this audit")):
            if said and any(step.leaks for step in own):
                break
            known = [step for step in steps if step.scenario.leaves and step.counts is not None and step.counts.judged]
            leaks = [step for step in known if step.leaks]
            if (best := max(leaks or known, key=attrgetter("share"), default=None)) is not None and (leaks or not said):
                assert best.counts is not None
                within = "" if leaks else f" (95 % interval {share_interval(best.counts.interval)})"
                said.append(f"{yes if leaks else 'Not shown by reconstruction'}: {uncapital(_read(best))}{within}")
            elif steps is own and self._own_not_attacked:
                said.append(self._own_not_attacked)
        return said

    @property
    def next_step(self) -> str:
        if self.network_alone:
            return "Fix the error above, and audit the app's own training"
        if found := self._of("data") or ([] if self.tone == LEAK or self.broken else self._of("facts")):
            accepted = "" if found[0].severity == "data" else ", or decide that it may leave"
            fewer = "Send fewer trees, with a coarser max_bin (docs/trees.md), or decide that these facts may leave"
            trees = accepted and any(step.scenario.name == "trees" for step in self.steps)
            return fewer if trees else f"Remove {found[0].where} from the app's replies{accepted}"
        if self.defense and (self.tone == LEAK or self.uploads_attacked):
            stronger = "It still leaks: try other settings, another defense, or secure aggregation (docs/defend.md)"
            put = f"Put {self.defense} into the ClientApp (docs/defend.md). Only differential privacy is a guarantee"
            return stronger if self.tone == LEAK else put
        step = self.shown_first
        if self.subject == "app" and step is not None and step.leaks and step.scenario.asked:
            defense, cost = noise_to_try(step.kind)
            return f"Repeat this audit with --with-defense '{defense}' to see what it prevents{cost} (docs/choose.md)"
        if self.tone == LEAK or self._unjudged:
            look = "Look at the reconstructions, or compare them with the site's own examples by --data"
            observers = {one.observer for one in self.answers if one.leaks}
            hide = "Hide single uploads from the server by secure aggregation (docs/secure_aggregation.md)"
            others = observers and "server" not in observers
            return OTHERS[max(observers)]["remedy"] if others else hide if self.tone == LEAK else look
        waits = "Wait: this page is updated as results arrive" if self.going_on else ""
        longer = "Attack longer with --budget thorough. Only differential privacy is a guarantee (docs/defend.md)"
        late = any("--seconds" in step.reason for step in self.steps)
        rest = "Read the list below of everything that is sent" if self.lines else "Fix the errors above"
        rest = longer if self.uploads_attacked else "Give the attacks more time with --seconds" if late else rest
        return "Audit the app again" if self.broken else waits or rest

    @property
    def shown_first(self) -> Answer | None:
        shown = [step for step in self.steps if step.shown]
        read = [step for step in shown if step.leaks]
        sent = [step for step in shown if step.scenario.leaves]
        return max(read or sent, key=attrgetter("share"), default=next(iter(shown), None))

    def _of(self, severity: Severity) -> list[CountedLeak]:
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def headline(self) -> str:
        said = self._own_headline if self.before is None else _compared(self, self.before)
        only = "Only the app's network was audited, on random inputs"
        return f"{only}: {uncapital(said)}" if self.network_alone else said

    @property
    def _own_headline(self) -> str:
        if clear := self._of("data"):
            return f"Clients send data in the clear: {clear[0].what}, in {clear[0].times} of {clear[0].of} replies"
        if read := [step for step in self.steps if step.leaks]:
            real = [(one, one.counts) for one in self.uploads_attacked if one.counts and one.scenario.name == "all"]
            most = max(read, key=attrgetter("share"))
            own = [f"; from the app's own upload, {c.read} of {c.judged}{' checked' * one.sampled}" for one, c in real]
            return _read(most) + "".join(own) * (most.scenario.name != "all")
        if leaking := [one for one in self.aggregate if one.leaks]:
            said = ". ".join(_revealed(leaking, server="Clients' uploads reveal to the server"))
            return f"{said}. {self._of_chance()}" if self.uploads_attacked else said
        if self.broken:
            return "The audit did not end: the result is not known"
        if facts := self._of("facts"):
            others = f", and {len(facts) - 1} more" if len(facts) > 1 else ""
            return f"Clients send facts about their data in the clear: {facts[0].what}{others}"
        return self._nothing_read()

    @property
    def _unjudged(self) -> list[Answer]:
        return [step for step in self.steps if step.shown and (n := step.counts) and n.unknown and not n.judged]

    @property
    def uploads_attacked(self) -> list[Answer]:
        return [step for step in self.steps if step.counts is not None and step.counts.judged and step.scenario.leaves]

    @property
    def measured(self) -> bool:
        return any(one.estimate for one in self.aggregate)

    def _of_chance(self) -> str:
        most = max(self.uploads_attacked, key=lambda step: (step.share, not step.scenario.asked))
        said = _read(most)
        words = max(map(_single_words, self.uploads_attacked), default=0)
        return f"{said}, but {words} single word{'s' * (words != 1)} of them" if words else said

    def _nothing_read(self) -> str:
        if self._unjudged and not self.uploads_attacked:
            return f"Guesses at the {KINDS[self._unjudged[0].kind]}s of the update are shown: are these yours?"
        attacked = [step for step in self.steps if step.counts is not None and step.counts.judged]
        if self.uploads_attacked:
            return f"{self._of_chance()}{_NO_GUARANTEE}"
        if attacked and (counts := attacked[0].counts) is not None:
            were = "was" if counts.read == 1 else "were"
            of = f"{counts.read} of {_number(counts.judged, KINDS[attacked[0].kind])} {were} reconstructed"
            why = " yet" if self.going_on else f": {self._why}" * (not self.network_alone)
            return f"No upload was attacked{why}. From gradients, which clients never send, {of}"
        if self.going_on or any(step.counts for step in self.steps):
            failed = "All attacks on single examples failed: nothing is known about them"
            return "No upload has been attacked yet" if self.going_on else failed
        if self.measured:
            said = "No single example was attacked, and uploads revealed no more about clients than guessing does"
            return f"{said}{_NO_GUARANTEE}"
        asked = "no client sent" if self.lines else "the server asked no client for"
        nothing = f"Nothing to audit: {self.silence or f'{asked} anything'}"
        listed = "" if self.network_alone else "; everything that is sent is listed below"
        return nothing if self.silent else f"Not attacked: {self._why}{listed}"

    @property
    def _why(self) -> str:
        asked = (step for step in self.steps if step.scenario.leaves and step.scenario.name != "all")
        unknown = self.silence or "no attack here fits what this app uploads"
        return next((step.reason for step in asked if step.reason), unknown)


def _compared(after: AuditRecord, before: AuditRecord) -> str:
    first, without = (one._own_headline.removesuffix(_NO_GUARANTEE) for one in (after, before))
    new, old = (
        max([step for step in one.steps if step.leaks] or one.uploads_attacked, key=attrgetter("share"), default=None)
        for one in (after, before)
    )
    said = "the same" if first == without else uncapital(without)
    if first != without and new and old and old.leaks and new.scenario.name == old.scenario.name:
        assert old.counts is not None
        said = f"{old.counts.read} of {_number(old.counts.judged, KINDS[old.kind])}"
    words = f"With {after.defense}{after.covers}, {uncapital(first)}; without it, {said}"
    named = (key for key in before.figures if "acc" in key.lower() and key in after.figures)
    if (key := next(named, None)) is None:
        return words
    moved = f"goes from {before.figures[key]:.3g} to {after.figures[key]:.3g}"
    return f"{words}. The app's accuracy {moved if before.figures[key] != after.figures[key] else 'stays the same'}"


def compared_rows(after: AuditRecord, before: AuditRecord) -> list[tuple[str, ...]]:
    """Return rows (name, figure without a defense, figure with the defense) that compare an app's leakage and costs."""

    def result(record: AuditRecord) -> str:
        attacked = record.uploads_attacked or record.measured
        return "yes" if record.tone == LEAK else "not by these attacks" if attacked else "not attacked"

    def counted(step: Answer | None) -> str:
        if step is None or step.counts is None:
            return "not attacked"
        control = step.control if isinstance(step.control, Counts) else None
        other = "no control" if control is None else f"control {control.read} of {control.judged}"
        return f"{step.counts.read} of {step.counts.judged}; {other}"

    sides = (before, after)
    rows: list[tuple[str, ...]] = [("Uploads leak above chance", *map(result, sides))]
    for step in (step for step in after.steps if step.scenario.leaves):
        alike = [next((s for s in one.steps if s.scenario.name == step.scenario.name), None) for one in sides]
        if any(each is not None and each.counts for each in alike):
            rows.append((SHORT.get(step.scenario.name, step.scenario.title), *map(counted, alike)))
    shown = [key for key in before.figures if "training" not in key] or list(before.figures)
    for key in shown[:MOST_FIGURES]:
        figures = (one.figures.get(key) for one in sides)
        rows.append((key, *("not reported" if value is None else f"{value:.4g}" for value in figures)))
    if after.going_on:
        return rows
    rows.append(("Training, seconds", *(f"{one.seconds.get('training', 0.0):.1f}" for one in sides)))
    sent = (sum(volume.bytes for volume in one.volumes if volume.direction == UP) for one in sides)
    return [*rows, ("Sent by clients, bytes", *(f"{number:,}" for number in sent))]


def _revealed(answers: Sequence[Answer], server: str) -> list[str]:
    sentences = []
    for who, subject in {"server": server, **{who: other["learns"] for who, other in OTHERS.items()}}.items():
        parts = []
        for one in (one for one in answers if one.observer == who):
            assert one.estimate is not None and isinstance(one.control, Estimate)
            title = QUESTIONS[one.question].title
            parts.append(f"{uncapital(title)} ({one.estimate.value:.2f}; control {one.control.value:.2f})")
        several = [", ".join(parts[:-1])] if len(parts) > 1 else []
        sentences += [f"{subject} {' and '.join([*several, *parts[-1:]])}"] if parts else []
    return sentences


def _single_words(step: Answer) -> int:
    if step.kind not in _READ_IN_WORDS:
        return 0
    pairs = [(set(one.original), set(one.guess or ())) for one in step.shown if one.original is not None]
    right = sum(len(truth & guess) for truth, guess in pairs)
    wrong = sum(len(guess - truth) for truth, guess in pairs)
    turned = sum(len(truth & guess) for (truth, _), (_, guess) in zip(pairs, pairs[1:] + pairs[:1], strict=True))
    return right if right > 2 * wrong and (len(pairs) < 2 or right > 2 * turned) else 0


def _read(step: Answer) -> str:
    counts, what = step.counts, KINDS[step.kind]
    assert counts is not None
    of = f"{counts.read} of {_number(counts.judged, what)}{' checked' * step.sampled}"
    how = f"{OBSERVERS[step.observer]} reconstructed"
    comma, luck = "," * step.sampled, ", no more than chance allows" * (counts.read > 0 and not step.leaks)
    of += {"node": ", given all edges,", "graph": " with all their edges, none given,"}.get(step.kind, comma)
    if step.scenario.source:
        return f"{how} {of} from {step.scenario.source}{luck}"
    if step.kind in _READ_IN_WORDS:
        how += " the words of"
        of = of if step.scenario.examples == 1 else f"{counts.read} of {_number(counts.judged, 'upload')}"
    number, later = step.scenario.examples, ", in the last round" if step.scenario.name == "later" else ""
    made = "one example" if number == 1 else f"{number} examples"
    uploads = "one upload" if counts.groups == 1 < number else "uploads"
    return f"{how} {of} from {uploads} of {made} in one step{later}{luck}"


OTHERS: Mapping[str, Mapping[str, str]] = shipped(__file__, "other_observers.json")
"""Observers other than the server -> what they learn, what they need for it, and what prevents it."""

OBSERVERS: Mapping[str, str] = {"server": "The server", "another_site": "A client", "outsider": "Everybody"}


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def audit_of_run(name: str, verdict: Verdict, site: tuple[Counts, int] | None = None) -> AuditRecord:
    """Return the record of a strategy's audit, with one result for each round and attacker.

    ``site``: counts of other clients' examples that one client reconstructed, and number of clients; ``None``: not
    tried.
    """
    found, source = verdict.readings, verdict.facts.source
    several, answers = len({one.attacker for one in found}) > 1, []
    for one in found:
        right = one.statistic("label_correct")
        scenario = Scenario(
            name=f"round {one.round}",
            title=f"Round {one.round}, {one.attacker} attacker" if several else f"Round {one.round}",
            uploads=UPLOADS[source],
            leaves=source is not AttackedUploads.SERVER,
            source=UPLOADS[source],
        )
        labels = None if right is None else (round(right.mean * right.n), right.n)
        answers.append(Answer(scenario=scenario, kind="image", counts=one.counts, labels=labels, among=len(found)))
    if site is not None:
        title = "Another site: " + ("the other's upload" if site[1] == 2 else f"the mean of {site[1] - 1} uploads")
        scenario = Scenario(name="site", title=title, uploads=title)
        answers.append(Answer(scenario=scenario, kind="image", counts=site[0], observer="another_site", among=1))
    return AuditRecord(app=name, answers=answers)


def render_audit(page: AuditRecord) -> str:
    """Render the HTML page of an app's audit."""
    questioned = [] if page.before is None else bars_of_questions(page.before.answers)
    return render(
        "audit.html.j2",
        run=None,
        page=page,
        bars=[
            *paired(_bars(page), [] if page.before is None else _bars(page.before), page.defense),
            *paired(bars_of_questions(page.answers), questioned, page.defense),
        ],
        compared=[] if page.before is None else compared_rows(page, page.before),
        questions=QUESTIONS,
        shown=_shown(page),
        shown_before=[] if page.before is None else _shown(page.before),
        counted={step.kind: step.counts for step in page.steps[::-1] if step.counts},
        notes=list(dict.fromkeys(note for step in page.steps for note in step.notes)),
        attacked=any(step.counts for step in page.steps),
        most_lines=MOST_LINES,
    )


def _shown(page: AuditRecord) -> list[tuple[Answer, list[dict[str, Any]]]]:
    return [(step, _views(step, step.shown)) for step in by_reality(page.steps) if step.counts]


def _bars(page: AuditRecord) -> list[Bar]:
    clear = []
    for one in page.findings:
        if one.severity == "data":
            title, share = f"In the clear: {one.what}", one.times / one.of if one.of else None
            figure, aside = f"{one.times} of {one.of}", f"replies to {one.kind}"
            clear.append(Bar(title=title, figure=figure, aside=aside, red=True, share=share))
    scenarios = bars_of(page.answers)
    if (step := page.shown_first) is not None and step.leaks:
        place = by_reality(page.steps).index(step)
        best = _views(step, best_of(step, in_words=step.kind in _READ_IN_WORDS))
        scenarios[place] = replace(scenarios[place], kind=step.kind, best=best)
    return [*clear[:MOST_CLEAR], *scenarios]


def _views(step: Answer, shown: Sequence[Shown]) -> list[dict[str, Any]]:
    return [_VIEWS[step.kind](one) for one in shown] if step.kind in _VIEWS else []


def levels_of(image: Any) -> np.ndarray:
    """Convert an image (C, H, W) in [0, 1] to uint8."""
    return (np.clip(np.asarray(image), 0, 1) * 255).round().astype(np.uint8)


def _picture(one: Any) -> dict[str, Any]:
    guess, original = ("" if image is None else data_uri(levels_of(image)) for image in (one.guess, one.original))
    like = one.guess if one.original is None else one.original
    small = like is not None and min(like.shape[1:]) < 128
    return {"original": original, "guess": guess, "read": one.reconstructed, "small": small}


def _row(one: Any) -> dict[str, Any]:
    def numbers(values: Sequence[float]) -> str:
        return " ".join(f"{value:.2f}" for value in values[:20]) + (" …" if len(values) > 20 else "")

    original = "not known" if one.original is None else numbers(one.original)
    guess = "no guess" if one.guess is None else numbers(one.guess)
    return {"original": original, "guess": guess, "read": one.reconstructed}


def _words(one: Any) -> dict[str, Any]:
    truth, guess = set(one.original or ()), set(one.guess or ())
    return {"right": len(truth & guess), "there": len(truth), "wrong": len(guess - truth), "read": one.reconstructed}


_READ_IN_WORDS = {"text"}  # kinds whose single words are reconstructed
_VIEWS: dict[str, Callable[[Any], dict[str, Any]]] = {"image": _picture, "row": _row, "node": _row, "text": _words}
