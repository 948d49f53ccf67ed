"""An app of two nodes that sends more than a site's policy lets out; what the server hears is written down."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

LOSS, EXAMPLES = 0.123456789, 117

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    (values,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"num-examples": EXAMPLES, "train_loss": LOSS})
    return Message(RecordDict({"arrays": ArrayRecord([values + 1]), "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": EXAMPLES, "accuracy": 0.5})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


class Hearing(FedAvg):
    """FedAvg that keeps what it heard."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=1.0, min_available_nodes=2)
        self.heard: list[dict[str, object]] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        self.heard += [_of("train", reply) for reply in replies]
        return super().aggregate_train(server_round, replies)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        replies = list(replies)
        self.heard += [_of("evaluate", reply) for reply in replies]
        return super().aggregate_evaluate(server_round, replies)


def _of(kind: str, reply: Message) -> dict[str, object]:
    told: dict[str, object] = {"kind": kind, "node": str(reply.metadata.src_node_id)}
    if reply.has_error():
        return told | {"error": reply.error.reason}
    return told | {name: dict(record) for name, record in reply.content.metric_records.items()}


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Hearing()
    start = ArrayRecord([np.zeros(16, np.float32)])
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=int(context.run_config["rounds"]))
    (values,) = result.arrays.to_numpy_ndarrays()
    Path(str(context.run_config["out"])).write_text(json.dumps({"heard": strategy.heard, "last": values.tolist()}))
