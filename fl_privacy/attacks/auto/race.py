"""Race of descents by successive halving, for many victims at once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive import KnownFeatures
from fl_privacy.attacks.attack import Report, part_of
from fl_privacy.attacks.auto.sub_attacks import Entry, Rung, normalizes_by_batch, seconds_of
from fl_privacy.attacks.exact.first_layer import HiddenFeatures
from fl_privacy.attacks.gradient_inversion import labels as labeling
from fl_privacy.attacks.gradient_inversion.execution import fitting_threads, multiplications_of_a_layer
from fl_privacy.attacks.gradient_inversion.grouping import Group, failed
from fl_privacy.attacks.gradient_inversion.layer_statistics import LayerStatistics
from fl_privacy.attacks.gradient_inversion.minimization import filmed_rows, films_of, minimize
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedVictim, prepare
from fl_privacy.attacks.gradient_inversion.priors import Guess
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models import Front
from fl_privacy.models.gradients import differentiable_twice
from fl_privacy.models.losses import is_plain
from fl_privacy.progress import counted
from fl_privacy.rng import cpu_threads, derive_generator
from fl_privacy.types import Batch, Observation, Reconstruction, Tensors
from fl_privacy.types.film import Snapshot, joined, shortened

ROUGHNESS = 3.0
"""Weight of total variation in a score: an image has to fit the update exp(3) times better for each further unit.
Images of pure noise have about 0.7, photographs 0.1. Exact updates' misfits differ by many orders of magnitude and
decide alone; for noisy ones, all attempts fit alike, and the smoothest is the likeliest."""

EXACT = 1e-12  # mismatch of an update that is reproduced up to rounding in single precision

UNDERDETERMINED = 1e-6
"""``EXACT`` if fewer values of the update are known than pixels, so that the smoothest fitting image is likeliest."""

_LEAST_VARIATION = 0.01  # least total variation of an image


@dataclass(frozen=True, eq=False)
class Judgment:
    """Scores of V attempts; the attempt with the least ``score`` (V,) wins, and infinity stands for NaN.

    ``mismatch``: (V,) geometric mean, over tensors, of 1 - cosine of the guess's gradient and the upload, in [0, 2];
    differences that a known or inferred defense explains do not count. The score is

    - ``log(mismatch) + ROUGHNESS * total variation`` if the noise level is unknown;
    - ``cosine distance / weight + total variation`` if it is known and determines the weight.

    For models that normalize by the batch, total variation is taken at equal contrast.
    """

    mismatch: Tensor
    widest: Tensor  # (V,) mismatch of the tensor with the most elements, which noise affects the least
    balance: Tensor  # (V,) weight at which total variation equals the loss, as a share of a zero gradient's
    score: Tensor


@dataclass(frozen=True, kw_only=True)
class _OfAllLayers(Cosine):
    per_layer: bool = True

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        return torch.stack([self._of_layer(s).clamp_min(EXACT).log() for s in statistics.values()]).mean(0).exp()


_common, _angle = _OfAllLayers(epsilon=1e-12), Cosine()


@torch.no_grad()
def judge(problem: Problem, variables: Tensor) -> Judgment:
    """Score each victim's guess, a row of ``variables``, with its images clamped to [0, 1]."""
    images = problem.images(variables).clamp(0, 1)
    transform = problem.constraints.transform
    seen = transform(images) if transform else images
    given = seen, problem.guessed_labels(variables), problem.hidden_gradients(variables)
    with differentiable_twice(), torch.no_grad():
        found = []  # of all tensors, the widest and the whole
        for one, hidden in zip(problem.rounds, given[2], strict=True):
            statistics = one.statistics(*given[:2], hidden)
            widest = _common._of_layer(max(statistics.values(), key=lambda each: each.target.size))
            found.append(torch.stack([_common(statistics), widest, _angle(statistics)]))
        mismatch, widest, angle = torch.stack(found).mean(0).double()
        misfit = (problem.mismatch(*given) / problem.zero_loss()).double()
    rough = problem.roughness(Guess(images, 1, lambda: ())).double()
    targets = [target for one in problem.rounds for target in one.targets.values()]
    bounded = [t.low.eq(t.high).sum(1) for t in targets if t.low is not None and t.high is not None]
    exact, free = sum(bounded, torch.zeros_like(targets[0].squared)), sum(t.size for t in targets if t.low is None)
    few = (exact > 0) & (exact + free < problem.pixels)  # some values are known exactly, but fewer than pixels
    score = torch.maximum(mismatch, torch.where(few, UNDERDETERMINED, EXACT).to(mismatch)).log() + ROUGHNESS * rough
    if (weight := problem.constraints.likeliest) is not None:
        weight = weight.double()
        score = torch.where(weight > 0, angle / weight.clamp_min(EXACT) + rough, score)
    balance = misfit / rough.clamp_min(_LEAST_VARIATION)
    return Judgment(mismatch, widest, balance, score.nan_to_num(math.inf, math.inf, math.inf))


def margin(problem: Problem) -> float:
    """Return the fall in log mismatch that overfitting explains: 2 pixels / largest tensor's elements (Akaike 1974)."""
    return 2 * problem.pixels / max(target.size for target in problem.rounds[-1].targets.values())


_EASED = 10.0  # largest factor by which total variation is eased from one rung to the next


@dataclass(frozen=True, eq=False)
class Attempt:
    """One gradient descent on one victim, with its best result so far and that result's scores (:class:`Judgment`)."""

    member: int  # number of the sub-attack
    start: int  # number of the attempt's start
    roughness: float  # weight of total variation in the next rung, as a share of a zero gradient's loss
    labels: Tensor | None = None  # own labels (B,); ``None``: the victim's
    with_features: bool = False  # ``True`` if the attempt matches known features, too
    given: str = ""  # attack that found its first images, or empty
    margin: float = 0.0  # least fall of log ``widest`` for other images to replace these
    variables: Tensor | None = None  # (N,); ``None`` before the first rung
    mismatch: float = math.inf
    widest: float = math.inf
    score: float = math.inf
    history: tuple[float, ...] = ()
    film: tuple[Snapshot, ...] = ()
    position: int = 0  # that of the victim

    @property
    def order(self) -> tuple[float, int, int]:
        return self.score, self.member, self.start

    @property
    def left_below(self) -> float:
        return self.widest * math.exp(-self.margin)

    def judged(self, judged: Judgment, row: int) -> "Attempt":
        mismatch, widest = float(judged.mismatch[row]), float(judged.widest[row])
        return replace(self, mismatch=mismatch, widest=widest, score=float(judged.score[row]))

    def after(
        self, variables: Tensor, judged: Judgment, row: int, losses: Tensor, film: Sequence[Snapshot]
    ) -> "Attempt":
        """Return the attempt with its new result if that has a better score, else with the old one.

        ``variables`` (N,), ``losses`` (T,), ``film`` (snapshots), and row ``row`` of the scores ``judged`` are the new
        result's. Images from another attack are replaced only if the log mismatch of the largest tensor also falls by
        ``margin``.
        """
        history = (*self.history, *losses[losses.isfinite()].tolist())
        roughness = min(self.roughness, max(self.roughness / _EASED, float(judged.balance[row])))
        tried = replace(self, history=history, roughness=roughness, film=joined(self.film, len(self.history), film))
        found = replace(tried.judged(judged, row), variables=variables, margin=0.0)
        worse = not found.score < self.score or (bool(self.given) and found.widest > self.left_below)
        return tried if self.variables is not None and worse else found


def ranked(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Sort attempts by score; those begun from another attack's images stay first unless others fit clearly better."""
    given = [attempt for attempt in attempts if attempt.given]
    known = min((attempt.widest for attempt in given), default=math.inf)
    below = min((attempt.left_below for attempt in given), default=math.inf)
    return sorted(attempts, key=lambda each: (each.widest > (known if each.given else below), *each.order))


@torch.no_grad()
def other_labels(prepared: Prepared, observation: Observation, number: int) -> list[Tensor]:
    """Return up to ``number`` alternatives to the inferred labels (B,), most likely first; none for one example."""
    layer = labeling.output_layer(observation.model, observation.num_classes)
    size = observation.upload.num_examples
    if layer is None or size == 1 or prepared.rounds[0].unrolls:
        return []
    like = next(prepared.observer.parameters())
    rng = derive_generator(prepared.seed, "attack", str(observation.id), "labels")
    gradient = _gradient_of(observation, layer, like)
    outputs = labeling.usual_outputs(prepared.observer, observation.input_shape, layer, rng, gradient)
    expected = labeling.expected_counts(gradient, layer, size, *outputs)
    return [] if expected is None else labeling.nearest_counts(expected, size, number + 1)[1:]


def _gradient_of(observation: Observation, layer: tuple[str, str | None], like: Tensor) -> Tensors:
    scale = observation.plan.loss_scale
    return {name: g.to(like) / scale for name, g in as_gradient(observation).items() if name in layer}


@torch.no_grad()
def refined_labels(prepared: Prepared, observation: Observation, labels: Tensor, images: Tensor) -> Tensor | None:
    """Infer labels (B,) again from ``images`` (B, C, H, W); ``None`` if unchanged, or if no bias gradient was uploaded.

    The counts of the classes follow from the output layer's gradient and the images' mean softmax. Images keep their
    labels as far as the counts allow.
    """
    layer = labeling.output_layer(observation.model, observation.num_classes)
    if layer is None or layer[1] is None or layer[1] not in observation.upload.tensors:
        return None
    probabilities = prepared.observer(images).softmax(1).mean(0)
    gradient = _gradient_of(observation, layer, images)
    found = labeling.infer_labels(gradient, layer, len(labels), probabilities, torch.ones_like(probabilities))
    if found is None:
        return None
    spare, result, unlabeled = torch.bincount(found, minlength=observation.num_classes), labels.clone(), []
    for place, label in enumerate(labels.tolist()):
        if spare[label] > 0:
            spare[label] -= 1
        else:
            unlabeled.append(place)
    result[unlabeled] = torch.arange(len(spare), device=labels.device).repeat_interleave(spare).to(labels)
    return result if unlabeled else None


FEATURES = 0.3  # weight of known features, as a share of a zero gradient's loss
_SURE_OF_LABELS = 2  # number of attempts at a batch that take the inferred labels


class Race:
    """Successive halving of gradient descents: in each round, only the best attempts at each victim go on.

    ``entered``: attempts at each victim. ``features``: exact inputs of a hidden layer, by the victim's position; if
    given, one more attempt also matches them. ``NotAttackableError`` if no attack can handle the group.
    """

    def __init__(
        self, group: Group, entered: Sequence[Entry], seed: int, *, features: Mapping[int, HiddenFeatures] | None = None
    ) -> None:
        self._features = features or {}
        self._members = list(dict.fromkeys(member for member, _, _ in entered))
        with cpu_threads(1):
            self._prepared: list[Prepared] = [prepare(member.attack, group, seed) for member in self._members]
        first = self._prepared[0]
        self.failures: Mapping[int, str] = first.failures
        self._victims = [{victim.position: victim for victim in one.victims} for one in self._prepared]
        self._any_contrast = normalizes_by_batch(group.first)
        blank = [Attempt(self._members.index(member), start, rough) for member, start, rough in entered]
        self._rough = blank[0].roughness
        # enter an attempt of the first contender for each transformation that the client may have done
        if (transforms := len(first.rounds[0].known.transforms)) > 1:
            blank = [replace(blank[0], start=start) for start in range(max(transforms, len(entered)))]
        self.attempts = {victim.position: self._with_labels(victim, blank) for victim in first.victims}

    def _with_labels(self, victim: PreparedVictim, blank: Sequence[Attempt]) -> list[Attempt]:
        blank = [replace(attempt, position=victim.position) for attempt in blank]
        if (known := self._features.get(victim.position)) is not None:
            free = [replace(attempt, labels=known.labels) for attempt in blank]
            featured = replace(free[0], start=1 + max(attempt.start for attempt in free), with_features=True)
            return [free[0], featured, *free[1:]][: max(2, len(free))]
        certain = victim.label_source != "inferred" or not is_plain(self._prepared[0].rounds[0].victim_model.loss)
        if certain or len(blank) <= _SURE_OF_LABELS:
            return blank
        others = other_labels(self._prepared[0], victim.observation, len(blank) - _SURE_OF_LABELS)
        sure, unsure = blank[:_SURE_OF_LABELS], blank[_SURE_OF_LABELS:]
        relabeled = [replace(attempt, labels=labels) for attempt, labels in zip(unsure, others, strict=False)]
        return [*sure, *relabeled, *unsure[len(others) :]]

    def add(self, position: int, batch: Batch, found_by: str = "") -> None:
        first, labels = self._prepared[0], None if batch.labels.is_floating_point() else batch.labels
        variables = first.settings.space.to_variables(batch.inputs).flatten()
        if position not in self.attempts or len(variables) != torch.Size(first.shape).numel():
            return
        row, _ = first.start([self._victims[0][position]], [0])
        variables = torch.cat([variables.to(row), row[0, len(variables) :]])
        number = 1 + max(attempt.start for attempt in self.attempts[position])
        given = Attempt(0, number, self._rough, labels, given=found_by, variables=variables, position=position)
        problem = self._problem([given])
        judged = judge(problem, variables[None])
        rough = min(self._rough, float(judged.balance[0]))
        self.attempts[position].append(replace(given.judged(judged, 0), roughness=rough, margin=margin(problem)))

    def seconds_per_evaluation(self, evaluations: int) -> float:
        positions = list(self.attempts)[: self._prepared[0].capacity]
        jobs = [Attempt(0, 0, self._rough, position=position) for position in positions]
        number = max(evaluations, self._members[0].evaluations)
        return seconds_of(lambda: self._descend(jobs, number, lambda share: None)) / (number * len(jobs))

    @property
    def most(self) -> int:
        return max(map(len, self.attempts.values()), default=1)

    def run(self, rungs: Sequence[Rung], report: Report) -> None:
        total, done = sum(rung.attempts * rung.evaluations for rung in rungs), 0.0
        for number, rung in enumerate(rungs):
            if number:
                self._keep(rung.attempts)
                own, number_of_images = self._prepared[0].rounds[0], self._prepared[0].shape[0]
                if number_of_images > 1 and not own.unrolls and is_plain(own.victim_model.loss):
                    self.attempts |= {place: list(map(self._relabeled, old)) for place, old in self.attempts.items()}
            size = rung.attempts * rung.evaluations / total
            self._rung(rung, part_of(report, done, done + size))
            done += size
        self._keep(1)

    def _keep(self, best: int) -> None:
        for position, attempts in self.attempts.items():
            self.attempts[position] = ranked(attempts)[:best]

    def _relabeled(self, attempt: Attempt) -> Attempt:
        prepared, victim = self._prepared[attempt.member], self._victim(attempt)
        labels = victim.labels
        if labels is None or labels.is_floating_point() or victim.label_source != "inferred":
            return attempt
        if attempt.variables is None or attempt.position in self._features:
            return attempt
        pixels = attempt.variables[: torch.Size(prepared.shape).numel()]
        images = prepared.settings.space.to_images(pixels.reshape(prepared.shape)).clamp(0, 1)
        found = refined_labels(prepared, victim.observation, labels, images)
        if found is None:
            return attempt
        other = replace(attempt, labels=found)
        other = other.judged(judge(self._problem([other]), attempt.variables[None]), 0)
        return other if other.score < attempt.score else attempt

    def _rung(self, rung: Rung, report: Report) -> None:
        left = [attempt for own in self.attempts.values() for attempt in own if attempt.mismatch > EXACT]
        done = 0
        for member in sorted({attempt.member for attempt in left}):
            jobs, capacity = [attempt for attempt in left if attempt.member == member], self._prepared[member].capacity
            chunks = [jobs[begin : begin + capacity] for begin in range(0, len(jobs), capacity)]
            stages = rung.stages if self._members[member].staged else 1
            for chunk in counted(self._members[member].name, chunks):
                after, shown = chunk, part_of(report, done / len(left), (done + len(chunk)) / len(left))
                for stage in range(stages):
                    of_stage = part_of(shown, stage / stages, (stage + 1) / stages)
                    after = self._descend(after, rung.evaluations // stages, of_stage)
                done += len(chunk)
                for before, attempt in zip(chunk, after, strict=True):
                    own = self.attempts[attempt.position]
                    own[own.index(before)] = attempt

    def _descend(self, jobs: Sequence[Attempt], evaluations: int, report: Report) -> list[Attempt]:
        prepared, member = self._prepared[jobs[0].member], self._members[jobs[0].member]
        victims = [self._victims[attempt.member][attempt.position] for attempt in jobs]
        settings = replace(member.attack, iterations=max(1, evaluations // member.evaluations))
        known = [attempt.variables for attempt in jobs]
        with cpu_threads(1):
            variables, generators = prepared.start(victims, [attempt.start for attempt in jobs])
            rows = [row if own is None else own.to(row) for row, own in zip(variables, known, strict=True)]
            variables, problem = torch.stack(rows), self._problem(jobs)
            size = multiplications_of_a_layer(prepared.observer, problem.images(variables))
        with fitting_threads(size):
            found = minimize(
                problem,
                variables,
                generators=generators,
                enough=0.0 * problem.zero_loss(),
                settings=settings,
                evaluate=Problem.evaluate,
                report=report,
                filmed=filmed_rows(victim.observation for victim in victims),
            )
            judged, films = judge(problem, found.variables), films_of(problem, found)
        return [
            attempt.after(found.variables[row], judged, row, found.history[:, row], films.get(row, ()))
            for row, attempt in enumerate(jobs)
        ]

    def _victim(self, attempt: Attempt) -> PreparedVictim:
        victim = self._victims[attempt.member][attempt.position]
        if attempt.labels is None or victim.labels is None:
            return victim
        return replace(victim, labels=attempt.labels.to(victim.labels.device))

    def _problem(self, jobs: Sequence[Attempt]) -> Problem:
        prepared = self._prepared[jobs[0].member]
        problem = prepared.problem([self._victim(attempt) for attempt in jobs], [attempt.start for attempt in jobs])
        zero, least = problem.zero_loss(), problem.constraints.smoothness
        weights = torch.tensor([attempt.roughness for attempt in jobs]).to(zero)
        known = replace(
            problem.constraints,
            smoothness=weights * zero if least is None else torch.maximum(weights * zero, least),
            any_contrast=self._any_contrast,
            features=self._known_features(prepared, jobs, zero),
        )
        return replace(problem, constraints=known)

    def _known_features(self, prepared: Prepared, jobs: Sequence[Attempt], zero: Tensor) -> KnownFeatures | None:
        own = [self._features[attempt.position] if attempt.with_features else None for attempt in jobs]
        some = next((one for one in own if one is not None), None)
        if some is None:
            return None
        values = torch.stack([torch.zeros_like(some.values) if one is None else one.values for one in own])
        weights = torch.tensor([0.0 if one is None else FEATURES for one in own])
        front = Front(prepared.observer, some.path)
        return KnownFeatures(front=front, values=values.to(zero), weight=weights.to(zero) * zero)

    def best(self, position: int) -> Reconstruction:
        (attempt,) = self.attempts[position]
        victim, prepared = self._victim(attempt), self._prepared[attempt.member]
        if attempt.variables is None or not math.isfinite(attempt.score):
            return failed(victim.observation, "A finite objective is expected, but no start has one; check the update.")
        size, pixels = prepared.shape[0], torch.Size(prepared.shape).numel()
        images = prepared.settings.space.to_images(attempt.variables[:pixels].reshape(prepared.shape))
        labels, loss = victim.labels, prepared.rounds[0].victim_model.loss
        if labels is None:
            labels = loss.expected(attempt.variables[pixels : pixels + size * prepared.num_classes].reshape(size, -1))
        own = self._members[attempt.member].name
        images = images.clamp(0, 1).float().to(victim.observation.precision).cpu()
        return Reconstruction(
            id=victim.observation.id,
            batch=Batch(images, loss.answers(labels).cpu()),
            loss=attempt.mismatch,
            history=attempt.history,
            film=shortened(attempt.film),
            label_source=victim.label_source,
            countermeasures=prepared.countermeasures,
            member=f"{attempt.given}, then {own}" if attempt.given else own,
        )
