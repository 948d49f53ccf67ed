"""A defense of the upload around any ``NumPyClient``."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MessageType, RecordDict
from torch import nn

from fl_privacy.defenses import Defense
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.flower._node_memory import expect_near, expect_unanswered, last_of_all, remember_answer
from fl_privacy.flower.answers import Answers, digest_of_records
from fl_privacy.flower.clients import NAMES, Arrays, Config, NumPyClient, Reply
from fl_privacy.flower.records import ROUND, load_state, save_state, to_array, to_tensor
from fl_privacy.flower.upload_defense import BufferPolicy, GuardedUpload, Shares, made_of
from fl_privacy.rng import Secret, SecretGenerator, derive_generator

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DefendedClient(NumPyClient):
    """The client ``inner``, which receives weights and replies weights, with the upload hooks of ``guard``'s defense.

    Attributes:
        inner: any Flower client.
        guard: the defense, and the arrays that it acts on.
        names: of the arrays, in order; by default as the message names them, else "0", "1", ...
        seed: of the hooks' randomness, in a simulation; ``None`` draws it from the operating system at each update, as
            privacy demands.
        client: names the client's stream under ``seed``.
        memory: where hooks keep what survives between rounds, and which rounds are answered: a round is answered once,
            unless a ``seed`` makes this a simulation. With the node's context, also after a restart of the node, and
            the same question with the same bytes; with ``context.state`` alone, until the node restarts.
        rounds: of a run that are answered at most, see ``defense_mod``.
        metrics: of the inner client that leave behind a promise of differential privacy, which does not cover them.
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
            UserError: outside of one: the network of the inner client may be trained already, on its own examples.
        """
        if self.answers_once:
            raise UserError(
                "A defended client is expected to be asked for no parameters, which may be trained ones without the"
                " defense; start from weights of the server's own (initial_parameters=...)."
            )
        return self.inner.get_parameters(config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, Config]:
        """Evaluate as the inner client does.

        Raises:
            UserError: the defense promises differential privacy, which exact figures of the examples would break.
        """
        if promises_privacy(self.guard.defense):
            raise UserError(
                f"{self.guard.defense.name} promises differential privacy, which an exact loss or accuracy on the"
                " client's own examples would break; test on the server (fraction_evaluate=0)."
            )
        return self.inner.evaluate(parameters, config)

    @property
    def answers_once(self) -> bool:
        """Say whether a round is answered once: not in a simulation, whose draws repeat."""
        return self.seed is None

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train as the inner client does, then defend the change of the weights.

        Raises:
            UserError: values are not finite, the round is missing or was answered, or the reply is no such weights.
        """
        sent = [np.array(array) for array in parameters]
        _expect_finite(sent, "sent")
        if not self.answers_once:
            return self._defended(sent, parameters, config)
        number, question = self._round(config), _records(parameters, 0, config)
        if not isinstance(self.memory, Context):
            expect_unanswered(self.memory, MessageType.TRAIN, number)
            if self.rounds is None:
                expect_near(last_of_all(self.memory), number)
            reply = self._defended(sent, parameters, config)
            remember_answer(self.memory, MessageType.TRAIN, number)
            return reply
        answers, digest = Answers(self.memory, self.rounds), digest_of_records(MessageType.TRAIN, question)
        if (kept := answers.again(MessageType.TRAIN, number, digest)) is not None:
            return _reply_of(kept)
        reply = self._defended(sent, parameters, config)
        answers.note(number, MessageType.TRAIN)
        answers.keep(MessageType.TRAIN, digest, _records(*reply))
        return reply

    def _defended(self, sent: Arrays, parameters: Arrays, config: Config) -> Reply:
        trained, num_examples, metrics = self.inner.fit(parameters, config)
        if [a.shape for a in trained] != [a.shape for a in sent]:
            raise UserError(
                f"{type(self.inner).__name__}.fit is expected to return weights of the shapes it was sent, but returned"
                f" {len(trained)} arrays for {len(sent)} or other shapes; a defense around it needs weights."
            )
        _expect_finite([np.asarray(array) for array in trained], "replied")
        names = self._names(len(sent), config)
        before = {n: to_tensor(a) for n, a in zip(names, sent, strict=True)}
        after = {n: to_tensor(np.asarray(a)) for n, a in zip(names, trained, strict=True)}
        records = self.memory.state if isinstance(self.memory, Context) else self.memory
        state = load_state(records)
        defended = self.guard(before, after, state, self._generator(config))
        save_state(records, state)
        reply = [to_array(defended[n]) for n in names]
        private = promises_privacy(self.guard.defense)
        told = {k: v for k, v in metrics.items() if k != NAMES and (not private or k in self.metrics)}
        return reply, num_examples, told

    def _round(self, config: Config) -> int:
        """Return the number of the round, which is answered once.

        Raises:
            UserError: it is missing, or the run has no such round.
        """
        number = config.get(ROUND)
        if not isinstance(number, int) or isinstance(number, bool):
            raise UserError(
                f"A defended client expects the number of the round as {ROUND!r} in the server's config, but got"
                f" {number!r}: the same round could be asked for until the noise is averaged away."
            )
        if number < 0 or (self.rounds is not None and number > self.rounds):
            raise UserError(f"A round of 0 to {self.rounds} is expected, but got {number}; the question is refused.")
        return number

    def _generator(self, config: Config) -> torch.Generator:
        if self.seed is None:
            return SecretGenerator(Secret.draw())
        if ROUND not in config:
            raise UserError(
                f"A seeded defense expects the number of the round as {ROUND!r} in the server's config, but it is"
                " missing; send it, or leave seed out."
            )
        return derive_generator(self.seed, "client", self.client, f"round-{config[ROUND]!r}", "defense")

    def _names(self, number: int, config: Config) -> list[str]:
        if self.names is not None:
            names = list(self.names)
        elif NAMES in config:
            names = _listed(str(config[NAMES]))
        else:
            names = [str(i) for i in range(number)]
        if len(names) != number:
            raise UserError(f"{number} names are expected, one for each array, but got {len(names)}.")
        return names


def _listed(text: str) -> list[str]:
    """Parse the names that a message says its arrays have."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise UserError(f"{NAMES} is expected to be a list of names in JSON, each once, but got {text!r:.100}.")
    return names


def _records(arrays: Arrays, number: int, settings: Config) -> RecordDict:
    """Turn a question or a reply into records."""
    listed = ArrayRecord({str(k): Array.from_numpy_ndarray(np.asarray(a)) for k, a in enumerate(arrays)})
    return RecordDict({"arrays": listed, "settings": ConfigRecord({**settings}), "n": ConfigRecord({"n": number})})


def _reply_of(kept: RecordDict) -> Reply:
    arrays = [array.numpy() for array in kept.array_records["arrays"].values()]
    return arrays, int(kept.config_records["n"]["n"]), dict(kept.config_records["settings"])  # type: ignore[arg-type]


def _expect_finite(arrays: Arrays, what: str) -> None:
    if any(array.dtype.kind in "fc" and not np.isfinite(array).all() for array in arrays):
        raise UserError(f"The weights that are {what} are expected to be finite, but some are not; they are refused.")


@overload
def defend(
    client: type[NumPyClient],
    defense: Defense,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    names: Sequence[str] | None = None,
    buffers: BufferPolicy = "kept",
    shares: Shares = "weights",
    metrics: Sequence[str] = (),
    seed: int | None = None,
    number: int = 0,
) -> Callable[..., DefendedClient]: ...


@overload
def defend(
    client: NumPyClient,
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
        client: a client, or a class of them: then the result takes the arguments of the class, and ``memory``.
        defense: with upload hooks only.
        model: what the arrays are the ``state_dict`` of, or its class: tells parameters from buffers.
        names: instead, the names of all arrays in order, in which batch norm's statistics go by theirs. With neither,
            arrays are called as the message does, else "0", "1", ..., and noise of differential privacy is refused.
        buffers: what becomes of buffers, see ``GuardedUpload``.
        shares: what the client replies, its ``weights`` or their ``change``.
        metrics: of the client that leave behind a promise of differential privacy, which does not cover them.
        seed: of the hooks' randomness, in a simulation; ``None`` draws it from the operating system.
        number: of the client, which names its stream under ``seed``.
        memory: the node's context, or ``context.state``, see ``DefendedClient``.
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
