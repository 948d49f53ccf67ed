"""Attack captured updates of a Flower app and write the page, during an audit or later."""

import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.attack import trained_on
from fl_privacy.federation.interception import at_typical_rates, by_id, changed, ids_of
from fl_privacy.models import normalized
from fl_privacy.report import write_report
from fl_privacy.report.audit_page import AuditRecord
from fl_privacy.report.audit_parts import Captured
from fl_privacy.report.headline import headline_of
from fl_privacy.runs.app_truth import KnownImages, NamedImages
from fl_privacy.runs.attack_stage import AttackStage, Judge
from fl_privacy.runs.attacker_knowledge import AttackerKnowledge
from fl_privacy.runs.destination import Monitor
from fl_privacy.runs.distractors import MOST
from fl_privacy.runs.distractors_of_app import others_of_app
from fl_privacy.runs.folder import RunFolder, read_run, verdict_of
from fl_privacy.runs.folder.leakage import REHEARSED, worst_by
from fl_privacy.runs.foreign_app import describe_app, rehearsed, worth_attacking
from fl_privacy.types import Observation
from fl_privacy.types.plan import Normalization


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedApp:
    """Captured updates of a Flower app, with what its audit recorded.

    Attributes:
        source: images that the user names as the clients'.
        found: sentences on single updates.
        victims: number of the server's own images, for clients that do not answer probes.
        every: ``True`` to attack all updates, of any number of images.
        adaptive: ``True`` to attack also with knowledge of a stated defense.
    """

    observations: Sequence[Observation]
    source: NamedImages
    record: AuditRecord
    found: Counter[str] = field(default_factory=Counter)
    victims: int = 8
    every: bool = False
    adaptive: bool = True

    @property
    def captured(self) -> Captured:
        assert self.record.captured is not None
        return self.record.captured

    def truth(self) -> KnownImages:
        known, observations = self.captured, self.observations
        prints = known.fingerprints
        return KnownImages(
            data=self.source.data,
            of_client=self.source.of_client,
            normalization=self.source.normalization,
            fingerprints={id: prints[str(id)] for id in ids_of(observations) if str(id) in prints},
            partitions=known.partitions,
            numbers={o.id: o.upload.num_examples for o in observations if o.id.client in known.identified},
        )


def as_clients_normalize(
    observations: Sequence[Observation], stated: Mapping[int, Normalization | None], own: Normalization | None
) -> Sequence[Observation]:
    """Give each observation a model with the normalization that its client states, instead of the model's ``own``."""
    if not set(stated.values()) - {own} or not observations:
        return observations
    networks = {own: observations[0].model}
    for chosen in set(stated.values()) - {own}:
        plain = copy.deepcopy(observations[0].model)
        plain._forward_pre_hooks.clear()
        networks[chosen] = plain if chosen is None else normalized(plain, chosen)
    return changed(observations, lambda o: replace(o, model=networks[stated.get(o.id.client, own)]))


def report_app(
    app: CapturedApp,
    attack: ReconstructionAttack | None,
    name: str,
    folder: RunFolder,
    *,
    monitor: Monitor,
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
    started, captured = time.perf_counter(), app.captured
    chosen, truth, said = _worth_attacking(app, changes=attack is not None)
    wrong = [f"Went wrong: {problem}." for problem in app.record.problems[:5]]
    described = describe_app(app.observations, captured.defense, app.found, captured.defenses)
    folder.write_environment(seed=seed)
    folder.write_threat_model([*described, *app.record.notes, *said, *wrong])
    folder.write_defense(captured.defense)
    if attack is not None and chosen:
        shape, ids, nodes = chosen[0].input_shape, ids_of(chosen), app.record.nodes
        adaptive = app.adaptive and (bool(captured.defense) or any(captured.defenses.values()))
        stage = AttackStage(
            attack=attack,
            seed=seed,
            threads=threads,
            jobs=jobs,
            knowledge=AttackerKnowledge(
                same_data=lambda victim: None if victim.probe is None else victim.source,  # probes stay the same
                defense=captured.defense if adaptive else None,
                defenses=captured.defenses,
            ),
            judge=Judge(
                truth=truth,
                others=others_of_app(app.truth(), ids, truth, shape, candidates, seed=seed, nodes=nodes),
                prior=any(trained_on(attack, o.input_shape) is not None for o in chosen),
            ),
            folder=folder,
            monitor=monitor,
            rehearsed=REHEARSED in said,
        )
        stage.run(by_id(chosen))
        done = f"attacked {len(chosen)} by {name} in {time.perf_counter() - started:.0f} s."
    else:
        done = "attacked none, so nothing is known about what uploads leak."
    folder.finish()
    page, run = write_report([folder.path]), read_run(folder.path)
    readings, mean = run.summary.attacked, ""
    if (worst := worst_by("psnr", readings)) is not None and (statistic := worst.statistic("psnr")) is not None:
        mean = f"; mean PSNR {statistic.mean:.1f} dB" + (f" ({whose})" if (whose := worst.among(readings)) else "")
    found = f"{headline_of(verdict_of(run)).text}{mean}.".replace("?.", "?")
    return f"audit: captured {_what(app.observations)}; {done} {found} Page: {page}"


def _worth_attacking(app: CapturedApp, *, changes: bool) -> tuple[Sequence[Observation], KnownImages, list[str]]:
    """Choose uploads to attack, or else compute some of the server's own; return also their truth, and sentences."""
    truth = app.truth()
    chosen, said = worth_attacking(app.observations, every=app.every)
    if app.captured.rates_estimated and changes:
        chosen = at_typical_rates(chosen)
    if not chosen and (own := rehearsed(app.observations, truth, app.victims)):
        images = truth.first(app.victims)
        return own, KnownImages(given={id: images[id.probe or 0] for id in ids_of(own)}), [*said, REHEARSED]
    known = truth.data is not None or truth.of_client is not None
    lost = known and sum(id.probe is not None and truth.batch(id) is None for id in ids_of(chosen))
    if lost:
        said.append(
            f"The images behind {lost} of {len(chosen)} attacked uploads are not in data: they are others, or changed"
            " by a transform that draws at random. They are shown without a figure."
        )
    return chosen, truth, said


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
