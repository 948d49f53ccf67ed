"""Recommend a defense in sentences."""

import math
from collections.abc import Sequence

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.report.words import below, metric, percent, points, title_within
from fl_privacy.runs.folder import defense_choice
from fl_privacy.runs.folder.defense_choice import Candidate
from fl_privacy.types.modality import modality_judged_by


def goal_in_words(candidates: Sequence[Candidate], psnr_below: float | None) -> str:
    """Describe the goal: ``no attacked image reconstructed``, and further requirements."""
    kind = kind_in_words(candidates[0]) if candidates else "image"
    below = "" if psnr_below is None else f" and every one below {metric(psnr_below, IMAGE_METRIC)}"
    return f"no attacked {kind} reconstructed{below}"


def kind_in_words(candidate: Candidate) -> str:
    """Name the attacked modality."""
    return modality_judged_by(candidate.judged_by).one


def nothing_told(candidate: Candidate) -> str:
    """Explain that nothing was reconstructed undefended."""
    return (
        f"No defense can be recommended: without one, no {kind_in_words(candidate)} was reconstructed either"
        f" ({candidate.name}, {read_of(candidate)}). The attack may be too weak (try more iterations or attack=auto),"
        " or this training leaks little by itself."
    )


def read_of(candidate: Candidate) -> str:
    """Count reconstructed examples; without any, add the upper bound of their share."""
    kind = kind_in_words(candidate)
    if candidate.read:
        return f"{candidate.read} of {candidate.images} {kind}s reconstructed"
    at_most = f"up to {100 * candidate.at_most:.0f} % of such {kind}s may leak"
    return f"none of {candidate.images} {kind}s reconstructed, though {at_most}"


def withheld(candidate: Candidate) -> str:
    """Explain why ``candidate`` is not recommended despite no reconstructions; empty if it is."""
    kind = kind_in_words(candidate)
    if not modality_judged_by(candidate.judged_by).pixels:
        return (
            f"No defense is recommended for {kind}s for now: attacks made for a single defense have reconstructed"
            f" {kind}s behind defenses behind which attack=auto reconstructed none."
        )
    why = ""
    if candidate.over_control is None:
        unknown = "what the best guess without the update reaches was not measured with it"
        why = f"{unknown}, so that the attack may have failed"
    elif candidate.over_control <= 0:
        short = metric(-candidate.over_control, candidate.judged_by)
        ends = f"{short} below" if candidate.over_control else "no better than"
        why = f"the attack behind it is {ends} the best guess without the update"
        why += ", which is the sign of an attack that failed"
    return f"{candidate.name} is not recommended: {why}." if why else ""


def doubts(candidate: Candidate) -> str:
    """Warn if too few uploads were attacked to rely on; else empty."""
    if not candidate.rests_on_few:
        return ""
    number = f"{candidate.groups} separate upload{'' if candidate.groups == 1 else 's'}"
    return f"This rests on {number} alone: attack more (victims=20) before you rely on it."


def answer(candidates: Sequence[Candidate], psnr_below: float | None = None) -> str:
    """Recommend a defense in a few sentences; empty if nothing was both trained and attacked."""
    if not candidates:
        return ""
    if not defense_choice.comparable(candidates):
        return "Some uploads leaked images and others texts, which no figure compares."
    if quiet := defense_choice.unread_undefended(candidates):
        return nothing_told(quiet)
    best = defense_choice.best_unread(candidates, psnr_below)
    asked = {about for candidate in candidates for about in candidate.inferred}
    members, points_above = percent(defense_choice.MEMBERSHIP_AT_MOST), 100 * defense_choice.ATTRIBUTE_AT_MOST
    limits = {
        About.MEMBERSHIP: f", with at most {members} of the members found at 1 % FPR",
        About.ATTRIBUTE: f", and an attribute inferred at most {points_above:.0f} points above guessing",
    }
    goal = goal_in_words(candidates, psnr_below) + "".join(words for about, words in limits.items() if about in asked)
    if best is None:
        least = min(candidates, key=lambda c: c.extent)
        said = f"None of {len(candidates)} has {goal}; {least.name} comes closest ({leakage_in_words(least)})."
        quiet_ones = [c for c in candidates if c.images and not (c.undefended or c.read or c.unknown or c.exposed)]
        open_ones = [c.name for c in quiet_ones if None in c.inferred.values()]
        kind, unknown = kind_in_words(candidates[0]), ", ".join(open_ones)
        return f"{said} Behind {unknown} no {kind} was reconstructed; the rest is unknown." if open_ones else said
    number = sum(c.unread(psnr_below) for c in candidates)
    kept = f", {points(best.pmm)} of the undefended" if best.pmm is not None else ""
    price = f"{best.name} (accuracy {percent(best.accuracy)}{kept}; {leakage_in_words(best)})"
    said = f"{number} of {len(candidates)} have {goal}; the most accurate is {price}."
    said = f"Of {len(candidates)}, only {price} has {goal}." if number == 1 else said
    return " ".join(filter(None, [said, withheld(best), doubts(best)]))


def leakage_in_words(candidate: Candidate) -> str:
    """Describe all figures of the leakage of ``candidate``."""
    name, kind = candidate.judged_by, kind_in_words(candidate)
    single = "" if math.isfinite(candidate.upper) else f" of one {kind}"
    by = f" [{candidate.by}]" if candidate.by else ""
    exposed = f", and {candidate.exposed} as what the defense put in their place" if candidate.exposed else ""
    unknown = candidate.unjudged - candidate.failures
    failed = f", while an attack failed on {candidate.failures}" if candidate.failures else ""
    failed += f", while {unknown} have no known original" if unknown > 0 else ""
    mean, best = metric(candidate.psnr, name), metric(candidate.largest, name)
    about = f"{mean}{single}{below(candidate.upper, candidate.psnr, name)}"
    return (
        f"{read_of(candidate)}{by}{exposed}, mean {title_within(name)} {about}, {best} for the best"
        f" reconstruction{failed}{told_beside(candidate)}"
    )


def told_beside(candidate: Candidate) -> str:
    """Describe inference results other than examples; empty without any."""
    words = {About.MEMBERSHIP: "TPR at 1 % FPR", About.ATTRIBUTE: "attribute"}
    told = []
    for about, measure in sorted(candidate.inferred.items()):
        shown = "not known" if measure is None else f"{percent(measure.value)}, at most {percent(measure.high)}"
        chance = "" if measure is None else f", guessing {percent(measure.chance)}"
        told.append(f"; {words[About(about)]} {shown}{chance}")
    return "".join(told)
