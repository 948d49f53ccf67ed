"""Turn Flower's differential privacy mods and strategies into functions to test."""

import importlib
import inspect
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import GaussianPrivacyEvent
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Strategy,
)
from flwr.serverapp.strategy.dp_adaptive_clipping import DifferentialPrivacyAdaptiveBase
from flwr.serverapp.strategy.dp_fixed_clipping import DifferentialPrivacyFixedClippingBase

from fl_privacy import checks
from fl_privacy.defenses import Defense
from fl_privacy.dp_check import Claim, Facts
from fl_privacy.dp_check.check import DpCheckRequest, tested
from fl_privacy.dp_check.claims import Stated, errors_alone
from fl_privacy.dp_check.draws import ByRound
from fl_privacy.dp_check.of_defense import on_defense
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.audit_protocol import numbers_of
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.records import NUM_EXAMPLES, PARTITION, PARTITIONS, ROUND, to_record, to_tensors
from fl_privacy.types import Tensors

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"

CLIPPING_NORM = "clipping_norm"

CLASSIC = (
    "LocalDpMod sets its noise by a formula that is proven for an epsilon below 1 only (Dwork and Roth 2014, theorem"
    " A.1); the recomputed epsilon holds at any size (Balle and Wang 2018, theorem 8)."
)
"""Note on the noise of Flower's ``LocalDpMod`` at a larger epsilon."""


def stated_by(subject: object, *, rounds: int = 1) -> Stated | None:
    """Return the DP claim of a mod or strategy of Flower, with facts such as its noise; ``None`` for other objects.

    A mod's claim protects from the server, a strategy's from receivers of the model. ``rounds``: number of rounds.
    """
    if isinstance(subject, LocalDpMod):
        if subject.epsilon and 0 < subject.delta < 1:  # the mod's own formula
            std = subject.sensitivity * math.sqrt(2 * math.log(1.25 / subject.delta)) / subject.epsilon
            facts = Facts(noise_multiplier=std / subject.clipping_norm, rounds=rounds)
        else:
            formula = "the noise: its formula has no value at this epsilon and delta"
            facts = Facts(noise_multiplier=None, rounds=rounds, missing=(formula,))
        promised = Claim(epsilon=subject.epsilon, delta=subject.delta, unit="client", by="LocalDpMod")
        notes = (CLASSIC,) if subject.epsilon >= 1 else ()
        return Stated(claim=promised, facts=facts, clip_norm=subject.clipping_norm, notes=notes)
    if not isinstance(subject, DifferentialPrivacyFixedClippingBase | DifferentialPrivacyAdaptiveBase):
        return None
    missing = ["that all clients count the same in the mean (a larger num-examples moves it by more than is noised)"]
    claim, accountant = None, getattr(subject, "accountant", None)
    if accountant is not None and isinstance(subject, DifferentialPrivacyFixedClippingBase):
        missing = []  # with an accountant, the strategy refuses replies that count differently
        if (most := accountant.config.max_epsilon) is not None:
            done = accountant.get_privacy_spent().num_releases
            all_clients, z = accountant.config.population_size, subject.noise_multiplier
            sampled = min(subject.num_sampled_clients, all_clients)
            event = GaussianPrivacyEvent(noise_multiplier=z, sample_size=sampled, population_size=all_clients)
            counts = range(1, max(0, rounds - done) + 1)
            exceeds = lambda count: accountant.would_exceed(event, count=count)  # noqa: E731
            if rounds := done + bisect_left(counts, True, key=exceeds):
                delta = accountant.config.target_delta
                claim = Claim(epsilon=most, delta=delta, rounds=rounds, by=type(subject).__name__)
            else:
                ends = "its accountant ends the training before the first round"
                missing = [f"a noise that fits into max_epsilon: {ends}"]
    multiplier, count = float(subject.noise_multiplier), getattr(subject, "clipped_count_stddev", None)
    if count is not None and multiplier != 0:  # 1 / z^2 of mean and noised count, two Gaussian releases, adds up
        multiplier = float((multiplier**-2 + count**-2) ** -0.5) if count > 0 else 0.0
    facts = Facts(noise_multiplier=multiplier, rounds=max(1, rounds), missing=tuple(missing), seen_by="model")
    return Stated(claim=claim, facts=facts, clip_norm=subject.clipping_norm)


def mechanism_of_mod(
    mod: Mod, *, config: Mapping[str, float] | None = None, metrics: Mapping[str, float] | None = None
) -> ByRound:
    """Turn ``mod`` into a function from a client's update to what the server receives.

    Each call is one round, in which the client is sent zeros and replies with the update. Metrics that the mod adds to
    the first reply are part of the result. ``config``: values that the server sends, such as ``clipping_norm``.
    ``metrics``: the client's metrics except ``num-examples``.
    """
    identify_process()
    records = _Records()
    context = Context(1, 1, {PARTITION: 0, PARTITIONS: 2}, RecordDict(), {})
    figures: list[str] | None = None

    def mechanism(update: Tensors, number: int) -> Tensors:
        nonlocal figures
        sent, own, _ = records.of(update)
        asked, stated = {ROUND: number, **(config or {})}, {NUM_EXAMPLES: 1, **(metrics or {})}
        with errors_alone("flwr"):
            reply = _reply(own, context, sent=sent, config=asked, metrics=stated, mod=mod)
        content = reply.content
        arrays = {n: t for record in content.array_records.values() for n, t in to_tensors(record).items()}
        said = {n: v for record in content.metric_records.values() for n, v in numbers_of(record).items()}
        figures = [n for n in said if n not in stated] if figures is None else figures
        added = {f"the metric {n}": torch.tensor(said.get(n, 0.0), dtype=torch.float64).nan_to_num() for n in figures}
        return {**arrays, **added}

    return ByRound(mechanism)


def together(mods: Sequence[Mod]) -> Mod:
    """Compose ``mods``, the outermost first, into one."""

    def around(inner: Mod, outer: Mod) -> Mod:
        def both(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
            return outer(message, context, lambda asked, given: inner(asked, given, call_next))

        return both

    return reduce(around, reversed(mods[:-1]), mods[-1])


def mechanism_of_strategy(
    strategy: Callable[[], Strategy] | Strategy, *, clients: int, mods: Sequence[Mod] = ()
) -> ByRound:
    """Return a function from one client's update to ``clients`` times the change that ``strategy`` makes to the model.

    The other clients reply with the arrays that they received. All clients report one example, so that the result is
    the sum of the updates. With adaptive clipping, it has an entry ``clipping_norm``: the logarithm of the next norm.

    ``strategy``: a strategy, or, if it changes between rounds (adaptive clipping), a function that makes one. ``mods``:
    mods of each client, such as ``fixedclipping_mod`` if clients clip.
    """
    checks.whole("clients", clients, at_least=1, example=10)
    identify_process()
    records, mod = _Records(), together(mods) if mods else None
    stated = {NUM_EXAMPLES: 1} if mods else {NUM_EXAMPLES: 1, "norm_bit": 0}

    def mechanism(update: Tensors, number: int) -> Tensors:
        subject = strategy if isinstance(strategy, Strategy) else strategy()
        sent, own, nothing = records.of(update)
        config = {ROUND: number, CLIPPING_NORM: float(getattr(subject, CLIPPING_NORM, math.inf))}
        with errors_alone("flwr"):
            replies = []
            for client in range(clients):
                context = Context(1, client + 1, {PARTITION: client, PARTITIONS: client + 1}, RecordDict(), {})
                arrays = ArrayRecord(dict(nothing)) if client else own
                replies.append(_reply(arrays, context, sent=sent, config=config, metrics=stated, mod=mod))
            # set the model that the round starts from, as ``configure_train`` does, without asking nodes
            if hasattr(subject, "current_arrays"):
                subject.current_arrays = sent
            if hasattr(subject, "_pending_events") and getattr(subject, "accountant", None) is not None:
                subject._pending_events[number] = None
            with blamed_on(type(subject).__name__):
                mean, _ = subject.aggregate_train(number, replies)
        if mean is None:
            raise UserError(
                f"{type(subject).__name__} is expected to aggregate {clients} replies, but returned none; give clients="
                " the number that it samples."
            )
        released = {name: tensor * clients for name, tensor in to_tensors(mean).items()}
        if isinstance(subject, DifferentialPrivacyAdaptiveBase):
            released[CLIPPING_NORM] = torch.tensor([math.log(subject.clipping_norm)], dtype=torch.float64)
        return released

    return ByRound(mechanism)


class _Records:
    """Cache of the last update as Flower records, since the conversion takes longer than the rest of a call."""

    def __init__(self) -> None:
        self._update: Tensors | None = None
        self._made: tuple[ArrayRecord, ArrayRecord, ArrayRecord] | None = None

    def of(self, update: Tensors) -> tuple[ArrayRecord, ArrayRecord, ArrayRecord]:
        if self._made is None or self._update is not update:
            zeros = {name: torch.zeros_like(value) for name, value in update.items()}
            self._update = update
            self._made = to_record(zeros), to_record(_not_nothing(update)), to_record(_not_nothing(zeros))
        sent, own, nothing = (ArrayRecord(dict(record)) for record in self._made)
        return sent, own, nothing


NOTHING = 1e-12  # size of a negligible update, since Flower's clipping divides by the norm and fails on zero


def _not_nothing(update: Tensors) -> Tensors:
    if any(bool(value.any()) for value in update.values()):
        return update
    return {name: value + NOTHING if number == 0 else value for number, (name, value) in enumerate(update.items())}


def _reply(
    arrays: ArrayRecord,
    context: Context,
    *,
    sent: ArrayRecord,
    config: Mapping[str, int | float],
    metrics: Mapping[str, int | float],
    mod: Mod | None,
) -> Message:
    asked = Message(RecordDict({ARRAYS: sent, CONFIG: ConfigRecord(dict(config))}), context.node_id, "train")

    def train(question: Message, _: Context) -> Message:
        return Message(RecordDict({ARRAYS: arrays, METRICS: MetricRecord(dict(metrics))}), reply_to=question)

    with blamed_on("A mod"):
        reply = mod(asked, context, train) if mod else train(asked, context)
    if reply.has_error():
        raise UserError(f"A mod is expected to answer a training message, but: {reply.error.reason}; see its log.")
    return reply


def located(name: str) -> Any:
    """Import the object ``module:attribute``, with the working directory on the path; ``UserError`` if missing."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(
            f"A subject is expected to be the folder of a run or an app, or module:attribute, but got {name!r}; put"
            " my_mod = LocalDpMod(1.0, 1.0, 1.0, 1e-5) into my_module.py, and name it as my_module:my_mod."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    found: Any = attempt(lambda: importlib.import_module(module))
    if isinstance(found, Failure):
        raise UserError(f"A module is expected, but {module!r} can't be imported ({found.reason}); run in its folder.")
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module} is expected to have {attribute!r}, but has not; see its names by dir({module}).")
        found = getattr(found, part)
    return found


def verdicts_on(
    subject: object, asked: DpCheckRequest, *, name: str = "", mods: Sequence[Any] = ()
) -> list[ClaimVerdict]:
    """Recompute and test each privacy claim that ``subject`` makes, with the settings ``asked``.

    ``subject``: a mod, a strategy, one of the package's defenses, a function from an update to the upload, or a
    function without arguments that makes one of these; ``UserError`` for others. ``name``: name of ``subject`` on
    pages; by default its own. ``mods``: mods of the clients under a strategy.
    """
    if inspect.isfunction(subject) and not inspect.signature(subject).parameters:
        made = attempt(subject)
        if isinstance(made, Failure):
            name = name or subject.__name__
            raise UserError(f"{name}() is expected to make a mechanism, but raised {made.reason}; repair it.")
        return verdicts_on(made, asked, name=name, mods=mods)
    name = name or getattr(subject, "__name__", type(subject).__name__)
    if str(getattr(subject, "__module__", "")).startswith("flwr.client."):
        raise UserError(
            f"{name} is expected to be a mod of flwr.clientapp.mod, but is one of flwr.client.mod, for messages of the"
            " old form, which are not checked; take the same name from flwr.clientapp.mod."
        )
    if isinstance(subject, Defense):
        return on_defense(subject, asked)
    if isinstance(subject, Strategy):
        sampled: Any = getattr(subject, "num_sampled_clients", 2)
        if not mods and isinstance(subject, DifferentialPrivacyClientSideFixedClipping):
            mods = (fixedclipping_mod,)
        if not mods and isinstance(subject, DifferentialPrivacyClientSideAdaptiveClipping):
            mods = (adaptiveclipping_mod,)
        # an adaptive norm would drift over the draws
        made = partial(deepcopy, subject) if isinstance(subject, DifferentialPrivacyAdaptiveBase) else subject
        mean = mechanism_of_strategy(made, clients=int(asked.clients or sampled), mods=mods)
        return [tested(name, mean, stated_by(subject, rounds=asked.rounds), asked)]
    arguments = 0
    if callable(subject) and not isinstance(subject, type):
        parameters = inspect.signature(subject).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = sum(p.kind in kinds and p.default is p.empty for p in parameters)
    if arguments not in (1, 3):
        raise UserError(
            f"{name} is expected to be a mod (message, context, call_next), a strategy, a defense of the package or a"
            f" function from an update to what is sent, but is a {type(subject).__name__}; wrap it into a function."
        )
    stated = stated_by(subject, rounds=asked.rounds)
    if arguments == 3:
        return [tested(name, mechanism_of_mod(subject), stated, asked)]  # type: ignore[arg-type]

    function: Any = subject

    def mechanism(update: Any) -> Tensors:
        with blamed_on(name):
            sent = function(update)
        return sent if isinstance(sent, Mapping) else {"value": sent}

    return [tested(name, mechanism, stated, asked)]
