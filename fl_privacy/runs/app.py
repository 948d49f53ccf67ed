"""Attack captured updates of a Flower app and write the page, during an audit or later."""

import copy
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.attack import trained_on
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.effects import Description, settings_in_words
from fl_privacy.federation import Failure, ServerPlan, attempt, local_update
from fl_privacy.federation.interception import at_typical_rates, by_id, changed, describe_model, ids_of, only
from fl_privacy.measure.counts import count
from fl_privacy.models import has_batch_norm, normalization_of, normalized
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.report import write_report
from fl_privacy.report.audit_file import write_audit
from fl_privacy.report.audit_page import AuditRecord
from fl_privacy.report.audit_parts import Captured
from fl_privacy.report.headline import headline_of
from fl_privacy.report.words import span
from fl_privacy.runs.another_site import seen_next_to
from fl_privacy.runs.app_truth import KnownImages, NamedImages
from fl_privacy.runs.attack_stage import AttackStage, Judge
from fl_privacy.runs.attacker_knowledge import AttackerKnowledge
from fl_privacy.runs.distractors import MOST, others_of_app
from fl_privacy.runs.folder import RunFolder, read_run, verdict_of
from fl_privacy.runs.folder.leakage import REHEARSED, worst_by
from fl_privacy.runs.ground_truth import together
from fl_privacy.runs.run_location import Monitor
from fl_privacy.types import Observation, VictimId
from fl_privacy.types.plan import Normalization

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedApp:
    """Captured updates of a Flower app, and the record of the app's audit."""

    observations: Sequence[Observation]
    source: NamedImages  # images that the user names as the clients'
    record: AuditRecord
    found: Counter[str] = field(default_factory=Counter)  # sentences on single updates
    victims: int = 8  # number of the server's own images, for clients that do not answer probes
    server: ServerPlan | str = field(default_factory=ServerPlan)  # its rule, or why it is no step of the mean
    every: bool = False  # ``True`` to attack all updates, of any number of images
    adaptive: bool = True  # ``True`` to attack also with knowledge of a stated defense

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
    """Return ``observations`` with models that normalize images as the clients do.

    ``stated``: client -> normalization (``None``: none). Clients that stated nothing normalize as ``own``.
    """
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
    """Attack captured updates of an app, write the report into ``folder``, and return one line on the result.

    ``attack``: ``None`` only reports. ``name``: attack's name. ``candidates``: largest number of other images among
    which an attacked image has to be recognized.
    """
    started, captured = time.perf_counter(), app.captured
    chosen, truth, said = _worth_attacking(app, typical_rates=attack is not None)
    wrong = [f"Went wrong: {problem}." for problem in app.record.problems[:5]]
    described = describe_app(app.observations, captured.defense, app.found, captured.defenses)
    folder.write_environment(seed=seed)
    if isinstance(app.server, str):
        said = [*said, f"Not attacked as another site sees uploads: {app.server}."]
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
        _attack_as_server_and_site(app, stage, chosen, folder)
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


def _attack_as_server_and_site(
    app: CapturedApp, stage: AttackStage, chosen: Sequence[Observation], folder: RunFolder
) -> None:
    stage.run(by_id(chosen))
    record, sites = app.record, app.record.nodes or 0
    seen = [] if isinstance(app.server, str) else seen_next_to(chosen, sites, app.server)
    if not seen or record.captured is None:
        return
    asked = [stage.knowledge.of_plain(observation) for observation, _ in seen]
    given = {}
    for observation, behind in seen:
        originals = [batch for id in behind if (batch := stage.judge.truth.batch(id)) is not None]
        if len(originals) == len(behind):
            given[observation.id] = together(originals)
    found = attempt(lambda: stage.attack(asked, seed=stage.seed))
    if isinstance(found, Failure):
        logger.warning("The uploads were not attacked as another site computes them: %s", found.reason)
        return
    scores = replace(stage.judge, truth=KnownImages(given=given)).scores(found, asked)
    counts = count((str(score.id), image) for score in scores for image in score.images)
    write_audit(folder.path, replace(record, captured=replace(record.captured, site=(counts, sites))))


def _worth_attacking(app: CapturedApp, *, typical_rates: bool) -> tuple[Sequence[Observation], KnownImages, list[str]]:
    truth = app.truth()
    chosen, said = worth_attacking(app.observations, every=app.every)
    if app.captured.rates_estimated and typical_rates:
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
    probes, clients = sum(id.probe is not None for id in ids), len({id.client for id in ids})
    rounds, updates = sorted({id.round for id in ids}), len(ids) - probes
    parts = [f"{updates} training updates" if updates else "", f"{probes} probes" if probes else ""]
    return (
        f"{' and '.join(filter(None, parts))} of {clients} client{'s' * (clients > 1)}"
        f" in round{'s' * (len(rounds) > 1)} {', '.join(map(str, rounds))}"
    )


MOST_FOUND = 12  # most sentences on single updates, the most frequent first
MOST_IMAGES, MOST_STEPS = 16, 8
"""Updates of more images or local steps are attacked only on request: that takes hours and rarely succeeds."""

MOST_PIXELS, MOST_REPLAYED = 1 << 26, 10_000  # values of a guess, and local steps, above which none is attacked


def worth_attacking(
    observations: Sequence[Observation], *, every: bool = False
) -> tuple[Sequence[Observation], list[str]]:
    """Return the observations to attack, and a sentence on the others, if any.

    Probes (extra uploads for the attack) are chosen; if there are none, training updates of few images and steps.
    ``every`` chooses all but huge updates.
    """
    if every:
        sizes = {o.id: (o.upload.num_examples * math.prod(o.input_shape), _steps(o)) for o in observations}
        large = {id for id, (pixels, steps) in sizes.items() if pixels > MOST_PIXELS or steps > MOST_REPLAYED}
        said = [f"Not attacked: {len(large)} updates that say to be of more images or steps than can be guessed."]
        return only(observations, lambda id: id not in large), said if large else []
    probes = {id for id in ids_of(observations) if id.probe is not None}
    sizes = {o.id: (o.upload.num_examples, _steps(o)) for o in only(observations, lambda id: id.probe is None)}
    small = {id for id, (images, steps) in sizes.items() if images <= MOST_IMAGES and steps <= MOST_STEPS}
    left = [size for id, size in sizes.items() if probes or id not in small]
    said = []
    if left:
        images, steps = zip(*left, strict=True)
        said.append(
            f"Captured but not attacked: {len(left)} training updates, each of {span(images)} images in"
            f" {span(steps)} local step{'' if set(steps) == {1} else 's'}."
            " A single image is mixed with the others there; the leakage of one image in one step is the worst case,"
            " which a client with few images comes close to."
        )
    return only(observations, (probes or small).__contains__), said


def rehearsed(observations: Sequence[Observation], truth: KnownImages, number: int) -> list[Observation]:
    """Compute the server's own uploads: for each round's model, one undefended step on each of ``number`` images."""
    last = {id.round: place for place, id in enumerate(ids_of(observations))}
    images, made = truth.first(number), []
    for round, place in sorted(last.items()):
        seen = observations[place]
        plan = replace(seen.plan, epochs=None, steps=None, batch_size=None, momentum=0.0, nesterov=False)
        for probe, batch in enumerate(images):
            result = local_update(
                seen.model,
                seen.sent,
                [batch],
                num_examples=1,
                plan=plan,
                defense=Defense(),
                state=ClientState(),
                rng=torch.Generator(),
                private_rng=torch.Generator(),
            )
            made.append(replace(seen, id=VictimId(round, 0, probe), upload=result.upload, plan=plan))
    return made


def describe_app(
    observations: Sequence[Observation], defense: Description, found: Counter[str], defenses: Mapping[int, Description]
) -> list[str]:
    """Return sentences for the report on the threat model, the model, the updates, and defenses that clients state.

    ``found``: sentence on updates -> number of updates for which it holds. ``defense``: defense that most clients
    state; ``defenses``: client -> its stated defense.
    """
    lines = [
        "The server is honest but curious: it follows the protocol and analyzes what it receives. The clients are those"
        " of the app.",
        "The attacker knows the architecture, the values each client was sent, and how clients train, as given or"
        " as inferred from the updates; no labels, no other images.",
    ]
    if observations:
        model = observations[0].model
        normalization = normalization_of(model)
        lines.append(
            "Images are assumed to enter the model unnormalized, in [0, 1]: if a client normalizes them, give its"
            " transform (transform= or data=)."
            if normalization is None
            else f"Images in [0, 1] are normalized before the model: {normalization.in_words()}."
        )
        if has_batch_norm(model) and any(o.plan.batch_norm == "train" for o in observations):
            lines.append(
                "In training mode batch norm removes each image's brightness and contrast from the gradient:"
                " reconstructions may have other colors than their originals."
            )
        lines += describe_model(model)
    total = max(found.values(), default=0)
    often = found.most_common(MOST_FOUND)
    lines += [f"{said} (So in {n} of {total} updates.)" if n < total else said for said, n in often]
    if all(parts == defense for parts in defenses.values()):
        return [*lines, f"Clients state a defense: {_in_words(defense)}." if defense else "Clients state no defense."]
    stated = Counter(_in_words(parts) for parts in defenses.values())
    lines += [
        f"{number} of {stated.total()} clients {f'state a defense: {text}' if text else 'state none'}."
        for text, number in stated.most_common()
    ]
    return [*lines, "Each client is taken at its word; the page uses what more than half of them state."]


def _in_words(defense: Description) -> str:
    return (settings_in_words(defense) or defense[0].name) if defense else ""


def _steps(observation: Observation) -> int:
    return number_of_steps(observation.upload.num_examples, observation.plan)
