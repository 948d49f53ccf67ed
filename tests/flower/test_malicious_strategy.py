"""A malicious server around a strategy of Flower's: what it sends is read, and the training goes on."""

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from fl_privacy.attacks.malicious import Imprint, Loki, ServerAttack, TrapWeights
from fl_privacy.federation.interception import Interceptor
from fl_privacy.flower import HonestButCurious, LocalGrid, Malicious, simulated_client_app
from fl_privacy.types import Certainty, LocalPlan, ModelState, Observation

from ..federation.harness import updates
from ..malicious import rounds

PLAN = LocalPlan(shares="weights", lr=0.05, steps=1, batch_size=32)
CLIENTS = 3


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (Imprint(activation="hardtanh", amplitude=0.1, scale=500.0), "lenet"),
        (Loki(bins=128), "lenet"),
        (TrapWeights(fires=0.03), "mlp"),
    ],
)
def test_single_images_are_read_under_fedavg(attack: ServerAttack, name: str) -> None:
    attack, seen = attack.informed(rounds.public()), list[Observation]()
    model = attack.architecture(rounds.network(name), (1, 28, 28), CLIENTS)
    clients = {k: rounds.client(model, PLAN, id=k, examples=32) for k in range(CLIENTS)}
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    interceptor = Interceptor(model=model, plan=PLAN, input_shape=(1, 28, 28), num_classes=10, sink=seen.append)
    server = HonestButCurious(
        Malicious(strategy, attack, model, rounds=[2]), interceptor, updates(1, 2, clients=(0, 1, 2))
    )
    initial = ArrayRecord(model.state_dict())
    result = server.start(LocalGrid(range(CLIENTS), simulated_client_app(clients)), initial, num_rounds=2)

    honest = [o for o in seen if o.id.round == 1]
    crafted = [o for o in seen if o.id.round == 2]
    assert len(honest) == len(crafted) == CLIENTS
    start = ModelState.of(model).parameters
    assert all(torch.equal(o.sent.parameters[n], start[n]) for o in honest for n in start)
    for observation in crafted:
        found = attack.read(observation)
        assert sum(c is Certainty.PROVEN for c in found.certainties) >= 5
    assert result.arrays is not None
    learnt = result.arrays.to_torch_state_dict()
    after_one = crafted[0].sent.parameters
    assert (not torch.equal(learnt["classifier.weight"], after_one["classifier.weight"])) == attack.trains
