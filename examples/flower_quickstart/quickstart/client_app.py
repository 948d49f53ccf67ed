"""The clients. The mods are what fl_privacy adds: the last one for the audit, ``defense_mod`` for a defense."""

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_privacy import defense_mod, probe_mod
from fl_privacy.defenses import dp_noise
from quickstart.task import Net, load_data, test, train


def own_data(context: Context):
    """Load the training and test data of this node."""
    config = context.node_config
    return load_data(int(config["partition-id"]), int(config["num-partitions"]), int(context.run_config["batch-size"]))


probe = probe_mod(
    model=Net, train=lambda net, loader, config: train(net, loader, epochs=1, lr=config["lr"]), dataset=own_data
)
defense = defense_mod(dp_noise(clip_norm=1.0, scale=0.02), model=Net, buffers="withheld")

app = ClientApp(mods=[defense, probe] if os.environ.get("QUICKSTART_DEFENDED") else [probe])


@app.train()
def train_on_node(msg: Message, context: Context) -> Message:
    """Train for one round on this node."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader, _ = own_data(context)
    loss = train(model, trainloader, int(context.run_config["local-epochs"]), float(msg.content["config"]["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate_on_node(msg: Message, context: Context) -> Message:
    """Compute loss and accuracy of the new model."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, testloader = own_data(context)
    with torch.random.fork_rng(devices=[]):
        loss, accuracy = test(model, testloader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
