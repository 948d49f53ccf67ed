"""What a run showed, in a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_privacy.metrics import FEW, share_at_most
from fl_privacy.report.inferred import told_apart
from fl_privacy.report.numbers import metric, percent, title
from fl_privacy.report.readings import (
    Reading,
    Tone,
    in_round,
    kind_of,
    most_exposed,
    most_recognized,
    readings_of,
    recognized_otherwise,
    tone_of,
)
from fl_privacy.results import Recognized, Summary
from fl_privacy.victim_ids import Certainty

UNDEFENDED_UNREAD = (
    "Clients did not defend themselves: that nothing was recognized tells of this attack, not of a protection. A"
    " stronger one, of more iterations or by attack=auto, may read more."
)


@dataclass(frozen=True)
class Verdict:
    """A headline.

    Attributes:
        text: how many images are recognizable.
        basis: by which bound, and what stays open.
        tone: ``leak`` if any image is recognizable in any round to any attacker, ``private`` if clients defended
            themselves and none is, by no metric, nor what a defense put in its place, and there are enough of them to
            say so, the attack failed on none and all originals are known, ``open`` otherwise.
    """

    text: str
    basis: str
    tone: Tone


def verdict(summary: Summary, kind: str = "image", *, undefended: bool = False) -> Verdict:
    """The headline of a run: what of its images, or examples of another ``kind``, is recognizable, and what else was
    told of them. Of an ``undefended`` one that was not read, that says more of the attack than of the uploads."""
    found = readings_of(summary, undefended=undefended)
    images, told = _of_images(summary, found, kind), told_apart(summary.inferred)
    if not told:
        return images
    known = f"the server can tell {' and '.join(told)}"
    if not found:
        return Verdict(known[0].upper() + known[1:], images.basis, "leak")
    return Verdict(f"{images.text}{'; ' if images.tone == 'leak' else ', but '}{known}", images.basis, "leak")


def _of_images(summary: Summary, found: Sequence[Reading], kind: str) -> Verdict:
    """By the main metric: the last attacked round and the first, each by the attacker that read most."""
    if not found:
        asked = "; what was asked beside was not told from chance" if summary.inferred else ""
        return Verdict(f"No {kind} was attacked{asked}", "", "open")
    most = most_recognized(found)
    if most is None:
        number = found[-1].leakage.images
        if any(reading.failures < reading.leakage.images for reading in found):
            return _without_truth(found, kind)
        return Verdict(
            f"The attack failed on {f'the only {kind}' if number == 1 else f'all {number} {kind}s'}", "", "open"
        )
    rounds = sorted({reading.round for reading in found})
    worst = {round: reading for round in rounds if (reading := most_recognized(in_round(found, round))) is not None}
    text = _count(worst[max(worst)]) + _to_whom(worst[max(worst)], found)
    if len(rounds) > 1:
        others = [round for round in dict.fromkeys((min(worst), most.round)) if round != max(worst)]
        beside = "".join(f"; in round {round}, {_share(worst[round])}" for round in others)
        text = f"In round {max(worst)}, {text[0].lower()}{text[1:]}{beside}"
    basis = _basis(found, worst)
    if not most.recognized and (other := recognized_otherwise(found)):
        text += f", but by {title(other.metric)} {_by_another(other)}"
        basis += f" {bound_in_words(other)} counts as recognizable as well ({other.source})."
    if not most.recognized and (exposed := most_exposed(found)):
        text += f"{', and' if other else ', but'} {_in_its_place(exposed, kind)}"
        basis += (
            f" Those that the defense put in their place count by {bound_in_words(exposed)}; what they show of the"
            " originals no figure says: look at the pictures."
        )
    return Verdict(text, basis, tone_of(found))


def _by_another(bound: Recognized) -> str:
    if bound.n == 1:
        return "it is"
    return f"{bound.recognizable} of {bound.n} {'is' if bound.recognizable == 1 else 'are'}"


def _in_its_place(exposed: Recognized, kind: str) -> str:
    if exposed.n == 1:
        return "the one that the defense put in its place is"
    verb = "is" if exposed.recognizable == 1 else "are"
    return f"{exposed.recognizable} of the {exposed.n} {kind}s that the defense put in their place {verb}"


def _without_truth(found: Sequence[Reading], kind: str) -> Verdict:
    """Reconstructions, and nobody who could say what they should be but, of some, the attacker itself."""
    made = sum(reading.leakage.images - reading.failures for reading in found)
    failed = sum(reading.failures for reading in found)
    beside = f" The attack failed on {failed} more." if failed else ""
    proven = sum(reading.leakage.certainties.get(Certainty.PROVEN, 0) for reading in found)
    sure = f", {f'{proven} of them' if made > 1 else 'and'} proven exact" if proven else ""
    return Verdict(
        f"{made} {kind}{' was' if made == 1 else 's were'} reconstructed{sure}: are these yours?",
        "The originals are not known here, so that no figure says how near they are: whoever has them can tell by the"
        f" pictures, or measure by truth=FOLDER.{beside}",
        "open",
    )


def bound_in_words(bound: Recognized) -> str:
    """For example ``PSNR ≥ 15.0 dB``."""
    sign = "≥" if bound.leaks == "above" else "<"
    return f"{title(bound.metric)} {sign} {metric(bound.value, bound.metric)}"


def _count(reading: Reading) -> str:
    (count, n), kind = _recognized(reading), kind_of([reading])
    if n == 1:
        return f"The attacked {kind} is {'' if count else 'not '}recognizable"
    if count:
        return f"{count} of {n} attacked {kind}s {'is' if count == 1 else 'are'} recognizable"
    return f"None of the {n} attacked {kind}s is recognizable"


def _share(reading: Reading) -> str:
    count, n = _recognized(reading)
    return f"{count or 'none'} of {n}"


def _to_whom(reading: Reading, found: Sequence[Reading]) -> str:
    rivals = [other for other in in_round(found, reading.round) if other.attacker != reading.attacker]
    if not rivals or not reading.recognized or any(other.recognized == reading.recognized for other in rivals):
        return ""
    return f" to an attacker that {'knows' if reading.attacker == 'adaptive' else 'does not know'} the defense"


def _recognized(reading: Reading) -> tuple[int, int]:
    bound = reading.recognized_by()
    return (bound.recognizable, bound.n) if bound else (0, 0)


def _basis(found: Sequence[Reading], worst: Mapping[int, Reading]) -> str:
    """By which bound, what the other attacker read, what failed, and what so few images leave open."""
    most = max(worst.values(), key=lambda reading: reading.recognized)
    bound, statistic = most.recognized_by(), most.statistic(most.main)
    assert bound is not None and statistic is not None
    sentences = [f"Recognizable means {bound_in_words(bound)} ({bound.source})."]
    others = [reading for reading in found if reading not in worst.values() and reading.recognized_by()]
    for attacker in dict.fromkeys(reading.attacker for reading in others):
        own = [reading for reading in reversed(others) if reading.attacker == attacker]
        told = ", ".join(
            _share(r) + (f" in round {r.round}" if len(worst) > 1 else "") for r in own[:: max(1, len(own) - 1)]
        )
        sentences.append(f"To the {attacker} attacker: {told}.")
    if failures := max(reading.failures for reading in found):
        sentences.append(f"The attack failed on {failures} more, which count as neither.")
    if unknown := max(reading.unjudged - reading.failures for reading in found):
        sentences.append(f"Of {unknown} more nobody here has the originals, so that they count as neither.")
    if not bound.recognizable:
        share = percent(share_at_most(0, bound.n, groups=statistic.groups))
        too_few = ", too few to call them private" if statistic.groups < FEW else ""
        sentences.append(
            f"From {bound.n} alone{too_few}, up to {share} of all {kind_of(found)}s could be (95 % confidence)."
        )
        if most.undefended:
            sentences.append(UNDEFENDED_UNREAD)
    return " ".join(sentences)
