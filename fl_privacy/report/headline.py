"""Put a verdict into words for pages and the terminal."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fl_privacy.errors import visible
from fl_privacy.files import shipped
from fl_privacy.measure import FEW, Statistic
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.measure.roc import Finding
from fl_privacy.report.words import metric, percent, ratio, title
from fl_privacy.runs.folder import Counts, Recognized, read_run, verdict_of
from fl_privacy.runs.folder.defense_choice import CAN_INFER
from fl_privacy.runs.folder.leakage import PUBLIC, AttackedUploads, AttackFacts
from fl_privacy.runs.folder.verdict import BOUNDED, LEAK, Ground, Tone, Verdict
from fl_privacy.types.modality import ROWS, TEXTS


@dataclass(frozen=True)
class Headline:
    """A report's main conclusion, in words: how much the attacks reconstructed."""

    text: str  # reconstructed examples, attacker and uploads; the bound; or why nothing is known
    basis: str  # evidence and open questions, in sentences
    tone: Tone
    lead: str = ""  # first part of ``text``, short enough for five seconds; all of it if empty
    scope: str = ""  # rest as a sentence, such as the attacked uploads; may be empty

    @property
    def first(self) -> str:
        return self.lead or self.text


class _Clause(NamedTuple):
    text: str
    leads: bool = True


UPLOADS: Mapping[AttackedUploads, str] = {
    AttackedUploads.PROBES: "uploads of few images each, which clients computed for this as they compute their own",
    AttackedUploads.TRAINING: "updates of the training itself",
    AttackedUploads.SERVER: "uploads of one image each that the server computed itself, undefended",
}


def headline_of(verdict: Verdict, kind: str | None = None) -> Headline:
    """Put ``verdict`` into words; ``kind`` replaces the name of the verdict's examples, such as ``image``."""
    kind = kind or verdict.modality.one
    clauses = _clauses(verdict, kind)
    lead, rest = ("".join(clause.text for clause in clauses if clause.leads is leads) for leads in (True, False))
    # make a sentence of the text after a comma or semicolon, or in parentheses
    text = rest.lstrip(" ,;")
    if text.startswith("("):
        text = text[1:].replace(")", "", 1)
    whole, scope = "".join(clause.text for clause in clauses), f"{capital(text)}." if text else ""
    return Headline(whole, " ".join(_basis(verdict, kind)), verdict.tone, lead, scope)


def _clauses(verdict: Verdict, kind: str) -> list[_Clause]:
    learns = " and ".join(CAN_INFER.get(about, about) for about in verdict.inferred)
    nothing = f"; no {kind} was attacked"
    who = observer(verdict.facts)
    known = f"{who} can infer {learns}" if learns else ""
    if verdict.ground is Ground.NOTHING:
        return [_Clause(f"No {kind} was attacked: nothing is known")]
    if verdict.ground is Ground.NOT_INFERRED:
        # questions that the server could not answer, and the attacks
        asked = tuple(dict.fromkeys(finding.about for finding in verdict.asked))
        questions = " or ".join(CAN_INFER.get(about, about) for about in asked)
        rest = _Clause(f", {_by_methods(verdict.asked, asked)}{nothing}", leads=False)
        return [_Clause(f"{capital(who)} could not infer {questions} better than by chance"), rest]
    if verdict.ground is Ground.OLDER:
        return [_Clause("Judged by an older version: run again for a verdict")]
    if not verdict.readings:
        by = _by_methods(verdict.asked, verdict.inferred)
        return [_Clause(capital(known)), _Clause(f", {by}{nothing}", leads=False)]
    joint = "; " if verdict.ground is Ground.READ else ", but "
    said = _of_attacked(verdict, kind)
    if verdict.facts.source is AttackedUploads.SERVER and verdict.ground is not Ground.BOUNDED:
        first = said[0].text
        said = [_Clause(f"No client's upload was attacked: {first[0].lower()}{first[1:]}"), *said[1:]]
    return [*said, *([_Clause(f"{joint}{known}")] if known else [])]


def _by_methods(found: Sequence[Finding], about: Collection[str]) -> str:
    own = [finding for finding in found if finding.about in about]
    number = len({(finding.about, finding.method) for finding in own})
    examples = max((finding.positives + finding.negatives for finding in own), default=0)
    by = "by one attack" if number == 1 else f"by the best of {number} attacks"
    return f"{by}, asked {examples:,} questions" if examples else by


def _of_attacked(verdict: Verdict, kind: str) -> list[_Clause]:
    if verdict.most is None or verdict.ground in (Ground.FAILED, Ground.NO_TRUTH):
        return _without_verdict(verdict, kind)
    who, counts = _who(verdict), verdict.most.counts
    if verdict.ground is Ground.BOUNDED:
        bound = verdict.bound
        assert bound is not None, "only a bound makes it green"
        bounded = f"Bounded: no attacker picks the right {kind} out of {bound.candidates + 1:,} more than"
        protected = "one example" if bound.unit == "example" else "all that a client sends"
        rounds = f"{bound.rounds} round{'' if bound.rounds == 1 else 's'}"
        for_whom = f" (epsilon {ratio(bound.epsilon)} at delta {ratio(bound.delta)} for {protected}, over {rounds})"
        found = f"; {who} reconstructed {_few_words(counts)}"
        return [_Clause(f"{bounded} {percent(bound.at_most)} of the time"), _Clause(f"{for_whom}{found}", leads=False)]
    chance = " (no more than chance allows)" if verdict.ground is Ground.BY_CHANCE else ""
    first = _Clause(f"{_result(verdict, kind)}{chance}")
    uploads = _Clause(f", {uploads_in_words(verdict.facts, kind)}", leads=False)
    came_out = read_words = ""
    if (put := verdict.exposed) is not None and put.recognizable > verdict.counts.read:
        which = f"the {kind}" if put.n == 1 else f"{put.recognizable} of the {put.n} {kind}s"
        were = "was" if put.recognizable == 1 else "were"
        came_out = f", but {which} that the defense substituted {were} reconstructed"
    exposed = _Clause(came_out)
    if (words := counts.words).read:
        texts = f"{words.texts} text{'' if words.texts == 1 else 's'}"
        were = "was" if words.read == 1 else "were"
        read_words = f"; {words.read} of {words.there} words of {texts} {were} reconstructed"
    if not counts.read:
        return [first, uploads, exposed, _Clause(f"; up to {_upper(counts)} of such {kind}s may leak")]
    most, by_round, rounds = verdict.most, verdict.by_round, ""
    if len(by_round) > 1:
        shown = sorted({most.round, max(by_round), min(by_round)})
        rounds = ": " + ", ".join(f"{read_in_words(by_round[k].counts)} in round {k}" for k in shown)
    return [first, uploads, _Clause(rounds, leads=False), exposed, _Clause(read_words)]


def _result(verdict: Verdict, kind: str) -> str:
    facts, counts = verdict.facts, verdict.counts
    examples = f"attacked {kind}{'s' * (counts.judged != 1)}{' whose original is known' * bool(counts.unknown)}"
    if not counts.read:
        how_many = "did not reconstruct the" if counts.judged == 1 else f"reconstructed none of {counts.judged}"
        return capital(f"{_who(verdict)} {how_many} {examples}")
    how_many = "the" if counts.judged == 1 else _few_words(counts)
    return f"{capital(observer(facts))}{_knowing(verdict)} reconstructed {how_many} {examples}"


def capital(text: str) -> str:
    """Return ``text`` with its first letter in upper case."""
    return f"{text[:1].upper()}{text[1:]}"


def _few_words(counts: Counts) -> str:
    return f"{counts.read or 'none'} of {counts.judged}"


def _upper(counts: Counts) -> str:
    return f"{100 * counts.interval[1]:.0f} %"


def read_in_words(counts: Counts) -> str:
    """Describe how many examples were reconstructed; if none, also the 95 % bound of the share that leaks."""
    return _few_words(counts) + ("" if counts.read else f" (up to {_upper(counts)})")


def uploads_in_words(facts: AttackFacts, kind: str) -> str:
    """Describe attacked uploads, such as ``from uploads of one image each that were made for the attack``."""
    low, high = facts.examples or (1, 1)
    number = f"one {kind} each" if high == 1 else f"{low if low == high else f'{low} to {high}'} {kind}s each"
    if facts.summed != 1:
        number = f"{number.removesuffix(' each')} in all"
        if facts.source is AttackedUploads.TRAINING:
            sites = f"{facts.summed} other sites" if facts.summed else "the other sites of a round"
            return f"from means of the training updates of {sites}, of {number}"
        return f"from means of {facts.summed} other sites' uploads, of {number}, that were made for the attack"
    match facts.source:
        case AttackedUploads.SERVER:
            return f"from undefended uploads of {number} that the server made itself"
        case AttackedUploads.TRAINING:
            return f"from the training updates themselves, of {number}"
    made = f"from uploads of {number} that were made for the attack"
    return f"{made}, not from training batches" if facts.trained else made


def _who(verdict: Verdict) -> str:
    facts = verdict.facts
    by = f"{observer(facts)} with the attack {facts.attack}" if facts.sites and facts.attack else observer(facts)
    by = f"the attack {facts.attack}" if facts.attack and not facts.sites else by
    return by + _knowing(verdict)


def observer(facts: AttackFacts) -> str:
    """Name the attacker who sees the uploads."""
    if facts.sites:
        who = "another site" if facts.sites == 1 else f"{facts.sites} colluding sites"
        return f"{who} with a poisoned update ({facts.server})" if facts.server else who
    return f"a malicious server ({facts.server})" if facts.server else "the server"


def _knowing(verdict: Verdict) -> str:
    most = verdict.most
    rivals = [r for r in verdict.readings if most and r.round == most.round and r.attacker is not most.attacker]
    if most is None or not most.counts.read or not rivals or most.counts.share in {r.counts.share for r in rivals}:
        return ""
    return f", {'knowing' if most.attacker == 'adaptive' else 'not knowing'} the defense,"


def _without_verdict(verdict: Verdict, kind: str) -> list[_Clause]:
    attacked = [reading.counts for reading in verdict.readings]
    if verdict.ground is Ground.FAILED:
        number = max(counts.images for counts in attacked)
        whole = f"the only {kind}" if number == 1 else f"all {number} {kind}s"
        return [_Clause(f"The attack failed on {whole}: nothing is known")]
    counts = max(attacked, key=lambda c: c.judged)
    if counts.judged:
        unknown = f"the originals of {counts.unknown} of {counts.images} attacked {kind}s are not known"
        known = f"{_who(verdict)} reconstructed {_few_words(counts)} with a known original"
        said = f"; {known} (up to {_upper(counts)} may be)"
        return [_Clause(f"No verdict: {unknown}"), _Clause(said, leads=False)]
    made = sum(c.images - c.failures for c in attacked)
    guessed = capital(f"{_who(verdict)} guessed {made} {kind}{'s' * (made != 1)}")
    uploads = _Clause(f", {uploads_in_words(verdict.facts, kind)}", leads=False)
    return [_Clause(guessed), uploads, _Clause(": are these yours?")]


def _basis(verdict: Verdict, kind: str) -> list[str]:
    if not verdict.readings:
        return []
    if verdict.ground is Ground.OLDER:
        return [
            "There was no control, so it is unknown whether the reconstructions are better than a guess without the"
            " update."
        ]
    sentences = []
    if verdict.ground is Ground.NO_TRUTH:
        sentences.append(
            "The originals are unknown here, so no figure says how close the guesses are: their owner can judge by the"
            " pictures, or measure with truth=FOLDER."
        )
    if verdict.most is not None and verdict.counts.read:
        sentences.append(_ways(verdict.counts, kind, verdict.most.statistic(IMAGE_METRIC)))
        if (words := verdict.counts.words).read:
            sentences.append(
                "Each different word counts once, in any order, and only beyond what word frequencies in public texts"
                f" predict. Wrongly inferred words: {words.wrong or 'none'}."
            )
    sentences.append(tried_in_words(verdict, kind))
    counts = [reading.counts for reading in verdict.readings]
    if verdict.ground is not Ground.FAILED and (failures := max(c.failures for c in counts)):
        sentences.append(f"The attack failed on {failures} more, which are not counted.")
    if verdict.ground is not Ground.NO_TRUTH and (unknown := max(c.unknown for c in counts)):
        sentences.append(f"The originals of {unknown} more are unknown here, so these are not counted.")
    if verdict.exposed:
        sentences.append(
            f"A {kind} that the defense substituted counts as reconstructed if {bound_in_words(verdict.exposed)}; no"
            " figure says how much of the original it shows: look at the pictures."
        )
    return [*sentences, *_open_ends(verdict, kind)]


CLEAR = 30.0  # PSNR in dB above which a guess is hardly distinguished from its original


def _ways(counts: Counts, kind: str, psnr: Statistic | None) -> str:
    ways = {
        f"{counts.exact} exactly": counts.exact,
        f"{counts.identified} identified among {counts.candidates:,} other {kind}s": counts.identified,
        f"{counts.recognizable} recognizable above what a guess without the update shows": counts.recognizable,
    }
    (low, high), apart = counts.interval, ""
    if counts.identified:
        blurred = "" if psnr and psnr.min >= CLEAR else ", as they are or blurred. The guess may look different"
        apart = f" Identified: the original is nearer to the guess than all other {kind}s are{blurred}."
    return (
        f"Reconstructed: {', '.join(way for way, number in ways.items() if number)}.{apart} With 95 %"
        f" confidence, this attack reconstructs {100 * low:.0f} to {100 * high:.0f} % of {kind}s attacked like this."
    )


def tried_in_words(verdict: Verdict, kind: str) -> str:
    """Describe the attack on examples (``kind``): budget, knowledge of the defense, number of uploads, image prior."""
    facts = verdict.facts
    server = observer(facts) if facts.server or facts.sites else "an honest-but-curious server"
    name = facts.attack or "the server's own reconstruction"
    budget = "several attacks, " * (name == "auto") + re.sub(r"\bbudget (\w+)", r"\1 budget", facts.budget)
    budget = f" ({budget})" if budget else ""
    adaptive = any(reading.attacker == "adaptive" for reading in verdict.readings)
    knows = " No attacker knew the defense; one that does may reconstruct more (threat_model=adaptive)."
    knows = " The plain attacker does not know the defense, the adaptive one does." if adaptive else knows
    knows = "" if facts.undefended or not facts.defenses else knows
    alone = "" if any(" round" in line for line in facts.knowledge) else ", each attacked alone"
    uploads = f"{facts.uploads} uploads per {kind}{alone}" if facts.uploads > 1 else f"one upload per {kind}"
    article, pixels = "an" if kind.startswith(tuple("aeiou")) else "a", verdict.modality.pixels
    used = [f"public {kind}s" if one == PUBLIC else one for one in facts.priors or () if one == PUBLIC or pixels]
    prior = "" if facts.priors is None else f", without {article} {kind} prior"
    prior = f", with {article} {kind} prior ({', '.join(used)})" if used else prior
    return f"Attack: {name}{budget}, run by {server}, on {uploads}{prior}.{knows}"


def _open_ends(verdict: Verdict, kind: str) -> list[str]:
    if verdict.ground not in (Ground.UNREAD, Ground.BY_CHANCE, Ground.BOUNDED):
        return []
    sentences, bounded, number = [], verdict.ground is Ground.BOUNDED, verdict.counts.groups
    if not bounded and 0 < number < FEW:
        sentences.append(
            f"Only {number} upload{'' if number == 1 else 's'} {'was' if number == 1 else 'were'} attacked."
        )
    if verdict.facts.undefended and not bounded:
        stronger = "attack.budget=thorough" if verdict.facts.attack == "auto" else "more iterations, attack=auto"
        sentences.append(
            f"Clients had no defense, so nothing protects them: a stronger attack ({stronger}) may reconstruct more."
        )
    if verdict.bound is not None and not bounded:
        sentences.append(
            f"Epsilon {ratio(verdict.bound.epsilon)} is too large to protect: an attacker may name the right"
            f" {kind} among {verdict.bound.candidates + 1:,} up to {percent(verdict.bound.at_most)} of the time."
        )
    adaptive = any(reading.attacker == "adaptive" for reading in verdict.readings)
    untried = [] if adaptive or verdict.facts.undefended else ["an attacker that knows the defense"]
    untried += ["" if verdict.facts.attack == "auto" else "the strongest attacker (attack=auto)", "longer attacks"]
    return [*sentences, f"Not tried: {', '.join(filter(None, untried))}."]


def bound_in_words(bound: Recognized) -> str:
    """Format the value from which a paper counts an example as reconstructed, such as ``PSNR ≥ 15.0 dB``."""
    sign = "≥" if bound.leaks == "above" else "<"
    return f"{title(bound.metric)} {sign} {metric(bound.value, bound.metric)}"


PAGE = "report.html"  # page in a run's folder

VERDICTS: Mapping[str, Mapping[str, str]] = shipped(__file__, "verdicts.yaml")
"""Reason for a verdict -> its ``meaning`` for decision makers and the next step, ``to_do``."""

_NO_RESULT = (Ground.FAILED, Ground.OLDER, Ground.NO_TRUTH, Ground.NOTHING)

_GRIDS = {TEXTS: "text", ROWS: "tables"}  # modality other than images -> grid that measures its defenses


def run_in_words(run_dir: Path) -> str:
    """Describe the result of the run in ``run_dir`` and the next step."""
    run = read_run(run_dir)
    verdict = verdict_of(run)
    return visible(f"{headline_of(verdict).text}. {to_do(verdict)}".replace("?.", "?"))


def approval(verdict: Verdict) -> str:
    """Say whether such a training may be approved."""
    said, facts = {LEAK: "Not as it is", BOUNDED: "Only if this bound suffices for your data"}, verdict.facts
    probed = verdict.ground is Ground.READ and facts.source is AttackedUploads.PROBES and facts.trained
    why = ": in training, a client with so little data may send such an upload" * probed
    return f"{said.get(verdict.tone, 'Not by this page')}{why}. {to_do(verdict)}"


def to_do(verdict: Verdict) -> str:
    """Recommend the next step to the owner of the clients."""
    if verdict.ground is Ground.READ:
        grid = _GRIDS.get(verdict.modality, "quick")
        measure = f"`fl-privacy trade-off {grid}`"
        if verdict.facts.undefended:
            return f"Defend the clients: {measure} shows which defense prevents this at what cost."
        return f"This defense does not prevent it: make it stronger, or choose another by {measure}."
    return VERDICTS[verdict.ground]["to_do"]


def answers_of(run_dirs: Sequence[Path]) -> str:
    """Describe the results of one or several runs, and name the run that leaks most."""
    if len(run_dirs) == 1:
        return run_in_words(run_dirs[0])
    runs = [read_run(path) for path in run_dirs]
    judged = [(verdict_of(run), run) for run in runs]
    leaks = [(verdict, run) for verdict, run in judged if verdict.tone == LEAK]
    if not leaks:
        known = sum(verdict.ground not in _NO_RESULT for verdict, _ in judged)
        none = f"None of {known} runs with a result reconstructed an example. {VERDICTS[Ground.UNREAD]['to_do']}"
        return none if known else f"None of {len(runs)} runs has a result: this says nothing about privacy."
    most, run = max(leaks, key=lambda pair: (pair[0].ground is Ground.READ, pair[0].counts.share or 0.0))
    text = headline_of(most).text
    return visible(
        f"{len(leaks)} of {len(runs)} runs leak; most in {run.path.name}:"
        f" {text[0].lower()}{text[1:]}. The page compares them."
    )
