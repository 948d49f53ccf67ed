"""A defense of the upload around any ``NumPyClient``."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MessageType, RecordDict
from torch import nn

from fl_privacy.defenses import Defense
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import attempt, expect_sound
from fl_privacy.flower._node_memory import SimulatedContext
from fl_privacy.flower.clients import NAMES, Arrays, Config, NumPyClient, Reply
from fl_privacy.flower.records import ROUND, kinds_of_arrays, plain_array, rounded, to_tensor
from fl_privacy.flower.reply_cache import Answers, Instead, digest_of_records, like_form
from fl_privacy.flower.upload_defense import BufferPolicy, GuardedUpload, Shares, generator_of_round, made_of
from fl_privacy.types import Tensors

LOSS = "loss"
"""Key of an evaluation's loss in a kept answer."""

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DefendedClient(NumPyClient):
    """The client ``inner``, which receives and replies weights, with the upload hooks of ``guard``'s defense.

    Attributes:
        names: names of the arrays, in order; by default those of the message, else "0", "1", ...
        seed: seed of the hooks' randomness in a simulation; ``None`` draws from the operating system, as privacy
            demands.
        memory: state of hooks, and the answered rounds: a round is answered once, unless a ``seed`` makes this a
            simulation. With the node's context, this survives a restart; with ``context.state`` alone, it does not.
        metrics: metrics that may leave despite a promise of differential privacy, which does not cover them.
    """

    inner: NumPyClient
    guard: GuardedUpload
    names: Sequence[str] | None = None
    seed: int | None = None
    client: int = 0
    memory: RecordDict | Context = field(default_factory=RecordDict)
    metrics: Sequence[str] = ()
    rounds: int | None = None

    def get_parameters(self, config: Config) -> Arrays:
        """Return the inner client's parameters, in a simulation only.

        Raises:
            UserError: it is no simulation, so that the network may be trained on the client's examples.
        """
        if self.answers_once:
            raise UserError(
                "A defended client is expected to be asked for no parameters, which may be trained ones without the"
                " defense; start from weights of the server's own (initial_parameters=...)."
            )
        return self.inner.get_parameters(config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, Config]:
        """Evaluate as the inner client does; outside of a simulation once a round, in three digits.

        Raises:
            UserError: the defense promises differential privacy, which exact figures would break; the round is missing
                or was answered; or ``fit`` would raise.
        """
        if promises_privacy(self.guard.defense):
            raise UserError(
                f"{self.guard.defense.name} promises differential privacy, which an exact loss or accuracy on the"
                " client's own examples would break; test on the server (fraction_evaluate=0)."
            )
        if not self.answers_once:
            return self.inner.evaluate(parameters, config)
        expect_sound(self._sent(parameters, config))

        def work() -> RecordDict:
            loss, num_examples, metrics = self.inner.evaluate(parameters, config)
            return _records([], num_examples, {k: rounded(v) for k, v in {LOSS: float(loss), **metrics}.items()})

        _, num_examples, figures = _reply_of(self._once(MessageType.EVALUATE, parameters, config, work))
        return float(figures.pop(LOSS)), num_examples, figures

    @property
    def answers_once(self) -> bool:
        return self.seed is None

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train as the inner client does, then defend the change of the weights; see ``defense_mod`` for failures.

        Raises:
            UserError: values are not finite, the round is missing or was answered, or the inner client failed.
        """
        sent = self._sent(parameters, config)
        expect_sound(sent)
        if not self.answers_once:
            return self._defended(sent, parameters, config)

        def instead(form: RecordDict) -> RecordDict | None:
            if (kinds := kinds_of_arrays(form, sent)) is None:
                return None
            return like_form(form, self._guarded(sent, self.guard.unchanged(sent, kinds), config))

        private = instead if promises_privacy(self.guard.defense) else None
        work = lambda: _records(*self._defended(sent, parameters, config))  # noqa: E731
        return _reply_of(self._once(MessageType.TRAIN, parameters, config, work, private))

    def _once(
        self,
        kind: str,
        parameters: Arrays,
        config: Config,
        work: Callable[[], RecordDict],
        instead: Instead | None = None,
    ) -> RecordDict:
        round = config.get(ROUND)
        if not isinstance(round, int) or isinstance(round, bool):
            raise UserError(
                f"A defended client expects the number of the round as {ROUND!r} in the server's config, but got"
                f" {round!r}: the same round could be asked for until the noise is averaged away."
            )
        if round < 0 or (self.rounds is not None and round > self.rounds):
            raise UserError(f"A round of 0 to {self.rounds} is expected, but got {round}; the question is refused.")
        question, known = digest_of_records(kind, _records(parameters, 0, config)), self.memory
        context = known if isinstance(known, Context) else SimulatedContext(0, 0, {}, known, {})
        return Answers(context, self.rounds).once([kind], round, question, work, instead=instead)

    def _sent(self, parameters: Arrays, config: Config) -> dict[str, torch.Tensor]:
        names: Any = [str(i) for i in range(len(parameters))] if self.names is None else self.names
        if self.names is None and NAMES in config:
            text = str(config[NAMES])
            names = attempt(lambda: json.loads(text))
            if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len({*names}) < len(names):
                raise UserError(f"{NAMES} is expected to be a list of names in JSON, each once, but got {text!r:.100}.")
        if len(names) != len(parameters):
            raise UserError(f"{len(parameters)} names are expected, one for each array, but got {len(names)}.")
        return {n: to_tensor(np.asarray(a)) for n, a in zip(names, parameters, strict=True)}

    def _defended(self, sent: Tensors, parameters: Arrays, config: Config) -> Reply:
        trained, num_examples, metrics = self.inner.fit(parameters, config)
        if [tuple(a.shape) for a in trained] != [tuple(t.shape) for t in sent.values()]:
            raise UserError(
                f"{type(self.inner).__name__}.fit is expected to return weights of the shapes it was sent, but returned"
                f" {len(trained)} arrays for {len(sent)} or other shapes; a defense around it needs weights."
            )
        reply = self._guarded(sent, {n: to_tensor(np.asarray(a)) for n, a in zip(sent, trained, strict=True)}, config)
        private = promises_privacy(self.guard.defense)
        told = {k: v for k, v in metrics.items() if k != NAMES and (not private or k in self.metrics)}
        return reply, num_examples, told

    def _guarded(self, sent: Tensors, replied: Tensors, config: Config) -> Arrays:
        records = self.memory.state if isinstance(self.memory, Context) else self.memory
        return self.guard.remembering(records, sent, replied, generator_of_round(self.seed, config, self.client))


def _records(arrays: Arrays, number: int, settings: Config) -> RecordDict:
    listed = ArrayRecord({str(k): plain_array(np.asarray(a)) for k, a in enumerate(arrays)})
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in settings.items()}
    return RecordDict({"arrays": listed, "settings": ConfigRecord(plain), "n": ConfigRecord({"n": int(number)})})


def _reply_of(kept: RecordDict) -> Reply:
    arrays = [array.numpy() for array in kept.array_records["arrays"].values()]
    return arrays, int(kept.config_records["n"]["n"]), dict(kept.config_records["settings"])  # type: ignore[arg-type]


class _Options(TypedDict, total=False):
    model: nn.Module | Callable[[], nn.Module] | None
    names: Sequence[str] | None
    buffers: BufferPolicy
    shares: Shares
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
    buffers: BufferPolicy = "kept",
    shares: Shares = "weights",
    metrics: Sequence[str] = (),
    seed: int | None = None,
    number: int = 0,
    memory: RecordDict | Context | None = None,
) -> DefendedClient | Callable[..., DefendedClient]:
    """Wrap ``client`` with the upload hooks of ``defense``; see ``GuardedUpload``.

    Args:
        client: a client, or a class; then the result takes the class's arguments and ``memory``.
        model: model, or its class, with the arrays as ``state_dict``; it distinguishes parameters from buffers.
        names: instead, the names of all arrays in order; batch norm's statistics are recognized by name. With neither,
            names are those of the message, else "0", "1", ..., and noise of differential privacy is refused.
        metrics: see ``DefendedClient``.
    """
    guard = GuardedUpload.around(defense, model, names, buffers, shares)
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
