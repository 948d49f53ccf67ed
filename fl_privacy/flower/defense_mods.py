"""A defense as a mod of any ``ClientApp`` of the Message API."""

import logging
from collections.abc import Callable, Sequence

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from fl_privacy.defenses import Defense
from fl_privacy.effects.kinds import Noise
from fl_privacy.errors import UserError
from fl_privacy.flower.audit_records import asked_probe, introduce, is_training, merged_config, tell_defense
from fl_privacy.flower.guarded_upload import (
    BufferPolicy,
    GuardedUpload,
    is_differentially_private,
    made_of,
)
from fl_privacy.flower.memory import expect_unanswered, remember_answer
from fl_privacy.flower.records import PARTITION, ROUND, load_state, save_state, to_array, to_tensor
from fl_privacy.rng import Secret, SecretGenerator, derive_generator
from fl_privacy.types import Tensors

logger = logging.getLogger(__name__)


def defense_mod(
    defense: Defense,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    names: Sequence[str] | None = None,
    buffers: BufferPolicy = "kept",
    seed: int | None = None,
) -> Mod:
    """A mod that puts the upload hooks of ``defense`` on the weights that a client replies to a training message.

    ``app = ClientApp(mods=[defense_mod(dp_noise(clip_norm=1.0, scale=0.1), model=Net)])``. Replies to other messages
    pass. One question of a kind (training, each probe) is answered once a round: the mean of many answers has no noise.
    The reply says by what it was defended, which is public. In front of ``probe_mod`` it defends probes as well.

    Args:
        defense: with upload hooks only: noise, clipping, pruning, selective sharing, quantization. What acts within the
            training (Refiner, Soteria, SPN, passports, ATS, DP-SGD, mixtures, condensed images) is refused:
            ``train_step`` puts it into the client's own training function.
        model: the client's model or its class, by which parameters are told from buffers.
        names: instead of it, the parameters that are defended.
        buffers: running statistics and the like are ``kept`` as the client replies them, ``withheld``, or
            ``defended`` like parameters, which makes noise of variances negative. They show the client's images too.
        seed: of the hooks' randomness, in a simulation; ``None`` draws it from the operating system at each update, as
            privacy demands.

    Raises:
        UserError: the defense acts within the training, or adds noise and is told neither ``model`` nor ``names``.
    """
    guard = GuardedUpload.around(defense, model, names, buffers)
    made = None if model is None else made_of(model)
    if made is not None and buffers == "kept" and is_differentially_private(defense):
        _warn_of_buffers(made, defense)
    order = None if made is None else list(made.state_dict())
    noised = any(isinstance(part.effect, Noise) for part in defense.parts)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not is_training(message) or not message.has_content():
            return call_next(message, context)
        asked = None if seed is not None else _asked(context, message, noised)
        if asked is not None:
            expect_unanswered(context.state, *asked)
        sent = _arrays(message, order)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        state = load_state(context.state)
        rng = _generator(seed, context, message)
        defended = guard(sent, _expect_like(_arrays(reply, order), sent), state, rng)
        save_state(context.state, state)
        if asked is not None:
            remember_answer(context.state, *asked)
        _put(reply, list(defended.values()))
        introduce(reply.content, context)
        tell_defense(reply.content, defense.parts)
        return reply

    return mod


def _warn_of_buffers(model: nn.Module, defense: Defense) -> None:
    """Say that running statistics leave without the noise that is on the parameters."""
    shown = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if shown:
        logger.warning(
            "The noise of %s is on the parameters; %d buffers such as %s are uploaded as they are, and no guarantee"
            " covers them (buffers='withheld' keeps them back).",
            defense.name,
            len(shown),
            shown[0],
        )


def _asked(context: Context, message: Message, noised: bool) -> tuple[str, int] | None:
    """The kind and the round of a question, of which there is one answer; ``None`` where it has no round.

    Raises:
        UserError: it has none, and the defense draws noise, which answers without end would average away.
    """
    number, probe = merged_config(context, message.content).get(ROUND), asked_probe(message.content)
    if isinstance(number, int) and not isinstance(number, bool):
        return ("train" if probe is None else f"probe-{probe[0]}"), number
    if noised:
        raise UserError(
            f"A client that adds noise expects the number of the round as {ROUND!r} in the server's config, but it is"
            " missing: without it the same round could be asked for until the noise is averaged away; send it."
        )
    return None


def _arrays(message: Message, order: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """The arrays of the one record that ``message`` has, by name; unnamed ones in the order of the model."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise UserError(
            f"A defended training message is expected to hold one record of arrays, but has {len(records)}; put the"
            " model into one."
        )
    arrays = {name: to_tensor(array.numpy()) for name, array in records[0].items()}
    unnamed = list(arrays) == [str(i) for i in range(len(arrays))]
    if unnamed and order is not None and len(order) == len(arrays):
        return dict(zip(order, arrays.values(), strict=True))
    return arrays


def _expect_like(replied: Tensors, sent: Tensors) -> Tensors:
    if {n: t.shape for n, t in replied.items()} != {n: t.shape for n, t in sent.items()}:
        raise UserError(
            "A defended client is expected to reply the weights it was sent, under the same names and of the same"
            f" shapes, but replied {len(replied)} arrays for {len(sent)} or others; the defense is on their change."
        )
    return {name: replied[name] for name in sent}


def _put(reply: Message, values: Sequence[torch.Tensor]) -> None:
    (name, record), *_ = reply.content.array_records.items()
    reply.content[name] = ArrayRecord(
        {key: Array.from_numpy_ndarray(to_array(value)) for key, value in zip(record, values, strict=True)}
    )


def _generator(seed: int | None, context: Context, message: Message) -> torch.Generator:
    if seed is None:
        return SecretGenerator(Secret.draw())
    config = merged_config(context, message.content)
    if ROUND not in config:
        raise UserError(
            f"A seeded defense expects the number of the round as {ROUND!r} in the server's config, but it is"
            " missing; send it, or leave seed out."
        )
    client, probe = context.node_config.get(PARTITION, context.node_id), asked_probe(message.content)
    purpose = "update" if probe is None else f"victim-{probe[0]}"
    return derive_generator(seed, "client", str(client), f"round-{config[ROUND]!r}", purpose, "defense")
