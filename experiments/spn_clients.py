"""Accuracy over the number of clients: each alone, together, and together behind defenses (SPN, Figures 7, 28 and 29).

    python experiments/spn_clients.py --data mnist_mini --width 8 --rounds 8 --clients 8 20 50

AlexNet, federated averaging as in the paper (SGD with momentum, one local epoch of batches of 64). ``Alone`` trains as
long on one client's examples only, mean over at most five clients.
"""

import argparse
from dataclasses import replace

import torch

from fl_privacy.data import load_data
from fl_privacy.data.partition import Dirichlet, Iid
from fl_privacy.defenses import ClientState, dp_noise, none, selective_sharing, spn
from fl_privacy.federation import Audit, Interceptor, Participant, Server, ServerPlan, evaluate_model, run_rounds
from fl_privacy.models import AlexNet, build_model
from fl_privacy.rng import derive_seed
from fl_privacy.types import LocalPlan, ModelState

DEFENSES = {
    "FedAvg": none(),
    "SPN-0.1": spn(alpha2=0.1),
    "PPDL-0.3": selective_sharing(share=0.3),
    "PPDL-0.05": selective_sharing(share=0.05),
    "DP-0.1": dp_noise(scale=0.1, at="gradient"),
}
ALONE = 5


def together(participants: dict[int, Participant], rounds: int, seed: int) -> ModelState:
    first = participants[0]
    server = Server(
        state=ModelState.of(first.model),
        local_plan=first.plan,
        plan=ServerPlan(),
        clients=sorted(participants),
        seed=seed,
    )
    interceptor = Interceptor(
        model=first.model,
        plan=first.plan,
        input_shape=first.examples.input_shape,
        num_classes=first.examples.num_classes,
        sink=lambda observation: None,
    )
    run_rounds(
        server, participants, rounds=rounds, audit=Audit(), interceptor=interceptor, on_round=lambda report: None
    )
    return server.state


def alone(participant: Participant, rounds: int) -> ModelState:
    """What one client comes to by itself."""
    state, values = ClientState(), ModelState.of(participant.model)
    for number in range(1, rounds + 1):
        delta = participant.update(values, state, round=number).upload.tensors
        values = ModelState({name: p + delta[name] for name, p in values.parameters.items()}, values.buffers)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--images", type=int, help="of the training set; all if not given")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 20, 50, 100])
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--alpha", type=float, help="of a Dirichlet partition; equal random shares if not given")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data = load_data(options.data)
    train = data.train if options.images is None else data.train.subset(torch.arange(options.images))
    channels, size, _ = train.input_shape
    shape = {"in_channels": channels, "image_size": size, "num_classes": train.num_classes}
    model = build_model(
        AlexNet, seed=options.seed, width=options.width, init="kaiming_uniform", mean=[0.5], std=[0.25], **shape
    )
    plan = LocalPlan(shares="delta", lr=options.lr, momentum=0.9, epochs=1, batch_size=64)
    partition = Iid() if options.alpha is None else Dirichlet(alpha=options.alpha)
    print(f"| clients | Alone | {' | '.join(DEFENSES)} |\n|---|---{'|---' * len(DEFENSES)}|", flush=True)
    for number in options.clients:
        parts = partition(train, num_clients=number, seed=derive_seed(options.seed, "partition"))
        members = {
            k: Participant(id=k, examples=train, indices=part, model=model, plan=plan, seed=options.seed)
            for k, part in enumerate(parts)
        }
        single = [alone(members[k], options.rounds) for k in range(min(ALONE, number))]
        scores = [sum(evaluate_model(model, state, data.test).accuracy for state in single) / len(single)]
        for defense in DEFENSES.values():
            defended = {k: replace(member, defense=defense) for k, member in members.items()}
            state = together(defended, options.rounds, options.seed)
            scores.append(evaluate_model(model, state, data.test).accuracy)
        print(f"| {number} | {' | '.join(f'{100 * score:.1f} %' for score in scores)} |", flush=True)


if __name__ == "__main__":
    main()
