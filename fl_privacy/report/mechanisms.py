"""Group runs into mechanisms at several strengths."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_privacy.files import write_whole
from fl_privacy.files.foreign import expect_file_name
from fl_privacy.report.page import render, writable
from fl_privacy.report.ppc import Sample, sample_of, with_worst
from fl_privacy.report.settings import GROUPS, UNSAID, chosen, flat_settings, telling_settings
from fl_privacy.report.words import MISSING, percent, ratio
from fl_privacy.runs.config.keys import is_within, keys_of
from fl_privacy.runs.config.settings import Role
from fl_privacy.runs.folder import Attacker, Run
from fl_privacy.runs.folder.claims import ClaimRecord
from fl_privacy.runs.folder.study import Versus

NO_CIRCUMSTANCES = ("seed", "threat_model.knows_defense", *keys_of(Role.DEFENSE))
"""Dotted keys that do not distinguish attacks, since both attackers have their own samples."""


def samples_of_runs(runs: Sequence[Run]) -> list[Sample]:
    """Return a sample for each attacker of each defended run that trained and was attacked.

    A mechanism's strength is the defense setting with most values, or the declared one of several; other differing
    settings make other mechanisms, and settings outside the defense, except the seed, other attacks.
    """
    defended = [run for run in runs if not run.identity.undefended]
    found = []
    for run in defended:
        mechanism, strength = _in_words(run, defended)
        for attacker in Attacker:
            sample = sample_of(
                [reading for reading in run.summary.attacked if reading.attacker == attacker],
                mechanism=mechanism,
                strength=strength,
                versus=Versus(_attack(run, defended), attacker),
                accuracy=run.summary.final_accuracy,
                update_distortion=run.summary.update_distortion,
                training=run.path.as_posix(),
            )
            found += [sample] if sample else []
    return with_worst(found)


def _in_words(run: Run, runs: Sequence[Run]) -> tuple[str, str]:
    defense, own, declared = chosen(run, "defense"), _settings(run), [*run.strengths]
    alike = [_settings(other) for other in runs if chosen(other, "defense") == defense]
    values = {key: {settings.get(key) for settings in alike} for key in own}
    varying = sorted(
        (key for key, taken in values.items() if len(taken) > 1),
        key=lambda key: (-len(values[key]), declared.index(key) if key in declared else len(declared)),
    )
    rest = ", ".join(f"{key} {own[key]}" for key in varying[1:])
    return f"{defense} ({rest})" if rest else defense, f"{varying[0]} {own[varying[0]]}" if varying else ""


def _settings(run: Run) -> dict[str, str]:
    section = run.identity.config.get("defense")
    found = flat_settings(section) if isinstance(section, Mapping) else ()
    return {key: str(value) for key, value in found if key not in UNSAID}


def _attack(run: Run, runs: Sequence[Run]) -> str:
    groups = [group for group in GROUPS if group != "defense"]
    options = {group: {chosen(other, group) for other in runs} for group in groups}
    words = [chosen(run, "attack")]
    words += [chosen(run, group) for group in groups if group != "attack" and len(options[group]) > 1]
    alike = [other for other in runs if all(chosen(other, group) == chosen(run, group) for group in groups)]
    settings, others = _circumstances(run), [_circumstances(other) for other in alike]
    for key in dict.fromkeys(key for found in others for key in found):
        if len({found.get(key) for found in others}) > 1:
            words.append(f"{'batch' if key == 'batch_size' else key} {settings.get(key)}")
    return " · ".join(words)


def _circumstances(run: Run) -> dict[str, str]:
    return {k: v for k, v in telling_settings(run).items() if not is_within(k, NO_CIRCUMSTANCES)}


def claim_views(records: Sequence[ClaimRecord]) -> list[tuple[ClaimRecord, list[tuple[str, str]]]]:
    """Return each claim with the rows of its figures."""
    return [(record, _rows(record)) for record in records]


def _rows(record: ClaimRecord) -> list[tuple[str, str]]:
    sure = f", with {percent(record.confidence)} confidence" if record.confidence is not None else ""
    over = "" if record.rounds in (None, 1) else f" over {record.rounds} rounds"
    most = record.estimate is not None or (record.noticed or 0.0) <= (record.claimed or 0.0)
    recomputed = MISSING
    if record.rdp is not None and record.pld is not None:
        recomputed = f"{ratio(record.rdp)} (Renyi), {ratio(record.pld)} (privacy loss distribution)"
    power = "Such a test can show at most" if most else "A false claim would have been noticed from"
    rows = [
        ("Promised", MISSING if record.claimed is None else f"epsilon {ratio(record.claimed)}{over}"),
        ("Recomputed from what is stated", recomputed),
        ("Shown by tests", MISSING if record.lower is None else f"at least {ratio(record.lower)}{sure}"),
        (power, ratio(record.noticed)),
    ]
    if record.estimate is not None:
        least = f" ({ratio(record.estimate_least)} or more if the scores are Gaussian, as they look)"
        limits = "" if record.estimate_least is None else least
        rows.append(("Estimated of one training, no bound", f"about {ratio(record.estimate)}{limits}"))
    return rows


def render_claims(records: Sequence[ClaimRecord], *, title: str) -> str:
    """Render the page on ``records``."""
    return render("claims.html.j2", claims=claim_views(records), title=title, first=records[0])


def write_claims_page(records: Sequence[ClaimRecord], page: Path, *, title: str) -> Path:
    """Write the page on ``records``; ``UserError`` if it is not writable."""
    expect_file_name(page)
    with writable(page):
        write_whole(page, render_claims(records, title=title))
    return page
