"""One answer to a question of a server, around any ``ClientApp``: asked again, it is the same bytes."""

import logging

from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.answers import Answers, digest_of
from fl_privacy.flower.audit_records import PROBED, asked_probe, is_training, merged_config
from fl_privacy.flower.records import CLIENT_RAISED, ROUND

logger = logging.getLogger(__name__)


def answer_once_mod(*, rounds: int | None = None) -> Mod:
    """A mod that lets an app answer each round of training once, also after a restart of the node.

    The same question is answered with the same bytes, another one of the same round refused. It belongs in front of the
    app of a client whose training function draws: ``ClientApp(mods=[answer_once_mod()])`` with ``train_step`` or
    ``private_loader``. ``defense_mod`` does it by itself.

    Args:
        rounds: of a run that are answered at most; ``None`` takes the run's own number, ``num-server-rounds`` of its
            config, without which a round is at most ``memory.MOST_AHEAD`` after the last one.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not (message.has_content() and is_training(message)):
            return call_next(message, context)
        return answered_once(message, context, call_next, rounds=rounds)

    return refusing(mod)


def answered_once(
    message: Message, context: Context, call_next: ClientAppCallable, *, rounds: int | None = None
) -> Message:
    """The answer of ``call_next`` to a training message, or the same as before where it was asked before.

    Training and each probe are questions of their own. An error is no answer.

    Raises:
        UserError: another question of this round was answered, the run has no such round, the message says none, or a
            probe is asked of an app that trains instead.
    """
    kind, round = _asked(context, message)
    question, answers = digest_of(message), Answers(context, rounds)
    if (kept := answers.again(kind, round, question)) is not None:
        return Message(kept, reply_to=message)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    if asked_probe(message.content) is not None and PROBED not in reply.content:
        raise UserError("A client without probe_mod is expected to be asked for no probe; the question is refused.")
    answers.note(round, kind)
    answers.keep(kind, question, reply.content)
    return reply


def refusing(mod: Mod) -> Mod:
    """``mod``, whose errors are replied in a line; what else the app raises stays in the node's log, but for its kind.

    A line that names a place of the node stays there too.
    """

    def answering(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        def called() -> Message:
            try:
                return mod(message, context, call_next)
            except UserError as error:
                line = " ".join(str(error).split())
                if "/" not in line or Answers(context).forgets:
                    return _error(message, line)
                logger.error("The question is refused: %s", error)
                return _error(message, "The client can't do what it is asked for; its own log says why.")

        reply = attempt(called)
        if not isinstance(reply, Failure):
            return reply
        logger.error("The client's app failed: %s", reply.reason)
        kind = reply.reason.partition(":")[0]
        return _error(message, f"The client's app failed ({kind}); its own log says why.")

    return answering


def _error(message: Message, reason: str) -> Message:
    return Message(Error(CLIENT_RAISED, reason), reply_to=message)


def _asked(context: Context, message: Message) -> tuple[str, int]:
    """The kind and the round of a question, of which there is one answer.

    Raises:
        UserError: it has no round: answers without end would average away what is drawn for each.
    """
    number, probe = merged_config(context, message.content).get(ROUND), asked_probe(message.content)
    if isinstance(number, int) and not isinstance(number, bool):
        kind = str(message.metadata.message_type).removesuffix(".default")  # which Flower takes for the same
        return (kind if probe is None else f"{kind}.probe-{probe[0]}"), number
    raise UserError(
        f"A defended client expects the number of the round as {ROUND!r} in the server's config, but it is missing:"
        " without it the same round could be asked for until the noise is averaged away; send it."
    )
