"""A defense as a mod of any ``ClientApp`` of the Message API."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from fl_privacy.defenses import Defense
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import expect_sound
from fl_privacy.flower import audit_protocol, records, upload_defense
from fl_privacy.flower.reply_cache import answered_once, content_of, like_form, refusing
from fl_privacy.types import Tensors

logger: logging.Logger = logging.getLogger(__name__)


def defense_mod(
    defense: Defense,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    names: Sequence[str] | None = None,
    buffers: upload_defense.BufferPolicy = "kept",
    shares: upload_defense.Shares = "weights",
    rounds: int | None = None,
    metrics: Sequence[str] = (records.NUM_EXAMPLES,),
    seed: int | None = None,
) -> Mod:
    """Build a mod that puts the upload hooks of ``defense`` on the weights a client replies to a training message.

    Use it as ``app = ClientApp(mods=[defense_mod(dp_noise(clip_norm=1.0, scale=0.1), model=Net)])``. Each kind of
    message (training, evaluation, query, probe) is answered once a round, also after a restart, and repeated with the
    same bytes, since the mean of many answers would have no noise. Messages that hold more than the model, in another
    order, or with values that are not finite or too large are refused in one line; any failure of the app gives the
    same line. Probes need ``probe_mod`` behind this mod. Other replies hold no arrays, and numbers of three digits.

    If the defense promises differential privacy, only ``metrics`` leave and none of the app's settings, since an exact
    loss or an error would reveal what the noise hides. An app that fails, or replies values that are not finite, counts
    as unchanged: noise leaves in the form of an earlier reply. After a failure before its first reply, it is not asked
    again until its operator removes a file named in the log. Training time is not hidden. ``UserError`` if the defense
    acts within the training, or adds noise without ``model`` or ``names``.

    Args:
        defense: defense with upload hooks only: noise, clipping, pruning, selective sharing, quantization. Defenses
            within the training need ``train_step``.
        model: the client's model or its class, which distinguishes parameters from buffers; parameters without gradient
            come back as they were sent.
        names: instead, the defended parameters, or all arrays, in their order.
        buffers: ``kept`` as the client replies them, ``withheld``, or ``defended`` like parameters, which makes noised
            variances negative. Running statistics leak the client's images too.
        rounds: largest number of a round; ``None`` takes ``num-server-rounds`` of the run's config, without which a
            round is at most ``memory.MOST_AHEAD`` after the last one.
        metrics: metrics that leave despite a promise of differential privacy, which does not cover them.
        seed: seed of the hooks' randomness in a simulation; ``None`` draws from the operating system, as privacy
            demands.
    """
    guard = upload_defense.GuardedUpload.around(defense, model, names, buffers, shares)
    made = None if model is None else upload_defense.made_of(model)
    if made is not None and buffers == "kept" and upload_defense.is_differentially_private(defense):
        shown = [name for name, buffer in made.named_buffers() if buffer.is_floating_point()]
        if shown:
            text = (
                "The noise of %s is on the parameters; %d buffers such as %s are uploaded as they are, and no guarantee"
                " covers them (buffers='withheld' keeps them back)."
            )
            logger.warning(text, defense.name, len(shown), shown[0])
    like = None if made is None else records.model_tensors(made)
    promised = metrics if promises_privacy(defense) else None
    return refusing(_Defending(guard=guard, like=like, names=names, metrics=promised, rounds=rounds, seed=seed))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Defending:
    guard: upload_defense.GuardedUpload
    like: Tensors | None
    names: Sequence[str] | None
    metrics: Sequence[str] | None
    rounds: int | None
    seed: int | None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # before the app gets the message, into which it may write
        sent = self.read(message.content) if audit_protocol.is_training(message) else {}
        expect_sound(sent)

        def answer(message: Message, context: Context) -> Message:
            content = content_of(call_next(message, context))
            if audit_protocol.is_training(message):
                return Message(self._defended(sent, message, context, content), reply_to=message)
            return Message(self._stated(content), reply_to=message)

        def instead(form: RecordDict) -> RecordDict | None:
            if (kinds := records.kinds_of_arrays(form, sent)) is None:
                return None
            values = self._guarded(sent, self.guard.unchanged(sent, kinds), message, context) if sent else []
            return like_form(form, values)

        if self.seed is None:
            private = None if self.metrics is None else instead
            return answered_once(message, context, answer, rounds=self.rounds, instead=private)
        return answer(message, context)

    def read(self, content: RecordDict) -> dict[str, torch.Tensor]:
        if len(content.array_records) != 1:
            raise UserError(
                "A defended training message is expected to hold one record of arrays, but has"
                f" {len(content.array_records)}; put the model into one."
            )
        if self.like is not None:
            return records.model_values(content, self.like, whole=True)
        arrays = records.all_arrays(content)
        if self.names is not None:
            arrays = records.named(arrays, self.names)
            records.expect_listed(list(arrays), self.names)
        return records.to_tensors(arrays)

    def _stated(self, content: RecordDict) -> RecordDict:
        if any(content.array_records.values()):  # on which no defense would act
            raise UserError(
                "A defended client is expected to reply arrays to training messages alone, where its defense acts on"
                " them; these are kept back."
            )
        if self.metrics is not None:
            withhold(content, self.metrics)
        elif self.seed is None:
            for name in [*content.metric_records, *content.config_records]:
                if name not in audit_protocol.OWN_RECORDS:
                    kind: Any = MetricRecord if name in content.metric_records else ConfigRecord
                    items = content[name].items()
                    content[name] = kind({k: v if k == records.NUM_EXAMPLES else records.rounded(v) for k, v in items})
        return content

    def _defended(self, sent: Tensors, message: Message, context: Context, content: RecordDict) -> RecordDict:
        replied = self.read(content)
        if {n: t.shape for n, t in replied.items()} != {n: t.shape for n, t in sent.items()}:
            raise UserError(
                "A defended client is expected to reply the weights it was sent, under the same names and of the same"
                f" shapes, but replied {len(replied)} arrays for {len(sent)} or others; the defense is on their change."
            )
        values = self._guarded(sent, {name: replied[name] for name in sent}, message, context)
        (name, record), *_ = content.array_records.items()
        content[name] = ArrayRecord(dict(zip(record, map(Array.from_numpy_ndarray, values), strict=True)))
        if self.metrics is not None:
            withhold(content, self.metrics)
        audit_protocol.introduce(content, context)
        audit_protocol.tell_defense(content, self.guard.defense.parts)
        return content

    def _guarded(self, sent: Tensors, replied: Tensors, message: Message, context: Context) -> list[np.ndarray]:
        probe = audit_protocol.asked_probe(message.content)
        purpose = "update" if probe is None else f"victim-{probe[0]}"
        client = str(context.node_config.get(records.PARTITION, context.node_id))
        config = audit_protocol.merged_config(context, message.content)
        rng = upload_defense.generator_of_round(self.seed, config, client, purpose)
        return self.guard.remembering(context.state, sent, replied, rng)


def withhold(reply: RecordDict, metrics: Sequence[str]) -> None:
    """Remove from a reply all figures but ``metrics``, and all settings but this package's."""
    for name, record in list(reply.metric_records.items()):
        reply[name] = MetricRecord({key: value for key, value in record.items() if key in metrics})
    for name in [name for name in reply.config_records if name not in audit_protocol.OWN_RECORDS]:
        del reply[name]
