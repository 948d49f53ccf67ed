"""Membership inference from a client's upload, by the losses of replayed examples."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_privacy.auditing.instrument.keras_layers import FromKeras, laid_out
from fl_privacy.auditing.instrument.program import Program, tensors_in
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.auditing.scenario_problem import NotAttackedError, WatchedReply, cleaned, names_in, reason_of
from fl_privacy.auditing.scenario_scores import TimeSpent
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.measure.aggregate_leakage import leaked_members
from fl_privacy.measure.answer import Answer
from fl_privacy.measure.roc import Separation, tpr_at

MOST, LEAST = 256, 8  # largest and smallest number of tested examples of a client


@dataclass(eq=False)
class _Losses:
    program: Program
    places: Mapping[int, int]
    model: nn.Module
    names: Mapping[str, str]

    @torch.no_grad()
    def of(self, examples: Sequence[Sequence[Tensor]], values: Mapping[str, Tensor]) -> np.ndarray:
        model = copy.deepcopy(self.model).eval()
        for module in (module for module in model.modules() if isinstance(module, nn.RNNBase)):
            module.flatten_parameters()
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, value in values.items():
            held = laid_out(model, self.names[name], value) if name in self.names else value
            if name in self.names and own[self.names[name]].shape == held.shape:
                own[self.names[name]].copy_(held)
        parameters, found = dict(model.named_parameters()), []
        for example in examples:
            kinds = {number: constant.dtype for number, constant in self.program.constants.items()}
            given = {number: example[place].to(kinds[number]) for number, place in self.places.items()}
            if any(isinstance(part, FromKeras) for part in model.modules()):
                given = {number: value.movedim(-1, 1) if value.dim() == 4 else value for number, value in given.items()}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                found.append(float(self.program.run(given, list(model.get_submodule("parts").children()), parameters)))
        return np.asarray(found)

    def each_takes(self, pool: Sequence[Sequence[Tensor]], values: Mapping[str, Tensor]) -> float:
        spent = TimeSpent()
        self.of(pool[:2], values)
        return max(spent() / 2, 1e-4)


def answered(ask: Callable[[], Answer], **about: Any) -> Answer:
    """Return the answer of ``ask``, or the reason for its failure, with the time taken and the fields ``about``."""
    started, made = time.perf_counter(), attempt(ask)
    answer = Answer(reason=reason_of(made)) if isinstance(made, Failure) else made
    return replace(answer, seconds=time.perf_counter() - started, **about)


def members_of(clients: Sequence[WatchedReply], seen: Watched | None, seconds: float) -> Answer:
    """Infer which client trained on which examples; ``NotAttackedError`` if no inference is possible.

    ``seen``: observed training step on one example, from which the app's loss is rebuilt. ``seconds``: time limit.
    """
    if len(clients) < 2:
        raise NotAttackedError("two clients are expected, to compare examples, but one alone was asked again; run more")
    losses = losses_from(seen)
    if not any(client.matched.parameters for client in clients):
        raise NotAttackedError("parameters are expected in uploads, but none was found; upload them unencoded")
    clients = [client for client in clients if all(value.isfinite().all() for value in after_upload(client).values())]
    if len(clients) < 2:
        raise NotAttackedError(f"two finite uploads are expected, but got {len(clients)}; lower the learning rate")
    if any(name in client.watched.gradients for client in clients for name in client.matched.withheld):
        raise NotAttackedError("trained parts are expected in uploads, but some are withheld; upload all of them")
    pools = [list(islice(singles_of(client.watched), MOST)) for client in clients]
    number = min(MOST, *(len(pool) for pool in pools))
    if number < LEAST:
        raise NotAttackedError(f"{LEAST} examples of each client are expected, but got {number}; use more data")
    each = losses.each_takes(pools[0], clients[0].watched.before)
    number = max(LEAST, min(number, int(seconds / (4 * len(clients) * each))))
    pools = [pool[:number] for pool in pools]
    labels = [torch.cat(client.watched.labels).tolist() if client.watched.labels else [] for client in clients]
    classes = [known[:number] if len(known) >= number else None for known in labels]
    found: list[list[np.ndarray]] = [[], [], [], []]
    for place, client in enumerate(clients):
        values = {**client.watched.before, **after_upload(client)}
        for kind, examples in enumerate(_alike(pools, classes, place)):
            before = losses.of(examples, client.watched.before)
            found[kind].append(before - losses.of(examples, values))
            found[2 + kind].append(-before)
    inside, outside, known, unknown = (np.concatenate(parts) for parts in found)
    if min(len(inside), len(outside)) < LEAST:
        raise NotAttackedError(f"{LEAST} pairs of equal class are expected, but got {len(inside)}; use more data")
    alike = " of the same class" if all(one is not None for one in classes) else ""
    said = f"{len(clients)} uploads of the whole training, {len(inside)} pairs of an own and another example{alike}"
    return separated(inside, outside, known, unknown, said)


def singles_of(seen: Watched) -> Iterator[list[Tensor]]:
    """Yield the tensors (1, ...) of each loaded example; if epochs were observed, only those of the first epoch."""
    batches = ([t for t in tensors_in(batch) if t.dim()] for batch in seen.batches)
    singles = ([t[k : k + 1] for t in batch] for batch in batches for k in range(min(map(len, batch), default=0)))
    yield from islice(singles, sum(seen.passes.values()) or None)


def separated(inside: np.ndarray, outside: np.ndarray, known: np.ndarray, unknown: np.ndarray, uploads: str) -> Answer:
    """Measure membership inference by how much training decreases each example's loss.

    ``inside``, ``outside``: decreases of members and non-members. The answer has the TPR at 1 % and 0.1 % FPR (Carlini
    et al. 2022). The control uses the negated losses before training instead: ``known`` of members, ``unknown`` of
    non-members. ``uploads``: description of the uploads. ``NotAttackedError`` if a loss is not finite.
    """
    if not all(np.isfinite(part).all() for part in (inside, outside, known, unknown)):
        raise NotAttackedError("finite losses are expected, but that of an example is not; lower the learning rate")
    found, said = Separation(positives=inside, negatives=outside), list[str]()
    for rate in (0.01, 0.001):
        at = tpr_at(found, rate)
        few = f"not measured (needs {round(1 / rate):,} non-members, has {len(outside)})"
        figure = few if at is None else f"{at.value:.3f} ({at.low:.3f} to {at.high:.3f})"
        said.append(f"at {100 * rate:g} % FPR {figure}")
    answer = leaked_members(inside, outside, (known, unknown), uploads)
    return replace(answer, notes=(*answer.notes, f"TPR (95 % interval): {'; '.join(said)}."))


def _alike(
    pools: Sequence[list[list[Tensor]]], classes: Sequence[list[int] | None], place: int
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return examples of client ``place``, and equally many of the same classes from others; ``pools``: by client."""
    following = [(place + k) % len(pools) for k in range(1, len(pools))]
    known = [[0] * len(pool) for pool in pools] if None in classes else [one or [] for one in classes]
    theirs: dict[int, list[list[Tensor]]] = {}
    for k in range(max(len(pool) for pool in pools)):  # of all the others in turn
        for other in following:
            if k < len(pools[other]):
                theirs.setdefault(known[other][k], []).append(pools[other][k])
    labeled = zip(pools[place], known[place], strict=True)
    pairs = [(example, theirs[label].pop(0)) for example, label in labeled if theirs.get(label)]
    return [own for own, _ in pairs], [other for _, other in pairs]


def after_upload(client: WatchedReply) -> dict[str, Tensor]:
    """Map each observed parameter name to its value after the client's training, computed from the upload.

    An uploaded gradient counts as one step of gradient descent with rate 0.01.
    """
    before, uploaded = client.watched.before, client.tensors()
    if client.matched.shares == "weights":
        return uploaded
    sign = 1.0 if client.matched.shares == "delta" else -0.01
    return {name: before[name].float() + sign * change for name, change in uploaded.items() if name in before}


def losses_from(seen: Watched | None) -> _Losses:
    """Rebuild the app's loss on one example from an observed step; ``NotAttackedError`` if none was recorded."""
    if seen is None:
        raise NotAttackedError("a step on one example is expected, for its loss, but none was seen; use a DataLoader")
    program = seen.program
    if program is None or not seen.batches:
        raise NotAttackedError("a loss on examples from a DataLoader is needed, but none was seen; use a DataLoader")
    batch = [t for t in tensors_in(seen.batches[0]) if t.dim()]
    places: dict[int, int] = {}
    for number, value in program.constants.items():
        if not value.dim() or len(value) != 1:
            continue
        place = next((k for k, t in enumerate(batch) if t.shape == value.shape and torch.equal(t, value.to(t))), None)
        if place is not None:
            places[number] = place
        elif value.numel() > 1:
            raise NotAttackedError(
                "loaded batches are expected as the network's inputs, but are changed outside of it, so that the loss"
                " on one example is not known; change them in forward()"
            )
    if not places:
        raise NotAttackedError("loaded batches are expected as the network's inputs, but differ; pass them on")
    parts = tuple(cleaned(part) for part in program.parts)
    model = nn.ModuleDict({"parts": nn.ModuleList(parts)})
    names = names_in(seen, program, model)
    return _Losses(replace(program, parts=parts).renamed(names), places, model, names)
