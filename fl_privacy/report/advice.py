"""Recommend, in sentences, a cheap defense behind which nothing was reconstructed."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.errors import UserError
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.measure.roc import promises_little
from fl_privacy.report.words import below, metric, percent, points, seconds, size, title_within
from fl_privacy.runs.folder import defense_choice
from fl_privacy.runs.folder.defense_choice import ROUNDING, Candidate, comparable, unread_undefended
from fl_privacy.runs.folder.leakage import Extent
from fl_privacy.runs.folder.study import STRONGEST, MeasuredDefense, MeasuredTable, Threat, read_tables
from fl_privacy.types.modality import Modality, modality_judged_by

SHIPPED = Path(__file__).resolve().parent / "measured"  # measurements shipped with the package
LITTLE_TIME = 0.01  # seconds that are negligible in a client's training, and vary between measurements
_SEARCHED_TEXTS = {
    "defense": ("dp_noise", "local_dp", "quantization"),
    "data.target": ("class",),
    "defense.at": ("upload",),
    "federation.plan.steps": ("1", "null"),
    "federation.plan.epochs": ("1", "null"),
    "federation.plan.optimizer": ("sgd", "adamw"),
}
"""Setting -> values with which attack=auto searches for the likeliest text of an upload."""

_OTHER_KINDS = (
    "No defense is recommended for {0}s for now: attacks made for a single defense have reconstructed {0}s where"
    " attack=auto reconstructed none."
)
MEASURED_ON = {"image": "cifar10", "row": "adult"}  # kind -> shipped measurements whose costs an audit names

ONCE = (
    "Clients that train on the same examples for many rounds send them many times, which was not attacked here, and"
    " what a defense draws anew each time, such as noise, averages out."
)


@cache
def noise_to_try(kind: str) -> tuple[str, str]:
    """Return noise settings with which no ``kind``, such as ``image``, was reconstructed, and their accuracy cost."""
    name = MEASURED_ON.get(kind, "")
    measured = read_tables(SHIPPED / f"{name}.json")[0].defenses if name else ()
    noised = [each for each in measured if each.overrides[0] in ("defense=dp_noise", "defense=local_dp")]
    unread = [each for each in noised if not each.by_threat["adaptive"].read]
    if not unread:
        return "dp_noise defense.scale=0.1", ""
    best = max(unread, key=attrgetter("accuracy"))
    words = " ".join(best.overrides).removeprefix("defense=")
    cost = f"measured on {name}, {percent(best.accuracy)} instead of {percent(measured[0].accuracy)}"
    return words, f". It can cost accuracy: {cost}"


def advice_from(
    table: MeasuredTable,
    *,
    accuracy_loss: float,
    threat: Threat,
    psnr_below: float | None = None,
    batch_size: int | None = None,
) -> list[str]:
    """Return sentences that recommend the cheapest defense in ``table`` within the limits, or say why there is none.

    The cheapest takes least time, then fewest bytes, then leaks least. ``UserError`` if the threat was not measured, or
    ``table`` mixes modalities.

    Args:
        accuracy_loss: limit of the accuracy lost, in percentage points.
        threat: attackers that the defense has to withstand.
        psnr_below: limit in dB for each image, and for the upper end of the 95 % interval of the mean; ``None``: none.
        batch_size: examples behind a client's upload; by default the training batch size in ``table``.
    """
    undefended, *defended = table.defenses
    known = _measured_against(threat, undefended, defended)
    candidates = [d.by_threat[threat] for d in (undefended, *known)]
    if not comparable(candidates):
        raise UserError("A table of images, or one of texts, is expected, but got both; name settings of one of them.")
    if quiet := unread_undefended([replace(candidates[0], undefended=True)]):
        return [f"Measured on {_measured_on(table)}: {len(known)} defenses. {nothing_reconstructed(quiet)}"]
    affordable = [d for d in known if d.accuracy >= undefended.accuracy - accuracy_loss / 100 - ROUNDING]
    safe = [d for d in affordable if d.by_threat[threat].unread(psnr_below)]
    allowed = f"{accuracy_loss:g} points of accuracy"
    unknown = [*table.unknown, *(d.name for d in defended if d not in known)]
    lines = [
        f"Measured on {_measured_on(table)}: {len(known)} defenses. {len(affordable)} cost at most {allowed}, and"
        f" {len(safe)} of these meet{'s' * (len(safe) == 1)} the goal: {goal_in_words(candidates, psnr_below)}.",
        *([f"Not known, since not everything was measured: {', '.join(unknown)}."] if unknown else []),
        *_private_by_name_alone(table),
        f"Without a defense: {_figures(undefended, undefended, threat)}.",
    ]
    kind = modality_judged_by(candidates[0].judged_by)
    least = min(affordable, key=lambda d: _leak(d, threat), default=None)
    if why := _why_none(table, batch_size, kind):
        if least is None:
            return [*lines, why]
        return [*lines, why, f"{least.name} leaks least of the defenses tried: {read_of(least.by_threat[threat])}."]
    if fit := [d for d in safe if not _kept_back(d, threat, table)]:
        best = min(fit, key=lambda d: (_cost(d), _leak(d, threat)))
        lines.append(
            f"Take {best.name} ({' '.join(best.overrides)}), the cheapest, if each example is uploaded once, in uploads"
            f" of {_numbers(table.batch_sizes)}: {_figures(best, undefended, threat)}."
        )
        return [*lines, *_not_protected(best, table, threat)]
    if safe:
        return [*lines, *_withheld(safe, table, threat)]
    lines.append(f"None does both: no defense here costs at most {allowed} and prevents every reconstruction.")
    if least is not None:
        lines.append(f"{least.name} leaks least, which is not enough: {_figures(least, undefended, threat)}.")
    return [*lines, *_dearer([d for d in known if d.by_threat[threat].unread(psnr_below)], table, threat)]


def _measured_against(
    threat: Threat, undefended: MeasuredDefense, defended: Sequence[MeasuredDefense]
) -> list[MeasuredDefense]:
    known = [d for d in defended if threat in d.by_threat]
    if threat in undefended.by_threat and known:
        return known
    measured = " or ".join(dict.fromkeys(one for defense in defended for one in defense.by_threat))
    by = "`fl-privacy benchmark`" if threat == "malicious" else "threat_model=adaptive in a grid"
    raise UserError(f"threat is expected to be one that was measured, {measured}, but got {threat}; {by} measures it.")


def _private_by_name_alone(table: MeasuredTable) -> list[str]:
    said, elements = list[str](), table.defenses[0].upload_bytes / 4
    for one in table.defenses[1:]:
        given = dict(each.removeprefix("defense.").partition("=")[::2] for each in one.overrides)
        if given.get("defense") in ("percentile", "exclude_vars"):
            said.append(f"{one.name} is no differential privacy: it adds no noise.")
        elif given.get("defense") == "svt" and 1 <= elements < math.inf:
            from fl_privacy.defenses import svt  # noqa: PLC0415
            from fl_privacy.defenses.privacy import svt_epsilon  # noqa: PLC0415

            with suppress(ValueError, UserError):  # settings that are none
                settings: dict[str, Any] = {
                    key: float(given[key]) for key in ("fraction", "epsilon", "noise_var") if key in given
                }
                svt(**settings)
                spent = svt_epsilon(round(elements), **settings)
                little = ", which promises little" * promises_little(epsilon=spent, delta=0.0)
                said.append(f"{one.name} spends an epsilon of {spent:,.0f} in each upload{little}.")
    return said


def _dearer(unread: Sequence[MeasuredDefense], table: MeasuredTable, threat: Threat) -> list[str]:
    if not unread:
        return []
    fit = [d for d in unread if not _kept_back(d, threat, table)]
    if not fit:
        return _withheld(unread, table, threat)
    costly = max(fit, key=lambda d: d.accuracy)
    figures = _figures(costly, table.defenses[0], threat)
    said = f"At a higher price, {costly.name} let nothing be reconstructed from one upload: {figures}."
    return [said, *_not_protected(costly, table, threat)]


def _measured_on(table: MeasuredTable) -> str:
    return f"{' '.join(table.settings)} ({table.when or 'on an unknown day, by an unknown version'})"


def _why_none(table: MeasuredTable, batch_size: int | None, kind: Modality) -> str:
    """Return why no defense is recommended; empty if the strongest attacker was measured at ``batch_size``."""
    if "auto" not in table.attacks or STRONGEST not in table.attackers:
        return (
            f"Nothing is recommended: the attacks tried are {', '.join(table.attacks)}"
            f" ({' '.join(table.attackers) or 'of an older version'}), not attack=auto with {STRONGEST}, which joins"
            f" all uploads and knows the defense's likelihood and public {kind.one}s. Measure again by"
            f" `{table.command}`."
        )
    wanted = table.trained_batch_sizes if batch_size is None else (batch_size,)
    if not kind.continuous and max(wanted, default=1) > 1:
        return "Nothing is recommended for uploads of several texts: the strongest attack works on single ones alone."
    of_all = batch_size is None and "federation.plan.batch_size=null" in table.settings
    if not of_all and set(wanted) <= set(table.batch_sizes):
        return ""
    all_of, of_training = "all examples" * of_all, " with which clients trained" * (batch_size is None)
    asked = "" if batch_size is not None else f", or ask for one of these, as by batch_size={table.batch_sizes[0]}"
    return (
        f"Nothing is recommended for uploads of {all_of or _numbers(wanted)}{of_training}: the attacked uploads hold"
        f" {_numbers(table.batch_sizes)}, and others may leak more. Attack as many as your clients upload,"
        f" by `fl-privacy trade-off GRID batch_size={'N' if of_all else wanted[0]}`{asked}."
    )


def _numbers(sizes: Sequence[int]) -> str:
    return f"{' or '.join(map(str, sizes))} example{'' if list(sizes) == [1] else 's'}"


def _withheld(unread: Sequence[MeasuredDefense], table: MeasuredTable, threat: Threat) -> list[str]:
    cheapest = min(unread, key=lambda d: (_cost(d), _leak(d, threat)))
    nor = " The other defenses that let nothing be reconstructed are not recommended either." if len(unread) > 1 else ""
    return [f"{_kept_back(cheapest, threat, table)}{nor} Measure again by `{table.command}`."]


def _kept_back(defense: MeasuredDefense, threat: Threat, table: MeasuredTable) -> str:
    found = defense.by_threat[threat]
    if not modality_judged_by(found.judged_by).continuous:
        overrides = [each.partition("=")[::2] for each in (*table.settings, *table.attackers, *defense.overrides)]
        given = {"defense": "none", **dict(overrides)}
        if any(given.get(key, values[0]) not in values for key, values in _SEARCHED_TEXTS.items()):
            return f"{defense.name} is not recommended: its attack did not search for the likeliest text."
    return withheld(found)


def _cost(defense: MeasuredDefense) -> tuple[float, float]:
    took = max(defense.seconds, LITTLE_TIME) if math.isfinite(defense.seconds) else math.inf
    return float(f"{took:.0e}"), defense.upload_bytes if math.isfinite(defense.upload_bytes) else math.inf


def _leak(defense: MeasuredDefense, threat: Threat) -> Extent:
    return defense.by_threat[threat].extent


def _figures(defense: MeasuredDefense, undefended: MeasuredDefense, threat: Threat) -> str:
    loss = 100 * (undefended.accuracy - defense.accuracy)
    took = seconds(defense.seconds) if math.isfinite(defense.seconds) else "unknown time"
    sent = size(defense.upload_bytes) if math.isfinite(defense.upload_bytes) else "unknown bytes"
    return (
        f"accuracy {percent(defense.accuracy)} ({0.0 - loss:+.1f} points to no defense),"
        f" {leakage_in_words(defense.by_threat[threat])}; the defense takes {took} an upload of {sent}"
    )


_STRONGER: Mapping[Threat, Mapping[Threat, str]] = {
    "honest": {"adaptive": "an attacker that knows the defense", "malicious": "a malicious server"},
    "adaptive": {"malicious": "a malicious server"},
    "malicious": {},
}


def _not_protected(defense: MeasuredDefense, table: MeasuredTable, threat: Threat) -> list[str]:
    found, lines = defense.by_threat[threat], [ONCE]
    chance = 1.0 if defense.delta is None else defense.delta
    little = defense.epsilon is not None and promises_little(epsilon=defense.epsilon, delta=chance)
    delta = "an unknown delta" if defense.delta is None else f"delta {defense.delta:.3g}"
    if doubted := doubts(found):
        lines.append(doubted)
    if threat == "honest" and "adaptive" not in defense.by_threat:
        lines.append("It was not measured against an attacker that knows the defense.")
    for other, who in _STRONGER[threat].items():
        if (more := defense.by_threat.get(other)) is not None:
            lines.append(f"The recommendation does not cover {who}: there, {read_of(more)}.")
    if defense.epsilon is None:
        lines.append("It gives no guarantee of differential privacy.")
    else:
        end = f"at {delta} in the end{', which promises little' * little}"
        lines.append(f"Its guarantee is an epsilon of {defense.epsilon:.3g} {end}.")
    lines.append(
        "It acts at each client, and so protects from the server and from other sites. Noise that a server adds to the"
        " mean protects from other sites alone; secure aggregation does not hide two sites from each other."
    )
    weights = {"initial": " a trained model,", "final": " an untrained model,"}.get(table.weights, "")
    server = "other malicious servers" if "malicious" in defense.by_threat else "malicious servers"
    inference = "other inference" if found.inferred else "membership and other inference"
    lines.append(f"Attacks tried: {', '.join(table.attacks)} by {' '.join(table.attackers)}.")
    if (present := metadata.version("fl-privacy")) not in table.when.split():
        lines.append(f"This was measured by another version than this one, {present}; attacks may be stronger now.")
    lines.append(
        f"Not tested: attacks other than {', '.join(table.attacks)} and longer ones,"
        f"{weights} other data, batches and models, {server}, colluding clients, {inference}."
    )
    return lines


def goal_in_words(candidates: Sequence[Candidate], psnr_below: float | None) -> str:
    """Describe the goal, such as ``no attacked image reconstructed and every one below 15.0 dB``."""
    kind = kind_in_words(candidates[0]) if candidates else "image"
    below = "" if psnr_below is None else f" and every one below {metric(psnr_below, IMAGE_METRIC)}"
    return f"no attacked {kind} reconstructed{below}"


def kind_in_words(candidate: Candidate) -> str:
    """Return the word for an attacked example, such as ``image``."""
    return modality_judged_by(candidate.judged_by).one


def nothing_reconstructed(candidate: Candidate) -> str:
    """Explain that no defense is recommended, since nothing was reconstructed from undefended updates."""
    return (
        f"No defense can be recommended: without one, no {kind_in_words(candidate)} was reconstructed either"
        f" ({candidate.name}, {read_of(candidate)}). The attack may be too weak (try more iterations or attack=auto),"
        " or this training leaks little by itself."
    )


def read_of(candidate: Candidate) -> str:
    """Describe how many examples were reconstructed; if none, also the 95 % upper bound of the share that may leak."""
    kind = kind_in_words(candidate)
    if candidate.read:
        return f"{candidate.read} of {candidate.images} {kind}s reconstructed"
    at_most = f"up to {100 * candidate.at_most:.0f} % of such {kind}s may leak"
    none = f"none of {candidate.images} {kind}s" if candidate.images != 1 else f"the one {kind} not"
    return f"{none} reconstructed, though {at_most}"


def withheld(candidate: Candidate) -> str:
    """Explain why ``candidate`` is not recommended despite no reconstructions; empty if it is recommended."""
    why = ""
    if candidate.over_control is None:
        why = "it was not compared with the best guess without the update, so the attack may have failed"
    elif candidate.over_control <= 0:
        short = metric(-candidate.over_control, candidate.judged_by)
        ends = f"{short} below" if candidate.over_control else "no better than"
        why = f"its attack is {ends} the best guess without the update"
        why += ", a sign that the attack failed"
    return f"{candidate.name} is not recommended: {why}." if why else ""


def doubts(candidate: Candidate) -> str:
    """Return a warning if too few uploads were attacked, else an empty text."""
    if not candidate.rests_on_few:
        return ""
    number = f"{candidate.groups} separate upload{'' if candidate.groups == 1 else 's'}"
    were = "was" if candidate.groups == 1 else "were"
    return f"Only {number} {were} attacked: attack more (victims=20) before you rely on this."


def answer(candidates: Sequence[Candidate], psnr_below: float | None = None) -> str:
    """Recommend the most accurate defense that meets the goal: nothing is reconstructed, and PSNR is below the limit.

    ``psnr_below``: limit in dB, if any. The answer is empty if there are no candidates.
    """
    if not candidates:
        return ""
    if not defense_choice.comparable(candidates):
        return "The uploads hold different kinds of examples: no figure compares them."
    if quiet := defense_choice.unread_undefended(candidates):
        return nothing_reconstructed(quiet)
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
        comes = f"{least.name} comes closest ({leakage_in_words(least)})"
        defenses = sum(not c.undefended for c in candidates)
        said = f"None of {defenses or len(candidates)} meets the goal ({goal}); {comes}."
        quiet_ones = [c for c in candidates if c.images and not (c.undefended or c.read or c.unknown or c.exposed)]
        open_ones = [c.name for c in quiet_ones if None in c.inferred.values()]
        kind, unknown = kind_in_words(candidates[0]), ", ".join(open_ones)
        return f"{said} With {unknown}, no {kind} was reconstructed; the rest is unknown." if open_ones else said
    number = sum(c.unread(psnr_below) for c in candidates)
    kept = f", {points(best.pmm)} of the undefended" if best.pmm is not None else ""
    price = f"accuracy {percent(best.accuracy)}{kept}; {leakage_in_words(best)}"
    said = f"{number} of {len(candidates)} meet the goal ({goal}); the most accurate is {best.name} ({price})."
    said = f"Only 1 of {len(candidates)} meets the goal ({goal}): {best.name}, {price}." if number == 1 else said
    open_kind = "" if modality_judged_by(best.judged_by).pixels else _OTHER_KINDS.format(kind_in_words(best))
    return " ".join(filter(None, [said, open_kind or withheld(best), doubts(best)]))


def leakage_in_words(candidate: Candidate) -> str:
    """Describe all figures of the leakage of ``candidate``."""
    name, kind = candidate.judged_by, kind_in_words(candidate)
    single = "" if math.isfinite(candidate.upper) else f" of one {kind}"
    by = f" in the worst case ({candidate.by})" if candidate.by else ""
    exposed = f", and {candidate.exposed} as the defense's substitutes" if candidate.exposed else ""
    unknown = candidate.unjudged - candidate.failures
    failed = f", while an attack failed on {candidate.failures}" if candidate.failures else ""
    failed += f", while {unknown} have no known original" if unknown > 0 else ""
    mean, best = metric(candidate.psnr, name), metric(candidate.largest, name)
    about = f"{mean}{single}{below(candidate.upper, candidate.psnr, name)}"
    inferred, words = "", {About.MEMBERSHIP: "TPR at 1 % FPR", About.ATTRIBUTE: "attribute"}
    for asked, measure in sorted(candidate.inferred.items()):
        shown = "not known" if measure is None else f"{percent(measure.value)}, at most {percent(measure.high)}"
        chance = "" if measure is None else f", guessing {percent(measure.chance)}"
        inferred += f"; {words[About(asked)]} {shown}{chance}"
    return (
        f"{read_of(candidate)}{by}{exposed}, mean {title_within(name)} {about}, {best} for the best"
        f" reconstruction{failed}{inferred}"
    )
