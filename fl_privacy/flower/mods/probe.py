"""Answer an auditing server with uploads of chosen examples."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_privacy.checks import whole
from fl_privacy.data.app_data import as_image, find_normalization, fingerprint, own_streams_put_back, probe_seed
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import UnfitMessageError, expect_sound
from fl_privacy.flower import audit_protocol, records
from fl_privacy.flower.curious import keep_own_norms, own_norms
from fl_privacy.flower.reply_cache import Answers, digest_of_records, refusing
from fl_privacy.models.unwrap_model import made_of
from fl_privacy.rng import streams_put_back
from fl_privacy.types.plan import Normalization

Train = Callable[..., object]
"""(net, loader) or (net, loader, config): trains ``net`` in place; config is the run's, updated by the message's."""

CONFIG_NAMES = ("config", "cfg", "settings")  # names of a third argument of ``train`` that gets the config


def probe_mod(
    *,
    model: nn.Module | Callable[[], nn.Module],
    train: Train,
    dataset: object,
    normalization: Normalization | None = None,
    images: int = 8,
    rounds: int | None = None,
) -> Mod:
    """Build a mod that lets an auditing server measure the worst case of the literature: one image in one step.

    For a probe, a request for the upload of chosen examples, ``train`` runs on a copy of the sent model, over a loader
    of these examples. The result is replied like any upload, through all mods listed before: ``mods=[defense_mod(...),
    probe_mod(...)]``. The reply names the images by fingerprints. The mod is the client's consent to uploads of its
    first ``images`` examples, each once a round; remove it after the audit.

    Args:
        model: the client's model or its class.
        train: the app's training function, as ``train(net, loader)`` or ``train(net, loader, config)``.
        dataset: data set or loader with its transform, a tuple whose first entry is one, or a function of the context.
        normalization: normalization of the images, if ``dataset`` does not reveal it.
        images: number of examples that may be probed, the first ones of ``dataset``.
        rounds: last round in which probes are answered; ``None`` takes it from the run config.
    """
    architecture = made_of(model)
    fit = train if _takes_config(train) else lambda net, loader, config: train(net, loader)
    budget = whole("images", images, at_least=1, at_most=1_000_000, example=8)
    chosen: dict[int, _Examples] = {}

    def answer(message: Message, context: Context, asked: tuple[int, int]) -> RecordDict:
        examples = chosen.setdefault(context.node_id, _Examples(dataset, context, normalization))
        return _answer(message, context, asked, examples, model=architecture, fit=fit)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        asked = audit_protocol.asked_probe(message.content) if audit_protocol.is_training(message) else None
        if asked is not None:
            probe, size = asked
            if (needed := (probe + 1) * size) > budget:
                raise UserError(
                    f"Probes of a client's first {budget} examples are expected, which it allows, but this one needs"
                    f" {needed}; ask for fewer victims, or let the client say probe_mod(images={needed})."
                )
            answers, each = Answers(context, rounds), records.images_of_probe(*asked)  # each image leaves once a round
            number = audit_protocol.merged_config(context, message.content).get(records.ROUND)
            if not isinstance(number, int) or isinstance(number, bool):
                raise UserError(
                    f"A probe is expected with the number of its round as {records.ROUND!r} in its config, but has"
                    " none; send it."
                )
            question = digest_of_records(message.metadata.message_type, message.content)
            work = partial(answer, message, context, asked)
            return Message(answers.once(each, number, question, work), reply_to=message)
        reply = call_next(message, context)
        if audit_protocol.is_training(message) and not reply.has_error():
            keep_own_norms(message.content, reply.content, architecture, context)
            reply.content[audit_protocol.ANSWERS] = ConfigRecord({"answers": True})
            audit_protocol.introduce(reply.content, context)
        return reply

    return refusing(mod)


def _answer(
    message: Message, context: Context, asked: tuple[int, int], examples: "_Examples", *, model: nn.Module, fit: Train
) -> RecordDict:
    with streams_put_back():
        data = examples.data()
    with streams_put_back(probe_seed(*asked)):
        with own_streams_put_back(data):
            batch = examples.batch(*asked)
        trained = _copy_with(model, message.content)
        trained.load_state_dict(own_norms(context), strict=False)
        loader: Any = DataLoader(batch, batch_size=len(batch), collate_fn=examples.collate)  # type: ignore[arg-type]
        fit(trained, loader, audit_protocol.merged_config(context, message.content))
    values = trained.to("cpu").state_dict()
    (name, record), *_ = message.content.array_records.items()
    names = records.named(record, list(values))
    reply = RecordDict({name: records.to_record(dict(zip(record, (values[n] for n in names), strict=True)))})
    reply[records.METRICS] = MetricRecord({records.NUM_EXAMPLES: len(batch)})
    images = [as_image(example) for example in batch]
    plain = images if examples.normalization is None else [examples.normalization.undo(image) for image in images]
    marks = [fingerprint(image) for image in plain]
    probed = audit_protocol.ProbedImages(fingerprints=marks, normalization=examples.normalization)
    audit_protocol.state_images(reply, probed)
    audit_protocol.introduce(reply, context)
    return reply


@dataclass(eq=False)
class _Examples:
    dataset: object
    context: Context
    given: Normalization | None
    collate: Any = None
    normalization: Normalization | None = None
    _data: object = field(default=None, init=False)

    def batch(self, probe: int, size: int) -> list[object]:
        data = self.data()
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            examples = list(islice(iter(data), probe * size, (probe + 1) * size))  # type: ignore[call-overload]
        else:
            examples = [data[k] for k in range(probe * size, min((probe + 1) * size, len(data)))]  # type: ignore[arg-type]
        if len(examples) < size:
            raise UnfitMessageError(
                f"A client is expected to hold {(probe + 1) * size} examples that may be probed, but has fewer; ask for"
                " fewer victims."
            )
        return examples

    def data(self) -> object:
        if self._data is None:
            data = self.dataset
            is_function = callable(data) and not hasattr(data, "__getitem__") and not isinstance(data, DataLoader)
            data = data(self.context) if is_function else data  # type: ignore[operator]
            if isinstance(data, tuple | list) and data and isinstance(data[0], DataLoader | Dataset):
                data = data[0]
            with own_streams_put_back(data):
                self.normalization = find_normalization(data) if self.given is None else self.given
            if isinstance(data, DataLoader):
                self.collate, data = data.collate_fn, data.dataset
            self._data = data
        return self._data


def _copy_with(model: nn.Module, content: RecordDict) -> nn.Module:
    copied = copy.deepcopy(model)
    try:
        values = records.model_values(content, records.model_tensors(copied), whole=True)
        expect_sound(values)
        copied.load_state_dict(values, strict=False)
    except (UserError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnfitMessageError(
            f"probe_mod's model is expected to be the app's, but does not take its values ({reason}); give that model."
        ) from error
    return copied


def _takes_config(train: Train) -> bool:
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"A function train(net, loader) is expected, but got {type(train).__name__}; give one."
        ) from error
    names = list(signature.parameters)
    takes_config = len(names) > 2 and names[2] in CONFIG_NAMES
    try:
        signature.bind(*(0, 0, 0)[: 2 + takes_config])
    except TypeError:
        raise UserError(
            "train is expected to be called as train(net, loader) or train(net, loader, config), but takes"
            f" {signature}; wrap it: train=lambda net, loader, config: train(net, loader, 1, config['lr'])."
        ) from None
    return takes_config
