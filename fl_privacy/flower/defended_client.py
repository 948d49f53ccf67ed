"""A defense of the upload around any ``NumPyClient``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from flwr.app import RecordDict
from torch import nn

from fl_privacy.defenses import Defense
from fl_privacy.errors import UserError
from fl_privacy.flower.clients import NAMES, Arrays, Config, NumPyClient, Reply
from fl_privacy.flower.guarded_upload import BufferPolicy, GuardedUpload, made_of
from fl_privacy.flower.records import ROUND, load_state, save_state, to_array, to_tensor
from fl_privacy.rng import Secret, SecretGenerator, derive_generator


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
        memory: ``context.state``, where hooks keep what survives between rounds.
    """

    inner: NumPyClient
    guard: GuardedUpload
    names: Sequence[str] | None = None
    seed: int | None = None
    client: int = 0
    memory: RecordDict = field(default_factory=RecordDict)

    def get_parameters(self, config: Config) -> Arrays:
        """Those of the inner client."""
        return self.inner.get_parameters(config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, Config]:
        """As the inner client does."""
        return self.inner.evaluate(parameters, config)

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train as the inner client does, then defend the change of the weights."""
        sent = [np.array(array) for array in parameters]
        trained, num_examples, metrics = self.inner.fit(parameters, config)
        if [a.shape for a in trained] != [a.shape for a in sent]:
            raise UserError(
                f"{type(self.inner).__name__}.fit is expected to return weights of the shapes it was sent, but returned"
                f" {len(trained)} arrays for {len(sent)} or other shapes; a defense around it needs weights."
            )
        names = self._names(len(sent), config)
        before = {n: to_tensor(a) for n, a in zip(names, sent, strict=True)}
        after = {n: to_tensor(np.asarray(a)) for n, a in zip(names, trained, strict=True)}
        state = load_state(self.memory)
        defended = self.guard(before, after, state, self._generator(config))
        save_state(self.memory, state)
        reply = [to_array(defended[n]) for n in names]
        return reply, num_examples, {key: value for key, value in metrics.items() if key != NAMES}

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
            names = json.loads(str(config[NAMES]))
        else:
            names = [str(i) for i in range(number)]
        if len(names) != number:
            raise UserError(f"{number} names are expected, one for each array, but got {len(names)}.")
        return names


@overload
def defend(
    client: type[NumPyClient],
    defense: Defense,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    names: Sequence[str] | None = None,
    buffers: BufferPolicy = "kept",
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
    seed: int | None = None,
    number: int = 0,
    memory: RecordDict | None = None,
) -> DefendedClient: ...


def defend(
    client: NumPyClient | type[NumPyClient],
    defense: Defense,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    names: Sequence[str] | None = None,
    buffers: BufferPolicy = "kept",
    seed: int | None = None,
    number: int = 0,
    memory: RecordDict | None = None,
) -> DefendedClient | Callable[..., DefendedClient]:
    """``client`` with the upload hooks of ``defense``; see ``GuardedUpload``.

    Args:
        client: a client, or a class of them: then the result takes the arguments of the class, and ``memory``.
        defense: with upload hooks only.
        model: what the arrays are the ``state_dict`` of, or its class: tells parameters from buffers.
        names: instead, the names of all arrays in order, in which batch norm's statistics go by theirs. With neither,
            arrays are called as the message does, else "0", "1", ..., and noise of differential privacy is refused.
        buffers: what becomes of buffers, see ``GuardedUpload``.
        seed: of the hooks' randomness, in a simulation; ``None`` draws it from the operating system.
        number: of the client, which names its stream under ``seed``.
        memory: ``context.state``, where hooks keep what survives between rounds.
    """

    guard = GuardedUpload.around(defense, model, names, buffers)
    ordered = names if model is None else list(made_of(model).state_dict())

    def wrap(inner: NumPyClient, memory: RecordDict | None) -> DefendedClient:
        kept = RecordDict() if memory is None else memory
        return DefendedClient(inner, guard, names=ordered, seed=seed, client=number, memory=kept)

    if isinstance(client, NumPyClient):
        return wrap(client, memory)

    def make(*args: Any, memory: RecordDict | None = None, **kwargs: Any) -> DefendedClient:
        return wrap(client(*args, **kwargs), memory)

    return make
