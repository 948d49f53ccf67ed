"""Apply a defense to the uploads of any ``NumPyClient`` or app."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from fl_privacy.defenses import Defense
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import attempt, expect_sound
from fl_privacy.flower import audit_protocol, records, reply_cache, upload_defense
from fl_privacy.flower._node_memory import SimulatedContext
from fl_privacy.flower.clients import NAMES, Arrays, Config, NumPyClient, Reply
from fl_privacy.models.unwrap_model import made_of
from fl_privacy.types import Tensors

LOSS = "loss"  # key of an evaluation's loss in a kept answer
logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DefendedClient(NumPyClient):
    """A client whose weights are changed by the upload hooks of a defense before they are sent.

    Attributes:
        guard: defense, with the arrays that it acts on.
        names: names of the arrays, in order; by default those of the message, else "0", "1", ...
        seed: seed of the hooks' draws in a simulation; ``None`` draws from the operating system's randomness.
        memory: storage of the hooks' state and of the answered rounds: a round is answered once, unless a ``seed``
            makes this a simulation. Pass the node's context to keep it over a restart; ``context.state`` is lost.
        metrics: metrics that may leave despite a promise of differential privacy, which does not cover them.
    """

    inner: NumPyClient
    guard: upload_defense.DefendedUpload
    names: Sequence[str] | None = None
    seed: int | None = None
    client: int = 0
    memory: RecordDict | Context = field(default_factory=RecordDict)
    metrics: Sequence[str] = ()
    rounds: int | None = None

    def get_parameters(self, config: Config) -> Arrays:
        if self.answers_once:
            raise UserError(
                "A defended client is expected to be asked for no parameters, which may be trained, but was; start from"
                " weights of the server's own (initial_parameters=...)."
            )
        return self.inner.get_parameters(config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, Config]:
        """Evaluate with the inner client; outside of simulations only once a round, and with figures of three digits.

        ``UserError`` if the defense promises differential privacy, or as in ``fit``.
        """
        if promises_privacy(self.guard.defense):
            raise UserError(
                f"{self.guard.defense.name} promises differential privacy and expects no test on clients, whose exact"
                " figures would break it, but got one; test on the server (fraction_evaluate=0)."
            )
        if not self.answers_once:
            return self.inner.evaluate(parameters, config)
        expect_sound(self._sent(parameters, config))

        def work() -> RecordDict:
            loss, num_examples, metrics = self.inner.evaluate(parameters, config)
            return _records(
                [], num_examples, {k: records.rounded(v) for k, v in {LOSS: float(loss), **metrics}.items()}
            )

        _, num_examples, figures = _reply_of(self._once(MessageType.EVALUATE, parameters, config, work))
        return float(figures.pop(LOSS)), num_examples, figures

    @property
    def answers_once(self) -> bool:
        return self.seed is None

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train as the inner client does, then defend the change of the weights; see ``defense_mod`` for failures.

        ``UserError`` if values are not finite, the round is missing or was answered before, or the inner client failed.
        """
        sent = self._sent(parameters, config)
        expect_sound(sent)
        if not self.answers_once:
            return self._defended(sent, parameters, config)

        def instead(form: RecordDict) -> RecordDict | None:
            if (kinds := records.kinds_of_arrays(form, sent)) is None:
                return None
            return reply_cache.like_form(form, self._guarded(sent, self.guard.unchanged(sent, kinds), config))

        private = instead if promises_privacy(self.guard.defense) else None
        work = lambda: _records(*self._defended(sent, parameters, config))  # noqa: E731
        return _reply_of(self._once(MessageType.TRAIN, parameters, config, work, private))

    def _once(
        self,
        kind: str,
        parameters: Arrays,
        config: Config,
        work: Callable[[], RecordDict],
        instead: reply_cache.Instead | None = None,
    ) -> RecordDict:
        round = config.get(records.ROUND)
        if not isinstance(round, int) or isinstance(round, bool):
            raise UserError(
                f"A defended client expects the number of the round as {records.ROUND!r} in the server's config, but"
                f" got {round!r}: without it, noise could be averaged away; send it."
            )
        if round < 0 or (self.rounds is not None and round > self.rounds):
            most = math.inf if self.rounds is None else self.rounds
            raise UserError(f"A round of 0 to {most} is expected, but got {round}; set rounds= for a longer run.")
        question, known = reply_cache.digest_of_records(kind, _records(parameters, 0, config)), self.memory
        context = known if isinstance(known, Context) else SimulatedContext(0, 0, {}, known, {})
        return reply_cache.Answers(context, self.rounds).once([kind], round, question, work, instead=instead)

    def _sent(self, parameters: Arrays, config: Config) -> dict[str, torch.Tensor]:
        names: Any = [str(i) for i in range(len(parameters))] if self.names is None else self.names
        if self.names is None and NAMES in config:
            text = str(config[NAMES])
            names = attempt(lambda: json.loads(text))
            if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len({*names}) < len(names):
                raise UserError(f"{NAMES} is expected to list unique names in JSON, but got {text!r:.100}; send these.")
        if len(names) != len(parameters):
            raise UserError(f"{len(parameters)} names are expected, one an array, but got {len(names)}; name all.")
        return {n: records.to_tensor(np.asarray(a)) for n, a in zip(names, parameters, strict=True)}

    def _defended(self, sent: Tensors, parameters: Arrays, config: Config) -> Reply:
        trained, num_examples, metrics = self.inner.fit(parameters, config)
        if [tuple(a.shape) for a in trained] != [tuple(t.shape) for t in sent.values()]:
            raise UserError(
                f"{type(self.inner).__name__}.fit is expected to return weights of the shapes it was sent, but returned"
                f" {len(trained)} arrays for {len(sent)} or other shapes; return the trained weights."
            )
        reply = self._guarded(
            sent, {n: records.to_tensor(np.asarray(a)) for n, a in zip(sent, trained, strict=True)}, config
        )
        private = promises_privacy(self.guard.defense)
        allowed = {k: v for k, v in metrics.items() if k != NAMES and (not private or k in self.metrics)}
        return reply, num_examples, allowed

    def _guarded(self, sent: Tensors, replied: Tensors, config: Config) -> Arrays:
        kept = self.memory.state if isinstance(self.memory, Context) else self.memory
        rng = upload_defense.generator_of_round(self.seed, config, self.client)
        return self.guard.remembering(kept, sent, replied, rng)


def _records(arrays: Arrays, number: int, settings: Config) -> RecordDict:
    listed = ArrayRecord({str(k): records.plain_array(np.asarray(a)) for k, a in enumerate(arrays)})
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in settings.items()}
    return RecordDict({"arrays": listed, "settings": ConfigRecord(plain), "n": ConfigRecord({"n": int(number)})})


def _reply_of(kept: RecordDict) -> Reply:
    arrays = [array.numpy() for array in kept.array_records["arrays"].values()]
    return arrays, int(kept.config_records["n"]["n"]), dict(kept.config_records["settings"])  # type: ignore[arg-type]


class _Options(TypedDict, total=False):
    model: nn.Module | Callable[[], nn.Module] | None
    names: Sequence[str] | None
    buffers: upload_defense.BufferPolicy
    shares: upload_defense.Shares
    metrics: Sequence[str]
    seed: int | None
    number: int


@overload
def defend(
    client: type[NumPyClient], defense: Defense, **options: Unpack[_Options]
) -> Callable[..., DefendedClient]: ...


@overload
def defend(
    client: NumPyClient, defense: Defense, *, memory: RecordDict | Context | None = None, **options: Unpack[_Options]
) -> DefendedClient: ...


def defend(
    client: NumPyClient | type[NumPyClient],
    defense: Defense,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    names: Sequence[str] | None = None,
    buffers: upload_defense.BufferPolicy = "kept",
    shares: upload_defense.Shares = "weights",
    metrics: Sequence[str] = (),
    seed: int | None = None,
    number: int = 0,
    memory: RecordDict | Context | None = None,
) -> DefendedClient | Callable[..., DefendedClient]:
    """Wrap ``client`` so that the upload hooks of ``defense`` change what it sends; see ``DefendedUpload``.

    Args:
        client: a client, or a class; then the result is a function of the class's arguments and ``memory``.
        model: model, or its class, with the arrays as ``state_dict``; it distinguishes parameters from buffers.
        names: names of all arrays in order, without ``model``; batch norm's statistics are recognized by name. If both
            are missing, names are those of the message, else "0", "1", ..., and noise for differential privacy is an
            error.
        buffers, shares: see ``defense_mod``.
        metrics, seed, memory: see ``DefendedClient``.
        number: number of the client, which separates its random draws from other clients'.
    """
    guard = upload_defense.DefendedUpload.around(defense, model, names, buffers, shares)
    ordered = names if model is None else list(made_of(model).state_dict())

    def wrap(inner: NumPyClient, memory: RecordDict | Context | None) -> DefendedClient:
        kept = RecordDict() if memory is None else memory
        if memory is None and seed is None:
            logger.warning(
                "A defended client without memory=context does not know which rounds it has answered before this object"
                " was made; a server that asks again averages noise away."
            )
        return DefendedClient(inner, guard, names=ordered, seed=seed, client=number, memory=kept, metrics=metrics)

    if isinstance(client, NumPyClient):
        return wrap(client, memory)

    def make(*args: Any, memory: RecordDict | Context | None = None, **kwargs: Any) -> DefendedClient:
        return wrap(client(*args, **kwargs), memory)

    return make


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
    """Build a mod that applies the upload hooks of ``defense`` to the weights in a client's training reply.

    Use it as ``app = ClientApp(mods=[defense_mod(dp_noise(clip_norm=1.0, scale=0.1), model=Net)])``. Each kind of
    message (training, evaluation, query, probe) is answered once a round, also after a restart, and a repeated message
    gets the same bytes, since the mean of many answers would have no noise. A message must hold the model alone, with
    finite values that are not too large; others get a one-line error, as does any failure of the app. Probes, which ask
    for the upload of a few examples, need ``probe_mod`` listed after this mod. Other replies hold no arrays, and
    rounded numbers.

    If the defense promises differential privacy, only ``metrics`` leave, since an exact loss or an error would reveal
    what the noise hides. If an app fails, or replies values that are not finite, pure noise shaped like an earlier
    reply is sent. After a failure before its first reply, the app gets no more messages until its operator removes a
    file named in the log. Training time is not hidden. ``UserError`` if the defense acts within the training, or adds
    noise without ``model`` or ``names``.

    Args:
        defense: defense with upload hooks only, such as noise, clipping or pruning; others need ``train_step``.
        model: the client's model or its class, which distinguishes parameters from buffers; parameters without gradient
            come back as they were sent.
        names: names of the defended parameters, or of all arrays, in their order, without ``model``.
        buffers: ``kept`` as the client replies them, ``withheld``, or ``defended`` like parameters, which makes noised
            variances negative. Running statistics leak the client's images too.
        shares: values that the client replies: ``weights``, or their ``change``.
        rounds: see ``answer_once_mod``.
        metrics: see ``DefendedClient``, also for ``seed``.
    """
    guard = upload_defense.DefendedUpload.around(defense, model, names, buffers, shares)
    made = None if model is None else made_of(model)
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
    return reply_cache.refusing(
        _Defending(guard=guard, like=like, names=names, metrics=promised, rounds=rounds, seed=seed)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Defending:
    guard: upload_defense.DefendedUpload
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
            content = reply_cache.content_of(call_next(message, context))
            if audit_protocol.is_training(message):
                return Message(self._defended(sent, message, context, content), reply_to=message)
            return Message(self._stated(content), reply_to=message)

        def instead(form: RecordDict) -> RecordDict | None:
            if (kinds := records.kinds_of_arrays(form, sent)) is None:
                return None
            values = self._guarded(sent, self.guard.unchanged(sent, kinds), message, context) if sent else []
            return reply_cache.like_form(form, values)

        if self.seed is None:
            private = None if self.metrics is None else instead
            return reply_cache.answered_once(message, context, answer, rounds=self.rounds, instead=private)
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
                "A defended client is expected to reply arrays to training messages alone, but got them in another"
                " reply; take them out."
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
                f" shapes, but replied {len(replied)} arrays for {len(sent)} or others; return the trained weights."
            )
        values = self._guarded(sent, {name: replied[name] for name in sent}, message, context)
        (name, record), *_ = content.array_records.items()
        content[name] = ArrayRecord(dict(zip(record, map(Array.from_numpy_ndarray, values), strict=True)))
        if self.metrics is not None:
            withhold(content, self.metrics)
        audit_protocol.introduce(content, context)
        audit_protocol.state_defense(content, self.guard.defense.parts)
        return content

    def _guarded(self, sent: Tensors, replied: Tensors, message: Message, context: Context) -> list[np.ndarray]:
        probe = audit_protocol.asked_probe(message.content)
        purpose = "update" if probe is None else f"victim-{probe[0]}"
        client = str(context.node_config.get(records.PARTITION, context.node_id))
        config = audit_protocol.merged_config(context, message.content)
        rng = upload_defense.generator_of_round(self.seed, config, client, purpose)
        return self.guard.remembering(context.state, sent, replied, rng)


def withhold(reply: RecordDict, metrics: Sequence[str]) -> None:
    """Remove from a reply all metrics but ``metrics``, and all config records but this package's."""
    for name, record in list(reply.metric_records.items()):
        reply[name] = MetricRecord({key: value for key, value in record.items() if key in metrics})
    for name in [name for name in reply.config_records if name not in audit_protocol.OWN_RECORDS]:
        del reply[name]
