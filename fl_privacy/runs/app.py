"""Attack captured updates of a Flower app and write the page, during an audit or later."""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.attack import trained_on
from fl_privacy.checks import fits
from fl_privacy.effects import Description, from_plain, to_plain
from fl_privacy.errors import UserError
from fl_privacy.federation.interception import at_typical_rates, by_id, ids_of
from fl_privacy.files import write_private
from fl_privacy.report import write_report
from fl_privacy.report.headline import headline_of
from fl_privacy.runs.app_truth import KnownImages, NamedImages
from fl_privacy.runs.attack_stage import AttackStage, Judge
from fl_privacy.runs.attacker_knowledge import AttackerKnowledge
from fl_privacy.runs.destination import Monitor
from fl_privacy.runs.distractors import MOST
from fl_privacy.runs.distractors_of_app import others_of_app
from fl_privacy.runs.folder import RunFolder, read_run, verdict_of
from fl_privacy.runs.folder.leakage import REHEARSED, readings_of, worst_by
from fl_privacy.runs.foreign_app import (
    describe_app,
    rehearsed,
    worth_attacking,
)
from fl_privacy.types import Observation, VictimId
from fl_privacy.types.plan import Normalization

NOTE = "audit.json"
"""File next to an app's captures, with facts that these lack."""

_MOST_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Note:
    """Findings of an audit that captured updates do not hold.

    Attributes:
        model: import path of the clients' model; never imported.
        normalizations: client -> normalization, if stated.
        defenses: client -> stated defense.
        fingerprints: probe id -> fingerprints of its images.
        rates_estimated: ``True`` if each update's learning rate was inferred from that update alone.
    """

    model: str = ""
    normalization: Normalization | None = None
    normalizations: Mapping[int, Normalization | None] = field(default_factory=dict)
    defense: Description = ()
    defenses: Mapping[int, Description] = field(default_factory=dict)
    fingerprints: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rates_estimated: bool = False


def write_note(folder: Path, note: Note) -> None:
    """Write ``note`` into the folder of an audit, readable only by its owner."""
    content = {
        "model": note.model,
        **plainly(note.normalization),
        "normalizations": {str(client): plainly(one) for client, one in note.normalizations.items()},
        "defense": to_plain(note.defense),
        "defenses": {str(client): to_plain(parts) for client, parts in note.defenses.items()},
        "fingerprints": {key: list(value) for key, value in note.fingerprints.items()},
        "rates_estimated": note.rates_estimated,
    }
    write_private(folder / NOTE, json.dumps(content, indent=1))


def plainly(normalization: Normalization | None) -> dict[str, list[float] | None]:
    """Return mean and standard deviation of each channel for JSON."""
    if normalization is None:
        return {"mean": None, "std": None}
    return {"mean": list(normalization.mean), "std": list(normalization.std)}


def _normalization(plain: Mapping[str, Any]) -> Normalization | None:
    mean, std = plain.get("mean"), plain.get("std")
    return None if mean is None or std is None else Normalization(mean, std)


def read_note(folder: Path) -> Note | None:
    """Return the audit's note, without trusting its content; ``None`` without one.

    Raises:
        UserError: it is damaged.
    """
    path = folder / NOTE
    if not path.is_file():
        return None
    wrong = UserError(f"{path} is expected to be as an audit wrote it, but is damaged; remove it.")
    if path.stat().st_size > _MOST_BYTES:
        raise wrong
    try:
        raw = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise wrong from error
    kinds: dict[str, Any] = {
        "model": str,
        "mean": list[float] | None,
        "std": list[float] | None,
        "fingerprints": Mapping[str, list[str]],
        "rates_estimated": bool,
        "normalizations": Mapping[str, Mapping[str, list[float] | None]],
        "defenses": Mapping[str, list[Any]],
    }
    if isinstance(raw, dict):
        raw = {"rates_estimated": False, "normalizations": {}, "defenses": {}, **raw}
    if not isinstance(raw, dict) or any(key not in raw or not fits(raw[key], kinds[key]) for key in kinds):
        raise wrong
    if not all(re.fullmatch(r"[0-9]{1,9}", client) for client in (*raw["normalizations"], *raw["defenses"])):
        raise wrong
    return Note(
        model=raw["model"],
        normalization=_normalization(raw),
        normalizations={int(client): _normalization(plain) for client, plain in raw["normalizations"].items()},
        defense=from_plain(raw.get("defense", [])),
        defenses={int(client): from_plain(plain) for client, plain in raw["defenses"].items()},
        fingerprints=raw["fingerprints"],
        rates_estimated=raw["rates_estimated"],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class AppReport:
    """Facts on an app whose updates were captured.

    Attributes:
        found: sentences on single updates.
        said: sentences on the app.
        victims: number of the server's own images, for clients that do not answer probes.
        identified: clients that state their partition.
        every: ``True`` to attack all updates, of any number of images.
        adaptive: ``True`` to attack also with knowledge of a stated defense.
        rates_estimated: ``True`` if learning rates were inferred from each update.
        nodes: number of nodes, with partitions 0 to ``nodes - 1``; ``None`` if not known.
    """

    observations: Sequence[Observation]
    source: NamedImages
    fingerprints: Mapping[VictimId, Sequence[str]]
    defense: Description = ()
    defenses: Mapping[int, Description] = field(default_factory=dict)
    partitions: Mapping[int, int] = field(default_factory=dict)
    found: Counter[str] = field(default_factory=Counter)
    said: Sequence[str] = ()
    victims: int = 8
    problems: Sequence[str] = ()
    identified: frozenset[int] = frozenset()
    every: bool = False
    adaptive: bool = True
    rates_estimated: bool = False
    nodes: int | None = None

    def truth(self) -> KnownImages:
        return KnownImages(
            data=self.source.data,
            of_client=self.source.of_client,
            normalization=self.source.normalization,
            fingerprints=self.fingerprints,
            partitions=self.partitions,
            numbers={o.id: o.upload.num_examples for o in self.observations if o.id.client in self.identified},
        )


def report_app(
    app: AppReport,
    attack: ReconstructionAttack | None,
    name: str,
    folder: RunFolder,
    *,
    monitor: Monitor | None = None,
    seed: int = 0,
    threads: int | None = None,
    jobs: int | None = None,
    candidates: int = MOST,
) -> str:
    """Attack the updates worth attacking, write the page, and return a line on the result.

    Args:
        attack: attack to run; ``None`` only captures.
        threads: CPU threads of the attack; ``None`` takes one per part, or PyTorch's default for one part.
        jobs: most processes that attack at once; ``None`` takes all cores.
        candidates: most distractors of each original.
    """
    started, monitor = time.perf_counter(), monitor or Monitor()
    chosen, truth, said = _worth_attacking(app, changes=attack is not None)
    wrong = [f"Went wrong: {problem}." for problem in app.problems[:5]]
    described = describe_app(app.observations, app.defense, app.found, app.defenses)
    folder.write_environment(seed=seed)
    folder.write_threat_model([*described, *app.said, *said, *wrong])
    folder.write_defense(app.defense)
    if attack is not None and chosen:
        shape, adaptive = chosen[0].input_shape, app.adaptive and (bool(app.defense) or any(app.defenses.values()))
        stage = AttackStage(
            attack=attack,
            seed=seed,
            threads=threads,
            jobs=jobs,
            knowledge=AttackerKnowledge(
                same_data=lambda victim: None if victim.probe is None else victim.source,  # probes stay the same
                defense=app.defense if adaptive else None,
                defenses=app.defenses,
            ),
            judge=Judge(
                truth=truth,
                others=others_of_app(app.truth(), ids_of(chosen), truth, shape, candidates, seed=seed, nodes=app.nodes),
                prior=any(trained_on(attack, o.input_shape) is not None for o in chosen),
            ),
            folder=folder,
            monitor=monitor,
            rehearsed=REHEARSED in said,
        )
        stage.run(by_id(chosen))
        done = f"attacked {len(chosen)} by {name} in {time.perf_counter() - started:.0f} s."
    else:
        done = "attacked none, which says nothing of what uploads give away."
    folder.finish()
    page, run = write_report([folder.path]), read_run(folder.path)
    readings, mean = readings_of(run.summary), ""
    if (worst := worst_by("psnr", readings)) is not None and (statistic := worst.statistic("psnr")) is not None:
        whose = f" ({worst.among(readings)})" if worst.among(readings) else ""
        mean = f"; mean PSNR {statistic.mean:.1f} dB{whose}"
    found = f"{headline_of(verdict_of(run)).text}{mean}.".replace("?.", "?")
    return f"audit: captured {_what(app.observations)}; {done} {found} Page: {page}"


def _worth_attacking(app: AppReport, *, changes: bool) -> tuple[Sequence[Observation], KnownImages, list[str]]:
    truth = app.truth()
    chosen, said = worth_attacking(app.observations, every=app.every)
    if app.rates_estimated and changes:
        chosen = at_typical_rates(chosen)
    if not chosen and (own := rehearsed(app.observations, truth, app.victims)):
        images = truth.first(app.victims)
        chosen, truth = own, KnownImages(given={id: images[id.probe or 0] for id in ids_of(own)})
        said.append(REHEARSED)
    return chosen, truth, [*said, *_not_found(chosen, truth)]


def _not_found(chosen: Sequence[Observation], truth: KnownImages) -> list[str]:
    if truth.data is None and truth.of_client is None:
        return []
    lost = sum(id.probe is not None and truth.batch(id) is None for id in ids_of(chosen))
    if not lost:
        return []
    return [
        f"The images behind {lost} of {len(chosen)} attacked uploads are not in data: they are others, or changed"
        " by a transform that draws at random. They are shown without a figure."
    ]


def _what(observations: Sequence[Observation]) -> str:
    ids = ids_of(observations)
    probes = [id for id in ids if id.probe is not None]
    updates = len(ids) - len(probes)
    rounds = sorted({id.round for id in ids})
    clients = len({id.client for id in ids})
    parts = [f"{updates} training updates" if updates else "", f"{len(probes)} probes" if probes else ""]
    return (
        f"{' and '.join(filter(None, parts))} of {clients} client{'s' * (clients > 1)}"
        f" in round{'s' * (len(rounds) > 1)} {', '.join(map(str, rounds))}"
    )
