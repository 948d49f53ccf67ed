"""A client's guard as a mod: looks at models, and at what a SecAgg+ server asks for, before the client's app does."""

from collections.abc import Callable
from dataclasses import replace

from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.inside.legacy import RECORD_KEY_CONFIGS, SecAggKey, SecAggStage
from fl_privacy.flower.records import CLIENT_RAISED, load_state, read_state, save_state
from fl_privacy.guard import ModelGuard
from fl_privacy.types import Batch

OwnExamples = Callable[[Context], Batch]
"""Some of the examples of the node with this context; the guard shows a model the first of them."""


def guard_mod(model: nn.Module, examples: OwnExamples, *, guard: ModelGuard | None = None) -> Mod:
    """Build a mod that refuses crafted models, for ``ClientApp(mods=[guard_mod(...), ...])``, in front of the others.

    A training message whose model is refused gets an error reply with one line of reason; the round goes on without
    this client. In front of ``secaggplus_mod`` it also refuses a threshold that two disjoint groups of clients reach,
    and a request for both kinds of key shares of a client. What it remembers of the last model is in ``context.state``.

    Args:
        model: the architecture agreed on; arrays that do not fit it are refused.
        examples: the node's own, at least two.
        guard: its thresholds.
    """
    watching = (guard or ModelGuard()).agreeing_on(model)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        found = attempt(lambda: _refusal(message, context))
        reason = found.reason.removeprefix("UserError: ").rstrip(".") if isinstance(found, Failure) else found
        if reason:
            return Message(Error(CLIENT_RAISED, f"The guard refused: {reason.rstrip('.')}."), reply_to=message)
        return call_next(message, context)

    def _refusal(message: Message, context: Context) -> str | None:
        record = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if record is not None and (reason := secagg_refusal(record)):
            return reason
        if not any(message.content.array_records.values()):
            return None
        sent, kept = read_state(message.content, model, whole=True), load_state(context.state)
        if reason := watching.refusal(model, sent, examples(context), kept.tensors):
            return reason
        save_state(context.state, replace(kept, tensors={**kept.tensors, **watching.remembered(sent)}))
        return None

    return mod


def secagg_guard_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse requests that break SecAgg+; goes in front of ``secaggplus_mod``.

    The part of ``guard_mod`` that looks at SecAgg+ alone.
    """
    record = message.content.config_records.get(RECORD_KEY_CONFIGS)
    if record is not None and (reason := secagg_refusal(record)):
        return Message(Error(CLIENT_RAISED, f"The guard refused: {reason.rstrip('.')}."), reply_to=message)
    return call_next(message, context)


def secagg_refusal(asked: ConfigRecord) -> str | None:
    """Say why not to answer what a SecAgg+ server asks in one of its stages; ``None`` where nothing speaks against it.

    Shares of both kinds take the masks off one upload: those of the private mask's seed and of the key of the pairwise
    masks (Bonawitz et al. 2017, section 6). An honest server asks for one kind alone of the same client; with a
    threshold of more than half of the shares no two groups of clients can be asked for different ones.
    """
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
