"""Rounds of a few clients as their server sees them."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from fl_privacy.data import LabelledExamples
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.federation import Client, Server, ServerPlan
from fl_privacy.types import LocalPlan, ModelState, Observation, VictimId


def observed_rounds(
    model: nn.Module,
    examples: LabelledExamples,
    owned: Sequence[Tensor],
    plan: LocalPlan,
    *,
    rounds: int,
    defense: Callable[[], Defense] = Defense,
) -> Iterator[list[Observation]]:
    """Train on the examples at ``owned``, one part for each client; yield each round's uploads as observations."""
    clients = {
        k: Client(id=k, examples=examples, indices=part, model=model, plan=plan, defense=defense(), seed=1)
        for k, part in enumerate(owned)
    }
    states = {k: ClientState() for k in clients}
    server = Server(state=ModelState.of(model), local_plan=plan, plan=ServerPlan(), clients=list(clients), seed=1)
    for number in range(1, rounds + 1):
        sent = server.state
        uploads = {k: client.update(sent, states[k], round=number).upload for k, client in clients.items()}
        server.receive(uploads)
        yield [
            Observation(
                id=VictimId(number, k),
                model=model,
                sent=sent,
                upload=upload,
                plan=plan.in_round(number),
                input_shape=examples.input_shape,
                num_classes=examples.num_classes,
            )
            for k, upload in uploads.items()
        ]
