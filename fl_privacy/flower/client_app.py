"""Answer Flower's Message API with a ``NumPyClient``."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from fl_privacy.errors import UserError
from fl_privacy.federation import Client, Failure, attempt
from fl_privacy.flower import _node_memory, audit_protocol, records, reply_cache
from fl_privacy.flower.clients import NAMES, Arrays, Config, MaskableClient, NumPyClient, PrivacyClient, Reply
from fl_privacy.flower.mods.defend import DefendedClient

Fit = Callable[[Arrays, Config], Reply]
MakeClient = Callable[[Context], NumPyClient]
Work = Callable[[], RecordDict]


def numpy_client_app(
    make_client: MakeClient,
    *,
    audited: Callable[[Context], bool] | bool = False,
    simulated: Callable[[], bool] = lambda: False,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Build a ClientApp that answers with a ``NumPyClient``.

    It answers ``train``, ``evaluate``, ``evaluate.personalize`` (train private layers), ``query`` and
    ``query.examples`` (facts about the client), with records named as in the request. An exception becomes an error
    reply of one line; metrics that are not numbers stay on the node. Outside of a simulation, clients that defend
    themselves answer a round once, also after a restart.

    Args:
        audited: ``True``, or a predicate of the context, if the app also answers ``train.probe``, by which a server
            gets uploads of small batches as often as it likes. This is unsafe if the data need protection.
        simulated: predicate, ``True`` if the server knows the clients' seed; ``query`` reports it.
    """
    app = ClientApp(mods=list(mods))

    def prober(client: NumPyClient, context: Context) -> Fit:
        if not (audited(context) if callable(audited) else audited):
            raise UserError("A probe is expected by audited clients only, but this one is not; set audited=True.")
        return _privacy_client(client, "A probed client").probe

    def once(kind: str, work: Callable[[NumPyClient, Message, Context], Work]) -> ClientAppCallable:
        def called(message: Message, context: Context) -> RecordDict:
            made = make_client(context)
            client = cast(NumPyClient, getattr(made, "numpy_client", made))
            return _once(client, message, context, kind, work(client, message, context))

        def answered(message: Message, context: Context) -> Message:
            content = attempt(partial(called, message, context))
            if isinstance(content, Failure):
                return Message(Error(records.CLIENT_RAISED, content.reason), reply_to=message)
            content[records.CLIENT] = _identity(context)
            return Message(content, reply_to=message)

        return answered

    app.train()(once("train", lambda client, m, _: partial(_train, _fitter(client, m.content), m.content)))
    app.train("probe")(once("probe", lambda client, m, c: partial(_train, prober(client, c), m.content)))
    app.evaluate()(once("evaluate", lambda client, m, _: partial(_evaluate, client.evaluate, m.content)))

    def personalize(client: NumPyClient, message: Message, _: Context) -> Work:
        return partial(_evaluate, _privacy_client(client, "A client that personalizes").personalize, message.content)

    app.evaluate("personalize")(once("personalize", personalize))
    _answer_queries(app, make_client, simulated)
    return app


def _answer_queries(app: ClientApp, make_client: MakeClient, simulated: Callable[[], bool]) -> None:
    @app.query()
    def query(message: Message, context: Context) -> Message:
        own_data = int(records.DATA_PATH in context.node_config)
        identity = {**_identity(context), records.SIMULATED: int(simulated()), records.OWN_DATA: own_data}
        return Message(RecordDict({records.CLIENT: ConfigRecord(identity)}), reply_to=message)

    @app.query("examples")
    def examples(message: Message, context: Context) -> Message:
        who = "A client that is asked for its number of examples"
        count = attempt(lambda: _privacy_client(make_client(context), who).wrapped.number_of_examples)
        if isinstance(count, Failure):
            return Message(Error(records.CLIENT_RAISED, count.reason), reply_to=message)
        return Message(RecordDict({records.CLIENT: ConfigRecord({records.NUM_EXAMPLES: count})}), reply_to=message)


def simulated_client_app(clients: Mapping[int, Client]) -> ClientApp:
    """Build a ClientApp in which each node is the simulated client of its partition."""
    return numpy_client_app(
        lambda context: PrivacyClient(clients[int(context.node_config[records.PARTITION])], context.state),
        audited=True,
        simulated=lambda: True,
    )


def _once(client: NumPyClient, message: Message, context: Context, kind: str, work: Work) -> RecordDict:
    if isinstance(client, DefendedClient) and client.answers_once:
        client.memory = context  # it handles repeated messages by itself
    config = audit_protocol.merged_config(context, message.content)
    round, kinds = config.get(records.ROUND), [kind]
    if not isinstance(client, PrivacyClient) or not client.answers_once:
        return work()
    if not isinstance(round, int) or isinstance(round, bool):
        return work()  # the client itself refuses a message without a round
    if isinstance(client.memory, _node_memory.ContextMemory):
        client.memory = _node_memory.ContextMemory(client.memory.records)  # counted here, in the same records
    if kind == "probe":  # each of its images is answered once a round
        kinds = records.images_of_probe(config.get(records.VICTIM), config.get(records.BATCH_SIZE))
    question = reply_cache.digest_of_records(message.metadata.message_type, message.content)
    return reply_cache.Answers(context, client.last_round).once(kinds, round, question, work)


def _train(fit: Fit, content: RecordDict) -> RecordDict:
    sent = records.all_arrays(content)
    arrays, num_examples, metrics = fit([records.array_values(a) for a in sent.values()], _config(content, sent))
    names = json.loads(str(metrics[NAMES])) if NAMES in metrics else list(sent)
    reply = {n: np.asarray(a) for n, a in zip(names, arrays, strict=True)}
    made: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {}
    if records.PARAMETERS in content.array_records:
        buffers = content.array_records[records.BUFFERS]
        made[records.PARAMETERS] = ArrayRecord({n: records.shortest(a) for n, a in reply.items() if n not in buffers})
        made[records.BUFFERS] = ArrayRecord({n: records.plain_array(a) for n, a in reply.items() if n in buffers})
    else:  # a stock strategy needs all names that it sent
        for key, record in content.array_records.items():
            made[key] = ArrayRecord({n: records.plain_array(reply[n]) if n in reply else a for n, a in record.items()})
    made[records.METRICS] = MetricRecord({records.NUM_EXAMPLES: int(num_examples), **_numbers(metrics)})
    return RecordDict(made)


def _evaluate(evaluate: Callable[[Arrays, Config], tuple[float, int, Config]], content: RecordDict) -> RecordDict:
    sent = records.all_arrays(content)
    loss, num_examples, metrics = evaluate([records.array_values(a) for a in sent.values()], _config(content, sent))
    figures = MetricRecord({records.NUM_EXAMPLES: int(num_examples), "loss": float(loss), **_numbers(metrics)})
    return RecordDict({records.METRICS: figures})


def _fitter(client: NumPyClient, content: RecordDict) -> Fit:
    if isinstance(client, MaskableClient):
        raise UserError("SecAgg+ is expected, but got a plain training message; run Flower's SecAggPlusWorkflow.")
    if records.PARAMETERS not in content and isinstance(client, PrivacyClient):
        shares = client.wrapped.plan.shares
        if shares != "weights":
            raise UserError(
                f"A stock strategy expects weights, but this client's plan shares its {shares};"
                " use plan.shares=weights or the strategy Federated."
            )
    return client.fit


def _privacy_client(client: NumPyClient, who: str) -> PrivacyClient:
    if not isinstance(client, PrivacyClient):
        raise UserError(f"{who} is expected to be a PrivacyClient, but is a {type(client).__name__}; return one.")
    return client


def _config(content: RecordDict, sent: Iterable[str]) -> Config:
    given: Config = {NAMES: json.dumps(list(sent))}
    for record in content.config_records.values():
        given.update({key: value for key, value in record.items() if not isinstance(value, list)})
    return given


def _numbers(metrics: Config) -> dict[str, int | float]:
    plain = {key: v.item() if isinstance(v, np.generic) else v for key, v in metrics.items()}
    return {key: int(v) if isinstance(v, bool) else v for key, v in plain.items() if isinstance(v, int | float)}


def _identity(context: Context) -> ConfigRecord:
    config = context.node_config
    return ConfigRecord({key: int(config[key]) for key in (records.PARTITION, records.PARTITIONS) if key in config})
