"""Who attacked what in a run, as far as a verdict has to say it: attacker, knowledge, budget, and kind of uploads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fl_privacy.config.groups import called
from fl_privacy.results.records import records_of
from fl_privacy.victim_ids import Attacker, VictimId

if TYPE_CHECKING:
    from fl_privacy.results.identity import Identity
    from fl_privacy.results.read import Run

REHEARSED = (
    "No client answers probes: the uploads that were attacked were computed by the server itself, of the first images"
    " of data, one image in one step, undefended, with the models that clients were sent. What clients' own training"
    " and defense make of a single image is measured with probe_mod in the client app."
)
"""In the threat model of an audit that had nothing of the clients that was worth attacking."""

NOT_TESTED = "Not tested:"
"""How sentences of a threat model begin that name attackers which were left out."""

_BUDGETS = {"iterations": "iterations", "restarts": "restarts", "budget": "budget", "seconds": "seconds"}
_PRIORS = ("generator", "prior", "image_prior", "denoiser")


class AttackedUploads(StrEnum):
    """What the attacked uploads are.

    Attributes:
        PROBES: extra uploads of chosen examples, each made as the client makes its own.
        TRAINING: the updates that trained the model.
        SERVER: uploads that the server computed itself, undefended, of images that it chose: no client made them.
    """

    PROBES = "probes"
    TRAINING = "training"
    SERVER = "server"


@dataclass(frozen=True, kw_only=True)
class AttackFacts:
    """What was tried.

    Attributes:
        attack: its name; empty where nothing was attacked or the name is not known.
        budget: settings that bound the work, such as ``60 iterations``; empty for the attack's own.
        server: name of a server attack that does not follow the protocol; empty for an honest one.
        knowledge: what the threat model says that the attacker knows, a sentence each.
        prior: what stood in for knowledge of how images look, by name; empty where nothing did.
        source: what the attacked uploads are.
        examples: fewest and most examples behind an attacked upload; ``None`` where nothing was attacked.
        uploads: most uploads of one example that were intercepted.
        trained: whether the model was trained in this run.
        undefended: whether clients did not defend themselves.
        defenses: names of the parts of the defense.
        untried: what the threat model says was not tested, a sentence each.
    """

    attack: str = ""
    budget: str = ""
    server: str = ""
    knowledge: tuple[str, ...] = ()
    prior: str = ""
    source: AttackedUploads = AttackedUploads.PROBES
    examples: tuple[int, int] | None = None
    uploads: int = 1
    trained: bool = False
    undefended: bool = False
    defenses: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()


def facts_of(run: Run) -> AttackFacts:
    """What the attackers of ``run`` tried."""
    return described_facts(run.identity, run.records, threats=run.threat_model, defenses=run.defenses)


def described_facts(
    identity: Identity,
    records: Sequence[Mapping[str, Any]],
    *,
    threats: Sequence[str] = (),
    defenses: Sequence[str] = (),
) -> AttackFacts:
    """The same from the parts that a run's folder holds.

    Args:
        identity: of the run.
        records: of ``metrics.jsonl``.
        threats: the threat model, in sentences.
        defenses: names of the parts of the defense.
    """
    images = [record for attacker in Attacker for record in records_of(records, "image", attacker)]
    sizes = Counter({str(image["id"]): 0 for image in images})
    for image in images:
        sizes[str(image["id"])] = max(sizes[str(image["id"])], int(image["image"]) + 1)
    sources = Counter(VictimId.parse(id).source for id in sizes)
    attack, section = _chosen(identity, "attack")
    server, _ = _chosen(identity, "server")
    return AttackFacts(
        attack="" if attack == "none" else attack,
        budget=", ".join(_budget(section)),
        server="" if server == "honest" else server,
        knowledge=tuple(line for line in threats if line.startswith("The attacker")),
        prior=next((str(section[name]) for name in _PRIORS if section.get(name)), ""),
        source=_source(records, sizes, threats),
        examples=(min(sizes.values()), max(sizes.values())) if sizes else None,
        uploads=max(sources.values(), default=1),
        trained=any(record["kind"] == "round" for record in records),
        undefended=identity.undefended,
        defenses=tuple(defenses),
        untried=tuple(line.removeprefix(NOT_TESTED).strip() for line in threats if line.startswith(NOT_TESTED)),
    )


def _source(records: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], threats: Sequence[str]) -> AttackedUploads:
    """As recorded with each attack; of a run of an older version by its threat model and the ids of its victims."""
    told = {str(record.get("uploads")) for record in records if record["kind"] == "attack"}
    recorded = [source for source in AttackedUploads if source in told]
    if len(recorded) == 1:
        return recorded[0]
    if REHEARSED in threats:
        return AttackedUploads.SERVER
    probed = sum(VictimId.parse(id).probe is not None for id in sizes)
    return AttackedUploads.TRAINING if sizes and not probed else AttackedUploads.PROBES


def _chosen(identity: Identity, group: str) -> tuple[str, Mapping[str, Any]]:
    """The option of a configuration group by its name, and its settings."""
    choices, section = identity.config.get("choices"), identity.config.get(group)
    settings = section if isinstance(section, Mapping) else {}
    option = called(str(choices.get(group) or ""), section) if isinstance(choices, Mapping) else ""
    return option or str(settings.get("name", "") if isinstance(section, Mapping) else section or ""), settings


def _budget(section: Mapping[str, Any]) -> list[str]:
    words = []
    for name, unit in _BUDGETS.items():
        value = section.get(name)
        if isinstance(value, bool) or value is None or (name == "restarts" and value == 1):
            continue
        if isinstance(value, int | float):
            words.append(f"{value:,} {unit[:-1] if value == 1 and unit.endswith('s') else unit}")
        elif isinstance(value, str):
            words.append(f"{unit} {value}")
    return words
