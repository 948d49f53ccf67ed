"""Order leakage results by how much they leak (:class:`Extent`), and describe the attacks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fl_privacy.checks import fits
from fl_privacy.measure import FEW, METRICS, Statistic
from fl_privacy.measure.registry import IMAGE_METRIC, TABLE_METRIC, TEXT_METRIC
from fl_privacy.runs.config.parse import called
from fl_privacy.runs.folder.records import records_of
from fl_privacy.runs.folder.summary import LeakageResult, Recognized
from fl_privacy.types.modality import IMAGES, MODALITIES, Modality
from fl_privacy.types.victim_ids import Attacker, VictimId

if TYPE_CHECKING:
    from fl_privacy.runs.folder.identity import Identity
    from fl_privacy.runs.folder.read import Run

COMPARED: Mapping[str, tuple[str, ...]] = {
    IMAGE_METRIC: ("psnr", "ssim", "lpips"),
    TEXT_METRIC: ("token_f1", "token_recall", "rouge_l"),
    TABLE_METRIC: ("cells_right", "categories_right", "numbers_right", "row_right"),
}
"""Main metric of a modality -> metrics shown side by side, the main one first."""

TRANSFORMED_METRIC = "transformed_psnr"  # nearness of guesses to a defense's substitutes for the originals


@dataclass(frozen=True, kw_only=True, order=True)
class Extent:
    """How much leaked. Extents compare by the share reconstructed; if it is equal, by the next field, and so on."""

    read: float = 0.0  # share of the attacked examples that were reconstructed; unscored ones count on request
    exact: float = 0.0
    inferred: int = 0  # number of other questions, such as who took part, that were answered better than by chance
    exposed: float = 0.0  # share recognizable as a defense's substitute for the original
    upper: float = -math.inf  # upper end of the 95 % interval of the main metric's mean; infinite if there is none
    mean: float = -math.inf


WORST = Extent(read=1.0, exact=1.0, upper=math.inf, mean=math.inf)  # of what was not attacked or not finished


def extent_of(found: Sequence[LeakageResult], *, inferred: int = 0, unknown_is_read: bool = True) -> Extent:
    """Return an :class:`Extent` (how much leaks) with the worst value of each field over ``found``.

    ``inferred``: number of facts, such as membership, that attacks inferred better than by chance. ``unknown_is_read``:
    ``True`` counts examples without a score as reconstructed, and returns :data:`WORST` if ``found`` is empty.
    """
    if not found:
        return WORST if unknown_is_read else Extent(inferred=inferred)
    statistics = [s for reading in found if (s := reading.statistic(reading.main)) is not None]
    exposed = most_exposed(found)
    return Extent(
        read=max(_share(r.counts.read + r.counts.unjudged * unknown_is_read, r, unknown_is_read) for r in found),
        exact=max(_share(r.counts.exact, r, unknown_is_read) for r in found),
        inferred=inferred,
        exposed=exposed.recognizable / exposed.n if exposed else 0.0,
        upper=max((s.ci95[1] if s.ci95 else math.inf for s in statistics), default=math.inf),
        mean=max((s.mean for s in statistics), default=math.inf),
    )


def _share(count: int, reading: LeakageResult, of_all: bool) -> float:
    number = reading.counts.images if of_all else reading.counts.judged
    return count / number if number else float(of_all)


def leaks_most(found: Sequence[LeakageResult]) -> LeakageResult | None:
    """Return the result that leaks most among those with a scored example; ``None`` if there are none."""
    known = [(extent_of([reading], unknown_is_read=False), reading) for reading in found if reading.counts.judged]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def worst_by(metric: str, found: Sequence[LeakageResult]) -> LeakageResult | None:
    """Return the first result whose mean of ``metric`` leaks most; ``None`` if no result has that metric."""
    measured = [(reading, s.mean) for reading in found if (s := reading.statistic(metric)) is not None]
    sign = 1 if metric not in METRICS or METRICS[metric].leaks == "high" else -1
    return max(measured, key=lambda pair: sign * pair[1])[0] if measured else None


def most_exposed(found: Sequence[LeakageResult]) -> Recognized | None:
    """Return the largest count of recognized substitutes (images that a defense trains on instead), if any."""
    bounds = [bound for reading in found if (bound := reading.counted_by(TRANSFORMED_METRIC))]
    most = max(bounds, key=lambda bound: bound.recognizable / bound.n, default=None)
    return most if most and most.recognizable else None


def modality_attacked(found: Sequence[LeakageResult], loader: str = "") -> Modality:
    """Return the kind of data attacked, by the results or else by the name ``loader`` of the data-loading function."""
    known = {reading.main for reading in found} or {loader.rpartition(".")[-1]}
    return next((one for one in MODALITIES if known & {one.metric, one.loader}), IMAGES)


def main_of(found: Sequence[LeakageResult]) -> str:
    """Return the main metric that all results share; empty if they differ. Without results, it is that of images."""
    known = {reading.main for reading in found if reading.metrics}
    return known.pop() if len(known) == 1 else "" if known else IMAGE_METRIC


def in_round(found: Sequence[LeakageResult], round: int) -> list[LeakageResult]:
    """Return the results of one round."""
    return [reading for reading in found if reading.round == round]


def few(statistic: Statistic, kind: str = "upload") -> str:
    """Return a warning such as ``only 2 uploads`` if ``statistic`` has too few of ``kind`` for an interval, else ""."""
    number, n = statistic.groups, statistic.n
    if number >= FEW:
        return ""
    return f"only {number} {kind if number == n else 'upload'}{'' if number == 1 else 's'}"


REHEARSED = (
    "No client answers probes: the uploads that were attacked were computed by the server itself, of the first images"
    " of data, one image in one step, undefended, with the models that clients were sent. What clients' own training"
    " and defense make of a single image is measured with probe_mod in the client app."
)
"""Threat model's sentence if the attacked uploads are the server's own, since clients answer no probes."""

NOT_TESTED = "Not tested:"  # prefix of threat model sentences on attackers that were not tested
SMOOTH, PUBLIC = "total variation", "public"  # priors: smooth images; examples that nobody attacks
FEWEST_IMAGES = 50  # fewest public images from which attacks learn a normal distribution
_BUDGETS = ("iterations", "restarts", "budget", "seconds")


class AttackedUploads(StrEnum):
    """Kind of the uploads that were attacked."""

    PROBES = "probes"  # extra uploads of chosen examples, made as the client makes its own
    TRAINING = "training"  # updates that trained the model
    SERVER = "server"  # uploads that the server computed itself, undefended, of images that it chose


@dataclass(frozen=True, kw_only=True)
class AttackFacts:
    """Facts about a run's attack: attacker, budget, knowledge and uploads."""

    attack: str = ""  # name; empty if none or not known
    budget: str = ""  # settings that bound the work, such as ``60 iterations``; empty for the attack's defaults
    server: str = ""  # name of a malicious server's attack; empty for an honest server
    sites: int = 0  # number of attacking sites; 0 if the server attacks
    summed: int = 1  # number of other sites whose mean the attacking ones see; 0 if it varies
    knowledge: tuple[str, ...] = ()  # attacker's knowledge by the threat model, a sentence each
    priors: tuple[str, ...] | None = ()  # names of the image priors that it uses; ``None`` if not recorded
    source: AttackedUploads = AttackedUploads.PROBES
    # fewest and most examples behind an attacked upload; ``None`` if nothing was attacked
    examples: tuple[int, int] | None = None
    uploads: int = 1  # most intercepted uploads of one example
    trained: bool = False
    undefended: bool = False
    defenses: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()  # threat model's list of untested attackers, a sentence each


def facts_of(run: Run) -> AttackFacts:
    """Describe the attacks tried on ``run``."""
    return described_facts(run.identity, run.records, threats=run.threat_model, defenses=run.defenses)


def described_facts(
    identity: Identity,
    records: Sequence[Mapping[str, Any]],
    *,
    threats: Sequence[str] = (),
    defenses: Sequence[str] = (),
) -> AttackFacts:
    """Return facts on a run's attacks from settings (``identity``), records, and sentences on threat and defense."""
    images = [record for attacker in Attacker for record in records_of(records, "image", attacker)]
    sizes = Counter({str(image["id"]): 0 for image in images})
    for image in images:
        sizes[str(image["id"])] = max(sizes[str(image["id"])], int(image["image"]) + 1)
    sources = Counter(VictimId.parse(id).source for id in sizes)
    attack, section = chosen_option(identity, "attack")
    server, _ = chosen_option(identity, "server")
    threat, federation = (identity.config.get(name) or {} for name in ("threat_model", "federation"))
    sites = int(threat["colluding_sites"]) if threat.get("observer") == "another_site" else 0
    source, summed = _source(records, sizes, threats), 1
    if sites and (source is AttackedUploads.PROBES or federation.get("aggregation") == "mean"):
        others = max(1, int(federation.get("clients") or 0) - sites)
        some = source is AttackedUploads.TRAINING and others > 1 and federation.get("fraction", 1) != 1
        summed = 1 if threat.get("differences") else 0 if some else others
    return AttackFacts(
        attack="" if attack == "none" else attack,
        budget=", ".join(_budget(section)),
        server="" if server == "honest" else server,
        sites=sites,
        summed=summed,
        knowledge=tuple(line for line in threats if line.startswith("The attacker")),
        priors=_priors(attack, section, threat, records),
        source=source,
        examples=(min(sizes.values()), max(sizes.values())) if sizes else None,
        uploads=max(sources.values(), default=1),
        trained=any(record["kind"] == "round" for record in records),
        undefended=identity.undefended,
        defenses=tuple(defenses),
        untried=tuple(line.removeprefix(NOT_TESTED).strip() for line in threats if line.startswith(NOT_TESTED)),
    )


def _priors(
    attack: str, section: Mapping[str, Any], threat: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> tuple[str, ...] | None:
    unrecorded = attack not in ("", "none", "auto") and not section.keys() - {"name"}
    if unrecorded or not str(section.get("_target_", "fl_privacy.")).startswith("fl_privacy."):
        return None
    weight, own, number = section.get("total_variation"), section.get("prior"), threat.get("public_images", 0)
    if weight is None and "total_variation" in section:  # the preset's own; L-BFGS in ATS's paper has none
        weight = (section.get("variant"), section.get("optimizer")) != ("paper", "lbfgs")
    said = " ".join(sentence for record in records for sentence in record.get("countermeasures", ()))
    looks = own or attack in ("auto", "bag_of_words") or section.get("start") in ("public_mean", "class_mean")
    normal = attack in ("maximum_a_posteriori", "blind_deconvolution")
    public = own != "photographs" and (looks or normal) and fits(number, int | None) and number != 0
    public &= not normal or number is None or number >= FEWEST_IMAGES
    used = {
        "a generator": "generator" in section,
        "an untrained network": section.get("space") == "network",
        SMOOTH: weight or attack in ("auto", "exact") or section.get("base") == "inverting_gradients" or SMOOTH in said,
        "image norm": section.get("image_norm"),
        "images unlike noise": section.get("away_from_noise"),
        PUBLIC: public,
        "spectrum of photographs": (isinstance(own, str) and not public) or "as photographs' do" in said,
    }
    return tuple(name for name, is_used in used.items() if is_used)


def _source(records: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], threats: Sequence[str]) -> AttackedUploads:
    stated = {str(record.get("uploads")) for record in records if record["kind"] == "attack"}
    recorded = [source for source in AttackedUploads if source in stated]
    if len(recorded) == 1:
        return recorded[0]
    if REHEARSED in threats:
        return AttackedUploads.SERVER
    probed = sum(VictimId.parse(id).probe is not None for id in sizes)
    return AttackedUploads.TRAINING if sizes and not probed else AttackedUploads.PROBES


def chosen_option(identity: Identity, group: str) -> tuple[str, Mapping[str, Any]]:
    """Return name and settings of the option that a run chose in ``group``; user code has its function's name."""
    choices, section = identity.config.get("choices"), identity.config.get(group)
    settings = section if isinstance(section, Mapping) else {}
    option = called(str(choices.get(group) or ""), section) if isinstance(choices, Mapping) else ""
    return option or str(settings.get("name", "") if isinstance(section, Mapping) else section or ""), settings


def _budget(section: Mapping[str, Any]) -> list[str]:
    words = []
    for name in _BUDGETS:
        value = section.get(name)
        if isinstance(value, str):
            words.append(f"{name} {value}")
        elif fits(value, float) and (name, value) != ("restarts", 1):
            words.append(f"{value:,} {name.removesuffix('s') if value == 1 else name}")
    return words
