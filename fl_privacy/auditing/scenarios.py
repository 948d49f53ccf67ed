"""Scenarios of an audit, from the worst case to the app's real uploads, all made by the app's own code."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.attack import within
from fl_privacy.attacks.auto.sub_attacks import EVALUATIONS
from fl_privacy.attacks.exact.first_layer import AnalyticInversion, agreed_ratios, find_first_layer
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.auditing.instrument.program import ReplayModel, tensors_in
from fl_privacy.auditing.instrument.watch import OnlyExamples, Watched
from fl_privacy.auditing.scenario_final import of_final_model
from fl_privacy.auditing.scenario_graphs import Graph, graph_of, nodes_of, score_graphs, score_nodes
from fl_privacy.auditing.scenario_members import answered, members_of
from fl_privacy.auditing.scenario_problem import (
    NotAttackedError,
    StepProblem,
    WatchedReply,
    read_problem,
    reason_of,
    seen_by_site,
)
from fl_privacy.auditing.scenario_scores import UNSURE, TimeSpent, score, seconds_of_evaluation
from fl_privacy.auditing.scenario_training import examples_of, observed_training, once, pool_of, sampled
from fl_privacy.auditing.scenario_words import words_in_training, words_of, words_of_uploads
from fl_privacy.auditing.server_step import PLAIN_MEAN
from fl_privacy.effects import Description
from fl_privacy.federation import ServerPlan
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files import shipped
from fl_privacy.measure.aggregate_leakage import ClassTrace, leaked_classes, leaked_words
from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.runs.another_site import MOST_BY_SITES, SITE_NOTE
from fl_privacy.runs.app import MOST_IMAGES
from fl_privacy.types import Observation, Reconstruction

logger: logging.Logger = logging.getLogger(__name__)

SOLVED, KNOWN = 1e-3, 0.01
"""Largest residual of solved equations relative to their right side, and relative distance of an input from a known
one."""

LEAST_SECONDS, LEAST_EVALUATIONS = 3.0, 25
"""Smallest attack time for an upload, in seconds of a standard processor, and smallest number of evaluations."""

MEMBER_SECONDS, LEAST_ASKED = 30.0, 20.0
"""Seconds for the losses of single examples, and smallest number for asking clients for uploads of single examples."""

FEW, ALONE = (2, 3, 4), "Expected more than 1 value per channel"
"""Numbers of examples that are tried if no single one is taken, and the words by which batch norm refuses one."""

MOST_IN_A_BATCH = 64  # largest number of examples in an attacked step

APART = "its examples do not come from a DataLoader, so one can't be singled out"

SCENARIOS: Mapping[str, str] = shipped(__file__, "scenarios.yaml")["network"]  # name -> title, the worst case first

Ask = Callable[[OnlyExamples | None], WatchedReply | Failure]
"""(examples to use; ``None``: all) -> a client's repeated answer, or the reason for none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedClient(WatchedReply):
    """A client's first reply. ``ask`` repeats it on chosen examples; ``ask_later`` repeats the ``latest`` reply."""

    number: int
    ask: Ask
    ask_later: Ask | None
    latest: WatchedReply

    def inputs(self) -> list[Tensor]:
        found: dict[tuple[int, ...], list[Tensor]] = {}
        entered = " ".join(self.watched.entered)
        for tensor in tensors_in([*(self.watched.batches or self.watched.inputs)]):
            shape, kind = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            whole = len(shape) > 1 and f"{str(shape).partition(',')[2]} {kind}" in entered  # such as pixels
            if tensor.dim() and (tensor.is_floating_point() or whole):
                found.setdefault(shape[1:], []).append(tensor.float() if whole else tensor)
        return [torch.cat(parts) for parts in found.values()]


def scenario_of(name: str, *, uploads: str = "", examples: int = 1) -> Scenario:
    """Return the scenario ``name`` of an audit; ``uploads``: words for its uploads, each of ``examples`` examples."""
    leaves = name not in ("evaluation", "gradient")
    return Scenario(name=name, title=SCENARIOS[name], uploads=uploads, leaves=leaves, examples=examples)


def _not_attacked(name: str, reason: str) -> Answer:
    return Answer(scenario=scenario_of(name), reason=reason)


@dataclass(eq=False)
class Scenarios:
    """Attacks on an app's clients in scenarios of growing difficulty.

    Attributes:
        sites: number of all clients.
        server: rule by which the server applies the mean update, or the reason why it does not.
        evaluated: batches that clients loaded for evaluation.
        attack_within: function from a number of evaluations to an attack that makes at most as many.
        tell: function that gets messages on the progress.
        defense: defense of uploads, which the attacker knows.
    """

    clients: Sequence[AskedClient]
    attack: ReconstructionAttack
    victims: int = 8
    seed: int = 0
    seconds: float = 600.0
    sites: int = 0
    server: ServerPlan | str = PLAIN_MEAN
    evaluated: Sequence[Any] = ()
    attack_within: Callable[[int], ReconstructionAttack] | None = None
    tell: Callable[[str], None] = field(default=lambda text: None, repr=False)
    defense: Description | None = None
    _single: Watched | None = field(default=None, init=False, repr=False)
    _batch: Answer | None = field(default=None, init=False, repr=False)
    _text: bool = field(default=False, init=False, repr=False)

    def aggregate(self, traces: Sequence[ClassTrace]) -> Iterator[Answer]:
        """Yield results on what uploads after whole trainings reveal, such as classes; call it after ``attack_all``.

        ``traces``: change of the output bias and class counts of each client whose labels were observed.
        """
        yield leaked_classes(traces)
        if read := [words for client in self.clients if (words := words_in_training(client))]:
            yield leaked_words(read)
        self.tell("Comparing losses of clients' examples")
        if self.clients:
            yield answered(lambda: members_of(self.clients, self._single, MEMBER_SECONDS), question="members")
        self.tell("Asking the model that everybody gets")
        latest = [client.latest for client in self.clients]
        yield from of_final_model(
            self.clients, latest, self._single, self.evaluated, MEMBER_SECONDS, server=self.server
        )

    def attack_all(self) -> Iterator[Answer]:
        spent = TimeSpent()
        if not self.clients:
            return
        first = self.clients[0].watched
        kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
        if first.training and any(isinstance(each, kinds) for part in first.modules for each in part.modules()):
            still = attempt(lambda: self._singles(later=False, evaluation=True))
            found, reason = still if not isinstance(still, Failure) else ([], reason_of(still))
            yield self._singly("evaluation", found, reason)
        singles = attempt(lambda: self._singles(later=False))
        found, reason = singles if not isinstance(singles, Failure) else ([], reason_of(singles))
        seen = [again.watched for _, again in found if again.watched.program and again.watched.batches]
        self._single = next((w for w in seen if all(len(t) == 1 for t in tensors_in(w.batches[0]) if t.dim())), None)
        late = f"no time was left of {self.seconds:.0f} seconds; --seconds gives more"
        for name in ("gradient", "one"):
            if name != "one" and spent() > max(self.seconds, LEAST_ASKED):  # uploads are what the audit is of
                yield _not_attacked(name, late)
                continue
            answer = self._singly(name, found, reason)
            if ALONE in answer.reason and found:  # by PyTorch, where the app's own library takes a single example
                again = attempt(lambda: self._singles(later=False, fewest=FEW[0]))
                found, reason = again if not isinstance(again, Failure) else ([], reason_of(again))
                answer = self._singly(name, found, reason)
            yield answer
        steps: dict[str, Callable[[], Answer]] = {
            "site": lambda: self._of_site(found, reason),
            "batch": self._one_batch,
            "all": self._whole_training,
        }
        if any(client.ask_later is not None for client in self.clients):
            steps["later"] = lambda: self._singly("later", *self._singles(later=True))
        for name, step in steps.items():
            if spent() > self.seconds:
                yield self._of_training(late) if name == "all" else _not_attacked(name, late)
                continue
            made = attempt(step)
            yield _not_attacked(name, reason_of(made)) if isinstance(made, Failure) else made

    def _singles(
        self, *, later: bool, fewest: int = 1, evaluation: bool = False
    ) -> tuple[list[tuple[AskedClient, WatchedReply]], str]:
        found: list[tuple[AskedClient, WatchedReply]] = []
        reason, spent = "", TimeSpent()
        for number in range(self.victims):
            client = self.clients[number % len(self.clients)]
            ask = client.ask_later if later else client.ask
            if ask is None:
                continue
            if number and (taken := spent()) > max(self.seconds / len(SCENARIOS), LEAST_ASKED):
                reason = reason or f"a client takes {taken / number:.0f} seconds to answer"
                break
            self.tell(f"Asking clients for uploads of one example: {number} of {self.victims}")
            again = _on_one(ask, number // len(self.clients), fewest=fewest, evaluation=evaluation)
            if isinstance(again, Failure):
                fails = f"the app's code fails on a single example ({again.reason})"
                reason = fails if client.watched.loaded else f"{APART}: {fails}"
                logger.info("Client %d: %s", client.number, again.reason)
                if not found:
                    break
                continue
            if not again.watched.cut or not again.watched.steps:
                reason = "its code makes no step on a single example" if again.watched.cut else APART
                break
            found.append((client, again))
        return found, reason

    def _of_site(self, found: Sequence[tuple[AskedClient, WatchedReply]], reason: str) -> Answer:
        others = self.sites - 1
        if others < 1:
            return _not_attacked("site", "one client takes part, so no other site looks; run more clients")
        if isinstance(self.server, str):
            return _not_attacked("site", self.server)
        if others > 1 and found:
            asked = [(client, client.ask(OnlyExamples(number=others))) for client, _ in found[: len(self.clients)]]
            summed = [(client, again) for client, again in asked if isinstance(again, WatchedReply)]
            reason = f"the app's code makes no single step on {others} examples"
            found = [(c, again) for c, again in summed if again.watched.loaded == others and again.watched.steps == 1]
        if not found:
            return _not_attacked("site", reason)
        found = found[:MOST_BY_SITES]
        turned = [again for _, again in (*found[1:], *found[:1])] if len(found) > 1 else list(self.clients[-1:])
        seen = [
            (c, seen_by_site(again, own, others, self.server)) for (c, again), own in zip(found, turned, strict=True)
        ]
        answer = self._singly("site", seen, reason)
        whose = "the only other client's uploads" if others == 1 else f"means over {others} other clients' uploads"
        said = f"{whose}, one example each in one step"
        scenario = replace(answer.scenario, uploads=said, source=said)
        return replace(answer, observer="another_site", scenario=scenario, notes=(*answer.notes, SITE_NOTE))

    def _singly(self, name: str, found: Sequence[tuple[AskedClient, WatchedReply]], reason: str) -> Answer:
        if not found:
            return _not_attacked(name, reason or "no client answered")
        started, asked = time.perf_counter(), found
        leaves = scenario_of(name).leaves

        def many() -> str:
            return f"{len(found)} {'upload' if leaves else 'gradient'}{'s' * (len(found) != 1)}"

        def attacked() -> Answer:
            nonlocal found
            if (words := self._words(found, uploaded=leaves)) is not None:
                return words
            found = self._in_time(found, uploaded=leaves)
            return self._attacked(found, uploaded=leaves)

        self.tell(f"Attacking {many()} of one example{' each' * (len(found) > 1)}")
        answer = attempt(attacked)
        if isinstance(answer, Failure):
            return _not_attacked(name, reason_of(answer))
        steps = max(1, *(again.watched.steps for _, again in found))
        size = max(1, *(again.watched.loaded // steps for _, again in found))
        of = "one example" if size == 1 else f"{size} examples, as its code (such as batch norm) takes no fewer,"
        clients = len({client.number for client, _ in found})
        within_steps = "in one step" if steps == 1 else f"in {steps} steps"
        said = f"{many()} of {clients} client{'s' * (clients != 1)}, each of {of} {within_steps}"
        scenario = scenario_of(name, uploads=said, examples=size)
        cut = [f"Time allowed attacks on {len(found)} of {len(asked)}; raise --seconds for more."] * (found != asked)
        return replace(answer, scenario=scenario, seconds=time.perf_counter() - started, notes=(*answer.notes, *cut))

    def _in_time(
        self, found: Sequence[tuple[AskedClient, WatchedReply]], *, uploaded: bool
    ) -> Sequence[tuple[AskedClient, WatchedReply]]:
        """Return as many of the replies as the fewest evaluations of each leave time for, but at least the first."""
        client, again = found[0]
        observed = read_problem(again.watched, client.inputs()).observed_reply(0, again, uploaded=uploaded)
        part = 3 if uploaded else len(SCENARIOS)  # most time is for uploads
        limit = max(LEAST_SECONDS * len(found), self.seconds / part)
        return found[: max(1, int(limit / LEAST_EVALUATIONS / seconds_of_evaluation(observed)))]

    def _words(self, found: Sequence[tuple[AskedClient, WatchedReply]], *, uploaded: bool) -> Answer | None:
        for infer in (words_of, words_of_uploads):
            if (words := infer(found, uploaded=uploaded)) is not None:
                self._text = True
                return words
        return None

    def _attacked(self, found: Sequence[tuple[AskedClient, WatchedReply]], *, uploaded: bool) -> Answer:
        problems = [read_problem(again.watched, client.inputs()) for client, again in found]
        observations = []
        for number, ((_, again), problem) in enumerate(zip(found, problems, strict=True)):
            observed, shared = problem.observed_reply(number, again, uploaded=uploaded), problems[0]
            observed = observed.given(defense=self.defense) if uploaded else observed
            own = problem.whole or bool(problem.model.fixed_inputs)  # its network holds the example's other inputs
            same = not own and problem.input_shape == shared.input_shape
            observations.append(replace(observed, model=shared.model, loss=shared.loss) if same else observed)
        if graphs := all(problem.model.kinds for problem in problems):
            edges = list[Graph | Failure]()
            for observation, problem in zip(observations, problems, strict=True):
                with within(self._seconds_each(len(observations))):
                    edges.append(graph_of(observation, problem.model.kinds))
            whole = score_graphs(problems, edges)
            if whole.above_chance and not any(isinstance(each, Failure) for each in edges):
                return whole
        guesses, hurried = self._reconstructions(observations)
        if all(guess.batch is None for guess in guesses):
            if graphs and whole.above_chance:
                return whole
            raise NotAttackedError((guesses[0].failure or "the attack gave no guess").partition(" (")[0].rstrip("."))
        loaded = [tensor for client, _ in found for tensor in client.inputs()]
        answer = score_nodes(problems, guesses, loaded) if graphs else score(problems, guesses, loaded, self.seed)
        if graphs and _read(whole) >= max(1, _read(answer)):
            return whole
        said = whole.notes[1:] if graphs else ()
        return replace(answer, notes=(*_notes(problems[0], observations[0], guesses), *said, *hurried))

    def _seconds_each(self, among: int) -> float:
        return max(LEAST_SECONDS, self.seconds / len(SCENARIOS) / among)

    def _reconstructions(self, observations: Sequence[Observation]) -> tuple[list[Reconstruction], tuple[str, ...]]:
        attack, said = self._attack_for(observations)
        if observations[0].num_classes == 1 and observations[0].knowledge.labels is not None:
            return [self._whole(one, attack) for one in observations], said
        alike = len({id(o.model) for o in observations}) == 1
        groups = [list(observations)] if alike else [[o] for o in observations]
        return [one for group in groups for one in attack(group, seed=self.seed)], said

    def _attack_for(self, observations: Sequence[Observation]) -> tuple[ReconstructionAttack, tuple[str, ...]]:
        limit = self._seconds_each(len(observations))
        number = max(LEAST_EVALUATIONS, int(limit / seconds_of_evaluation(observations[0])))
        if self.attack_within is None or number >= EVALUATIONS["quick"]:
            return self.attack, ()
        return self.attack_within(number), (
            f"Time allowed {number} of {EVALUATIONS['quick']} evaluations an upload; raise --seconds for a fair test.",
        )

    def _whole(self, observation: Observation, attack: ReconstructionAttack) -> Reconstruction:
        assert isinstance(observation.model, ReplayModel)
        if observation.model.kinds and (nodes := nodes_of(observation, observation.model.kinds)) is not None:
            return nodes
        solved = AnalyticInversion()([observation], seed=self.seed)[0]
        if solved.failure is None and solved.loss < SOLVED:
            return replace(solved, member="the first dense layer's equations")
        apart, number = entered_apart(observation), observation.upload.num_examples
        enough = solved.batch is not None and len(apart) >= number
        made = solved if enough else attack([observation], seed=self.seed)[0]
        if made.batch is None or not len(apart):
            return made
        batch = replace(made.batch, inputs=torch.cat([apart.to(made.batch.inputs), made.batch.inputs])[:number])
        return replace(made, batch=batch, member="rows of neurons that see one input alone")

    def _one_batch(self) -> Answer:
        started = time.perf_counter()
        self.tell("Attacking an upload of one batch")
        client = self.clients[0]
        again = client.ask(OnlyExamples(number=None))
        if isinstance(again, Failure):
            again = client.ask(None)
        if isinstance(again, Failure):
            return _not_attacked("batch", f"the app's code fails on a single batch ({again.reason})")
        size = again.watched.loaded if again.watched.cut else 0
        if not size and again.watched.program is not None:
            size = max((len(t) for t in again.watched.program.constants.values() if t.dim()), default=0)
        if (steps := again.watched.steps) != 1:
            return _not_attacked("batch", f"one step on a batch is expected, but its code makes {steps}; make one")
        if size > MOST_IN_A_BATCH:
            return _not_attacked("batch", f"a batch has {size} examples; beyond {MOST_IN_A_BATCH} it is not attacked")
        answer = self._words([(client, again)], uploaded=True) or self._attacked([(client, again)], uploaded=True)
        uploads = f"of {size} examples in one step"
        scenario = scenario_of("batch", uploads=f"1 upload of 1 client, {uploads}", examples=max(1, size))
        answer = replace(answer, scenario=scenario, seconds=time.perf_counter() - started)
        self._batch = answer if size == client.watched.loaded and client.watched.steps == 1 else None
        return answer

    def _whole_training(self) -> Answer:
        started = time.perf_counter()
        if self._batch is not None:
            return self._of_training(answer=self._batch)
        if not self.clients[0].matched.parameters:
            return self._of_training("no parameter of the network is in what it sends; sums over clients are not tried")
        if self._text:
            return self._of_training("its texts are mixed; the words of all of them together are asked about below")
        self.tell("Attacking what the training itself uploads")
        made = attempt(self._training_attacked)
        if isinstance(made, Failure):
            return self._of_training(reason_of(made))
        return replace(self._of_training(answer=made), seconds=time.perf_counter() - started)

    def _of_training(self, reason: str = "", answer: Answer | None = None) -> Answer:
        watched = self.clients[0].watched
        said = f"{watched.loaded or 'all its'} examples in {watched.steps} step{'s' * (watched.steps != 1)}"
        scenario = scenario_of("all", uploads=f"the training's own upload, of {said}", examples=max(1, watched.loaded))
        scenario = replace(scenario, source=f"the app's own upload of {said}")
        return replace(answer or Answer(reason=reason), scenario=scenario)

    def _training_attacked(self) -> Answer:
        client, pairs, own = self.clients[0], list[tuple[StepProblem, Observation]](), list[Tensor]()
        pool, number, assumed = None, 0, ""
        for victim, each in enumerate(self.clients[:2]):
            again = each.ask(OnlyExamples(number=min(examples_of(each.watched) or MOST_IMAGES, MOST_IMAGES)))
            if isinstance(again, Failure):
                if victim:
                    break
                raise NotAttackedError(
                    f"the app's code fails on a few of its examples ({again.reason}); let it train on a few"
                )
            problem = read_problem(again.watched, each.inputs())
            if not victim:
                own = once(each.watched, each.inputs())
                pool = pool_of(problem, own)
                number = len(problem.truth) if pool is None else min(len(pool), MOST_IMAGES)
            if len(problem.truth) > MOST_IMAGES:
                of = "nodes of graphs together" if problem.model.kinds else "examples"
                raise NotAttackedError(
                    f"{MOST_IMAGES} {of} at most are expected, but got {len(problem.truth)}; take fewer"
                )
            if victim and pool is None and len(problem.truth) != number:
                break
            observed, said = observed_training(each, problem, number, victim)
            assumed = assumed or said
            pairs.append((problem, observed.given(defense=self.defense)))
        problems, observations = [problem for problem, _ in pairs], [observed for _, observed in pairs]
        guesses, hurried = self._reconstructions(observations)
        guess, problem = replace(guesses[0], **UNSURE), problems[0]
        if guess.batch is None:
            raise NotAttackedError((guess.failure or "the attack gave no guess").partition(" (")[0].rstrip("."))
        others = [tensor for other in self.clients[1:] for tensor in other.inputs()]
        total = max(number, examples_of(client.watched), 0 if pool is None else len(pool))
        if pool is not None:
            problem = sampled(problem, pool, others, guess, number=number, seed=self.seed)
        # other clients' examples may differ in kind, which would make guesses at no example look right
        loaded = own if total > number else [*own, *others]
        answer = score([problem], [guess], loaded, self.seed, *guesses[1:])
        drawn = f" of {total} examples: any that equal a guess, then random ones"
        sample = drawn if total > number else " examples"
        scored = f"{assumed} Guesses are compared with {number}{sample}."
        return replace(answer, notes=(*_notes(problems[0], observations[0], guesses), scored, *hurried))


def _on_one(ask: Ask, number: int, *, fewest: int = 1, evaluation: bool = False) -> WatchedReply | Failure:
    """Return a client's reply to training on example ``number`` or on a few, else in each epoch; or the first error."""
    first: Failure | None = None
    for few, repeats in product((few for few in (1, *FEW) if few >= fewest), (False, True)):
        again = ask(OnlyExamples(first=few * number, number=few, repeats=repeats, evaluation=evaluation))
        if not isinstance(again, Failure):
            return again
        first = first or again
    assert first is not None
    return first


def _read(answer: Answer) -> int:
    return answer.counts.read if answer.counts is not None and answer.above_chance else 0


def _notes(problem: StepProblem, observation: Observation, guesses: Sequence[Reconstruction]) -> tuple[str, ...]:
    loss = f"The loss is {problem.loss.name}; the attacker is given no labels."
    loss = "The attacker is given the loss's other inputs, such as labels." if problem.whole else loss
    said = [*problem.notes, loss]
    if missing := len(observation.sent.parameters) - len(observation.upload.tensors):
        of = len(observation.sent.parameters)
        said.append(f"{missing} of {of} parameters do not leave the client, or do not train.")
    by = sorted({guess.member for guess in guesses if guess.member})
    return (*said, *(f"The best guesses are those of the attack: {member}." for member in by))


def entered_apart(observation: Observation) -> Tensor:
    """Return inputs (N, ...) computed from first-layer neurons that only one example activates, except known ones."""
    model = observation.model
    assert isinstance(model, ReplayModel)
    known = [value for n in model.fixed_inputs if (value := model.program.constants[n]).shape[1:] == model.shapes[0]]
    if observation.plan.optimizer != "sgd":
        return torch.empty(0, *observation.input_shape)
    layer = attempt(lambda: find_first_layer(model, observation.sent, observation.input_shape))
    gradient = attempt(lambda: as_gradient(observation))
    if isinstance(layer, Failure) or isinstance(gradient, Failure) or not {layer.weight, layer.bias} <= gradient.keys():
        return torch.empty(0, *observation.input_shape)
    ratios = agreed_ratios(gradient[layer.weight], gradient[layer.bias])
    found = layer.pixels(ratios).reshape(-1, *observation.input_shape).float()
    given = model.looked_for(torch.cat(known)).flatten(1) if known else found.flatten(1)[:0]
    return found[(torch.cdist(found.flatten(1), given) > KNOWN * given.norm(dim=1)).all(1)]
