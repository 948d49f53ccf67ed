"""``fl-privacy audit-update BEFORE AFTER``: reconstruct examples from the change between two files."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.named import attack_named
from fl_privacy.auditing.scenario_scores import Counted, compared, count_images, count_rows, labels_right
from fl_privacy.auditing.scenario_words import scored_words
from fl_privacy.auditing.session import AuditSession
from fl_privacy.auditing.update_given import SiteExamples, entrance_of, network_of, place_of, read_examples, shape_of
from fl_privacy.auditing.update_observed import UNKNOWN_RATE, inferred, observation_of, updates_of
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files import make_out_folder
from fl_privacy.files.foreign import expanded
from fl_privacy.measure.answer import Answer, Kind, Scenario, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.intervals import binomial_tail
from fl_privacy.models import normalized
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.models.unwrap_model import plain_model
from fl_privacy.report.audit_file import folder_name, terminal_line
from fl_privacy.report.audit_page import AuditRecord, Line, Volume
from fl_privacy.rng import derive_generator
from fl_privacy.runs.distractors import others_among
from fl_privacy.types import Batch, Certainty, ModelState, Observation, Reconstruction, VictimId
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS, Modality
from fl_privacy.types.plan import Normalization
from fl_privacy.types.schema import Schema, with_schema

KIND_OF: Mapping[Modality, Kind] = {IMAGES: "image", ROWS: "row", TEXTS: "text"}
_EXAMPLES, _MOST_INFERRED, _MOST_LINES = (1, 2, 4), 4, 200
_DISTRACTORS, _SAME, _WHOLE = 1000, 1e-6, 0.05


@dataclass(frozen=True, kw_only=True)
class UpdateAuditRequest:
    """Settings of an audit of saved updates.

    Attributes:
        before, after: file or folder of files with the model as sent, and with the update, respectively.
        model: ``file.py:Net`` or a program of ``torch.export``.
        shape: shape of an example; ``None`` infers it.
        examples, steps: numbers of examples and local steps to assume, each in turn; empty infers them.
        lr: learning rate; ``None`` infers it.
        data: folder of the true examples of all updates, or with a subfolder for each update, of the same name.
        others: examples of the same kind that the update never saw, for controls.
        normalization: pixels' normalization before the network.
        seconds: time after which no further attack begins.
    """

    before: Path
    after: Path
    model: str
    shape: tuple[int, ...] | None = None
    examples: Sequence[int] = ()
    steps: Sequence[int] = ()
    lr: float | None = None
    data: Path | None = None
    others: Path | None = None
    normalization: Normalization | None = None
    out: Path = Path("audit")
    budget: str | float = "quick"
    seconds: float = 600.0
    seed: int = 0
    device: str = "cpu"


def audit_update(asked: UpdateAuditRequest, tell: Callable[[str], None] = lambda text: None) -> "UpdateAudit":
    """Attack saved updates and write a page.

    Only the model's code is executed. ``UserError`` if files, model or examples can't be read, or do not fit together.
    """
    network = network_of(asked.model)
    session = UpdateAudit(asked, network, tell)
    make_out_folder(session.folder, session.folder, asked.out)
    session.write("The updates are attacked now.")
    if (cut := session.end()) is not None:
        session.problems.append(f"Attacks ended before all were made: {cut.reason}")
    session.line = terminal_line(session.write(), session.page)
    return session


class UpdateAudit(AuditSession):
    """Audit of saved updates, which attacks them for each assumed number of examples and of local steps."""

    def __init__(self, asked: UpdateAuditRequest, network: nn.Module, tell: Callable[[str], None]) -> None:
        super().__init__(expanded(asked.out).absolute() / folder_name(expanded(asked.after).stem))
        self.asked, self.tell, self.problems, self.answers = asked, tell, list[str](), list[Answer]()
        self.device = str(resolve_device(asked.device))
        self.kind, width, self.entrance = entrance_of(network)
        if asked.shape is not None and len(asked.shape) == 3:
            self.kind, width = IMAGES, asked.shape[0]  # of which a fully connected layer takes the pixels
        self.updates = updates_of(network, asked.before, asked.after)
        reads, shape = partial(read_examples, kind=self.kind, width=width), asked.shape
        self.truths = list[SiteExamples]()
        places = [] if asked.data is None else [place_of(expanded(asked.data), one.name) for one in self.updates]
        for place in places:
            self.truths.append(reads(place, shape=shape))
            shape = shape or tuple(self.truths[-1].inputs.shape[1:])
        self.shape = shape_of(network, asked.shape, shape)
        self.others = torch.empty(0, *self.shape, dtype=torch.int64 if self.kind is TEXTS else torch.float32)
        if asked.others is not None:
            self.others = reads(expanded(asked.others), shape=self.shape, seed=asked.seed).inputs
        self.rest = torch.cat([self.others, *(truth.inputs for truth in self.truths)])
        if self.kind is ROWS and len(self.others) > 1:  # ranges that the attacker knows, not those of the truth
            network = with_schema(network, Schema.inferred(self.others))
        if asked.normalization is not None:
            if self.kind is not IMAGES or len(asked.normalization.mean) not in (1, self.shape[0]):
                given = f"{asked.normalization.in_words()} for {self.kind.data} of shape {self.shape}"
                raise UserError(
                    "--normalize is expected to give one mean and deviation for images, or one for each channel, but"
                    f" got {given}; give as many, or omit it for other data."
                )
            network = normalized(network, asked.normalization)
        self.network = network if self.kind is TEXTS else plain_model(network, self.shape)
        with torch.no_grad():
            self.num_classes = int(self.network.eval()(torch.zeros(2, *self.shape).to(self.others.dtype)).shape[1])
        self.found = [inferred(self.network, one, self.shape, self.num_classes) for one in self.updates]
        if all(one.backwards for one in self.found) and min(n for n, _ in self.assumptions()) < self.num_classes - 1:
            self.problems.append(
                "The change looks like that of BEFORE and AFTER in the other order: all classes but one would be in it."
                " Exchange the files, unless it holds so many examples."
            )

    def assumptions(self) -> list[tuple[int, int]]:
        steps = self.asked.steps or tuple(dict.fromkeys(one.steps or 1 for one in self.found))[:_MOST_INFERRED]
        sizes = [len(truth.inputs) for truth in self.truths]
        ranks = dict.fromkeys(one.examples for one in self.found if one.examples and max(steps) == 1)
        examples = self.asked.examples or tuple(ranks)[:_MOST_INFERRED]
        examples = examples or ((sizes[0],) if sizes and max(sizes) <= max(_EXAMPLES) else _EXAMPLES)
        return [(number, count) for number in examples for count in steps]

    def attack_all(self) -> None:
        for examples, steps in (cases := self.assumptions()):
            title = f"Assumed: {_of(examples, 'example')} in {_of(steps, 'step')}"
            what = "the update" if len(self.updates) == 1 else f"{len(self.updates)} updates"
            scenario = Scenario(
                name=f"update {examples} {steps}",
                title=title,
                uploads=f"{what} of {_of(examples, 'example')} in {_of(steps, 'step')}, as assumed",
                examples=examples,
                source=f"{what}, assumed to hold {_of(examples, 'example')} in {_of(steps, 'step')}",
            )
            self.tell(f"Attacking {scenario.source}")
            begun = time.perf_counter()
            late = bool(self.answers) and begun - self.started > self.asked.seconds
            made = Failure("--seconds were over") if late else attempt(partial(self._answer, examples, steps))
            answer = Answer(kind=KIND_OF[self.kind], reason=made.reason) if isinstance(made, Failure) else made
            answer = replace(answer, seconds=time.perf_counter() - begun)
            self.answers.append(replace(answer, scenario=scenario, among=len(cases)))
            self.write("Further assumptions are attacked.")

    def _answer(self, examples: int, steps: int) -> Answer:
        asked = self.asked
        seen = [
            observation_of(
                self.network, update, self.shape, known, examples=examples, steps=steps, lr=asked.lr, number=number
            )
            for number, (update, known) in enumerate(zip(self.updates, self.found, strict=True))
        ]
        alone = len(seen) == 1 and bool(self.truths) and self.kind is not TEXTS
        control = self._control(seen[0], steps) if alone else None
        attack = attack_named("auto")(budget=asked.budget, device=self.device)
        made = attack([*seen, *([control] if control is not None else [])], seed=asked.seed)
        other = made.pop() if control is not None else None
        answer = self._judged(made, other, examples)
        notes = [*answer.notes, *(n for one, guess in zip(seen, made, strict=True) for n in (*one.notes, *guess.notes))]
        notes += [f"The attack reports: {why}." for guess in made if (why := guess.failure)]
        return replace(answer, notes=tuple(dict.fromkeys(notes)))

    def _control(self, observation: Observation, steps: int) -> Observation | None:
        number = observation.upload.num_examples
        rng = derive_generator(self.asked.seed, "control")
        pool = self.others
        if not len(pool) and self.kind is IMAGES:
            shipped = others_among([], [], self.shape, 64, seed=self.asked.seed).candidates
            pool = pool if shipped is None else shipped.images
        if len(pool) < number:
            return None
        chosen = torch.randperm(len(pool), generator=rng)[:number]
        labels = torch.randint(self.num_classes, (number,), generator=rng)
        state, plan = observation.sent, observation.plan
        for _ in range(steps):
            loss = (observation.loss or CROSS_ENTROPY).function
            made = loss_gradients(
                self.network, state, Batch(pool[chosen], labels), batch_norm=plan.batch_norm, loss_function=loss
            )
            moved = {name: p.detach() - plan.lr * made.gradients[name] for name, p in state.parameters.items()}
            state = ModelState({n: p.detach() for n, p in moved.items()}, made.buffers or state.buffers)
        kept, delta = observation.upload, plan.shares == "delta"
        values = {n: state.parameters[n] - (observation.sent.parameters[n] if delta else 0) for n in kept.tensors}
        buffers = {name: state.buffers[name] for name in kept.buffers}
        return replace(
            observation, id=VictimId(0, len(self.updates)), upload=replace(kept, tensors=values, buffers=buffers)
        )

    def _judged(self, made: Sequence[Reconstruction], other: Reconstruction | None, examples: int) -> Answer:
        if not self.truths:
            return self._unjudged(made)
        if (few := min(len(truth.inputs) for truth in self.truths)) < examples:
            return Answer(kind=KIND_OF[self.kind], reason=f"--data holds {few} examples, fewer than are assumed")
        if self.kind is TEXTS:
            return self._words(made)
        known = list(zip(made, self.truths, strict=True))
        chosen = [_nearest(one, truth, examples, self.asked.seed) for one, truth in known]
        answer = compared(KIND_OF[self.kind], made, chosen, self._counted(chosen), other)
        right = [
            0 if one.batch is None else labels_right(one.batch.labels, truth.labels)
            for (one, own), truth in zip(known, chosen, strict=True)
            if own.labels is not None
        ]
        labels = (sum(right), sum(len(truth) for truth in chosen)) if right else None
        most = max(len(truth.inputs) for truth in self.truths)
        if most > examples and answer.counts is not None:
            # the examples nearest to a guess were taken for its truth: chance takes the nearest of all
            counts = answer.counts
            hits, share = counts.read, most / (most + max(1, counts.candidates))
            if counts.exact:  # a guess that equals a row is luck if others have that row, too
                hits, share = self._common(made, chosen) or (counts.exact, 0.0)
            luck = max(counts.by_chance, binomial_tail(hits, counts.judged, share))
            note = (
                f"Each guess is compared with the nearest of up to {most} examples of --data, which its chance allows"
                " for: figures are shares of the guesses, not of --data."
            )
            answer = replace(answer, counts=replace(counts, chance=min(1.0, luck)), notes=[*answer.notes, note])
        return replace(answer, labels=labels)

    def _common(self, made: Sequence[Reconstruction], chosen: Sequence[Batch]) -> tuple[int, float] | None:
        """Return (exact guesses, share of examples with duplicates), or ``None`` if an exact guess has no duplicate."""
        every = torch.cat([*(truth.inputs for truth in self.truths), self.others]).flatten(1).float()
        pairs = [(one.batch.inputs, own.inputs) for one, own in zip(made, chosen, strict=True) if one.batch is not None]
        equal = torch.cat([own[_same(own, guess).any(1)] for guess, own in pairs])
        _, place, times = torch.unique(every, dim=0, return_inverse=True, return_counts=True)
        once = (_same(equal, every).sum(1) < 2).any()
        return None if once else (len(equal), float((times[place] > 1).float().mean()))

    def _counted(self, truths: Sequence[Batch]) -> Counted:
        own = torch.cat([truth.inputs for truth in truths])
        pool = self.rest[~_same(self.rest, own).any(1)]
        pool = pool[
            torch.randperm(len(pool), generator=derive_generator(self.asked.seed, "distractors"))[:_DISTRACTORS]
        ]
        if self.kind is IMAGES:
            others = others_among(
                [(image, 0) for image in pool], truths, self.shape, _DISTRACTORS, seed=self.asked.seed
            )
            return partial(count_images, others=others)
        low, high = self.rest.amin(0), self.rest.amax(0)
        width = torch.where(high > low, high - low, torch.ones_like(high))

        def scaled(found: Sequence[Reconstruction], truths: Sequence[Batch]) -> tuple[Counts, Sequence[Shown]]:
            def unit(batch: Batch) -> Batch:
                return replace(batch, inputs=(batch.inputs.float() - low) / width)

            guesses = [one if one.batch is None else replace(one, batch=unit(one.batch)) for one in found]
            return count_rows(guesses, [unit(truth) for truth in truths], (pool - low) / width)

        return scaled

    def _words(self, made: Sequence[Reconstruction]) -> Answer:
        def words(tokens: Tensor | None) -> set[int]:
            return set() if tokens is None else set(tokens.flatten().tolist()) - {-1}

        texts = [[words(text) for text in truth.inputs] for truth in self.truths]
        guesses = [one.batch.inputs if one.words is None and one.batch is not None else one.words for one in made]
        read = [(set().union(*own), words(guess)) for own, guess in zip(texts, guesses, strict=True)]
        return scored_words(read, len(read), [words(text) for text in self.others], texts)

    def _unjudged(self, made: Sequence[Reconstruction]) -> Answer:
        guesses = [guess for one in made if one.batch is not None for guess in one.batch.inputs]
        values = [g.clamp(0, 1).numpy() if self.kind is IMAGES else g.flatten().tolist() for g in guesses]
        counts = Counts(unknown=len(guesses), failures=sum(one.batch is None for one in made))
        shown = [Shown(original=None, guess=value, reconstructed=False) for value in values[:8]]
        proven = sum(one.certainty is Certainty.PROVEN for one in made)
        notes = [f"{proven} of {len(made)} updates prove the guesses: no others give them."] if proven else []
        return Answer(kind=KIND_OF[self.kind], counts=counts, shown=shown, notes=notes)

    def record(self, going_on: str = "") -> AuditRecord:
        asked, size = self.asked, sum(sum(t.nbytes for t in one.upload.values()) for one in self.updates)
        said = list(dict.fromkeys(line for update in self.updates for line in update.said))
        lines = [
            Line(
                direction="client to server",
                kind="update",
                record=self.updates[0].name,
                key=name,
                what=f"parameter {tuple(value.shape)}",
                size=float(value.nbytes),
                messages=len(self.updates),
                rounds=[],
            )
            for name, value in list(self.updates[0].upload.items())[:_MOST_LINES]
        ]
        of = "the change" if self.updates[0].is_change else "the weights"
        many = f"the update {self.updates[0].name}" if len(self.updates) == 1 else f"{len(self.updates)} updates"
        files = _of(len(self.updates), "file")
        lede = f"{many[0].upper()}{many[1:]}: {of} in {files}, compared with the model that was sent."
        return AuditRecord(
            app=expanded(asked.after).stem,
            subject="update",
            lede=f"{lede} The code that trained it is not known.",
            answers=self.answers,
            lines=lines,
            volumes=[Volume(direction="client to server", kind="update", messages=len(self.updates), bytes=size)],
            facts=self.facts(),
            problems=self.problems,
            notes=said,
            going_on=going_on,
            environment=[
                ("fl-privacy", metadata.version("fl-privacy")),
                ("torch", torch.__version__),
                ("Attack", f"auto, budget {asked.budget}, seed {asked.seed}, {asked.device}"),
            ],
            seconds={"all": round(time.perf_counter() - self.started, 1)},
        )

    def facts(self) -> list[tuple[str, str]]:
        found, asked, shape = self.found, self.asked, "x".join(map(str, self.shape))
        numbers, steps, rates = zip(*((one.examples, one.steps, one.rate) for one in found), strict=True)
        exact = all(number == 1 for number in asked.steps or steps)
        exact &= all(abs(float(one.classes.sum()) - 1) < _WHOLE for one in found if one.classes is not None)
        doubt = "" if exact else "; after several steps or a filter, it can be 5 times too low and classes are rough"
        how, assumed = f"the output layer's bias{doubt}", f"a learning rate of {UNKNOWN_RATE}"
        return [
            ("Network", f"{type(self.network).__name__}, {self.num_classes} outputs"),
            ("Kind of examples", f"{self.kind.data}: the first layer is {self.entrance}"),
            ("Shape of an example", f"{shape}, {'given' if asked.shape else 'inferred'}"),
            ("Examples", _said(asked.examples, numbers, "the rank of a layer's change", "each below")),
            ("Local steps", _said(asked.steps, steps, "batch norm's counter, or the file", "1")),
            ("Learning rate" + " times steps" * (not asked.lr), _said(asked.lr, rates, how, assumed)),
            ("Classes", _classes(found[0].classes)),
        ]


def _same(some: Tensor, others: Tensor) -> Tensor:
    return torch.cdist(some.flatten(1).float(), others.flatten(1).float(), p=torch.inf) <= _SAME


def _of(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _said(given: Any, found: Sequence[float | None], how: str, otherwise: str) -> str:
    if given:
        return f"{', '.join(map(str, given)) if isinstance(given, Sequence) else given}, given"
    if not (known := [one for one in found if one is not None]):
        return f"not inferred; assumed: {otherwise}"
    return f"about {' to '.join(dict.fromkeys(f'{one:.3g}' for one in (min(known), max(known))))}, from {how}"


def _classes(shares: Tensor | None) -> str:
    if shares is None:
        return "not inferred before the attack"
    most = [k for k in shares.argsort(descending=True).tolist() if shares[k] > 0.05][:8]
    return ", ".join(f"{k} ({100 * float(shares[k]):.0f} %)" for k in most) + ", from the output layer's bias"


def _nearest(guess: Reconstruction, truth: SiteExamples, number: int, seed: int) -> Batch:
    """Return the ``number`` true examples nearest to the guesses, each once; random ones if the attack failed."""
    size = len(truth.inputs)
    labels = torch.zeros(size).long() if truth.labels is None else truth.labels
    order = torch.randperm(size, generator=derive_generator(seed, "truth")).tolist()
    if size > number and guess.batch is not None and guess.batch.inputs.shape[1:] == truth.inputs.shape[1:]:
        given, own = (
            F.layer_norm(x.flatten(1).float(), x[0].flatten().shape) for x in (guess.batch.inputs, truth.inputs)
        )
        order = torch.cdist(given, own).argsort(1).T.flatten().tolist() + order
    chosen = list(dict.fromkeys(order))[:number]
    return Batch(truth.inputs[chosen], labels[chosen])
