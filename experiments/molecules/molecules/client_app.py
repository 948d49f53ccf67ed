"""molecules: the client."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from molecules.task import build, load_data, test as test_fn, train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model = build(context.run_config["model"])
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    trainloader, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"], context.run_config["batch-size"]
    )
    loss = train_fn(model, trainloader, context.run_config["local-epochs"], msg.content["config"]["lr"], device)
    metrics = {"train_loss": loss, "num-examples": len(trainloader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = build(context.run_config["model"])
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    _, valloader = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"], context.run_config["batch-size"]
    )
    metrics = {"eval_acc": test_fn(model, valloader, device), "num-examples": len(valloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
