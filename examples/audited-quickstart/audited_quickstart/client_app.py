"""The clients. ``probe_mod`` is what fl_privacy adds: it answers for single examples while the app is audited."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from audited_quickstart.task import Net, load_data, test, train
from fl_privacy import probe_mod


def own_data(context: Context):
    """Load the training and test data of this node."""
    node = context.node_config
    return load_data(int(node["partition-id"]), int(node["num-partitions"]), int(context.run_config["batch-size"]))


probe = probe_mod(
    model=Net, train=lambda net, loader, config: train(net, loader, epochs=1, lr=config["lr"]), dataset=own_data
)
app = ClientApp(mods=[probe])


@app.train()
def train_on_node(msg: Message, context: Context) -> Message:
    """Train for one round on this node."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = own_data(context)
    loss = train(net, loader, int(context.run_config["local-epochs"]), float(msg.content["config"]["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate_on_node(msg: Message, context: Context) -> Message:
    """Compute the new model's accuracy."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = own_data(context)
    metrics = MetricRecord({"accuracy": test(net, loader), "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
