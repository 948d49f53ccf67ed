"""A mod that checks models and SecAgg+ requests before the client's app gets them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from fl_privacy.defenses.guard import ModelGuard
from fl_privacy.federation.replies import Failure, attempt, expect_sound
from fl_privacy.flower.audit_protocol import is_evaluation, is_training
from fl_privacy.flower.inside.legacy import RECORD_KEY_CONFIGS, SecAggKey, SecAggStage
from fl_privacy.flower.records import CLIENT_RAISED, UNFIT, load_state, read_state, save_state
from fl_privacy.flower.reply_cache import Answers, asked_of, digest_of_records
from fl_privacy.types import Batch, ModelState

OwnExamples = Callable[[Context], Batch]
"""Function from a node's context to some of its examples, of which the guard passes the first through a model."""


def guard_mod(model: nn.Module, examples: OwnExamples | None = None, *, guard: ModelGuard | None = None) -> Mod:
    """Build a mod that refuses crafted models, for ``ClientApp(mods=[guard_mod(...), ...])``, listed before the others.

    The reply is then an error of one line. Listed before ``secaggplus_mod``, it also refuses requests that would unmask
    an upload (:func:`secagg_refusal`). The last accepted model is kept in ``context.state``, to compare the next one
    with it. ``model``: architecture agreed on; arrays that do not fit it are refused. ``guard``: settings of the
    checks.

    ``examples``: function that returns at least two of the node's examples; ``None`` checks the weights alone. Outside
    of simulations, only the first model of each kind of message and round is evaluated on them. The reason of a refusal
    then goes to the node's log, not to the server, since it depends on the examples.
    """
    return _Guarding(model, examples, (guard or ModelGuard()).agreeing_on(model))


@dataclass(frozen=True, eq=False)
class _Guarding:
    model: nn.Module
    examples: OwnExamples | None
    guard: ModelGuard

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not (is_training(message) or is_evaluation(message)):
            return call_next(message, context)
        found, code = attempt(lambda: self._refusal(message, context)), UNFIT
        if found is None:
            found, code = attempt(lambda: self._look(message, context)), CLIENT_RAISED
        reason = found.reason.partition("Error: ")[2] if isinstance(found, Failure) else found
        if reason is not None:
            return Message(Error(code, f"The guard refused: {reason.rstrip('.')}."), reply_to=message)
        return call_next(message, context)

    def _sent(self, message: Message) -> ModelState | None:
        there = any(message.content.array_records.values())
        return read_state(message.content, self.model, whole=True) if there else None

    def _refusal(self, message: Message, context: Context) -> str | None:
        if reason := secagg_refusal(message.content.config_records.get(RECORD_KEY_CONFIGS)):
            return reason
        if (sent := self._sent(message)) is None:
            return None
        expect_sound({**sent.parameters, **sent.buffers})
        return self.guard.refusal_of_weights(sent, load_state(context.state).tensors)

    def _look(self, message: Message, context: Context) -> str | None:
        if (sent := self._sent(message)) is None:
            return None
        if (examples := self.examples) is not None:
            answers = Answers(context)
            if answers.forgets:
                if reason := self.guard.refusal(self.model, sent, examples(context), {}):
                    return reason
            else:
                kind, round = asked_of(context, message)
                models = digest_of_records(kind, RecordDict(dict(message.content.array_records)))

                def work() -> RecordDict:
                    self.guard.expect_honest(self.model, sent, examples(context), {})
                    return RecordDict()

                answers.once([f"guard.{kind}"], round, models, work)
        if is_training(message):
            kept = load_state(context.state)
            save_state(context.state, replace(kept, tensors={**kept.tensors, **self.guard.remembered(sent)}))
        return None


def secagg_guard_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Mod listed before ``secaggplus_mod`` that refuses requests which break SecAgg+; see :func:`secagg_refusal`."""
    if reason := secagg_refusal(message.content.config_records.get(RECORD_KEY_CONFIGS)):
        return Message(Error(UNFIT, f"The guard refused: {reason.rstrip('.')}."), reply_to=message)
    return call_next(message, context)


def secagg_refusal(asked: ConfigRecord | None) -> str | None:
    """Return a reason to refuse the request ``asked`` of a SecAgg+ server, or ``None``.

    A server with shares of both a client's private and its pairwise masks can unmask its upload (Bonawitz et al. 2017,
    section 6). Refused are requests for both kinds, and thresholds of at most half of the shares, with which two groups
    of clients could be asked for one kind each.
    """
    if asked is None:
        return None
    stage = asked.get(SecAggKey.STAGE)
    if stage == SecAggStage.SETUP:
        shares, threshold = asked.get(SecAggKey.SHARE_NUMBER), asked.get(SecAggKey.THRESHOLD)
        if not isinstance(shares, int) or not isinstance(threshold, int) or 2 * threshold <= shares:
            return f"a threshold of {threshold!r} of {shares!r} key shares is not above half"
    if stage == SecAggStage.UNMASK:
        lists = [asked.get(key) for key in (SecAggKey.ACTIVE_NODE_ID_LIST, SecAggKey.DEAD_NODE_ID_LIST)]
        if not all(isinstance(nodes, list) for nodes in lists):
            return "no lists of active and dropped nodes were sent"
        active, dead = (list(nodes) for nodes in lists if isinstance(nodes, list))
        if both := set(active) & set(dead):
            return f"node {min(both)} is named as active and as dropped, which unmasks its upload"  # type: ignore[type-var]
        if len(set(active)) < len(active) or len(set(dead)) < len(dead):
            return "a node is named twice"
    return None
