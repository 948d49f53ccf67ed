"""A client of this package as Flower's ``NumPyClient``."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import RecordDict

from fl_privacy.defenses import ClientState, Defense, ats, dp_noise, fdl_pp, pruning, refiner, split_fed, spn
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, Evaluation, LocalResult, private_names
from fl_privacy.federation.replies import UnfitMessageError, expect_sound, hide_reason
from fl_privacy.flower import records
from fl_privacy.flower._node_memory import ContextMemory, Memory
from fl_privacy.flower.inside.legacy import NumPyClient, Scalar
from fl_privacy.rng import Secret
from fl_privacy.types import ModelState, Tensors

T = TypeVar("T")
Arrays = list[np.ndarray]
Config = dict[str, Scalar]
Reply = tuple[Arrays, int, Config]
NAMES = "names"  # key of the names of a list of arrays, as JSON, in the config received and in the metrics returned
ATTEMPT = "attempt"  # config key: number of the protocol's run under SecAgg+, in which a failed round is repeated

MOST_COUNTED = "most-examples"
"""Config key: largest number of examples that a client may state under SecAgg+; larger ones overflow the sum."""

MOST_ATTEMPTS = 100
COUNTS = "counts"  # metrics key of integer buffers, sent in the clear as JSON, since SecAgg+ would blur them


class PrivacyClient(NumPyClient):
    """A client of this package behind Flower's ``NumPyClient`` interface.

    Arrays come in the order of the model's ``state_dict`` or of ``config["names"]``; the reply names its arrays in
    ``metrics["names"]``. If it uploads weights (``plan.shares="weights"``), it works under any stock Flower strategy.
    All draws come from the client's ``seed``: a secret such as ``node_secret(context)``, or a number in a simulation.
    ``memory`` stores private layers and which rounds were answered: ``context.state``, which a restart empties, or
    ``node_memory(context)``.

    Example:
        class QuantizingClient(PrivacyClient):
            make_defense = staticmethod(quantization)
    """

    make_defense: ClassVar[Callable[..., Defense] | None] = None
    """Function that makes the defense of a subclass; ``None`` keeps the defense of ``client``."""

    last_round: int | None = None
    """Last round of the run. Later rounds are refused, since answering one would rule out all before. ``None``
    accepts at most ``memory.MOST_AHEAD`` rounds after the last answered one."""

    def __init__(self, client: Client, memory: RecordDict | Memory | None = None, **settings: Any) -> None:
        if self.make_defense is not None:
            client = replace(client, defense=self.make_defense(**settings))
            client.defense.prepare_for(client.model, client.examples.input_shape)
        elif settings:
            raise UserError(
                f"{type(self).__name__} makes no defense and is expected to get no settings, but got"
                f" {', '.join(settings)}; use a subclass with make_defense."
            )
        self.wrapped = client
        memory = RecordDict() if memory is None else memory
        self.memory: Memory = (
            ContextMemory(memory, once=self.answers_once) if isinstance(memory, RecordDict) else memory
        )

    def get_parameters(self, config: Config) -> Arrays:
        values = self.wrapped.model.state_dict()
        return [records.to_array(values[name]) for name in self._public_names()]

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train in the round ``config["server-round"]`` and return the arrays to upload.

        ``UserError`` if the model does not fit or is not finite, this round was answered before, or training failed.
        """
        round, sent = self._round(config), self._sent(parameters, config)
        update = partial(self.wrapped.update, sent, round=round)
        return self._reply(self._counted(["train"], self._message_number(config), update))

    def probe(self, parameters: Arrays, config: Config) -> Reply:
        """Return the upload from batch ``config["victim"]``, from 0, of ``config["batch-size"]`` examples alone."""
        images = records.images_of_probe(config.get(records.VICTIM), config.get(records.BATCH_SIZE))
        round, sent = self._round(config), self._sent(parameters, config)
        number, size = _integer(config, records.VICTIM), _integer(config, records.BATCH_SIZE)

        def work(state: ClientState) -> LocalResult:
            probed = state if self.wrapped.defense.examples else ClientState(dict(state.tensors))
            return self.wrapped.probe(sent, probed, round=round, probe=number, batch_size=size)

        return self._reply(self._counted(images, round, work))

    def personalize(self, parameters: Arrays, config: Config) -> tuple[float, int, Config]:
        """End the round: train the private part on the new model; return loss, number of examples and metrics.

        The whole model is tested if ``config["test"]`` is set, unless a deployed client promises differential privacy.
        """
        round, test = self._round(config), bool(_integer(config, records.TEST)) and not self._keeps_figures
        work = partial(self.wrapped.personalize, self._sent(parameters, config), round=round, test=test)
        end = self._counted(["personalize"], round, work)
        seconds: Config = {} if self._keeps_figures else {records.SECONDS: end.seconds}
        if end.evaluation is None:
            return 0.0, 0, seconds
        loss, number, metrics = self._figures(end.evaluation)
        return loss, number, {**seconds, **metrics}

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, Config]:
        """Return loss, number of examples and accuracy of the sent model, with private layers, on the client's data.

        Outside of a simulation the client answers once a round, with figures rounded to three digits. ``UserError`` if
        ``fit`` would raise one, or the defense promises differential privacy, which exact figures would break.
        """
        if promises_privacy(self.wrapped.defense):
            raise UnfitMessageError(
                f"{self.wrapped.defense.name} promises differential privacy and expects no test on clients, whose exact"
                " figures would break it, but got one; test on the server (fraction_evaluate=0)."
            )
        mine = self.wrapped.examples.subset(self.wrapped.indices)
        work = partial(self.wrapped.evaluate, self._sent(parameters, config), examples=mine)
        if not self.answers_once:
            return self._figures(work(self.memory.load(self.wrapped.device)))
        return self._figures(self._counted(["evaluate"], self._round(config), work))

    def _counted(self, kinds: Sequence[str], round: int, work: Callable[[ClientState], T]) -> T:
        for kind in kinds:
            self.memory.expect_new(kind, round, bounded=self.last_round is not None)
        state = self.memory.load(self.wrapped.device)
        if not self.answers_once:
            result = work(state)
        else:
            for kind in kinds:
                self.memory.save(state, after=(kind, round))
            result = hide_reason(lambda: work(state))
        self.memory.save(state)
        return result

    def _figures(self, tested: Evaluation) -> tuple[float, int, Config]:
        figures = [tested.loss, tested.accuracy]
        loss, accuracy = map(records.rounded, figures) if self.answers_once else figures
        return loss, tested.num_examples, {"accuracy": accuracy}

    def _reply(self, result: LocalResult) -> Reply:
        uploaded = {**result.upload.tensors, **result.upload.buffers}
        metrics: Config = {NAMES: json.dumps(list(uploaded))}
        if not self._keeps_figures:
            metrics |= {records.SECONDS: result.seconds, records.DEFENSE_SECONDS: result.defense_seconds}
        withheld = math.isnan(result.train_loss)
        metrics |= {records.LOSS_WITHHELD: 1} if withheld else {records.TRAIN_LOSS: result.train_loss}
        return [records.to_array(t) for t in uploaded.values()], result.upload.num_examples, metrics

    @property
    def answers_once(self) -> bool:
        return isinstance(self.wrapped.seed, Secret)

    @property
    def _keeps_figures(self) -> bool:
        return self.answers_once and promises_privacy(self.wrapped.defense)

    def _round(self, config: Config) -> int:
        number = _integer(config, records.ROUND)
        if number < 0 or (self.last_round is not None and number > self.last_round):
            raise UnfitMessageError(
                f"A round of 0 to {math.inf if self.last_round is None else self.last_round} is expected, but got"
                f" {number}; set last_round for a longer run."
            )
        return number

    def _message_number(self, config: Config) -> int:
        return self._round(config)

    def _sent(self, parameters: Arrays, config: Config) -> ModelState:
        model = self.wrapped.model
        names: Sequence[str] = json.loads(str(config[NAMES])) if NAMES in config else self._public_names()
        if len(names) != len(parameters):
            raise UnfitMessageError(
                f"{len(names)} arrays are expected for this model, but got {len(parameters)};"
                " send the values of its state_dict in order."
            )
        buffers = dict(model.named_buffers())
        own: Tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
        got = dict(zip(names, map(records.to_tensor, parameters), strict=True))
        tensors = {name: t.to(own[name].dtype) if name in own else t for name, t in got.items()}
        if self.answers_once:
            expect_sound(tensors)
        held = {name: tensors.pop(name) for name in list(tensors) if name in buffers}
        return ModelState(tensors, held)

    def _public_names(self) -> list[str]:
        kept = private_names(self.wrapped.model, self.wrapped.defense)
        return [name for name in self.wrapped.model.state_dict() if name not in kept]


class DPClient(PrivacyClient):
    """Client that clips its update and adds noise; see :func:`dp_noise`."""

    make_defense = staticmethod(dp_noise)


class PruningClient(PrivacyClient):
    """Client that uploads only the most important elements of its update; see :func:`pruning`."""

    make_defense = staticmethod(pruning)


class ATSClient(PrivacyClient):
    """Client that trains on transformed images; see :func:`ats`."""

    make_defense = staticmethod(ats)


class RefinerClient(PrivacyClient):
    """Client that uploads the gradient of noise-like data instead of its own; see :func:`refiner`."""

    make_defense = staticmethod(refiner)


class SPNClient(PrivacyClient):
    """Client that trains a private head next to the public model; see :func:`spn`."""

    make_defense = staticmethod(spn)


class SplitFedClient(PrivacyClient):
    """Client that keeps some layers private; see :func:`split_fed`."""

    make_defense = staticmethod(split_fed)


class PassportClient(PrivacyClient):
    """Client with private layers, whose scale and offset come from secret inputs ("passports"); see :func:`fdl_pp`."""

    make_defense = staticmethod(fdl_pp)


class MaskableClient(PrivacyClient):
    """Client for SecAgg+: it uploads arrays of floating-point values within [-``clip``, ``clip``]."""

    def __init__(self, client: Client, memory: RecordDict | Memory, *, clip: float) -> None:
        super().__init__(client, memory)
        self.clip = clip

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train as ``PrivacyClient`` does; ``UserError`` also if a value exceeds ``clip``."""
        arrays, num_examples, metrics = super().fit(parameters, config)
        named = dict(zip(json.loads(str(metrics[NAMES])), arrays, strict=True))
        masked = {name: np.atleast_1d(array) for name, array in named.items() if array.dtype.kind == "f"}
        hide_reason(lambda: self._expect_within(masked)) if self.answers_once else self._expect_within(masked)
        counts = {name: array.tolist() for name, array in named.items() if name not in masked}
        most = _integer(config, MOST_COUNTED) if MOST_COUNTED in config else num_examples
        figures: Config = {**metrics, NAMES: json.dumps(list(masked)), COUNTS: json.dumps(counts)}
        return list(masked.values()), min(num_examples, most), figures

    def _expect_within(self, masked: Mapping[str, np.ndarray]) -> None:
        for name, array in masked.items():
            if not (np.abs(array) <= self.clip).all():
                raise UserError(
                    f"Values of {name} are expected within +-{self.clip}, but reach {np.abs(array).max():.3g};"
                    " raise secure_aggregation.clip or lower the learning rate."
                )

    def _message_number(self, config: Config) -> int:
        """Return the server's count of attempts instead of the round, since SecAgg+ may repeat a failed round."""
        number = _integer(config, ATTEMPT)
        if self.last_round is not None and number > MOST_ATTEMPTS * max(1, self.last_round):
            raise UnfitMessageError(
                f"At most {MOST_ATTEMPTS} attempts of a round are expected, but got number {number}; start a new run."
            )
        return number


def _integer(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise UnfitMessageError(f"A number {key!r} is expected in the server's config, but got {value!r}; send it.")
    return value
