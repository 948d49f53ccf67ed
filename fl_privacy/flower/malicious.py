"""A malicious server: any Flower strategy, with crafted values sent in place of the model."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fl_privacy.attacks.malicious import ServerAttack
from fl_privacy.flower.records import all_arrays, named, read_state, to_array
from fl_privacy.flower.wrappers import StrategyAround


@dataclass(eq=False)
class Malicious(StrategyAround):
    """Send each client the model that ``attack`` crafts from the one ``strategy`` has for it.

    ``HonestButCurious`` around it captures the replies, for the attack's ``read`` on each observation::

        HonestButCurious(Malicious(FedAvg(), attack, model), interceptor, audit)

    If an attack puts a layer in front of the model, clients and ``strategy`` must start from
    ``attack.architecture(...)``. In attacked rounds whose replies train nothing, the model stays as it is.

    Attributes:
        attack: attack, fitted to public images if it needs them.
        rounds: attacked rounds; ``None`` for all.
    """

    attack: ServerAttack
    model: nn.Module
    rounds: Collection[int] | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of ``strategy`` with crafted values; a client is the rank of its node's id among all.

        Raises:
            UserError: the model has no layer that the attack can use.
        """
        sent = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not self._attacks(server_round):
            return sent
        nodes, crafted = sorted(grid.get_node_ids()), list[Message]()
        for message in sent:
            content, metadata = message.content, message.metadata
            client = nodes.index(metadata.dst_node_id)
            made = self.attack.craft(self.model, read_state(content, self.model), client)
            values = {**made.parameters, **made.buffers}
            names = named(all_arrays(content), list(self.model.state_dict()))
            own = dict(zip(all_arrays(content), names, strict=True))
            records = {
                place: ArrayRecord({key: Array.from_numpy_ndarray(to_array(values[own[key]])) for key in record})
                for place, record in content.array_records.items()
            }
            changed, kind, group = RecordDict({**content, **records}), metadata.message_type, metadata.group_id
            crafted.append(Message(changed, metadata.dst_node_id, kind, ttl=metadata.ttl, group_id=group))
        return crafted

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        return (arrays if self.attack.trains or not self._attacks(server_round) else None), metrics

    def _attacks(self, round: int) -> bool:
        return self.rounds is None or round in self.rounds
